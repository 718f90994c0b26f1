#include "muster/internal/failures.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "worker/collective/nested_collectives.h"
#include "worker/train/guard.h"

namespace muster::internal {

absl::Status GuardNamed(absl::string_view what, absl::FunctionRef<void()> tensor_code) {
  const absl::Status status = Guard(tensor_code);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

StatusOnWire OnWire(const absl::Status& status) {
  return {static_cast<int>(status.code()), std::string(status.message())};
}

void ThrowFirst(const std::vector<StatusOnWire>& statuses) {
  const bool alike = std::all_of(statuses.begin(), statuses.end(),
                                 [&](const auto& status) { return status == statuses[0]; });
  for (size_t r = 0; r < statuses.size(); ++r) {
    const auto& [code, message] = statuses[r];
    if (code == 0) continue;
    ThrowIfError(absl::Status(static_cast<absl::StatusCode>(code),
                              alike ? message : absl::StrCat("rank ", r, ": ", message)));
  }
}

void ThrowIfAnyFailed(Comm& comm, const absl::Status& mine) {
  ThrowFirst(GatherObject(comm, OnWire(mine)));
}

void RunOnAll(Comm& comm, absl::FunctionRef<void()> tensor_code, absl::string_view outcome) {
  absl::Status mine = Guard(tensor_code);
  if (!mine.ok() && !outcome.empty()) {
    mine = absl::Status(mine.code(), absl::StrCat(mine.message(), "; ", outcome));
  }
  ThrowIfAnyFailed(comm, mine);
}

bool OnAnyProcess(Comm& comm, bool here) {
  bool anywhere = false;
  for (const std::string& one : comm.AllGatherBytes(here ? "1" : "0")) anywhere |= one == "1";
  return anywhere;
}

}  // namespace muster::internal
