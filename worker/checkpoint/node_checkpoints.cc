#include "worker/checkpoint/node_checkpoints.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/block_transfers.h"
#include "worker/checkpoint/node_exchange.h"
#include "worker/checkpoint/node_part.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/staged_save.h"

namespace muster {
namespace {

using Json = nlohmann::json;

// Dumps JSON whose messages may not be UTF-8.
std::string Dumped(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// The parts of one checkpoint that a leader has.
struct Holding {
  std::string text;  // text of the manifest; empty: none can be read
  Manifest manifest;
  std::vector<std::string> intact;
  // Why the other files are not intact.
  std::vector<std::string> damaged;
  // The error of reading the manifest or a file, which may be intact: see StaysUnreadable().
  absl::Status unreadable;

  Json Summary() const {
    if (text.empty()) return nullptr;
    return {{"digest", DigestBytes(text).xxh3},
            {"step", manifest.info.step},
            {"created", manifest.created},
            {"intact", intact},
            {"damaged", damaged}};
  }
};

Holding Inspect(const std::string& dir, VerifyLevel level) {
  Holding holding;
  absl::StatusOr<std::string> text = ReadRecordFile(JoinPath(dir, kManifestName));
  if (!text.ok()) {
    if (!absl::IsNotFound(text.status()) && !StaysUnreadable(text.status())) {
      holding.unreadable = text.status();
    }
    return holding;
  }
  absl::StatusOr<Manifest> manifest = ParseManifest(*text, JoinPath(dir, kManifestName));
  if (!manifest.ok()) {
    MUSTER_LOG(Warning) << manifest.status().message();
    return holding;
  }
  for (const ManifestFile& file : manifest->files) {
    const absl::Status status = VerifyCheckpointFile(dir, file, level);
    if (status.ok()) {
      holding.intact.push_back(file.name);
    } else if (!StaysUnreadable(status)) {
      holding.unreadable.Update(status);
    } else if (PathExists(JoinPath(dir, file.name))) {
      holding.damaged.push_back(std::string(status.message()));
    }
  }
  holding.text = *std::move(text);
  holding.manifest = *std::move(manifest);
  return holding;
}

// One checkpoint over all nodes. The same on every rank, except `dir`, `mine` and `lacks`.
class Gathering {
 public:
  Gathering(Comm& comm, std::string dir, const NodeGroups& groups)
      : comm_(comm), dir_(std::move(dir)), groups_(groups) {}

  // (collective) Looks for the files on all nodes. A file of the right size may still turn out to
  // be damaged when it is read.
  absl::Status Find(VerifyLevel level);
  // (collective) Fetches what this node lacks, if any node lacks anything.
  absl::Status Complete();
  // Whether some node lacks files of it.
  bool IsInParts() const { return !lacking_.empty(); }
  // (collective) Opens the checkpoint with its files where they are. Errors: this rank does not see
  // a file that its node has.
  absl::StatusOr<StateReader> OpenInParts() const;

 private:
  // Chooses the checkpoint whose manifest has this digest.
  absl::Status Choose(const std::string& digest, const std::vector<Json>& summaries);
  absl::Status MissingFiles(const std::vector<Json>& summaries) const;
  absl::Status FetchInto(Staging* staging);
  absl::Status FetchFile(const ManifestFile& file, AtomicFile* out);
  absl::Status KeepIntact(const Staging& staging) const;
  // Returns FAILED_PRECONDITION if this node has another checkpoint of this name that is pinned.
  absl::Status CheckMayReplace() const;
  // Returns the seal.json of a node that has the one for this manifest; empty if none has.
  std::string FetchSeal();

  Comm& comm_;
  const std::string dir_;
  const NodeGroups& groups_;
  Holding mine_;
  Manifest manifest_;
  std::string digest_;  // digest of the manifest's text
  // By file name: the leaders that have it.
  std::map<std::string, std::vector<int>, std::less<>> holders_;
  std::set<int> lacking_;  // leaders that lack a file
};

absl::Status Gathering::Find(VerifyLevel level) {
  std::string mine = "null";
  const absl::Status inspected = GuardRank([&]() -> absl::Status {
    if (groups_.leads()) mine_ = Inspect(dir_, level);
    mine = Dumped(mine_.Summary());
    return absl::OkStatus();
  });
  if (!inspected.ok()) {
    // Treat the failure as if the node could not read it now: the others learn of that below.
    mine_ = Holding{};
    mine_.unreadable = inspected;
  }
  std::vector<Json> summaries;
  for (const std::string& text : comm_.AllGatherBytes(mine)) {
    summaries.push_back(Json::parse(text));
  }
  // Try the latest first: SettleNodes() has chosen if two were partly published.
  std::map<std::tuple<int64_t, std::string, std::string>, int, std::greater<>> candidates;
  for (size_t rank = 0; rank < summaries.size(); ++rank) {
    const Json& summary = summaries[rank];
    if (summary.is_null()) continue;
    candidates.try_emplace({summary["step"], summary["created"], summary["digest"]},
                           static_cast<int>(rank));
  }
  // Files that a node cannot read at the moment are not lost if other nodes have all of them.
  const absl::Status unreadable = AgreeOnFiles(comm_, mine_.unreadable, {}, nullptr);
  absl::Status first = unreadable;
  for (const auto& [age, holder] : candidates) {
    const absl::StatusOr<Manifest> manifest =
        ParseManifest(comm_.BroadcastBytes(mine_.text, holder), dir_);
    // The node that has the manifest could read it, so an error ends the search.
    MUSTER_RETURN_IF_ERROR(manifest.status());
    manifest_ = *manifest;
    const absl::Status chosen = Choose(std::get<2>(age), summaries);
    if (chosen.ok()) return chosen;
    if (!unreadable.ok()) return unreadable;
    if (first.ok()) first = chosen;
  }
  if (!first.ok()) return first;
  return absl::NotFoundError(absl::StrCat("no node has a checkpoint ", dir_));
}

absl::Status Gathering::Choose(const std::string& digest, const std::vector<Json>& summaries) {
  digest_ = digest;
  holders_.clear();
  lacking_.clear();
  for (const NodeGroups::Node& node : groups_.nodes) {
    const Json& summary = summaries[node.leader];
    if (summary.is_null() || summary["digest"] != digest) {
      lacking_.insert(node.leader);
      continue;
    }
    for (const Json& name : summary["intact"]) holders_[name].push_back(node.leader);
    if (summary["intact"].size() < manifest_.files.size()) lacking_.insert(node.leader);
  }
  return MissingFiles(summaries);
}

absl::Status Gathering::MissingFiles(const std::vector<Json>& summaries) const {
  std::map<std::string, std::vector<std::string>> missing;  // by node
  for (const ManifestFile& file : manifest_.files) {
    if (holders_.count(file.name) > 0) continue;
    std::string node = absl::StrCat("the node of rank ", file.rank);
    for (const ManifestNode& entry : manifest_.nodes) {
      if (std::find(entry.ranks.begin(), entry.ranks.end(), file.rank) == entry.ranks.end())
        continue;
      node = NodeName(entry);
    }
    missing[node].push_back(file.name);
  }
  if (missing.empty()) return absl::OkStatus();
  std::vector<std::string> parts;
  for (const auto& [node, files] : missing) {
    parts.push_back(absl::StrCat(absl::StrJoin(files, ", "), ", which ", node, " wrote"));
  }
  std::string damage;
  for (const Json& summary : summaries) {
    if (summary.is_null()) continue;
    for (const Json& text : summary["damaged"]) {
      absl::StrAppend(&damage, "; ", text.get<std::string>());
    }
  }
  return absl::DataLossError(absl::StrCat(
      "no node of this job has an intact copy of ", absl::StrJoin(parts, " and "), " (checkpoint ",
      dir_, "); start the job with that node, or load an earlier ", "checkpoint", damage));
}

// Hard links cost nothing; what a file system cannot link is copied.
absl::Status Gathering::KeepIntact(const Staging& staging) const {
  for (const std::string& name : mine_.intact) {
    const ManifestFile* const file = manifest_.Find(name);
    const ManifestFile* const here = mine_.manifest.Find(name);
    if (file == nullptr || here == nullptr || file->digest != here->digest) continue;
    const std::string from = JoinPath(dir_, name);
    const std::string to = JoinPath(staging.path(), name);
    if (link(from.c_str(), to.c_str()) == 0) continue;
    std::error_code error;
    if (!std::filesystem::copy_file(from, to, error)) {
      return absl::UnavailableError(
          absl::StrCat("cannot copy ", from, " to ", to, ": ", error.message()));
    }
    // All files must be durable before the folder gets its name, like those that a rank writes.
    const OwnedFd copy(open(to.c_str(), O_RDONLY | O_CLOEXEC));
    if (!copy.open() || fsync(copy.get()) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot sync ", to));
    }
  }
  return absl::OkStatus();
}

// A receiver that fails keeps receiving, so that the ranks stay in step.
absl::Status Gathering::FetchFile(const ManifestFile& file, AtomicFile* out) {
  const int holder = holders_.at(file.name).front();
  const std::string path = JoinPath(dir_, file.name);
  std::ifstream in;
  if (comm_.rank() == holder) in.open(path, std::ios::binary);
  Digester digester;
  absl::Status written;
  MUSTER_RETURN_IF_ERROR(BroadcastPieces(
      comm_, holder, file.digest.bytes,
      [&](char* to, size_t size) -> absl::Status {
        in.read(to, static_cast<std::streamsize>(size));
        if (static_cast<size_t>(in.gcount()) == size) return absl::OkStatus();
        return absl::UnknownError(
            absl::StrCat(path, ": cannot be read: the file is shorter, or its disk fails"));
      },
      [&](absl::string_view piece) {
        if (out == nullptr || !written.ok()) return;
        written = GuardRank([&] {
          digester.Update(piece);
          return out->Append(piece);
        });
      }));
  if (out != nullptr && written.ok()) {
    written = GuardRank([&]() -> absl::Status {
      if (digester.Finish() == file.digest) return out->Commit();
      // Damaged in transit, or on the disk of the holder, whose verification finds out.
      return absl::UnavailableError(
          absl::StrCat(path, ": what rank ", holder, " sent does not match the manifest"));
    });
  }
  return AgreeOnFiles(comm_, written, {}, nullptr);
}

absl::Status Gathering::FetchInto(Staging* staging) {
  uint64_t bytes = 0;
  int files = 0;
  for (const ManifestFile& file : manifest_.files) {
    const std::vector<int>& holders = holders_.at(file.name);
    const bool all_lack = std::all_of(lacking_.begin(), lacking_.end(), [&](int leader) {
      return std::find(holders.begin(), holders.end(), leader) != holders.end();
    });
    if (all_lack) continue;
    std::optional<AtomicFile> out;
    const absl::Status created = GuardRank([&]() -> absl::Status {
      if (staging == nullptr) return absl::OkStatus();
      const std::string path = JoinPath(staging->path(), file.name);
      if (PathExists(path)) return absl::OkStatus();
      absl::StatusOr<AtomicFile> opened = AtomicFile::Create(path);
      MUSTER_RETURN_IF_ERROR(opened.status());
      out.emplace(*std::move(opened));
      return absl::OkStatus();
    });
    MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm_, created, {}, nullptr));
    MUSTER_RETURN_IF_ERROR(FetchFile(file, out.has_value() ? &*out : nullptr));
    bytes += file.digest.bytes;
    ++files;
  }
  if (comm_.rank() == 0) {
    std::vector<std::string> names;
    for (const int leader : lacking_) names.push_back(groups_.Describe(leader));
    MUSTER_LOG(Info) << "fetched " << files << " files of " << dir_ << ", " << bytes
                     << " bytes, for " << absl::StrJoin(names, ", ");
  }
  return absl::OkStatus();
}

std::string Gathering::FetchSeal() {
  std::string mine;
  (void)GuardRank([&]() -> absl::Status {
    if (!groups_.leads()) return absl::OkStatus();
    MUSTER_ASSIGN_OR_RETURN(const RegisteredCheckpoint seal, ReadSeal(dir_));
    MUSTER_RETURN_IF_ERROR(CheckSeal(dir_, manifest_, seal));
    mine = EncodeSeal(seal);
    return absl::OkStatus();
  });
  for (std::string& text : comm_.AllGatherBytes(mine)) {
    if (!text.empty()) return std::move(text);
  }
  return "";
}

absl::Status Gathering::CheckMayReplace() const {
  if (!mine_.text.empty() && DigestBytes(mine_.text).xxh3 == digest_) return absl::OkStatus();
  if (!HasPin(dir_)) {
    const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(dir_);
    if (!seal.ok() && !absl::IsNotFound(seal.status()) && !StaysUnreadable(seal.status())) {
      return seal.status();
    }
    if (!seal.ok() || !seal->pinned) return absl::OkStatus();
  }
  // Even a damaged checkpoint may be worth keeping.
  const std::string what = mine_.text.empty()
                               ? std::string("damaged")
                               : absl::StrCat("the checkpoint of step ", mine_.manifest.info.step);
  return absl::FailedPreconditionError(
      absl::StrCat(dir_, " is pinned on ", HostName(), " and is ", what, ", not that of step ",
                   manifest_.info.step,
                   ", which other nodes have by this name: move it away, or unpin it (muster "
                   "checkpoints unpin)"));
}

absl::Status Gathering::Complete() {
  if (lacking_.empty()) return absl::OkStatus();
  std::optional<Staging> staging;
  const bool lacks = lacking_.count(comm_.rank()) > 0;
  const absl::Status begun = GuardRank([&]() -> absl::Status {
    if (!lacks) return absl::OkStatus();
    MUSTER_RETURN_IF_ERROR(CheckMayReplace());
    absl::StatusOr<Staging> created = Staging::Create(dir_);
    MUSTER_RETURN_IF_ERROR(created.status());
    staging.emplace(*std::move(created));
    return KeepIntact(*staging);
  });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm_, begun, {}, nullptr));
  MUSTER_RETURN_IF_ERROR(FetchInto(staging.has_value() ? &*staging : nullptr));
  const std::string seal = FetchSeal();
  const absl::Status published = GuardRank([&]() -> absl::Status {
    if (!lacks) return absl::OkStatus();
    MUSTER_RETURN_IF_ERROR(staging->Complete(manifest_));
    if (!seal.empty()) MUSTER_RETURN_IF_ERROR(WriteSealText(staging->path(), seal));
    return staging->Rename();
  });
  return AgreeOnFiles(comm_, published, {}, nullptr);
}

