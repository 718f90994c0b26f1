#include "base/size_pair.h"

#include "absl/strings/str_cat.h"
#include "base/units.h"

namespace muster {

SizePair HumanBytesApart(int64_t first, int64_t second) {
  SizePair texts = {HumanBytes(first), HumanBytes(second)};
  if (first == second || texts.first != texts.second) return texts;
  return {absl::StrCat(first, " B"), absl::StrCat(second, " B")};
}

}  // namespace muster
