#ifndef MUSTER_WORKER_TEXT_OLDER_FILES_H_
#define MUSTER_WORKER_TEXT_OLDER_FILES_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/text/folder_tokens.h"

namespace muster::text {

// The files of a tokenizer in folders from before tokenizer.json. Pure.
struct OlderFiles {
  FolderFiles beside = {};  // without tokenizer.json
  // The model's config.json.
  nlohmann::json config = nullptr;
  // Only those that FilesOf() names are needed.
  std::optional<std::string> vocab_json = std::nullopt, merges_txt = std::nullopt,
                             vocab_txt = std::nullopt, tokenizer_model = std::nullopt;
  // Whether the folder has a tokenizer.model, for the message if no file names a class.
  bool has_tokenizer_model = false;
};

// Returns the names of the files from which the class of such a tokenizer is made, by the other
// fields of `files`; none for a class that TokenizerOfOlderFiles() refuses.
std::vector<std::string> FilesOf(const OlderFiles& files);

struct OlderTokenizer {
  nlohmann::json tokenizer;  // in the format of tokenizer.json
  // The folder's, with the tokens of the roles that it leaves to the class.
  nlohmann::ordered_json tokenizer_config;
  bool without_flags = false;  // as in FolderFiles
};

// Returns the tokenizer that transformers 5 makes of them. The class is that of
// tokenizer_config.json, of config.json, or of the model, and for a Qwen2 always Qwen2Tokenizer:
// GPT2Tokenizer and Qwen2Tokenizer from vocab.json and merges.txt, BertTokenizer from vocab.txt,
// LlamaTokenizer from a tokenizer.model with BPE. NOT_FOUND names a class or a file that is not
// among these. INVALID_ARGUMENT names the file and the wrong line, piece or setting.
absl::StatusOr<OlderTokenizer> TokenizerOfOlderFiles(const OlderFiles& files);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_OLDER_FILES_H_
