#include "worker/checkpoint/node_group.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/clean_path.h"
#include "worker/checkpoint/removal.h"
#include "worker/checkpoint/staging_folder.h"

namespace muster {
namespace {

constexpr char kProbeMark[] = ".muster-node-";

// Removes the probe folders of dead ranks. A live rank keeps its folder locked, but the other
// machines of a network file system, even its server, may not see that, so only old folders are
// removed.
void RemoveAbandonedProbes(const std::string& parent) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    const std::string path = JoinPath(parent, name);
    if (!HasMark(name, "", kProbeMark)) continue;
    struct stat info;
    if (lstat(path.c_str(), &info) != 0 ||
        absl::Now() - absl::TimeFromTimespec(info.st_mtim) < kQuietTime) {
      continue;
    }
    const OwnedFd lock(LockFolder(path));
    // If a folder cannot be removed, it only takes room.
    if (lock.open()) (void)RemoveCheckpointTree(path);
  }
}

// Returns a text that only ranks that see the same `parent` have in common, as far as a rank can
// tell by itself. `node` alone is not enough: it is based on host names, which machines from one
// image share, and several launches on one host may have a folder each.
std::string PlaceOf(const std::string& parent, int node) {
  char mounts[128] = {};
  if (readlink("/proc/self/ns/mnt", mounts, sizeof(mounts) - 1) < 0) mounts[0] = '\0';
  const absl::StatusOr<std::string> boot = ReadFile("/proc/sys/kernel/random/boot_id", 128);
  return absl::StrCat(node, "\n", boot.value_or(""), "\n", mounts, "\n", AbsolutePath(parent));
}

// Returns the lowest rank of each rank's node.
std::vector<int> LowestOfNode(const std::vector<std::string>& node_of) {
  std::vector<int> lowest;
  for (const std::string& node : node_of) {
    lowest.push_back(
        static_cast<int>(std::find(node_of.begin(), node_of.end(), node) - node_of.begin()));
  }
  return lowest;
}

}  // namespace

NodeGroups NodeGroups::Shared(int rank, int size) {
  NodeGroups groups;
  groups.rank = rank;
  groups.leader_of.assign(size, 0);
  groups.nodes = {{.leader = 0, .host = HostName()}};
  return groups;
}

std::string NodeGroups::Describe(int leader) const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < leader_of.size(); ++rank) {
    if (leader_of[rank] == leader) ranks.push_back(static_cast<int>(rank));
  }
  std::string host;
  for (const Node& node : nodes) {
    if (node.leader == leader) host = node.host;
  }
  return absl::StrCat("node ", host, ranks.size() == 1 ? " (rank " : " (ranks ",
                      absl::StrJoin(ranks, ", "), ")");
}

absl::StatusOr<NodeGroups> FindNodeGroups(Comm& comm, const std::string& parent, int node) {
  const int rank = comm.rank();
  const std::vector<int> lowest = LowestOfNode(comm.AllGatherBytes(PlaceOf(parent, node)));
  const bool lowest_here = lowest[rank] == rank;

  std::string name;
  OwnedFd probe_lock(-1);
  const absl::Status probed = GuardRank([&]() -> absl::Status {
    if (!lowest_here) return absl::OkStatus();
    MUSTER_RETURN_IF_ERROR(MakeDirectories(parent));
    RemoveAbandonedProbes(parent);
    MUSTER_ASSIGN_OR_RETURN(const WriterFolder made, MakeWriterFolder([&parent] {
                              return JoinPath(parent, absl::StrCat(kProbeMark, RandomHex()));
                            }));
    probe_lock = OwnedFd(made.lock);
    name = BaseName(made.path);
    return absl::OkStatus();
  });
  // A rank that may not write there leads itself: no two leaders write into one folder, and a load
  // may find all that it needs. A save reports that it may not write.
  const absl::Status agreed =
      AgreeOnFiles(comm, absl::IsPermissionDenied(probed) ? absl::OkStatus() : probed, {}, nullptr);
  const std::vector<std::string> names =
      comm.AllGatherBytes(lowest_here && probed.ok() ? name : "");

  int leader = lowest[rank];
  if (lowest_here && probed.ok() && agreed.ok()) {
    for (int other = 0; other < rank; ++other) {
      if (names[other].empty() || !PathExists(JoinPath(parent, names[other]))) continue;
      leader = other;
      break;
    }
  }
  // After this exchange no rank looks for the files.
  const std::vector<std::string> seen = comm.AllGatherBytes(absl::StrCat(leader, " ", HostName()));
  absl::Status removed;
  if (lowest_here && probed.ok()) {
    removed = GuardRank([&] { return RemoveCheckpointTree(JoinPath(parent, name)); });
  }
  MUSTER_RETURN_IF_ERROR(agreed);
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, removed, {}, nullptr));

  NodeGroups groups;
  groups.rank = rank;
  for (int other = 0; other < comm.size(); ++other) {
    // The answer of the lowest rank of its node counts for all of them.
    const std::string& answer = seen[lowest[other]];
    groups.leader_of.push_back(std::stoi(answer));
  }
  for (int other = 0; other < comm.size(); ++other) {
    if (groups.leader_of[other] != other) continue;
    const std::string& answer = seen[other];
    groups.nodes.push_back({.leader = other, .host = answer.substr(answer.find(' ') + 1)});
  }
  return groups;
}

absl::StatusOr<NodeGroups> GroupsOf(Comm& comm, const std::string& dir, std::optional<int> node) {
  if (!node.has_value()) return NodeGroups::Shared(comm.rank(), comm.size());
  return FindNodeGroups(comm, ParentPath(dir), *node);
}

}  // namespace muster
