#ifndef MUSTER_BASE_JSON_H_
#define MUSTER_BASE_JSON_H_

#include <cstddef>
#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/text.h"  // IWYU pragma: export

namespace muster {

struct JsonLimits {
  size_t max_bytes = size_t{64} << 20;
  int max_depth = 64;
};

// Reads strict JSON (RFC 8259): no comments, no trailing comma or text, no byte order mark, valid
// UTF-8, and no name twice in one object. Integers stay exact in 64 bits. Pure. Errors:
// INVALID_ARGUMENT "SOURCE:LINE:COLUMN: why"; RESOURCE_EXHAUSTED beyond a limit.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view source,
                                         const JsonLimits& limits = {});

}  // namespace muster

#endif  // MUSTER_BASE_JSON_H_
