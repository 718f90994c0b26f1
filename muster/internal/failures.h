#ifndef MUSTER_INTERNAL_FAILURES_H_
#define MUSTER_INTERNAL_FAILURES_H_

#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "worker/collective/comm.h"

namespace muster::internal {

// As Guard(), with "`what`: " before the message of an error.
absl::Status GuardNamed(absl::string_view what, absl::FunctionRef<void()> tensor_code);

// The code and message of a status, as processes exchange them.
using StatusOnWire = std::tuple<int, std::string>;
StatusOnWire OnWire(const absl::Status& status);

// Throws the first error of `statuses`, one of each rank. It names its rank unless all ranks have
// failed alike, and is the same on every process.
void ThrowFirst(const std::vector<StatusOnWire>& statuses);

// (collective) Throws the same on every process if one of them has failed, naming it. Unlike
// OnAll() (worker/collective/on_all.h) it keeps the code of the error, which callers return.
void ThrowIfAnyFailed(Comm& comm, const absl::Status& mine);

// (collective) Runs `tensor_code`, which is no collective, and throws as ThrowIfAnyFailed does.
// `outcome`, what has happened to the state so far, is added to the message of an error.
void RunOnAll(Comm& comm, absl::FunctionRef<void()> tensor_code, absl::string_view outcome = "");

// (collective) Whether `here` is true on any process.
bool OnAnyProcess(Comm& comm, bool here);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_FAILURES_H_
