#ifndef MUSTER_WORKER_TEXT_ALIGNED_TEXT_H_
#define MUSTER_WORKER_TEXT_ALIGNED_TEXT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::text {

// Larger texts are refused: each byte takes nine of memory.
inline constexpr size_t kMaxTextBytes = size_t{256} << 20;

// How many bytes the components of a file may make of a text. One character can rightly become a
// dozen; a file that is out to use up memory doubles the text again and again.
inline constexpr size_t MaxGrownBytes(size_t original_bytes) {
  return (size_t{16} << 20) + 16 * original_bytes;
}

// Bytes [begin, end) of a text.
struct ByteRange {
  uint32_t begin = 0;
  uint32_t end = 0;

  friend bool operator==(ByteRange a, ByteRange b) { return a.begin == b.begin && a.end == b.end; }
};

// A text that knows for each of its bytes which range of the original text it stands for. Valid
// UTF-8; the bytes of one character need not have the same range. Not thread-safe.
struct AlignedText {
  std::string text;
  std::vector<ByteRange> ranges;  // one for each byte of `text`

  // `original`, each character standing for itself; `shift` is added to all ranges.
  static AlignedText Of(absl::string_view original, uint32_t shift = 0);

  // The range that bytes [begin, end), which are not none, stand for.
  ByteRange OriginalOf(size_t begin, size_t end) const {
    return {ranges[begin].begin, ranges[end - 1].end};
  }

  void Append(const AlignedText& from, size_t begin, size_t end);
  void Append(absl::string_view characters, ByteRange range);
  void Append(char32_t c, ByteRange range);
  void Clear();
};

// A stretch [begin, end) of an AlignedText on its way to tokens, and what of the original it stands
// for.
struct Span {
  uint32_t begin = 0;
  uint32_t end = 0;
  ByteRange original;
  int64_t added_id = -1;  // the added token that it is; -1: none, text to be tokenized

  uint32_t size() const { return end - begin; }
};

// A text cut into spans, in order. Spans of added tokens may overlap those before them.
struct SplitText {
  AlignedText aligned;
  std::vector<Span> spans;

  absl::string_view TextOf(const Span& span) const {
    return absl::string_view(aligned.text).substr(span.begin, span.size());
  }
};

// Writes what becomes of one stretch of a text, character by character, so that the new characters
// stand for what the old ones stood for.
class Rewriter {
 public:
  // Of `from`'s bytes [begin, end); `original` is what they stand for. Appends to `out`.
  Rewriter(const AlignedText& from, size_t begin, size_t end, ByteRange original, AlignedText& out)
      : from_(from), at_(begin), begin_(begin), end_(end), original_(original), out_(out) {}

  // Leaves out the next `count` characters.
  void Skip(size_t count);

  // Writes `c`. With `change` 0 it takes the place of the next character; with -n it takes the
  // place of the next 1 + n; above 0 it is new, and stands for what the character before stands
  // for.
  void Put(char32_t c, int64_t change);

 private:
  const AlignedText& from_;
  size_t at_;
  const size_t begin_;
  const size_t end_;
  const ByteRange original_;
  AlignedText& out_;
};

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_ALIGNED_TEXT_H_
