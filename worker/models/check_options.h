#ifndef MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_
#define MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "worker/models/generate.h"
#include "worker/models/model_config.h"

namespace muster::models {

// INVALID_ARGUMENT for what Generate() refuses whatever the model and the prompt are: for programs
// that say it before they load a large model. stop_strings are for who has a tokenizer.
absl::Status CheckOptions(const GenerateOptions& options);

// INVALID_ARGUMENT if `prompt` ("a prompt of"), which has `length` tokens, and the new ones are
// more than the model's positions.
absl::Status CheckContext(const ModelConfig& config, absl::string_view prompt, int64_t length,
                          const GenerateOptions& options);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_
