#ifndef MUSTER_WORKER_TEXT_OLDER_FILES_H_
#define MUSTER_WORKER_TEXT_OLDER_FILES_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/text/folder_tokens.h"

namespace muster::text {

// The files of a tokenizer as folders have them that are older than tokenizer.json. Pure.
struct OlderFiles {
  FolderFiles beside = {};  // without tokenizer.json
  // config.json, of the model.
  nlohmann::json config = nullptr;
  // Those that FilesOf() names are enough.
  std::optional<std::string> vocab_json = std::nullopt, merges_txt = std::nullopt,
                             vocab_txt = std::nullopt, tokenizer_model = std::nullopt;
  // Whether the folder has one, for the message where no file names a class.
  bool has_tokenizer_model = false;
};

// The names of the files that the class of such a tokenizer is made of, by what `files` has
// besides; none for a class that TokenizerOfOlderFiles() refuses.
std::vector<std::string> FilesOf(const OlderFiles& files);

struct OlderTokenizer {
  nlohmann::json tokenizer;  // as tokenizer.json
  // That of the folder, with the tokens of the roles that it leaves to the class.
  nlohmann::ordered_json tokenizer_config;
  bool without_flags = false;  // as FolderFiles has it
};

// The tokenizer that transformers 5 makes of them. The class is that of tokenizer_config.json, of
// config.json, or of the model, and for a Qwen2 always Qwen2Tokenizer: GPT2Tokenizer and
// Qwen2Tokenizer of vocab.json and merges.txt, BertTokenizer of vocab.txt, LlamaTokenizer of a
// tokenizer.model of BPE. NOT_FOUND names a class or a file that is not among these.
// INVALID_ARGUMENT names the file and the line, piece or setting that is not as it must be.
absl::StatusOr<OlderTokenizer> TokenizerOfOlderFiles(const OlderFiles& files);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_OLDER_FILES_H_
