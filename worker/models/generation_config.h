#ifndef MUSTER_WORKER_MODELS_GENERATION_CONFIG_H_
#define MUSTER_WORKER_MODELS_GENERATION_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/models/generate.h"

namespace muster::models {

// Returns the generation settings that a model's makers recommend: those of
// FOLDER/generation_config.json, which transformers' generate() starts from as well. If there is no
// such file, the settings of generation in FOLDER/config.json, as in older folders; else the
// defaults of GenerateOptions. A setting that would change what is generated and that Muster does
// not have is refused by name. `do_sample` replaces the file's: a temperature, top_k, top_p or
// min_p beside "do_sample": false is meant for callers who sample, and top_k is 50 unless the file
// says otherwise. Without sampling, the settings of sampling are not read, valid or not.
// `max_new_tokens` is used if the file has none. Errors: INVALID_ARGUMENT, UNIMPLEMENTED "FILE:
// FIELD ...".
absl::StatusOr<GenerateOptions> ReadGenerationConfig(
    const std::string& folder, std::optional<bool> do_sample = std::nullopt,
    int64_t max_new_tokens = GenerateOptions().max_new_tokens);

// The same from the text of such a file; `source` is for messages.
absl::StatusOr<GenerateOptions> ParseGenerationConfig(
    absl::string_view json, absl::string_view source, std::optional<bool> do_sample = std::nullopt,
    int64_t max_new_tokens = GenerateOptions().max_new_tokens);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_GENERATION_CONFIG_H_
