#include "worker/checkpoint/checkpoint_search.h"

#include <algorithm>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/log.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/node_checkpoints.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/staging_folder.h"

namespace muster {
namespace {

// (collective) Whether the checkpoint that was opened is no longer in its place on some node,
// because another process has moved, removed or replaced it.
bool HasChanged(Comm& comm, const NodeGroups& groups, const StateReader& opened) {
  bool changed = false;
  // A node that has none of its files may have anything in that place.
  if (groups.leads() && opened.HasAnyHere()) {
    const absl::StatusOr<Manifest> now = ReadManifest(opened.dir());
    changed = !PathExists(opened.dir()) ||
              (now.ok() &&
               EncodeManifest(*now).value_or("") != EncodeManifest(opened.manifest()).value_or(""));
  }
  const std::vector<std::string> all = comm.AllGatherBytes(changed ? "changed" : "");
  return std::count(all.begin(), all.end(), "changed") > 0;
}

}  // namespace

absl::StatusOr<StateReader> OpenAndReadCheckpoint(
    Comm& comm, const WantedCheckpoint& wanted,
    absl::FunctionRef<absl::Status(StateReader& reader)> read) {
  const absl::Cleanup release = [] { ReleaseInPlace(); };
  const bool newest = wanted.dir.empty();
  const bool on_nodes = wanted.groups.nodes.size() > 1;
  const bool logs = comm.rank() == 0;
  std::vector<std::string> damaged;
  absl::Status first;  // why a checkpoint was passed over
  int moved = 0;
  while (true) {
    std::string path;
    absl::StatusOr<StateReader> reader =
        OpenCheckpointOnNodes(comm, wanted.dir, wanted.folder, wanted.groups, wanted.registrar,
                              damaged, &path, wanted.in_parts);
    absl::Status status = reader.status();
    // For a named checkpoint, ABORTED means that it was replaced while the ranks opened it.
    bool has_moved = absl::IsAborted(status);
    if (reader.ok()) {
      status = read(*reader);
      if (status.ok()) return reader;
      // Release the folder, because the next search may rename it.
      ReleaseInPlace();
      has_moved = (absl::IsNotFound(status) || absl::IsDataLoss(status)) &&
                  HasChanged(comm, wanted.groups, *reader);
      if (has_moved) {
        status = absl::AbortedError(
            absl::StrCat(path, ": another process has replaced, renamed or removed it while it ",
                         "was read (", status.message(), ")"));
      }
    } else if (absl::IsNotFound(status)) {
      if (!first.ok()) return first;
      // Not the same as "none yet", after which training would begin from scratch.
      return moved > 0 ? absl::UnavailableError(status.message()) : status;
    }
    if (has_moved) {
      if (++moved == kCheckpointSearches) return absl::UnavailableError(status.message());
      if (logs) MUSTER_LOG(Info) << status.message() << "; the search begins again";
      continue;
    }
    // Files that a disk cannot read (EIO, ESTALE, EACCES) may be readable elsewhere, or later, so
    // they are no reason to take an older checkpoint.
    const bool damage = absl::IsDataLoss(status);
    const bool again = reader.ok()
                           ? (newest && damage) || (on_nodes && (damage || IsReadError(status)))
                           : newest && damage && !on_nodes && !path.empty();
    if (!again || std::find(damaged.begin(), damaged.end(), path) != damaged.end()) return status;
    if (logs && on_nodes) {
      MUSTER_LOG(Warning) << "all nodes verify their files of " << path << ": " << status.message();
    } else if (logs) {
      MUSTER_LOG(Warning) << "passing over " << path
                          << (reader.ok() ? absl::StrCat(" of step ", reader->info().step) : "")
                          << ": " << status.message();
      if (reader.ok()) ReportDamage(path, wanted.registrar, status.message());
    }
    damaged.push_back(path);
    first.Update(status);
  }
}

}  // namespace muster
