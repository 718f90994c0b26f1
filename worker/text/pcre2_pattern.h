#ifndef MUSTER_WORKER_TEXT_PCRE2_PATTERN_H_
#define MUSTER_WORKER_TEXT_PCRE2_PATTERN_H_

#include <memory>

#include "absl/strings/string_view.h"
#include "worker/text/pattern.h"

namespace muster::text {

// Makes the pattern of an expression in PCRE2's syntax, compiled to machine code if the system
// allows that; nullptr if PCRE2 does not accept it. It reads the bytes of a text, whereas ICU reads
// 16-bit units that have to be made first, and takes a fifth of ICU's time.
std::unique_ptr<Pattern> MakePcre2Pattern(absl::string_view expression);

// Whether `text`, valid UTF-8, has a character that ICU knows and PCRE2 does not: one of Unicode
// 15, because PCRE2's tables are of Unicode 14. Pure.
bool HasNewerThanPcre2(absl::string_view text);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_PCRE2_PATTERN_H_
