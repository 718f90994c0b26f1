#ifndef MUSTER_WORKER_COLLECTIVE_COLLECTIVE_ERROR_H_
#define MUSTER_WORKER_COLLECTIVE_COLLECTIVE_ERROR_H_

#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace muster {

// Every explanation of a lost collective has one of these phrases (worker/job/lost_collective.h
// writes them), so that none is explained twice.
inline constexpr absl::string_view kDidNotTakePart = "did not take part in ";
inline constexpr absl::string_view kDidNotFinish = " did not finish within ";
inline constexpr absl::string_view kConnectionLost = " did not finish since a connection was lost";

// Whether `error` says that a transport (Gloo, shared memory, NCCL) waited too long for a peer.
bool IsCollectiveTimeout(absl::string_view error);

// Whether `error` is a transport's message about a peer that did not arrive in time or whose
// connection was lost.
bool IsLostCollective(absl::string_view error);

// Whether `error` is an explanation: it names the ranks already.
bool IsExplained(absl::string_view error);

// Takes the transport's message and returns a line that names the ranks that did not take part.
using CollectiveExplainer = std::function<std::string(absl::string_view error)>;

// Call it in a catch block: throws a c10::DistBackendError with the text of `explain` if the
// exception in flight is a lost collective, otherwise the exception itself. For exceptions of a
// backward pass, whose collectives bypass the Comm. `explain` may be null.
[[noreturn]] void RethrowExplained(const CollectiveExplainer& explain);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COLLECTIVE_ERROR_H_
