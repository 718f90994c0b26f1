#include "worker/job/generation_end.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/muster/v1/error.pb.h"
#include "rpc/status.h"

namespace muster {
namespace {

// No process writes this key.
constexpr char kNeverKey[] = "muster/end_of_generation";

}  // namespace

absl::StatusOr<std::string> AwaitGenerationEnd(CoordinatorClient& client, absl::Duration timeout) {
  const absl::Status status = client.Wait({kNeverKey}, timeout).status();
  switch (rpc::GetReason(status)) {
    case v1::ERROR_REASON_GENERATION_ENDED:
    case v1::ERROR_REASON_STALE_GENERATION:
      return std::string(status.message());
    case v1::ERROR_REASON_WAIT_TIMEOUT:
      return absl::DeadlineExceededError(
          absl::StrCat("the generation continues after ", absl::FormatDuration(timeout)));
    default:
      break;
  }
  if (!status.ok()) return status;
  return absl::InternalError(absl::StrCat("a process has written the key ", kNeverKey));
}

}  // namespace muster
