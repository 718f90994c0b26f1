#include "coordinator/checkpoint/checkpoint_set.h"

#include <algorithm>
#include <utility>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/checkpoint/chain.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

// Returns the folder part of a path; empty for a plain name.
absl::string_view FolderOf(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos ? absl::string_view() : path.substr(0, slash);
}

v1::OpError Conflict(std::string message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_CHECKPOINT_CONFLICT,
                   std::move(message));
}

std::string Name(const v1::CheckpointRecord& record) {
  return absl::StrCat("checkpoint ", record.checkpoint_id(), " (", Quoted(record.path()), ", step ",
                      record.step(), ")");
}

std::string StateText(v1::CheckpointState state) {
  switch (state) {
    case v1::CHECKPOINT_STATE_PREPARING:
      return "being prepared";
    case v1::CHECKPOINT_STATE_SEALED:
      return "sealed and not published";
    case v1::CHECKPOINT_STATE_PUBLISHED:
      return "published";
    case v1::CHECKPOINT_STATE_DELETING:
      return "being deleted";
    default:
      return "in no known state";
  }
}

// Returns whether a resume may take the checkpoint, once it is published.
bool IsResumable(const v1::CheckpointRecord& record) {
  return record.promoted() && record.damage().empty();
}

std::optional<v1::OpError> CheckPath(absl::string_view field, absl::string_view path) {
  if (path.empty()) return BadField(field, absl::StrCat(field, " is empty: name a folder"));
  if (path.size() > CheckpointSet::kMaxPath) {
    return TooLarge(field, absl::StrCat(field, " has ", path.size(), " bytes: at most ",
                                        CheckpointSet::kMaxPath));
  }
  return std::nullopt;
}

std::optional<v1::OpError> CheckFile(const v1::ShardFile& file) {
  const std::string& name = file.name();
  const bool plain = !name.empty() && name.size() <= CheckpointSet::kMaxFileName && name != "." &&
                     name != ".." && std::none_of(name.begin(), name.end(), [](unsigned char c) {
                       return c < 0x20 || c == 0x7f || c == '/';
                     });
  if (!plain) {
    return BadField("files.name", absl::StrCat(Quoted(name), " is not a plain file name of 1 to ",
                                               CheckpointSet::kMaxFileName, " bytes"));
  }
  const bool digest =
      file.xxh3().size() == 32 && std::all_of(file.xxh3().begin(), file.xxh3().end(), [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
      });
  if (!digest) {
    return BadField("files.xxh3", absl::StrCat("file ", Quoted(name), ": ", Quoted(file.xxh3()),
                                               " is not a digest of 32 hexadecimal digits"));
  }
  return std::nullopt;
}

}  // namespace

CheckpointSet::CheckpointSet(std::string job_id, ReportBudget* budget, Faults faults, Signer sign)
    : job_id_(std::move(job_id)), budget_(budget), faults_(faults), sign_(std::move(sign)) {}

CheckpointSet::Entry* CheckpointSet::Find(uint64_t id) {
  const auto it = entries_.find(id);
  return it == entries_.end() ? nullptr : &it->second;
}

CheckpointSet::Error CheckpointSet::NoCheckpoint(uint64_t id) const {
  return MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_NO_CHECKPOINT,
                   absl::StrCat("job ", Quoted(job_id_), " has no checkpoint ", id,
                                ": it was aborted or deleted, or belongs to a generation that has "
                                "ended; begin a new one"));
}

CheckpointSet::Error CheckpointSet::CheckWhole(const v1::CheckpointRecord& record,
                                               absl::string_view done) {
  if (record.state() == v1::CHECKPOINT_STATE_SEALED ||
      record.state() == v1::CHECKPOINT_STATE_PUBLISHED) {
    return std::nullopt;
  }
  return Conflict(absl::StrCat(Name(record), " is ", StateText(record.state()),
                               ": only a sealed or published one can be ", done));
}

void CheckpointSet::Changed(const v1::CheckpointRecord& record, Changes* changes) const {
  v1::CheckpointChanged& change = changes->emplace_back();
  change.set_job_id(job_id_);
  *change.mutable_record() = record;
}

