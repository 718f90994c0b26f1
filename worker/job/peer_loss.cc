#include "worker/job/peer_loss.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "worker/collective/collective_error.h"

namespace muster {

namespace {

// Matches the coordinator's words: "generation 7 of job ... has ended".
bool SaysGenerationEnded(absl::string_view text) {
  constexpr absl::string_view kGeneration = "generation ";
  for (size_t at = text.find(kGeneration); at != absl::string_view::npos;
       at = text.find(kGeneration, at + 1)) {
    const absl::string_view rest = text.substr(at + kGeneration.size());
    if (!rest.empty() && absl::ascii_isdigit(rest[0]) && absl::StrContains(rest, " has ended")) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool IsLossOfPeer(const absl::Status& error) {
  if (error.ok()) return false;
  const absl::string_view text = error.message();
  if (IsExplained(text)) return true;
  // Look for phrases that only a transport, a process group or the coordinator's client uses.
  // Phrases of the operating system alone ("timed out", "Broken pipe") may be about a connection of
  // the program's own.
  for (const absl::string_view words :
       {"gloo/transport", "Connection closed by peer", "has left the group", "has died",
        "did not arrive in time", "ncclRemoteError", "ncclSystemError",
        "the group is unusable since ", "lost another process at step ",
        "the generation has ended: ", ": end the generation and join the next one"}) {
    if (absl::StrContains(text, words)) return true;
  }
  return SaysGenerationEnded(text);
}

}  // namespace muster
