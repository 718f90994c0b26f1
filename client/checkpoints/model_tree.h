#ifndef MUSTER_CLIENT_CHECKPOINTS_MODEL_TREE_H_
#define MUSTER_CLIENT_CHECKPOINTS_MODEL_TREE_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/bigmodel/device_map.h"

namespace muster::client {

// Derives the modules of a model from the names of its tensors, for the planner, if no program has
// constructed them. Pure.

struct TreeTensor {
  std::string name = "";   // "model.layers.0.mlp.up_proj.weight"
  std::string dtype = "";  // as in safetensors
  std::vector<int64_t> shape = {};
  size_t file = 0;           // the index of its shard: shards are written in the order of the model
  std::string storage = "";  // equal for names of the same tensor; empty: no other name
};

// Names do not tell classes: the class of a module is the last part of its name that is not a
// number, so that model.layers.0 and model.layers.1 have the class "layers"; a list itself is a
// "ModuleList". Parts come in the order of the models of transformers; unknown ones by the first
// file that contains something of them, then by name, numbers as numbers. Running statistics,
// rotary tables and integers count as buffers.
//
// Errors: INVALID_ARGUMENT that quotes a name with an empty part or more than 64 parts, or one that
// is a tensor and a module.
absl::StatusOr<PlannedModel> TreeOf(const std::vector<TreeTensor>& tensors);

// Adds lm_head.weight, for BERT cls.predictions.decoder, if it is missing, as a second name of the
// word embedding. Returns false if no embedding is recognized by its name.
bool TieHead(PlannedModel* model);

// Returns the classes of the entries of the outermost module lists, which are the layers of a
// model, and of modules like BERT's embeddings, which transformers also keeps whole.
std::set<std::string> LayerClasses(const PlannedModel& model);

// Returns the class that TreeOf gives the modules of a class of transformers or Muster
// ("LlamaDecoderLayer": "layers"), or the entries of a list ("model.layers.*"); returns any other
// name unchanged.
std::string TreeClass(absl::string_view class_name);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_MODEL_TREE_H_
