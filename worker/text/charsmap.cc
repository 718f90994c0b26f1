#include "worker/text/charsmap.h"

#include <unicode/ubrk.h>
#include <unicode/utext.h>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/text.h"

namespace muster::text {
namespace {

uint32_t LittleEndian(absl::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 4; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  return value;
}

// The fields of a unit of the trie (Darts' double array).
bool HasLeaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t Value(uint32_t unit) { return unit & 0x7FFFFFFF; }
uint32_t Label(uint32_t unit) { return unit & (0x80000000 | 0xFF); }
uint32_t Offset(uint32_t unit) { return unit >> 10 << ((unit & 0x200) >> 6); }

}  // namespace

absl::StatusOr<Charsmap> Charsmap::Parse(absl::string_view base64) {
  std::string bytes;
  if (!absl::Base64Unescape(base64, &bytes)) {
    return absl::InvalidArgumentError("is not base64");
  }
  if (bytes.size() < 4) return absl::InvalidArgumentError("ends before the size of its trie");
  const uint32_t trie_bytes = LittleEndian(bytes, 0);
  if (trie_bytes > bytes.size() - 4 || trie_bytes < 4) {
    return absl::InvalidArgumentError(absl::StrCat("a trie of ", trie_bytes,
                                                   " bytes does not fit into the ",
                                                   bytes.size() - 4, " that are there"));
  }
  Charsmap map;
  map.units_.resize(trie_bytes / 4);
  for (size_t i = 0; i < map.units_.size(); ++i) map.units_[i] = LittleEndian(bytes, 4 + 4 * i);
  map.texts_ = bytes.substr(4 + map.units_.size() * 4);
  if (!IsValidUtf8(map.texts_)) return absl::InvalidArgumentError("its texts are not UTF-8");
  return map;
}

absl::optional<absl::string_view> Charsmap::Find(absl::string_view text) const {
  uint32_t node = Offset(units_[0]);
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == 0) break;
    node ^= byte;
    if (node >= units_.size() || Label(units_[node]) != byte) break;
    const uint32_t unit = units_[node];
    node ^= Offset(unit);
    if (!HasLeaf(unit)) continue;
    if (node >= units_.size()) break;
    const uint32_t begin = Value(units_[node]);
    // It must be the start of a text, not the middle of a character.
    if (begin >= texts_.size() || (static_cast<unsigned char>(texts_[begin]) & 0xC0) == 0x80) break;
    const size_t end = std::min(texts_.find('\0', begin), texts_.size());
    return absl::string_view(texts_).substr(begin, end - begin);
  }
  return absl::nullopt;
}

std::vector<absl::string_view> GraphemeClusters(absl::string_view text) {
  std::vector<absl::string_view> clusters;
  UErrorCode error = U_ZERO_ERROR;
  UText* const source =
      utext_openUTF8(nullptr, text.data(), static_cast<int64_t>(text.size()), &error);
  UBreakIterator* const breaks = ubrk_open(UBRK_CHARACTER, "", nullptr, 0, &error);
  ubrk_setUText(breaks, source, &error);
  if (U_SUCCESS(error)) {
    int32_t begin = ubrk_first(breaks);
    for (int32_t end = ubrk_next(breaks); end != UBRK_DONE; end = ubrk_next(breaks)) {
      clusters.push_back(text.substr(begin, end - begin));
      begin = end;
    }
  } else if (!text.empty()) {
    clusters.push_back(text);
  }
  ubrk_close(breaks);
  utext_close(source);
  return clusters;
}

}  // namespace muster::text
