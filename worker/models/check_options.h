#ifndef MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_
#define MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_

#include "absl/status/status.h"
#include "worker/models/generate.h"

namespace muster::models {

// INVALID_ARGUMENT for what Generate() refuses whatever the model and the prompt are: for programs
// that say it before they load a large model. stop_strings are for who has a tokenizer.
absl::Status CheckOptions(const GenerateOptions& options);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_CHECK_OPTIONS_H_
