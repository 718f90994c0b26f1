#include "worker/checkpoint/some_names.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace muster {

std::string SomeNames(const std::vector<std::string>& names, size_t most) {
  const size_t shown = std::min(names.size(), most);
  std::string text = absl::StrJoin(names.begin(), names.begin() + shown, ", ");
  if (names.size() > shown) absl::StrAppend(&text, " and ", names.size() - shown, " more");
  return text;
}

}  // namespace muster