absl::StatusOr<StateReader> Gathering::OpenInParts() const {
  FilesOnNodes nodes{.leader_of = groups_.leader_of, .holders = holders_};
  const absl::Status seen = GuardRank([&]() -> absl::Status {
    for (const ManifestFile& file : manifest_.files) {
      if (!nodes.Has(comm_.rank(), file.name)) continue;
      MUSTER_RETURN_IF_ERROR(VerifyCheckpointFile(dir_, file, VerifyLevel::kSizes));
    }
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm_, seen, {}, nullptr));
  return StateReader::InParts(comm_.rank(), dir_, manifest_, std::move(nodes));
}

// `damaged`: checkpoints of which an existing file was found damaged. `parts`: null, or gets the
// gathering of a checkpoint of which some node lacks files.
absl::Status CompleteOnNodes(Comm& comm, const std::string& dir, const NodeGroups& groups,
                             const std::vector<std::string>& damaged,
                             std::optional<Gathering>* parts) {
  MUSTER_RETURN_IF_ERROR(SettleNodes(comm, dir, groups));
  const auto complete = [&](VerifyLevel level) -> absl::Status {
    Gathering gathering(comm, dir, groups);
    MUSTER_RETURN_IF_ERROR(gathering.Find(level));
    if (parts == nullptr || !gathering.IsInParts()) return gathering.Complete();
    parts->emplace(std::move(gathering));
    return absl::OkStatus();
  };
  if (std::find(damaged.begin(), damaged.end(), dir) == damaged.end()) {
    // Files are checked when they are read, and those of other nodes when they arrive, so reading
    // all of them before would be unnecessary.
    const absl::Status completed = complete(VerifyLevel::kSizes);
    if (!absl::IsDataLoss(completed) && !IsReadError(completed)) return completed;
  }
  return complete(VerifyLevel::kContents);
}

