#ifndef MUSTER_WORKER_TEXT_ADDED_TOKENS_H_
#define MUSTER_WORKER_TEXT_ADDED_TOKENS_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/text/aligned_text.h"
#include "worker/text/normalizers.h"
#include "worker/text/trie.h"
#include "worker/text/vocabulary.h"

namespace muster::text {

// A token that is cut out of the text before the model sees it.
struct AddedToken {
  uint32_t id = 0;
  std::string content;
  bool single_word = false;  // only if no word character is next to it
  bool lstrip = false;       // takes the blanks before it
  bool rstrip = false;       // takes the blanks after it
  bool normalized = false;   // searched for in the normalized text
  bool special = false;      // Decode can omit it
};

// The added tokens of a tokenizer. Immutable, thread-safe.
class AddedTokens {
 public:
  // Reads `added_tokens`. As in Hugging Face's library, a token that the model has keeps the
  // model's id, and a new one gets the next free id; a warning is logged if the file gives another.
  // `normalizer` may be null. The tokens `more` follow those of the file, and get their ids in the
  // same way. Errors: INVALID_ARGUMENT if a field is wrong; UNIMPLEMENTED if a field is not known;
  // those of the normalizer.
  static absl::StatusOr<AddedTokens> Make(const nlohmann::json& json, const std::string& path,
                                          const Vocabulary& vocabulary,
                                          const Normalizer* normalizer,
                                          const std::vector<AddedToken>& more = {});

  // Normalizes `text`, valid UTF-8, and cuts out the added tokens; the rest is still to be split.
  // `normalizer` may be null.
  absl::StatusOr<SplitText> Extract(absl::string_view text, const Normalizer* normalizer) const;

  // Return nullptr if it is not an added token.
  const AddedToken* Find(int64_t id) const;
  const AddedToken* Find(absl::string_view content) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  struct Match {
    uint32_t begin;
    uint32_t end;
    int64_t id;  // -1: the text between tokens
  };

  // The tokens that are searched for in one kind of text.
  struct Finder {
    Trie trie;              // values are positions in tokens_
    bool starts[256] = {};  // whether a token begins with the byte
    bool empty = true;
  };

  // Gives the token its id: that of a token with its content, that of the model, or else `next_id`.
  void Add(AddedToken token, const Vocabulary& vocabulary, uint32_t& next_id);
  static Finder MakeFinder(const std::vector<std::pair<std::string, uint32_t>>& texts);
  void FindAll(absl::string_view text, const Finder& finder, std::vector<Match>& matches) const;

  std::vector<AddedToken> tokens_;
  absl::flat_hash_map<int64_t, size_t> by_id_;
  absl::flat_hash_map<std::string, size_t> by_content_;
  Finder in_text_;
  Finder in_normalized_;
};

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_ADDED_TOKENS_H_
