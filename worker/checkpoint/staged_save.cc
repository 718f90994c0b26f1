#include "worker/checkpoint/staged_save.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/disposal.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/seal.h"

namespace muster {
namespace {

using Json = nlohmann::json;

// Returns one status for all ranks, of what the leaders did.
absl::Status AgreeOfLeaders(Comm& comm, const NodeGroups& groups, const absl::Status& mine) {
  return groups.nodes.size() == 1 ? StatusOfMain(comm, mine)
                                  : AgreeOnFiles(comm, mine, {}, nullptr);
}

// Runs what leaders do with their folders, under `mu` if there is one.
absl::Status OnlyLeader(const NodeGroups& groups, Mutex* mu,
                        absl::FunctionRef<absl::Status()> work) {
  if (!groups.leads()) return absl::OkStatus();
  if (mu == nullptr) return GuardRank(work);
  MutexLock lock(mu);
  return GuardRank(work);
}

// A folder of a leader with a manifest.
struct Copy {
  std::string path;
  // Equal manifests have equal texts.
  std::string digest;
  int64_t step = 0;
  std::string created;

  auto age() const { return std::tie(step, created, digest); }
};

// `hidden`: set if there may be a copy at `dir` that cannot be read now.
absl::StatusOr<std::vector<Copy>> ReadCopies(const std::string& dir, bool* hidden) {
  std::vector<Copy> copies;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> paths, CopiesOf(dir));
  for (const std::string& path : paths) {
    const absl::StatusOr<std::string> text = ReadRecordFile(JoinPath(path, kManifestName));
    if (absl::IsNotFound(text.status()) || StaysUnreadable(text.status())) continue;
    if (!text.ok() && path == dir) {
      MUSTER_LOG(Warning) << text.status().message();
      *hidden = true;
      continue;
    }
    MUSTER_RETURN_IF_ERROR(text.status());
    const absl::StatusOr<Manifest> manifest = ParseManifest(*text, path);
    if (!manifest.ok()) continue;
    copies.push_back({.path = path,
                      .digest = DigestBytes(*text).xxh3,
                      .step = manifest->info.step,
                      .created = manifest->created});
  }
  return copies;
}

}  // namespace

absl::StatusOr<StagedSave> StagedSave::Begin(Comm& comm, const std::string& dir, NodeGroups groups,
                                             bool replaces, Disposal* disposal, Mutex* folder_mu) {
  StagedSave save(std::move(groups), folder_mu);
  const absl::Status created = OnlyLeader(save.groups_, folder_mu, [&]() -> absl::Status {
    if (disposal != nullptr) disposal->Wait();
    absl::StatusOr<Staging> staging = Staging::Create(dir, replaces);
    MUSTER_RETURN_IF_ERROR(staging.status());
    save.staging_.emplace(*std::move(staging));
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOfLeaders(comm, save.groups_, created));
  const std::string mine = save.staging_.has_value() ? save.staging_->path() : "";
  save.path_ = save.groups_.nodes.size() == 1 ? comm.BroadcastBytes(mine, 0)
                                              : comm.AllGatherBytes(mine)[save.groups_.leader()];
  return save;
}

absl::Status StagedSave::CheckVisible() const {
  if (PathExists(path_)) return absl::OkStatus();
  if (groups_.leads()) {
    return absl::NotFoundError(absl::StrCat(
        path_,
        " was removed while this save wrote there: nothing else may remove the folder of a save"));
  }
  return absl::NotFoundError(
      absl::StrCat(path_, " of rank ", groups_.leader(),
                   " is not visible here; checkpoints need a file system that all ranks share, or "
                   "options.project.save_on_each_node"));
}

absl::Status StagedSave::Publish(Comm& comm, Publication publication, const absl::Status& written,
                                 const std::vector<ManifestFile>& mine) {
  publication.staging_path = path_;
  publication.folder_mu = mu_;
  if (groups_.nodes.size() == 1) {
    return PublishTogether(comm, staging_.has_value() ? &*staging_ : nullptr, publication, written,
                           mine);
  }
  std::vector<ManifestFile> all;
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, written, mine, &all));
  MUSTER_RETURN_IF_ERROR(ProveTogether(comm, path_, mine));
  const ChainEnd previous = PreviousOnNodes(comm, publication.path);
  MUSTER_RETURN_IF_ERROR(PublishOnNodes(comm, publication, all));
  SealOnNodes(comm, publication, all, previous);
  if (comm.rank() == 0) CountUnrecorded(publication, all);
  if (!publication.folder.has_value() || publication.options.keep <= 0) return absl::OkStatus();
  // The checkpoint exists; failing to delete an old one does not change that.
  const absl::Status rotated =
      RotateOnNodes(comm, *publication.folder, groups_, publication.options.keep,
                    publication.options.keep_every, mu_, publication.options.disposal);
  if (!rotated.ok() && comm.rank() == 0) MUSTER_LOG(Warning) << rotated.message();
  return absl::OkStatus();
}

