#ifndef MUSTER_WORKER_TEXT_PATTERN_H_
#define MUSTER_WORKER_TEXT_PATTERN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/text/settings.h"

namespace muster::text {

// Bytes [begin, end) of a text in which a pattern was searched for; `match` is false for the text
// between matches.
struct Piece {
  uint32_t begin = 0;
  uint32_t end = 0;
  bool match = false;
};

// A pattern of a tokenizer.json: a text, or a regular expression in Oniguruma's syntax with its
// meaning (character classes are Unicode's, `^` and `$` are the ends of lines). Immutable,
// thread-safe.
class Pattern {
 public:
  virtual ~Pattern() = default;

  // Divides `text`, valid UTF-8, into matches and the text between them, left to right, with empty
  // matches, except directly after a match. Nothing for an empty text. Appends to `pieces`. Errors:
  // RESOURCE_EXHAUSTED if the expression needs more steps or stack than a match may take.
  virtual absl::Status Find(absl::string_view text, std::vector<Piece>& pieces) const = 0;

  // Makes a pattern that matches the text itself.
  static std::unique_ptr<Pattern> Literal(std::string text);

  // Makes a pattern with PCRE2 if it can express the same, otherwise with ICU. Errors:
  // INVALID_ARGUMENT if the expression is malformed; UNIMPLEMENTED if it uses a construct that we
  // do not translate. Both name it.
  static absl::StatusOr<std::unique_ptr<Pattern>> Regex(absl::string_view expression);

  // Makes a pattern with ICU, against which PCRE2 is tested.
  static absl::StatusOr<std::unique_ptr<Pattern>> IcuRegex(absl::string_view expression);

 protected:
  Pattern() = default;
};

// Makes the pattern of the field `pattern` of a component: {"String": text} or {"Regex":
// expression}.
absl::StatusOr<std::unique_ptr<Pattern>> MakePattern(Settings& settings);

// The expression that divides text into words for GPT-2 and all tokenizers that follow it.
inline constexpr absl::string_view kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_PATTERN_H_
