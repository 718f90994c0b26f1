#include "worker/collective/collective_error.h"

#include <exception>

#include "absl/strings/match.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

// In the error of every call after a lost one.
constexpr absl::string_view kUnusable = "the group is unusable since";

}  // namespace

bool IsCollectiveTimeout(absl::string_view error) {
  for (const absl::string_view words :
       {"Timed out", "timed out", "Timeout", "timeout caused", "did not arrive in time"}) {
    if (absl::StrContains(error, words)) return true;
  }
  return false;
}

bool IsExplained(absl::string_view error) {
  return absl::StrContains(error, kDidNotTakePart) || absl::StrContains(error, kDidNotFinish) ||
         absl::StrContains(error, kConnectionLost);
}

bool IsLostCollective(absl::string_view error) {
  if (absl::StrContains(error, kUnusable) || IsExplained(error)) return false;
  if (IsCollectiveTimeout(error)) return true;
  for (const absl::string_view words :
       {"gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe",
        "has left the group", "has died", "ncclRemoteError", "ncclSystemError"}) {
    if (absl::StrContains(error, words)) return true;
  }
  return false;
}

void RethrowExplained(const CollectiveExplainer& explain) {
  std::string text;
  try {
    throw;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
    if (explain == nullptr || !IsLostCollective(text)) throw;
  } catch (const std::exception& error) {
    text = error.what();
    if (explain == nullptr || !IsLostCollective(text)) throw;
  }
  C10_THROW_ERROR(DistBackendError, explain(text));
}

}  // namespace muster
