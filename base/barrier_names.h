#ifndef MUSTER_BASE_BARRIER_NAMES_H_
#define MUSTER_BASE_BARRIER_NAMES_H_

#include "absl/strings/string_view.h"

namespace muster {

// Prefix of the barrier names that the library keeps for itself: a program's barriers cannot have
// them.
inline constexpr absl::string_view kOwnBarriers = "muster/";

// Prefix of the names of barriers in which ranks wait to learn which ranks are gone. The
// coordinator blames no rank for not arriving: a missing rank may have timed out earlier, or may
// still wait.
inline constexpr absl::string_view kAfterLoss = "muster/after a lost ";
inline constexpr absl::string_view kAfterLostCollective = "muster/after a lost collective";
inline constexpr absl::string_view kAfterLostConnection = "muster/after a lost connection";

}  // namespace muster

#endif  // MUSTER_BASE_BARRIER_NAMES_H_
