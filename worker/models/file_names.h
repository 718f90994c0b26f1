#ifndef MUSTER_WORKER_MODELS_FILE_NAMES_H_
#define MUSTER_WORKER_MODELS_FILE_NAMES_H_

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "worker/models/model_config.h"

namespace muster::models {

// The names of a model's tensors in files, for models and for tools. Without torch. Pure.

// TextModelImpl::ParameterName. Empty for a tensor that the model does not need.
std::string ParameterNameOf(const ModelConfig& config, const std::string& name_in_file);

// Whether the model never computes with this tensor: transformers keeps it in its files, and so
// does Muster, as a buffer. Files may lack it.
bool IsUnused(const ModelConfig& config, const std::string& parameter);

// Returns Google's names of a norm's weights, `LayerNorm.gamma` and `LayerNorm.beta`, as
// `LayerNorm.weight` and `LayerNorm.bias`; other names unchanged. transformers does so for models
// of every class.
std::string WithoutGammaAndBeta(const std::string& name_in_file);

// Returns, for each head's name in files, the model's name of the tensor that the config ties it
// to.
std::vector<std::pair<std::string, std::string>> TiedHeads(const ModelConfig& config);

// Returns ParameterNameOf for files that hold these names: if a tied weight is there only under the
// head's name, that name stands for the embedding.
std::function<std::string(const std::string&)> NamesOfFiles(
    const ModelConfig& config, const std::set<std::string>& names_in_files);

// TextModelImpl::PartsOf: the tensors in a file that hold all experts of a layer, as in
// transformers 5's models in memory, are the matrices of each expert.
std::vector<std::string> PartsOf(const ModelConfig& config, const std::string& name_in_file);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_FILE_NAMES_H_
