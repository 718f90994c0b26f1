#ifndef MUSTER_WORKER_TEXT_ONIGURUMA_H_
#define MUSTER_WORKER_TEXT_ONIGURUMA_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::text {

// A regular expression in ICU's syntax.
struct IcuExpression {
  std::string text;
  // Whether PCRE2 (with UTF and UCP) reads the text in the same way. It does not if the text has
  // sets inside of sets, intersections, properties other than general categories and those that we
  // name ourselves, letters that fold to several, grapheme clusters, or atomic groups.
  bool for_pcre2 = true;
};

// Translates a regular expression in Oniguruma's default syntax, which tokenizer.json files use,
// into one with the same meaning. What differs: `\s`, `\w`, `\h`, `\b`, `.`, `^`, `$`, the names of
// properties, brackets inside brackets, `{,n}`, `{n}?`, `{n,m}+`. Pure. Errors: INVALID_ARGUMENT if
// it is malformed; UNIMPLEMENTED for a construct that has no translation; both say at which
// character.
absl::StatusOr<IcuExpression> IcuFromOniguruma(absl::string_view expression);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_ONIGURUMA_H_
