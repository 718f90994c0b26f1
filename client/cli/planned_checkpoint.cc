#include "client/cli/planned_checkpoint.h"

#include "absl/strings/str_cat.h"
#include "client/checkpoints/newest_checkpoint.h"

namespace muster::client {

void FindCheckpoint(const std::string& folder, PlannedCheckpoint* checkpoint) {
  checkpoint->why = kWhoResumes;
  const auto found = NewestCheckpoint(folder);
  if (!found.ok()) {
    checkpoint->unknown = true;
    checkpoint->why = absl::StrCat(found.status().message(), "; ", kWhoResumes);
  } else if (found->has_value()) {
    checkpoint->path = (*found)->path;
    checkpoint->step = (*found)->step;
  }
}

std::string ResumesFrom(const PlannedCheckpoint& checkpoint) {
  if (checkpoint.unknown) return "unknown";
  return checkpoint.path.empty() ? "none" : checkpoint.path;
}

}  // namespace muster::client
