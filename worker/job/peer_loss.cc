#include "worker/job/peer_loss.h"

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "worker/collective/collective_error.h"

namespace muster {

bool IsLossOfPeer(const absl::Status& error) {
  if (error.ok()) return false;
  const absl::string_view text = error.message();
  if (IsLostCollective(text) || IsExplained(text)) return true;
  for (const absl::string_view words :
       {"the group is unusable since ", "lost another process at step ",
        "the generation has ended: ", ": end the generation and join the next one"}) {
    if (absl::StrContains(text, words)) return true;
  }
  return absl::StrContains(text, "generation ") && absl::StrContains(text, " has ended");
}

}  // namespace muster