void CheckpointSet::Remove(uint64_t id, Changes* changes) {
  entries_.erase(id);
  v1::CheckpointChanged& change = changes->emplace_back();
  change.set_job_id(job_id_);
  change.set_removed(id);
}

void CheckpointSet::StartReports(Entry* entry) const {
  entry->reports = std::make_unique<Entry::Reports>(budget_);
  const int ranks = std::clamp(entry->record.ranks(), 0, kMaxRanks);
  entry->reports->parts.resize(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    entry->reports->open.insert(entry->reports->open.end(), rank);
  }
  entry->reports->Charge();
}

CheckpointSet::Error CheckpointSet::Begin(const v1::BeginCheckpointRequest& request,
                                          uint64_t generation, uint64_t id,
                                          v1::BeginCheckpointReply* reply, Changes* changes) {
  if (auto error = CheckPath("path", request.path())) return error;
  if (auto error = CheckPath("staging", request.staging())) return error;
  if (request.path() == request.staging()) {
    return BadField("staging", absl::StrCat("staging is the path itself, ", Quoted(request.path()),
                                            ": files must not be seen before they are complete"));
  }
  if (request.ranks() < 1 || request.ranks() > kMaxRanks) {
    return BadField("ranks", absl::StrCat("ranks is ", request.ranks(),
                                          ": a checkpoint is written by 1 to ", kMaxRanks));
  }
  if (request.step() < 0 || request.iteration() < 0 || request.keep() < 0 ||
      request.keep_every() < 0) {
    return BadField("step", "step, iteration, keep and keep_every must not be negative");
  }
  size_t preparing = 0;
  for (const auto& [other_id, entry] : entries_) {
    const v1::CheckpointRecord& record = entry.record;
    if (record.state() == v1::CHECKPOINT_STATE_DELETING && record.published() &&
        record.path() == request.path()) {
      return Conflict(absl::StrCat(Name(record),
                                   " is being deleted: delete its folder and say so, ",
                                   "or save under another name"));
    }
    if (record.state() != v1::CHECKPOINT_STATE_PREPARING) continue;
    ++preparing;
    if (record.path() != request.path()) continue;
    if (record.step() != request.step() || record.plan_digest() != request.plan_digest() ||
        record.ranks() != request.ranks() || record.staging() != request.staging()) {
      return Conflict(absl::StrCat(
          Name(record), " is being prepared by ", record.ranks(), " ranks with plan ",
          absl::StrCat(absl::Hex(record.plan_digest(), absl::kZeroPad16)),
          "; this caller begins step ", request.step(), " with ", request.ranks(),
          " ranks and plan ", absl::StrCat(absl::Hex(request.plan_digest(), absl::kZeroPad16)),
          ": all ranks must save the same state at the same step"));
    }
    reply->set_checkpoint_id(other_id);
    return std::nullopt;
  }
  if (preparing >= kMaxPreparing) {
    return TooLarge("path", absl::StrCat(preparing, " checkpoints of job ", Quoted(job_id_),
                                         " are being prepared: finish or abort one first"));
  }
  if (entries_.size() >= kMaxRecords) {
    const std::optional<uint64_t> oldest = Forgettable();
    if (!oldest.has_value()) {
      return TooLarge("path", absl::StrCat("job ", Quoted(job_id_), " has ", entries_.size(),
                                           " checkpoints of which no record can be forgotten: "
                                           "delete the folders that retention lets go"));
    }
    Remove(*oldest, changes);
  }
  Entry& entry = entries_[id];
  v1::CheckpointRecord& record = entry.record;
  record.set_checkpoint_id(id);
  record.set_state(v1::CHECKPOINT_STATE_PREPARING);
  record.set_path(request.path());
  record.set_staging(request.staging());
  record.set_iteration(request.iteration());
  record.set_step(request.step());
  record.set_plan_digest(request.plan_digest());
  record.set_ranks(request.ranks());
  record.set_generation(generation);
  record.set_keep(request.keep());
  record.set_keep_every(request.keep_every());
  record.set_promoted(!request.hold_back());
  StartReports(&entry);
  Changed(record, changes);
  reply->set_checkpoint_id(id);
  return std::nullopt;
}

