#include "proto/end_class.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace muster {
namespace {

constexpr char kPrefix[] = "END_CLASS_";

}  // namespace

std::string EndClassName(v1::EndClass end_class) {
  const std::string& name = v1::EndClass_Name(end_class);
  return name.empty() ? "UNKNOWN" : std::string(absl::StripPrefix(name, kPrefix));
}

v1::EndClass EndClassOfName(absl::string_view name) {
  v1::EndClass end_class = v1::END_CLASS_UNSPECIFIED;
  v1::EndClass_Parse(absl::StrCat(kPrefix, name), &end_class);
  return end_class;
}

}  // namespace muster
