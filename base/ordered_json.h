#ifndef MUSTER_BASE_ORDERED_JSON_H_
#define MUSTER_BASE_ORDERED_JSON_H_

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/json.h"

namespace muster {

// Does the same as ParseJson, but keeps the names of objects in the order of the text. The time is
// linear in its length; a search by name is linear in the size of the object.
absl::StatusOr<nlohmann::ordered_json> ParseOrderedJson(absl::string_view text,
                                                        absl::string_view source,
                                                        const JsonLimits& limits = {});

}  // namespace muster

#endif  // MUSTER_BASE_ORDERED_JSON_H_
