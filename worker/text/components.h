#ifndef MUSTER_WORKER_TEXT_COMPONENTS_H_
#define MUSTER_WORKER_TEXT_COMPONENTS_H_

#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/settings.h"

namespace muster::text {

// One kind of component of a tokenizer.json (normalizers, pre-tokenizers, ...): the functions that
// make each type, and the format of a "Sequence" of them.
template <typename Part>
struct ComponentKind {
  std::map<absl::string_view, std::function<absl::StatusOr<std::unique_ptr<Part>>(Settings&)>>
      makers;
  absl::string_view parts;  // the field of a "Sequence" that lists its parts
  std::function<std::unique_ptr<Part>(std::vector<std::unique_ptr<Part>>)> sequence;
  size_t most_parts = std::numeric_limits<size_t>::max();
};

// Makes the component that `json`, the object at `path`, describes. UNIMPLEMENTED for a type that
// `kind` does not have, for a setting for which its maker did not ask, and for deep nesting;
// INVALID_ARGUMENT for wrong values.
template <typename Part>
absl::StatusOr<std::unique_ptr<Part>> MakeComponent(const ComponentKind<Part>& kind,
                                                    const nlohmann::json& json,
                                                    const std::string& path, int depth = 0) {
  constexpr int kMaxDepth = 16;
  Settings settings(json, path);
  const std::string type = settings.Type();
  MUSTER_RETURN_IF_ERROR(settings.status());
  if (depth > kMaxDepth) return settings.NotSupported("nesting this deep");
  std::unique_ptr<Part> made;
  if (type == "Sequence") {
    std::vector<std::unique_ptr<Part>> parts;
    for (const nlohmann::json& part : settings.List(kind.parts)) {
      if (parts.size() == kind.most_parts) {
        return settings.Wrong(kind.parts,
                              absl::StrCat("has more than ", kind.most_parts, " parts"));
      }
      MUSTER_ASSIGN_OR_RETURN(
          std::unique_ptr<Part> one,
          MakeComponent(kind, part,
                        absl::StrCat(settings.PathOf(kind.parts), "[", parts.size(), "]"),
                        depth + 1));
      parts.push_back(std::move(one));
    }
    made = kind.sequence(std::move(parts));
  } else {
    const auto maker = kind.makers.find(type);
    if (maker == kind.makers.end()) {
      return settings.NotSupported(absl::StrCat("type '", Printable(type), "'"));
    }
    MUSTER_ASSIGN_OR_RETURN(made, maker->second(settings));
  }
  MUSTER_RETURN_IF_ERROR(settings.Finish());
  return made;
}

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_COMPONENTS_H_