// Checks a part against itself and what has been reported. `bytes`: what its files will hold.
CheckpointSet::Error CheckpointSet::CheckPart(const v1::ReportShardsRequest& request,
                                              const Entry& entry, size_t* bytes) const {
  const Entry::Reports& reports = *entry.reports;
  const int rank = request.rank();
  absl::flat_hash_set<absl::string_view> names;
  Coverage trial;  // so that nothing of a refused part is kept
  for (const v1::ShardFile& file : request.files()) {
    if (auto error = CheckFile(file)) return error;
    const auto known = reports.files.find(file.name());
    if (known != reports.files.end() || !names.insert(file.name()).second) {
      const int other = known != reports.files.end() ? known->second.second : rank;
      return BadField("files.name",
                      absl::StrCat("rank ", rank, " reports file ", Quoted(file.name()),
                                   ", which rank ", other, " has reported before"));
    }
    *bytes += 2 * file.name().size() + 192;
    for (const v1::TensorSlice& slice : file.slices()) {
      if (auto error = trial.Add(slice, file.name())) return error;
    }
  }
  const size_t more = *bytes + trial.bytes();
  if (budget_ != nullptr && more > budget_->of_all - std::min(budget_->used, budget_->of_all)) {
    return MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_OVERLOADED,
                     absl::StrCat("the reports of checkpoints of all jobs hold ",
                                  budget_->used >> 20, " of at most ", budget_->of_all >> 20,
                                  " MiB: try again when another checkpoint is sealed"));
  }
  if (reports.bytes_of_all() + more > kMaxReportBytes) {
    return TooLarge("files", absl::StrCat("the reports of ", Name(entry.record), " have more than ",
                                          kMaxReportBytes >> 20,
                                          " MiB: report fewer slices, for example one for each "
                                          "rank and tensor"));
  }
  // Checks the part against what others have reported.
  for (const v1::ShardFile& file : request.files()) {
    for (const v1::TensorSlice& slice : file.slices()) {
      if (auto error = reports.coverage.Check(slice, file.name())) return error;
    }
  }
  return std::nullopt;
}

CheckpointSet::Error CheckpointSet::Report(const v1::ReportShardsRequest& request) {
  Entry* const entry = Find(request.checkpoint_id());
  if (entry == nullptr) return NoCheckpoint(request.checkpoint_id());
  if (const size_t bytes = request.ByteSizeLong(); bytes > kMaxPartBytes) {
    return TooLarge("files", absl::StrCat("a report of ", bytes, " bytes: send parts of at most ",
                                          kMaxPartBytes >> 20, " MiB"));
  }
  // This is a repeat after the end: all that it says is known.
  if (entry->reports == nullptr) return std::nullopt;
  Entry::Reports& reports = *entry->reports;
  const int rank = request.rank();
  if (rank < 0 || rank >= entry->record.ranks()) {
    return BadField("rank", absl::StrCat("rank ", rank, " writes nothing of ", Name(entry->record),
                                         ": its ranks are 0 to ", entry->record.ranks() - 1));
  }
  if (request.part() < 0 || request.part() >= kMaxParts) {
    return BadField(
        "part", absl::StrCat("part ", request.part(), ": parts count from 0 to ", kMaxParts - 1));
  }
  int& next = reports.parts[rank];
  if (request.part() < next || !reports.open.contains(rank)) return std::nullopt;
  if (request.part() > next) {
    return BadField(
        "part",
        absl::StrCat("part ", request.part(), " of rank ", rank, " comes before part ", next,
                     ": send the parts in order, and all of them again after a restart of "
                     "the coordinator"));
  }
  size_t bytes = 0;
  if (auto error = CheckPart(request, *entry, &bytes)) return error;
  for (const v1::ShardFile& file : request.files()) {
    for (const v1::TensorSlice& slice : file.slices()) {
      reports.coverage.Add(slice, file.name());
    }
    v1::ShardFile kept;
    kept.set_name(file.name());
    kept.set_bytes(file.bytes());
    kept.set_xxh3(file.xxh3());
    reports.files[file.name()] = {std::move(kept), rank};
  }
  reports.bytes += bytes;
  reports.problem.reset();
  reports.Charge();
  ++next;
  if (request.last()) reports.open.erase(rank);
  return std::nullopt;
}

