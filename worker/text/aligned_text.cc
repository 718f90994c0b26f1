#include "worker/text/aligned_text.h"

#include "base/text.h"
#include "worker/text/unicode.h"

namespace muster::text {

AlignedText AlignedText::Of(absl::string_view original, uint32_t shift) {
  AlignedText aligned;
  aligned.text.assign(original.data(), original.size());
  aligned.ranges.resize(original.size());
  for (size_t at = 0; at < original.size();) {
    const size_t begin = at;
    NextCharacter(original, at);
    const ByteRange range = {static_cast<uint32_t>(begin) + shift,
                             static_cast<uint32_t>(at) + shift};
    for (size_t i = begin; i < at; ++i) aligned.ranges[i] = range;
  }
  return aligned;
}

void AlignedText::Append(const AlignedText& from, size_t begin, size_t end) {
  text.append(from.text, begin, end - begin);
  ranges.insert(ranges.end(), from.ranges.begin() + static_cast<ptrdiff_t>(begin),
                from.ranges.begin() + static_cast<ptrdiff_t>(end));
}

void AlignedText::Append(absl::string_view characters, ByteRange range) {
  text.append(characters.data(), characters.size());
  ranges.insert(ranges.end(), characters.size(), range);
}

void AlignedText::Append(char32_t c, ByteRange range) {
  AppendUtf8(text, c);
  ranges.resize(text.size(), range);
}

void AlignedText::Clear() {
  text.clear();
  ranges.clear();
}

void Rewriter::Skip(size_t count) {
  for (; count > 0 && at_ < end_; --count) NextCharacter(from_.text, at_);
}

void Rewriter::Put(char32_t c, int64_t change) {
  ByteRange range = {original_.begin, original_.begin};
  if (change > 0 || at_ >= end_) {
    if (at_ > begin_) range = from_.ranges[at_ - 1];
  } else {
    range = from_.ranges[at_];
    Skip(static_cast<size_t>(1 - change));
  }
  out_.Append(c, range);
}

}  // namespace muster::text
