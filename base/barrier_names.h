#ifndef MUSTER_BASE_BARRIER_NAMES_H_
#define MUSTER_BASE_BARRIER_NAMES_H_

#include "absl/strings/string_view.h"

namespace muster {

// Names that begin like this are the library's own: a program's barriers cannot have them.
inline constexpr absl::string_view kOwnBarriers = "muster/";

// The names of barriers in which ranks wait for a while to learn who is gone, begin like this. The
// coordinator blames nobody for not coming: who is missing may have timed out before, or wait on.
inline constexpr absl::string_view kAfterLoss = "muster/after a lost ";
inline constexpr absl::string_view kAfterLostCollective = "muster/after a lost collective";
inline constexpr absl::string_view kAfterLostConnection = "muster/after a lost connection";

}  // namespace muster

#endif  // MUSTER_BASE_BARRIER_NAMES_H_
