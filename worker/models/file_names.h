#ifndef MUSTER_WORKER_MODELS_FILE_NAMES_H_
#define MUSTER_WORKER_MODELS_FILE_NAMES_H_

#include <string>
#include <vector>

#include "worker/models/model_config.h"

namespace muster::models {

// How the tensors of a decoder are named in files, for models and for tools. Without torch. Pure.

// TextModelImpl::ParameterName of a decoder. Empty for a tensor that it does not need.
std::string DecoderParameterName(const DecoderConfig& config, const std::string& name_in_file);

// TextModelImpl::PartsOf of a decoder: the tensors in a file that hold all experts of a layer, as
// the model in the memory of transformers 5 has them, are the matrices of each expert.
std::vector<std::string> DecoderPartsOf(const DecoderConfig& config,
                                        const std::string& name_in_file);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_FILE_NAMES_H_
