#ifndef MUSTER_WORKER_TEXT_ENCODING_H_
#define MUSTER_WORKER_TEXT_ENCODING_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster {

// A text, or a pair of texts, as tokens. All lists except `overflowing` have one entry for each
// token.
struct Encoding {
  // Code points [begin, end) of the input text.
  struct Offsets {
    int64_t begin = 0;
    int64_t end = 0;

    friend bool operator==(Offsets a, Offsets b) { return a.begin == b.begin && a.end == b.end; }
  };

  std::vector<int64_t> ids;
  std::vector<int64_t> type_ids;
  std::vector<std::string> tokens;
  std::vector<Offsets> offsets;
  std::vector<int64_t> special_tokens_mask;  // 1: added by the template or as padding
  std::vector<int64_t> attention_mask;       // 0: padding
  std::vector<Encoding> overflowing;         // the rest that truncation cut off, in windows

  size_t size() const { return ids.size(); }
};

enum class TextSide { kLeft, kRight };

// How encodings are cut to a length.
struct Truncation {
  enum class Strategy {
    kLongestFirst,  // the longer text of a pair; both if that is not enough
    kOnlyFirst,
    kOnlySecond,
  };
  int64_t max_length = 512;  // in tokens, including those of the template
  int64_t stride = 0;        // how many tokens a window shares with the previous one
  Strategy strategy = Strategy::kLongestFirst;
  TextSide direction = TextSide::kRight;  // which end is cut off
};

// How the encodings of a batch are padded to equal length.
struct Padding {
  std::optional<int64_t> length = {};  // unset: the length of the longest
  int64_t pad_to_multiple_of = 0;
  int64_t pad_id = 0;
  int64_t pad_type_id = 0;
  std::string pad_token = "[PAD]";
  TextSide direction = TextSide::kRight;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TEXT_ENCODING_H_
