#ifndef MUSTER_WORKER_TEXT_ONIGURUMA_H_
#define MUSTER_WORKER_TEXT_ONIGURUMA_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::text {

// A regular expression in Oniguruma's syntax (its default one), which tokenizer.json files use,
// written for ICU so that it means the same. What differs: `\s`, `\w`, `\h`, `\b`, `.`, `^`, `$`,
// the names of properties, brackets inside brackets, `{,n}`, `{n}?`, `{n,m}+`. Pure. Errors:
// INVALID_ARGUMENT malformed; UNIMPLEMENTED a construct that has no translation; both say at which
// character.
absl::StatusOr<std::string> IcuFromOniguruma(absl::string_view expression);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_ONIGURUMA_H_
