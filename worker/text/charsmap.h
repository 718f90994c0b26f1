#ifndef MUSTER_WORKER_TEXT_CHARSMAP_H_
#define MUSTER_WORKER_TEXT_CHARSMAP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"

namespace muster::text {

// SentencePiece's table of replacements: a trie of bytes, and texts that end with a zero byte.
// Immutable, thread-safe.
class Charsmap {
 public:
  // `base64` holds the size of the trie in bytes (32 bits, little-endian), its units, and the
  // texts. Errors: INVALID_ARGUMENT if it holds something else.
  static absl::StatusOr<Charsmap> Parse(absl::string_view base64);

  // Returns the replacement of the shortest entry with which `text` begins; nullopt if there is
  // none.
  absl::optional<absl::string_view> Find(absl::string_view text) const;

 private:
  std::vector<uint32_t> units_;
  std::string texts_;
};

// Returns the user-perceived characters of `text`, in order.
std::vector<absl::string_view> GraphemeClusters(absl::string_view text);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_CHARSMAP_H_