absl::StatusOr<StateReader> OpenOnEveryRank(Comm& comm, const std::string& dir) {
  absl::StatusOr<StateReader> reader = StateReader::Open(dir);
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, reader.status(), {}, nullptr));
  // Each node has a path of its own.
  MUSTER_RETURN_IF_ERROR(CheckOpenedAlike(comm, *reader, /*given=*/false));
  return reader;
}

// (collective) Returns the numbers of checkpoints that any node has, descending. `mine`: gets those
// of this node, on a leader.
absl::StatusOr<std::vector<int64_t>> NumbersOnNodes(Comm& comm, const CheckpointFolder& folder,
                                                    const NodeGroups& groups,
                                                    std::set<int64_t>* mine) {
  const absl::Status listed = GuardRank([&]() -> absl::Status {
    if (!groups.leads()) return absl::OkStatus();
    MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, folder.Numbers());
    mine->insert(numbers.begin(), numbers.end());
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, listed, {}, nullptr));
  std::set<int64_t, std::greater<>> all;
  for (const std::string& numbers : comm.AllGatherBytes(Json(*mine).dump())) {
    for (const Json& number : Json::parse(numbers)) all.insert(number.get<int64_t>());
  }
  return std::vector<int64_t>(all.begin(), all.end());
}

// (collective) Returns why a load without a directory must not take `path`: the seal.json of some
// node says that it was held back when it was sealed. (Runs that shared one disk may have left that
// file.) Empty: no seal.json says so. `damage`: set if this can never be determined.
absl::StatusOr<std::string> WhyHeldBack(Comm& comm, const std::string& path,
                                        const NodeGroups& groups, bool* damage) {
  std::string mine;
  bool damaged = false;
  const absl::Status looked = GuardRank([&]() -> absl::Status {
    if (!groups.leads()) return absl::OkStatus();
    const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(path);
    damaged = !seal.ok() && StaysUnreadable(seal.status());
    if (seal.ok() && !seal->promoted) {
      mine = absl::StrCat(path, " was held back when it was saved");
    } else if (damaged) {
      mine = absl::StrCat(seal.status().message(), "; it is unknown whether it was held back");
    } else if (!seal.ok() && !absl::IsNotFound(seal.status())) {
      return seal.status();
    }
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, looked, {}, nullptr));
  for (const std::string& answer : comm.AllGatherBytes(Dumped({damaged, mine}))) {
    const Json other = Json::parse(answer);
    std::string why = other[1];
    if (why.empty()) continue;
    *damage = other[0];
    return why;
  }
  return "";
}