CheckpointSet::Error CheckpointSet::Seal(const v1::SealCheckpointRequest& request,
                                         v1::SealCheckpointReply* reply, Changes* changes) {
  Entry* const entry = Find(request.checkpoint_id());
  if (entry == nullptr) return NoCheckpoint(request.checkpoint_id());
  v1::CheckpointRecord& record = entry->record;
  if (entry->reports == nullptr) {
    if (record.state() == v1::CHECKPOINT_STATE_DELETING) {
      return Conflict(absl::StrCat(Name(record), " is being deleted"));
    }
    *reply->mutable_checkpoint() = record;
    return std::nullopt;
  }
  Entry::Reports& reports = *entry->reports;
  if (!reports.open.empty() && !faults_.seals_before_coverage) {
    constexpr size_t kNamed = 16;
    std::vector<int> named;
    for (const int rank : reports.open) {
      if (named.size() < kNamed) named.push_back(rank);
    }
    v1::OpError error = MakeError(
        absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_SHARDS_MISSING,
        absl::StrCat(Name(record), " cannot be sealed: ", reports.open.size(), " of ",
                     record.ranks(), " ranks have not reported what they wrote: ranks ",
                     absl::StrJoin(named, ", "), reports.open.size() > kNamed ? ", ..." : ""));
    for (const int rank : reports.open) {
      if (error.detail().culprits_size() >= 64) break;
      error.mutable_detail()->add_culprits()->set_rank(rank);
    }
    return error;
  }
  // Runs once for the same reports, however often it is asked.
  if (!reports.problem.has_value()) reports.problem = reports.coverage.FirstProblem();
  if (!reports.problem->empty() && !faults_.seals_before_coverage) {
    return MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_COVERED,
                     absl::StrCat(Name(record), " cannot be sealed: ", *reports.problem));
  }
  std::vector<v1::ShardFile> files;
  files.reserve(reports.files.size());
  uint64_t bytes = 0;
  for (const auto& [name, file] : reports.files) {
    files.push_back(file.first);
    bytes += file.first.bytes();
  }
  record.set_state(v1::CHECKPOINT_STATE_SEALED);
  record.set_created_unix_us(request.created_unix_us());
  record.set_files(static_cast<int64_t>(files.size()));
  record.set_bytes(bytes);
  record.set_files_sha256(FilesSha256(files));
  record.set_previous_sha256(head_);
  record.set_sha256(RecordSha256(job_id_, record));
  if (sign_ != nullptr) record.set_signature(sign_(record.sha256()));
  head_ = record.sha256();
  entry->reports.reset();
  Changed(record, changes);
  changes->back().set_head_sha256(head_);
  *reply->mutable_checkpoint() = record;
  return std::nullopt;
}

void CheckpointSet::Adopt(CheckpointSet* former) {
  entries_ = std::move(former->entries_);
  head_ = std::move(former->head_);
  if (former->job_id_ == job_id_) return;
  for (auto& [id, entry] : entries_) {
    v1::CheckpointRecord& record = entry.record;
    if (!record.sha256().empty() && record.job_id().empty()) record.set_job_id(former->job_id_);
  }
}

