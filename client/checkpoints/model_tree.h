#ifndef MUSTER_CLIENT_CHECKPOINTS_MODEL_TREE_H_
#define MUSTER_CLIENT_CHECKPOINTS_MODEL_TREE_H_

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "worker/bigmodel/device_map.h"

namespace muster::client {

// The modules of a model, from the names of its tensors alone: what is between dots is a module.
// Files do not say in which order modules run, so this is by what names usually mean: embeddings
// first, entries of lists by their numbers, final norms and heads last. Pure.
//
// The class of a module is its path with "*" for numbers ("model.layers.*.mlp"); of the blocks of
// families that are known (`model_type` of config.json) also the name that transformers has for it
// ("LlamaDecoderLayer").
PlannedModel TreeOf(const std::vector<PlannedTensor>& tensors, absl::string_view model_type);

// The classes of the outermost entries of lists: what nobody divides among devices.
std::set<std::string> BlockClasses(const PlannedModel& model);

// "model.layers.0", ..., "model.layers.21" as "model.layers.0-21"; others as they are.
std::vector<std::string> Shortened(const std::vector<std::string>& names);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_MODEL_TREE_H_