// (collective) Whether the folder that some node had at `dir`, a number of `folder`, is gone. The
// remains of a replaced checkpoint, which cannot be loaded, do not count: they were there before.
bool IsGone(Comm& comm, const std::string& dir, const CheckpointFolder& folder, int64_t number,
            bool was_here) {
  const auto is_left = [&] {
    const absl::StatusOr<std::vector<int64_t>> numbers = folder.Numbers();
    return !numbers.ok() || std::binary_search(numbers->begin(), numbers->end(), number);
  };
  bool gone = false;
  // A folder that cannot be examined is not known to be gone.
  (void)GuardRank([&] {
    gone = was_here && !PathExists(dir) && !is_left();
    return absl::OkStatus();
  });
  const std::vector<std::string> all = comm.AllGatherBytes(gone ? "gone" : "");
  return std::count(all.begin(), all.end(), "gone") > 0;
}

// Returns the error for a checkpoint that the leaders have just completed but that a rank does not
// see: it looks elsewhere, or has an outdated view of a file server. That is no reason to take an
// older checkpoint.
absl::Status NotSeenByAll(const absl::Status& opened, const std::string& dir) {
  return absl::FailedPreconditionError(absl::StrCat(
      opened.message(), "; the nodes had all of ", dir,
      " a moment before: all ranks of a node must see one folder; where they do, start again"));
}

}  // namespace