std::optional<uint64_t> CheckpointSet::Forgettable() const {
  // The checkpoints that a resume would take now, by folder.
  absl::flat_hash_map<absl::string_view, uint64_t> newest;
  for (const auto& [id, entry] : entries_) {
    if (IsResumable(entry.record)) newest[FolderOf(entry.record.path())] = id;
  }
  // A folder without a record counts as its seal.json says: the same for one that was not marked
  // since, unless the marks were made where the folder is not seen.
  const auto rank = [](const v1::CheckpointRecord& record) {
    return (record.pinned() ? 2 : 0) + (IsResumable(record) ? 0 : 1);
  };
  const v1::CheckpointRecord* found = nullptr;
  for (const auto& [id, entry] : entries_) {
    const v1::CheckpointRecord& record = entry.record;
    if (record.state() != v1::CHECKPOINT_STATE_PUBLISHED) continue;
    if (const auto last = newest.find(FolderOf(record.path()));
        last != newest.end() && last->second == id) {
      continue;
    }
    if (found == nullptr || rank(record) < rank(*found)) found = &record;
  }
  if (found == nullptr) return std::nullopt;
  return found->checkpoint_id();
}

std::vector<uint64_t> CheckpointSet::Superfluous(absl::string_view folder, int keep,
                                                 int64_t keep_every) const {
  std::vector<uint64_t> found;
  if (keep <= 0) return found;
  int newer = 0;
  bool resumable = false;  // a newer one that a resume may take
  for (auto it = entries_.rbegin(); it != entries_.rend(); ++it) {
    const v1::CheckpointRecord& record = it->second.record;
    if (FolderOf(record.path()) != folder) continue;
    if (record.state() != v1::CHECKPOINT_STATE_PUBLISHED) {
      if (record.state() == v1::CHECKPOINT_STATE_PREPARING && faults_.deletes_before_seal) ++newer;
      continue;
    }
    // The checkpoint that a resume would use now is always kept, no matter how many were held back
    // since.
    const bool newest_to_resume =
        IsResumable(record) && !resumable && !faults_.deletes_last_resumable;
    resumable = resumable || IsResumable(record);
    // A damaged checkpoint does not count as one that is kept, and goes once there are `keep` whole
    // ones.
    if ((record.pinned() && !faults_.deletes_pinned) ||
        (record.damage().empty() ? ++newer <= keep : newer < keep) || newest_to_resume) {
      continue;
    }
    // A program without an optimizer stays at step 0: that is no reason to keep all it saves.
    if (keep_every > 0 && record.step() > 0 && record.step() % keep_every == 0) continue;
    found.push_back(it->first);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

CheckpointSet::Error CheckpointSet::Publish(const v1::PublishCheckpointRequest& request,
                                            v1::PublishCheckpointReply* reply, Changes* changes) {
  const uint64_t id = request.checkpoint_id();
  Entry* const entry = Find(id);
  if (entry == nullptr) return NoCheckpoint(id);
  v1::CheckpointRecord& record = entry->record;
  if (record.state() != v1::CHECKPOINT_STATE_SEALED &&
      record.state() != v1::CHECKPOINT_STATE_PUBLISHED) {
    return Conflict(absl::StrCat(Name(record), " is ", StateText(record.state()),
                                 ": only a sealed one can be published"));
  }
  if (record.state() == v1::CHECKPOINT_STATE_SEALED) {
    for (auto it = entries_.upper_bound(id); it != entries_.end(); ++it) {
      if (it->second.record.published() && it->second.record.path() == record.path()) {
        return Conflict(absl::StrCat(Name(record), " cannot be published: ",
                                     Name(it->second.record), " is newer and has its name"));
      }
    }
    record.set_state(v1::CHECKPOINT_STATE_PUBLISHED);
    record.set_published(true);
    record.set_stall_us(std::max<int64_t>(request.stall_us(), 0));
    record.set_save_us(std::max<int64_t>(request.save_us(), 0));
    Changed(record, changes);
  }
  *reply->mutable_checkpoint() = record;
  // A copy, because what is removed below moves the others.
  const v1::CheckpointRecord& published = reply->checkpoint();
  // It took the place of what was published under its path before, which must not count in
  // retention.
  std::vector<uint64_t> replaced;
  for (const auto& [other_id, other] : entries_) {
    if (other_id < id && other.record.published() && other.record.path() == published.path())
      replaced.push_back(other_id);
  }
  for (const uint64_t other : replaced) Remove(other, changes);
  std::vector<uint64_t> go =
      Superfluous(FolderOf(published.path()), published.keep(), published.keep_every());
  // A load that has found newer checkpoints damaged or gone gives an old one its name and takes it.
  std::erase(go, id);
  for (const auto& [other_id, other] : entries_) {
    const v1::CheckpointState state = other.record.state();
    if (state == v1::CHECKPOINT_STATE_DELETING ||
        // Sealed by a generation that has ended, and never requested.
        (state == v1::CHECKPOINT_STATE_SEALED && other_id < id &&
         FolderOf(other.record.path()) == FolderOf(published.path()) &&
         other.record.generation() < published.generation() && !other.record.pinned())) {
      go.push_back(other_id);
    }
  }
  std::sort(go.begin(), go.end());
  for (const uint64_t other : go) {
    Entry* const old = Find(other);
    if (reply->to_delete_size() >= kDeleteLimit) break;
    if (old->record.state() != v1::CHECKPOINT_STATE_DELETING) {
      old->record.set_state(v1::CHECKPOINT_STATE_DELETING);
      Changed(old->record, changes);
    }
    *reply->add_to_delete() = old->record;
  }
  return std::nullopt;
}

CheckpointSet::Error CheckpointSet::Abort(uint64_t id, Changes* changes) {
  const Entry* const entry = Find(id);
  if (entry == nullptr) return std::nullopt;
  if (entry->record.state() != v1::CHECKPOINT_STATE_PREPARING) {
    return Conflict(absl::StrCat(Name(entry->record), " is ", StateText(entry->record.state()),
                                 ": only one that is being prepared can be aborted"));
  }
  Remove(id, changes);
  return std::nullopt;
}

CheckpointSet::Error CheckpointSet::Deleted(const v1::CheckpointDeletedRequest& request,
                                            Changes* changes) {
  for (const uint64_t id : request.checkpoint_ids()) {
    const Entry* const entry = Find(id);
    if (entry != nullptr && entry->record.state() != v1::CHECKPOINT_STATE_DELETING) {
      return Conflict(absl::StrCat(Name(entry->record), " is ", StateText(entry->record.state()),
                                   ": it is not marked for deletion"));
    }
  }
  for (const uint64_t id : request.checkpoint_ids()) {
    if (Find(id) != nullptr) Remove(id, changes);
  }
  return std::nullopt;
}

CheckpointSet::Error CheckpointSet::Mark(const v1::MarkCheckpointRequest& request,
                                         v1::MarkCheckpointReply* reply, Changes* changes) {
  Entry* const entry = Find(request.checkpoint_id());
  if (entry == nullptr) return NoCheckpoint(request.checkpoint_id());
  v1::CheckpointRecord& record = entry->record;
  if (auto error = CheckWhole(record, "marked")) return error;
  const bool was_pinned = record.pinned(), was_promoted = record.promoted();
  switch (request.mark()) {
    case v1::MarkCheckpointRequest::PIN:
      record.set_pinned(true);
      break;
    case v1::MarkCheckpointRequest::UNPIN:
      record.set_pinned(false);
      break;
    case v1::MarkCheckpointRequest::PROMOTE:
      record.set_promoted(true);
      break;
    case v1::MarkCheckpointRequest::HOLD_BACK:
      record.set_promoted(false);
      break;
    default:
      return BadField("mark", absl::StrCat("mark ", static_cast<int>(request.mark()),
                                           " is not known: PIN, UNPIN, PROMOTE or HOLD_BACK"));
  }
  if (record.pinned() != was_pinned || record.promoted() != was_promoted) Changed(record, changes);
  *reply->mutable_checkpoint() = record;
  return std::nullopt;
}

CheckpointSet::Error CheckpointSet::Verify(const v1::VerifyCheckpointRequest& request,
                                           v1::VerifyCheckpointReply* reply, Changes* changes) {
  if (request.depth() != v1::VERIFY_SIZES && request.depth() != v1::VERIFY_CONTENTS) {
    return BadField("depth", absl::StrCat("depth ", static_cast<int>(request.depth()),
                                          " is not known: VERIFY_SIZES or VERIFY_CONTENTS"));
  }
  if (request.damage().size() > kMaxDamage) {
    return TooLarge("damage", absl::StrCat("damage has ", request.damage().size(),
                                           " bytes: at most ", kMaxDamage));
  }
  if (request.verified_unix_us() == 0) {
    return BadField("verified_unix_us", "verified_unix_us is 0: say when the files were read");
  }
  Entry* const entry = Find(request.checkpoint_id());
  if (entry == nullptr) return NoCheckpoint(request.checkpoint_id());
  v1::CheckpointRecord& record = entry->record;
  if (auto error = CheckWhole(record, "verified")) return error;
  const std::string& sealed_by = record.job_id().empty() ? job_id_ : record.job_id();
  if (RecordSha256(sealed_by, record) != record.sha256()) {
    return Conflict(absl::StrCat(Name(record),
                                 ": its record at the coordinator is not as it was "
                                 "sealed; use another checkpoint, or load the folder by name"));
  }
  if (request.sha256() != record.sha256()) {
    return Conflict(absl::StrCat(Name(record),
                                 " has a record other than the one that its files were "
                                 "compared with: another checkpoint has its folder"));
  }
  // A shallow look that finds nothing says nothing about what a deep one has found. Nor does an
  // older look, unless it was deeper than the newer one, which found nothing.
  const bool weaker = request.damage().empty() && request.depth() < record.verified() &&
                      !faults_.sizes_clear_damage;
  const bool both = !record.damage().empty() && !request.damage().empty();
  const bool deeper = request.depth() > record.verified() && (record.damage().empty() || both);
  const bool older = request.verified_unix_us() < record.verified_unix_us() && !deeper;
  if (!weaker && !older) {
    // Damage that a deep look has found stays until one as deep finds nothing, whatever a shallow
    // one finds in between.
    const bool repeated = request.verified_unix_us() == record.verified_unix_us() &&
                          request.depth() <= record.verified() &&
                          request.damage() == record.damage();
    record.set_verified(both ? std::max(record.verified(), request.depth()) : request.depth());
    if (!both || request.verified_unix_us() >= record.verified_unix_us()) {
      record.set_verified_unix_us(request.verified_unix_us());
      record.set_damage(request.damage());
    }
    if (faults_.sizes_count_as_contents) record.set_verified(v1::VERIFY_CONTENTS);
    if (!repeated && !faults_.forgets_damage) Changed(record, changes);
  }
  *reply->mutable_checkpoint() = record;
  return std::nullopt;
}

CheckpointSet::Error CheckpointSet::Collect(const v1::CollectCheckpointsRequest& request,
                                            v1::CollectCheckpointsReply* reply, Changes* changes) {
  if (request.keep() < 1) {
    return BadField(
        "keep", absl::StrCat("keep is ", request.keep(), ": at least one checkpoint has to stay"));
  }
  if (request.keep_every() < 0) return BadField("keep_every", "keep_every must not be negative");
  // The folders of checkpoints with a deletion order that may not have been carried out.
  absl::btree_set<absl::string_view> folders;
  for (const auto& [id, entry] : entries_) folders.insert(FolderOf(entry.record.path()));
  std::vector<uint64_t> go;
  for (const absl::string_view folder : folders) {
    const std::vector<uint64_t> found = Superfluous(folder, request.keep(), request.keep_every());
    go.insert(go.end(), found.begin(), found.end());
  }
  for (const auto& [id, entry] : entries_) {
    if (entry.record.state() == v1::CHECKPOINT_STATE_DELETING) go.push_back(id);
  }
  std::sort(go.begin(), go.end());
  for (const uint64_t id : go) {
    if (reply->to_delete_size() >= kDeleteLimit) break;
    v1::CheckpointRecord& record = Find(id)->record;
    if (!request.dry_run() && record.state() != v1::CHECKPOINT_STATE_DELETING) {
      record.set_state(v1::CHECKPOINT_STATE_DELETING);
      Changed(record, changes);
    }
    *reply->add_to_delete() = record;
  }
  return std::nullopt;
}

CheckpointSet::Error CheckpointSet::Resolve(const v1::ResolveCheckpointRequest& request,
                                            v1::ResolveCheckpointReply* reply) const {
  const bool by_id = request.checkpoint_id() != 0, by_step = request.step() != 0;
  for (auto it = entries_.rbegin(); it != entries_.rend(); ++it) {
    const v1::CheckpointRecord& record = it->second.record;
    if (record.state() == v1::CHECKPOINT_STATE_SEALED) {
      if (!by_id && !by_step && reply->unpublished_size() < kDeleteLimit) {
        *reply->add_unpublished() = record;
      }
      continue;
    }
    if (record.state() != v1::CHECKPOINT_STATE_PUBLISHED) continue;
    if (by_id && it->first != request.checkpoint_id()) continue;
    if (by_step && record.step() != request.step()) continue;
    const bool resumable = IsResumable(record) ||
                           (faults_.resumes_from_damaged && record.promoted()) ||
                           (faults_.resumes_from_held_back && record.damage().empty());
    if (!by_id && !request.any() && !resumable) continue;
    if (record.verified() < request.verified() ||
        (request.verified() != v1::VERIFY_DEPTH_UNSPECIFIED && !record.damage().empty())) {
      continue;
    }
    *reply->mutable_checkpoint() = record;
    return std::nullopt;
  }
  // Nothing is published yet, but what is sealed is whole.
  if (reply->unpublished_size() > 0) return std::nullopt;
  if (by_id) return NoCheckpoint(request.checkpoint_id());
  return MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_NO_CHECKPOINT,
                   absl::StrCat("job ", Quoted(job_id_), " has no published ",
                                request.any() ? "" : "and promoted ",
                                request.verified() == 0 ? "" : "and verified ", "checkpoint",
                                by_step ? absl::StrCat(" of step ", request.step()) : ""));
}

const v1::CheckpointRecord* CheckpointSet::NewestPromoted(absl::string_view folder) const {
  for (auto it = entries_.rbegin(); it != entries_.rend(); ++it) {
    const v1::CheckpointRecord& record = it->second.record;
    const bool whole = record.state() == v1::CHECKPOINT_STATE_SEALED ||
                       record.state() == v1::CHECKPOINT_STATE_PUBLISHED;
    if (!whole || !IsResumable(record)) continue;
    const absl::string_view path = record.path();
    if (folder.empty() || path.substr(0, path.rfind('/')) == folder) return &record;
  }
  return nullptr;
}

void CheckpointSet::List(const v1::ListCheckpointsRequest& request,
                         v1::ListCheckpointsReply* reply) const {
  const int limit = request.limit() > 0 ? std::min(request.limit(), kListLimit) : kListLimit;
  for (auto it = entries_.upper_bound(request.after()); it != entries_.end(); ++it) {
    if (reply->checkpoints_size() >= limit) {
      reply->set_more(true);
      return;
    }
    *reply->add_checkpoints() = it->second.record;
  }
}

void CheckpointSet::DropPreparing(Changes* changes) {
  std::vector<uint64_t> over;
  for (const auto& [id, entry] : entries_) {
    if (entry.record.state() == v1::CHECKPOINT_STATE_PREPARING) over.push_back(id);
  }
  for (const uint64_t id : over) Remove(id, changes);
}

void CheckpointSet::Restore(const v1::CheckpointChanged& change) {
  if (!change.head_sha256().empty()) head_ = change.head_sha256();
  if (change.removed() != 0) entries_.erase(change.removed());
  if (!change.has_record()) return;
  Entry& entry = entries_[change.record().checkpoint_id()];
  entry.record = change.record();
  entry.reports.reset();
  if (entry.record.state() == v1::CHECKPOINT_STATE_PREPARING) StartReports(&entry);
}

size_t CheckpointSet::report_bytes() const {
  size_t bytes = 0;
  for (const auto& [id, entry] : entries_) {
    if (entry.reports != nullptr) bytes += entry.reports->bytes_of_all();
  }
  return bytes;
}

}  // namespace muster::coordinator
