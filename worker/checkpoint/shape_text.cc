#include "worker/checkpoint/shape_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace muster {
namespace {

constexpr size_t kMaxDimensions = 64;
constexpr size_t kShown = 8;

}  // namespace

std::string ShapeText(const std::vector<uint64_t>& shape) {
  if (shape.size() <= kMaxDimensions) return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
  return absl::StrCat("[", absl::StrJoin(shape.begin(), shape.begin() + kShown, ", "), ", ... (",
                      shape.size(), " dimensions)]");
}

}  // namespace muster