// Returns where the chain ends over all nodes, as far as the next record needs it: rank 0's node
// may have joined later and lack the end.
ChainEnd StagedSave::PreviousOnNodes(Comm& comm, const std::string& path) const {
  std::string mine;
  // If that fails, the chain begins again.
  (void)OnlyLeader(groups_, mu_, [&]() -> absl::Status {
    const ChainEnd end = PreviousRecords(path);
    if (end.last.has_value()) {
      mine = Json({{"highest", end.highest_id},
                   {"id", end.last->id},
                   {"created", end.last->created_us},
                   {"sha256", end.last->sha256},
                   {"previous", end.last->previous_sha256},
                   {"of_job", !end.last->job.empty()}})
                 .dump();
    }
    return absl::OkStatus();
  });
  std::vector<RegisteredCheckpoint> ends;  // ends of the chains on the nodes
  uint64_t highest_id = 0;
  for (const std::string& text : comm.AllGatherBytes(mine)) {
    if (text.empty()) continue;
    const Json end = Json::parse(text);
    highest_id = std::max(highest_id, end["highest"].get<uint64_t>());
    RegisteredCheckpoint& record = ends.emplace_back();
    record.id = end["id"];
    record.created_us = end["created"];
    record.sha256 = end["sha256"];
    record.previous_sha256 = end["previous"];
    // EndOfChain() only checks whether there is a job.
    if (end["of_job"].get<bool>()) record.job = "a coordinator's";
  }
  // Use the same rule as on one disk: a coordinator's ids are no order.
  ChainEnd newest = EndOfChain(ends, absl::Now());
  newest.highest_id = highest_id;
  return newest;
}

void StagedSave::SealOnNodes(Comm& comm, const Publication& publication,
                             const std::vector<ManifestFile>& files, const ChainEnd& previous) {
  std::string text;
  if (comm.rank() == 0) {
    const absl::Status made = OnlyLeader(groups_, mu_, [&]() -> absl::Status {
      MUSTER_ASSIGN_OR_RETURN(
          const RegisteredCheckpoint record,
          MakeRecord(publication, publication.path, comm.size(), files, previous));
      text = EncodeSeal(record);
      return absl::OkStatus();
    });
    if (!made.ok()) {
      MUSTER_LOG(Warning) << publication.path << " is saved without a " << kSealName << ": "
                          << made.message();
    }
  }
  text = comm.BroadcastBytes(text, 0);
  if (text.empty()) return;
  const absl::Status written =
      OnlyLeader(groups_, mu_, [&] { return WriteSealText(publication.path, text); });
  if (!written.ok()) {
    MUSTER_LOG(Warning) << publication.path << " is saved on this node without a " << kSealName
                        << ": " << written.message();
  }
}

absl::Status StagedSave::PublishOnNodes(Comm& comm, const Publication& publication,
                                        std::vector<ManifestFile> files) {
  Manifest manifest;
  manifest.info = publication.info;
  manifest.info.world_size = comm.size();
  manifest.created = absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone());
  manifest.files = std::move(files);
  // Every node gets the same bytes.
  manifest.created = comm.BroadcastBytes(manifest.created, 0);
  for (const NodeGroups::Node& node : groups_.nodes) {
    ManifestNode& entry = manifest.nodes.emplace_back();
    entry.host = node.host;
    for (int rank = 0; rank < comm.size(); ++rank) {
      if (groups_.leader_of[rank] == node.leader) entry.ranks.push_back(rank);
    }
  }
  const auto here = [this](const ManifestFile& file) {
    return groups_.leader_of[file.rank] == groups_.leader();
  };
  MUSTER_RETURN_IF_ERROR(AgreeOfLeaders(
      comm, groups_, OnlyLeader(groups_, mu_, [&] { return staging_->Prepare(manifest, here); })));
  MUSTER_RETURN_IF_ERROR(
      AgreeOfLeaders(comm, groups_, OnlyLeader(groups_, mu_, [&] { return staging_->Commit(); })));
  return AgreeOfLeaders(comm, groups_, OnlyLeader(groups_, mu_, [&] {
                          return staging_->Finish(publication.options.disposal);
                        }));
}

absl::Status CheckPublishable(const NodeGroups& groups, const PublishOptions& options) {
  // Only the coordinator can hold a checkpoint back.
  if (groups.nodes.size() == 1 || options.promote) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "options.checkpoint.promote is false, which needs a file system that all nodes share, not "
      "options.project.save_on_each_node with a disk in every node");
}

