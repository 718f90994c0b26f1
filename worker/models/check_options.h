#ifndef MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_
#define MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "worker/models/generate.h"
#include "worker/models/model_config.h"

namespace muster::models {

// Returns INVALID_ARGUMENT for options that Generate() refuses for any model and prompt, so that
// programs can report them before they load a large model. stop_strings need a tokenizer.
absl::Status CheckOptions(const GenerateOptions& options);

// Returns INVALID_ARGUMENT if `prompt` ("a prompt of"), which has `length` tokens, and the new
// tokens exceed the model's positions.
absl::Status CheckContext(const ModelConfig& config, absl::string_view prompt, int64_t length,
                          const GenerateOptions& options);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_
