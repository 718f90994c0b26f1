#ifndef MUSTER_WORKER_TEXT_ALIGNED_TEXT_H_
#define MUSTER_WORKER_TEXT_ALIGNED_TEXT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::text {

// The largest text; larger ones are refused, because each byte takes nine of memory.
inline constexpr size_t kMaxTextBytes = size_t{256} << 20;

// Returns how many bytes the components of a file may make of a text. One character can
// legitimately become a dozen, but a malicious file doubles the text again and again.
inline constexpr size_t MaxGrownBytes(size_t original_bytes) {
  return (size_t{16} << 20) + 16 * original_bytes;
}

// Bytes [begin, end) of a text.
struct ByteRange {
  uint32_t begin = 0;
  uint32_t end = 0;

  friend bool operator==(ByteRange a, ByteRange b) { return a.begin == b.begin && a.end == b.end; }
};

// A text with the range of the original text that each of its bytes stands for. Valid UTF-8; the
// bytes of one character need not have the same range. Not thread-safe.
struct AlignedText {
  std::string text;
  std::vector<ByteRange> ranges;  // one for each byte of `text`

  // Makes the text `original`, each character standing for itself; `shift` is added to all ranges.
  static AlignedText Of(absl::string_view original, uint32_t shift = 0);

  // Returns the range that bytes [begin, end), at least one, stand for.
  ByteRange OriginalOf(size_t begin, size_t end) const {
    return {ranges[begin].begin, ranges[end - 1].end};
  }

  void Append(const AlignedText& from, size_t begin, size_t end);
  void Append(absl::string_view characters, ByteRange range);
  void Append(char32_t c, ByteRange range);
  void Clear();
};

// A stretch [begin, end) of an AlignedText that is to become tokens, and the range of the original
// that it stands for.
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

// Writes the replacement of one stretch of a text, character by character, so that the new
// characters stand for what the old ones stood for.
class Rewriter {
 public:
  // Rewrites `from`'s bytes [begin, end); `original` is the range that they stand for. Appends to
  // `out`.
  Rewriter(const AlignedText& from, size_t begin, size_t end, ByteRange original, AlignedText& out)
      : from_(from), at_(begin), begin_(begin), end_(end), original_(original), out_(out) {}

  // Omits the next `count` characters.
  void Skip(size_t count);

  // Writes `c`. With `change` 0 it replaces the next character; with -n it replaces the next 1 + n;
  // above 0 it is new, and stands for the same as the previous character.
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
