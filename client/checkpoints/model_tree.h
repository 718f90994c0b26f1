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

// The modules of a model from the names of its tensors, for the planner, where no program has
// constructed them. Pure.

struct TreeTensor {
  std::string name = "";   // "model.layers.0.mlp.up_proj.weight"
  std::string dtype = "";  // as in safetensors
  std::vector<int64_t> shape = {};
  size_t file = 0;           // of the shards: they are written in the order of the model
  std::string storage = "";  // equal for names of one tensor; empty: it is alone
};

// Names do not tell classes: the class of a module is the last part of its name that is not a
// number, so that model.layers.0 and model.layers.1 are of the class "layers"; a list itself is a
// "ModuleList". Parts come in the order that the models of transformers have; unknown ones by the
// first file that holds something of them, then by name, numbers as numbers. Running statistics,
// rotary tables and integers count as buffers.
//
// Errors: INVALID_ARGUMENT that quotes a name with an empty part or more than 64 parts, or one that
// is a tensor and a module.
absl::StatusOr<PlannedModel> TreeOf(const std::vector<TreeTensor>& tensors);

// Adds lm_head.weight, of BERT cls.predictions.decoder, if it is not there, as a second name of the
// embedding of words. False if no embedding is known by its name.
bool TieHead(PlannedModel* model);

// The classes of the entries of the outermost module lists, what each layer of a model is, and of
// modules like BERT's embeddings, which transformers keeps whole too.
std::set<std::string> LayerClasses(const PlannedModel& model);

// The class that TreeOf gives the modules of a class of transformers or Muster
// ("LlamaDecoderLayer": "layers"), or to the entries of a list ("model.layers.*"); any other name
// as it is.
std::string TreeClass(absl::string_view class_name);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_MODEL_TREE_H_