absl::Status SettleNodes(Comm& comm, const std::string& dir, const NodeGroups& groups) {
  if (groups.nodes.size() == 1) return absl::OkStatus();
  std::vector<Copy> mine;
  bool hidden = false;
  // A copy beside `dir` that cannot be read at the moment may be the latest, so that is an error.
  const absl::Status looked = OnlyLeader(groups, nullptr, [&]() -> absl::Status {
    MUSTER_ASSIGN_OR_RETURN(mine, ReadCopies(dir, &hidden));
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOfLeaders(comm, groups, looked));
  // If a node's `dir` cannot be read, nothing is moved; the load takes it from the other nodes.
  for (const std::string& other : comm.AllGatherBytes(hidden ? "1" : "0")) {
    if (other == "1") return absl::OkStatus();
  }
  Json json = Json::array();
  for (const Copy& copy : mine) {
    json.push_back({copy.path == dir, copy.digest, copy.step, copy.created});
  }
  const std::vector<std::string> all = comm.AllGatherBytes(json.dump());

  // Find the latest that every leader has, and whether it is in its place everywhere.
  std::map<std::string, int> count, in_place;
  std::map<std::string, Copy> known;
  for (const NodeGroups::Node& node : groups.nodes) {
    std::set<std::string> seen;
    for (const Json& entry : Json::parse(all[node.leader])) {
      const std::string digest = entry[1];
      if (entry[0].get<bool>()) ++in_place[digest];
      if (!seen.insert(digest).second) continue;
      ++count[digest];
      known[digest] = {.path = "", .digest = digest, .step = entry[2], .created = entry[3]};
    }
  }
  const int leaders = static_cast<int>(groups.nodes.size());
  const Copy* latest = nullptr;
  for (const auto& [digest, copy] : known) {
    if (count[digest] < leaders) continue;
    if (latest == nullptr || latest->age() < copy.age()) latest = &copy;
  }
  if (latest == nullptr || in_place[latest->digest] == leaders) return absl::OkStatus();

  return AgreeOfLeaders(
      comm, groups, OnlyLeader(groups, nullptr, [&]() -> absl::Status {
        const auto found = std::find_if(mine.begin(), mine.end(), [&](const Copy& copy) {
          return copy.digest == latest->digest;
        });
        if (found->path == dir) return absl::OkStatus();
        MUSTER_LOG(Warning) << "moving " << found->path << " to " << dir
                            << ": a save on several nodes was interrupted while it published";
        return PutInPlace(found->path, dir);
      }));
}

absl::Status RotateOnNodes(Comm& comm, const CheckpointFolder& folder, const NodeGroups& groups,
                           int keep, int64_t keep_every, Mutex* folder_mu, Disposal* disposal) {
  std::vector<int64_t> mine;
  // The pinned ones among saves on one disk, by the seal.json of this node: see PinnedIn().
  std::vector<int64_t> pinned_here;
  MUSTER_RETURN_IF_ERROR(AgreeOfLeaders(
      comm, groups, OnlyLeader(groups, folder_mu, [&]() -> absl::Status {
        MUSTER_ASSIGN_OR_RETURN(mine, folder.SeenPublished());
        MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> paths, PinnedIn(folder));
        for (const int64_t number : mine) {
          const std::string path = folder.PathOf(number);
          if (std::find(paths.begin(), paths.end(), path) != paths.end()) {
            pinned_here.push_back(number);
          }
        }
        return absl::OkStatus();
      })));
  const std::vector<std::string> all = comm.AllGatherBytes(Json({mine, pinned_here}).dump());
  std::map<int64_t, size_t> count;
  // The checkpoints that are pinned on any node: the other nodes have parts of them, or copies.
  std::set<int64_t> pinned;
  for (const NodeGroups::Node& node : groups.nodes) {
    const Json of_node = Json::parse(all[node.leader]);
    for (const int64_t number : of_node[0].get<std::vector<int64_t>>()) ++count[number];
    for (const int64_t number : of_node[1].get<std::vector<int64_t>>()) pinned.insert(number);
  }
  std::vector<int64_t> whole;
  for (const auto& [number, nodes] : count) {
    if (nodes == groups.nodes.size() && pinned.count(number) == 0) whole.push_back(number);
  }
  // Only if enough are kept: then all that is older and not on all nodes is removed, too.
  if (whole.empty() || static_cast<int>(whole.size()) < keep) return absl::OkStatus();
  const int64_t oldest_kept = whole[whole.size() - keep];
  const absl::Status removed = OnlyLeader(groups, folder_mu, [&]() -> absl::Status {
    absl::Status all_of_node;
    for (const int64_t number : mine) {
      if (number >= oldest_kept || pinned.count(number) > 0) continue;
      if (StaysForItsStep(folder.PathOf(number), keep_every)) continue;
      all_of_node.Update(RemoveCheckpoint(folder.PathOf(number), disposal));
    }
    all_of_node.Update(SyncDirectory(folder.root()));
    return all_of_node;
  });
  return AgreeOfLeaders(comm, groups, removed);
}

}  // namespace muster