absl::StatusOr<StateReader> OpenCheckpointOnNodes(Comm& comm, const std::string& dir,
                                                  const CheckpointFolder& folder,
                                                  const NodeGroups& groups,
                                                  CheckpointRegistrar* registrar,
                                                  const std::vector<std::string>& damaged,
                                                  std::string* tried, bool in_parts) {
  if (groups.nodes.size() == 1) {
    return OpenCheckpoint(comm, dir, folder, registrar, damaged, tried);
  }
  bool completed = false;  // every node has all of it, or all together have
  std::optional<Gathering> parts;
  const auto open = [&](const std::string& path) -> absl::StatusOr<StateReader> {
    if (tried != nullptr) *tried = path;
    completed = false;
    parts.reset();
    MUSTER_RETURN_IF_ERROR(
        CompleteOnNodes(comm, path, groups, damaged, in_parts ? &parts : nullptr));
    completed = true;
    return parts.has_value() ? parts->OpenInParts() : OpenOnEveryRank(comm, path);
  };
  const auto is_lack = [](const absl::Status& opened) {
    return absl::IsDataLoss(opened) || absl::IsNotFound(opened);
  };
  if (!dir.empty()) {
    absl::StatusOr<StateReader> reader = open(dir);
    if (completed && is_lack(reader.status())) return NotSeenByAll(reader.status(), dir);
    return reader;
  }
  std::set<int64_t> mine;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers,
                          NumbersOnNodes(comm, folder, groups, &mine));
  std::string why;
  bool damaged_ones = false;
  for (const int64_t number : numbers) {
    const std::string path = folder.PathOf(number);
    bool damaged_seal = false;
    MUSTER_ASSIGN_OR_RETURN(const std::string held_back,
                            WhyHeldBack(comm, path, groups, &damaged_seal));
    if (!held_back.empty()) {
      if (comm.rank() == 0) {
        MUSTER_LOG(Warning) << "passing over " << path << ": " << held_back << ": load_state(\""
                            << path << "\") loads it";
      }
      if (why.empty()) why = absl::StrCat(": ", held_back);
      damaged_ones = damaged_ones || damaged_seal;
      continue;
    }
    absl::StatusOr<StateReader> reader = open(path);
    const absl::Status& opened = reader.status();
    // Other errors, such as a full disk, are no reason to take an older checkpoint.
    if (!is_lack(opened)) return reader;
    const bool was_here =
        groups.leads() && ((completed && !parts.has_value()) || mine.count(number) > 0);
    if (IsGone(comm, path, folder, number, was_here)) return absl::AbortedError(opened.message());
    if (completed) return NotSeenByAll(opened, path);
    if (comm.rank() == 0) {
      MUSTER_LOG(Warning) << "passing over " << path << ": " << opened.message();
    }
    if (why.empty()) why = absl::StrCat(": ", opened.message());
    damaged_ones = damaged_ones || absl::IsDataLoss(opened);
  }
  why = absl::StrCat("no complete checkpoint in ", folder.root(), why);
  // Not the same as "none yet", after which training would begin from scratch.
  if (damaged_ones) return absl::DataLossError(why);
  return absl::NotFoundError(why);
}

}  // namespace muster
