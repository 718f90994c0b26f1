#ifndef MUSTER_WORKER_TEXT_FOLDER_TOKENS_H_
#define MUSTER_WORKER_TEXT_FOLDER_TOKENS_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/text/added_tokens.h"

namespace muster::text {

// Reads what the files beside a tokenizer.json say about tokens, as transformers 5 understands
// them. Pure.

// The contents of the files, null for a missing one; `folder` begins their names in messages.
struct FolderFiles {
  std::string folder = {};
  nlohmann::json tokenizer = nullptr;  // tokenizer.json
  // The order of names decides which new token gets which id.
  nlohmann::ordered_json tokenizer_config = nullptr;    // tokenizer_config.json
  nlohmann::ordered_json special_tokens_map = nullptr;  // special_tokens_map.json
  nlohmann::ordered_json added_tokens = nullptr;        // added_tokens.json
  // Whether tokens with a role and extra ones lose the flags that files give them, as in the class
  // Qwen2Tokenizer, which adds them once more.
  bool without_flags = false;
};

struct FolderTokens {
  // Tokens by role ("eos_token"), including a model's own roles ("image_token").
  std::map<std::string, std::string> roles;
  // Tokens to add to those of tokenizer.json, in this order; one that it has with other flags gets
  // these flags. Their ids mean nothing.
  std::vector<AddedToken> added;
  // Ids by content, as in the files. The tokenizer may give others.
  std::vector<std::pair<std::string, int64_t>> ids;
};

// tokenizer_config.json determines the tokens. Without `added_tokens_decoder` there, as
// transformers wrote it until 2023, the roles of special_tokens_map.json take precedence over it,
// except for a model's own roles, and added_tokens.json is read. A token that has a role is special
// and cut out of texts, and so is one of `extra_special_tokens` unless it says otherwise. One that
// tokenizer.json has with "special": false becomes special through a role if there is no
// `added_tokens_decoder`, or if that says so. INVALID_ARGUMENT names the file and the wrong field.
absl::StatusOr<FolderTokens> TokensOfFolder(const FolderFiles& files);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_FOLDER_TOKENS_H_
