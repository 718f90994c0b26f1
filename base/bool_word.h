#ifndef MUSTER_BASE_BOOL_WORD_H_
#define MUSTER_BASE_BOOL_WORD_H_

#include <optional>

#include "absl/strings/string_view.h"

namespace muster {

// Reads a yes or no of a flag, a variable or a config file, in any case: 1 y yes t true on, 0 n no
// f false off, as Accelerate reads them. Returns nullopt for anything else.
std::optional<bool> ParseBoolWord(absl::string_view text);

}  // namespace muster

#endif  // MUSTER_BASE_BOOL_WORD_H_
