#include "worker/checkpoint/publication.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/log.h"
#include "base/owned_fd.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/clean_path.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/planned_files.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/seal_chain.h"
#include "worker/checkpoint/sealing.h"
#include "worker/checkpoint/staging_folder.h"

namespace muster {
namespace {

// The limit of coordinator/checkpoint/coverage.h.
constexpr size_t kMaxSliceRank = 8;
constexpr size_t kMaxSliceName = 1024;

// The share of the slices in the largest report of a file (worker/job/checkpoint_client.cc).
constexpr size_t kMaxSlicesBytes = 700 << 10;

// After this many restarts of the registry during one save, something else must be wrong.
constexpr int kSealTries = 10;

constexpr size_t kLargestKeyFile = 16 << 10;

// A lock of a mutex that may be null.
class OptionalLock {
 public:
  explicit OptionalLock(Mutex* mu) ABSL_NO_THREAD_SAFETY_ANALYSIS : mu_(mu) {
    if (mu_ != nullptr) mu_->Lock();
  }
  ~OptionalLock() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (mu_ != nullptr) mu_->Unlock();
  }
  OptionalLock(const OptionalLock&) = delete;
  OptionalLock& operator=(const OptionalLock&) = delete;

 private:
  Mutex* const mu_;
};

constexpr absl::string_view kExtension = ".safetensors";

// Follows the id of a checkpoint whose plan is by files.
constexpr absl::string_view kByFiles = " by files";

struct RankPlan {
  // "files": the summary (TensorList) of each file whose tensors it knows; then "tensors" is empty.
  std::map<std::string, std::string> files;
  // "tensors": [file, name, type, shape].
  std::vector<ShardSlice> tensors;
  // "parts": the whole file for each part. Tensors of parts are those of the whole.
  std::map<std::string, std::string> parts;
  std::string text;
};

// The registry's name for a tensor of a file: the same in every part of the file, and different
// from those of other models and optimizers.
std::string NameOfSlice(absl::string_view file, absl::string_view tensor) {
  std::string name = absl::StrCat(absl::StripSuffix(file, kExtension), ":", tensor);
  if (name.size() <= kMaxSliceName) return name;
  const std::string digest = DigestBytes(name).xxh3;
  return absl::StrCat(Utf8Prefix(name, kMaxSliceName - 1 - digest.size()), ":", digest);
}

// Returns a slice for a whole tensor; `held`: the file has it; otherwise it is announced as one
// that some file has. The registry knows boxes of at most kMaxSliceRank dimensions, and every slice
// needs at least one element.
ShardSlice SliceOf(std::string name, absl::string_view type, std::vector<int64_t> shape,
                   bool held) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  if (shape.empty() || elements == 0) shape = {1};
  if (shape.size() > kMaxSliceRank) shape = {elements};
  ShardSlice slice;
  slice.tensor = std::move(name);
  slice.dtype = std::string(type);
  slice.offset.assign(shape.size(), 0);
  slice.extent = held ? shape : slice.offset;
  slice.global_shape = std::move(shape);
  return slice;
}

// Returns one slice for all tensors of a file: it has as many elements as the file has tensors. Its
// name contains the digest, so what a file holds covers what is planned only if both are the same.
ShardSlice SliceOfFile(absl::string_view file, const std::string& summary, bool held) {
  int64_t tensors = 0;
  (void)absl::SimpleAtoi(absl::string_view(summary).substr(0, summary.find(' ')), &tensors);
  std::string name = absl::StrCat("file ", file, " of ", summary);
  if (name.size() > kMaxSliceName) name = absl::StrCat("file ", DigestBytes(name).xxh3);
  return SliceOf(std::move(name), "U8", {tensors}, held);
}

std::string SummaryOf(const SafetensorsHeader& header) {
  TensorList list;
  for (const SafetensorsEntry& entry : header.tensors) {
    const std::vector<int64_t> shape(entry.shape.begin(), entry.shape.end());
    list.Add(entry.name, SafetensorsTypeName(entry.type), shape);
  }
  return list.Summary();
}

// The key of a tensor in a FileReport, which also has files.
std::string TensorKey(absl::string_view name) { return absl::StrCat("tensor ", name); }
std::string TypeAndShape(const ShardSlice& slice) {
  return absl::StrCat(slice.dtype, " [", absl::StrJoin(slice.global_shape, ", "), "]");
}

// Returns at least the size of the slice in a message.
size_t SizeOf(const ShardSlice& slice) {
  return slice.tensor.size() + slice.dtype.size() + 15 * slice.global_shape.size() + 24;
}

absl::StatusOr<RankPlan> ParsePlan(const std::string& path, const std::string& text) {
  RankPlan plan;
  plan.text = text;
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    for (const nlohmann::json& tensor : json.at("tensors")) {
      plan.tensors.push_back(
          SliceOf(NameOfSlice(tensor.at(0).get<std::string>(), tensor.at(1).get<std::string>()),
                  tensor.at(2).get<std::string>(), tensor.at(3).get<std::vector<int64_t>>(),
                  /*held=*/false));
    }
    plan.parts = json.at("parts").get<std::map<std::string, std::string>>();
    if (json.contains("files")) {
      plan.files = json.at("files").get<std::map<std::string, std::string>>();
    }
  } catch (const nlohmann::json::exception& error) {
    return absl::DataLossError(absl::StrCat(path, ": ", kPlanKey, ": ", error.what()));
  }
  return plan;
}

// Returns the plan of a rank; empty if it has written none.
absl::StatusOr<RankPlan> ReadPlan(const std::string& dir, int rank,
                                  const std::vector<ManifestFile>& files) {
  const std::string name = RandomStatesFileName(rank);
  if (std::none_of(files.begin(), files.end(),
                   [&](const ManifestFile& file) { return file.name == name; })) {
    return RankPlan();
  }
  const std::string path = JoinPath(dir, name);
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(path));
  if (!header.metadata.has_value()) return RankPlan();
  const auto found = header.metadata->find(kPlanKey);
  return found == header.metadata->end() ? RankPlan() : ParsePlan(path, found->second);
}

// Returns a digest of what is to be saved and who writes it: names and ranks of files, and rank 0's
// plan of the tensors. FNV-1a, the same in every run.
uint64_t PlanDigest(const std::vector<ManifestFile>& files, const RankPlan& plan) {
  std::vector<std::string> lines;
  for (const ManifestFile& file : files) lines.push_back(absl::StrCat(file.name, "\n", file.rank));
  std::sort(lines.begin(), lines.end());
  lines.push_back(plan.text);
  uint64_t hash = 14695981039346656037u;
  for (const std::string& line : lines) {
    for (const char c : line) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
    hash = (hash ^ '\n') * 1099511628211u;
  }
  return hash;
}

// Returns what this rank's files hold, according to their headers, and what its plan says that the
// checkpoint holds; for rank 0 also the manifest, so that the record covers all that is in the
// folder. `by_files`: whether rank 0 plans by files; the contents of a file are then one slice, not
// one for each tensor.
absl::StatusOr<std::vector<ShardFileReport>> ReportOf(const std::string& dir, int rank,
                                                      const std::vector<ManifestFile>& files,
                                                      bool by_files) {
  MUSTER_ASSIGN_OR_RETURN(const RankPlan plan, ReadPlan(dir, rank, files));
  std::vector<ShardFileReport> reports;
  if (rank == 0) {
    MUSTER_ASSIGN_OR_RETURN(const FileDigest manifest, DigestFile(JoinPath(dir, kManifestName)));
    ShardFileReport& report = reports.emplace_back();
    report.name = kManifestName;
    report.bytes = manifest.bytes;
    report.xxh3 = manifest.xxh3;
  }
  std::vector<std::pair<size_t, ShardSlice>> slices;  // slices for these reports
  std::vector<std::pair<size_t, ShardSlice>> of_files;
  std::set<absl::string_view> own;
  for (const ShardSlice& slice : plan.tensors) own.insert(slice.tensor);
  for (const ManifestFile& file : files) {
    ShardFileReport& report = reports.emplace_back();
    report.name = file.name;
    report.bytes = file.digest.bytes;
    report.xxh3 = file.digest.xxh3;
    if (!absl::EndsWith(file.name, kExtension)) continue;
    MUSTER_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                            ReadSafetensorsHeader(JoinPath(dir, file.name)));
    const auto part = plan.parts.find(file.name);
    const std::string& whole = part == plan.parts.end() ? file.name : part->second;
    if (by_files || plan.files.count(file.name) > 0) {
      of_files.emplace_back(reports.size() - 1,
                            SliceOfFile(file.name, SummaryOf(header), /*held=*/true));
    }
    if (plan.files.count(file.name) > 0) continue;
    for (const SafetensorsEntry& entry : header.tensors) {
      std::string name = NameOfSlice(whole, entry.name);
      if (by_files && own.count(name) == 0) continue;
      slices.emplace_back(reports.size() - 1,
                          SliceOf(std::move(name), SafetensorsTypeName(entry.type),
                                  {entry.shape.begin(), entry.shape.end()}, /*held=*/true));
    }
  }
  // Slices that do not fit into a file's report go into another one; those that fit into none are
  // left out: the digests of the files cover them.
  std::vector<size_t> sizes(reports.size(), 0);
  const auto put = [&](size_t at, const ShardSlice& slice) {
    const size_t size = SizeOf(slice);
    for (size_t k = 0; k < reports.size(); ++k) {
      const size_t to = (at + k) % reports.size();
      if (sizes[to] + size > kMaxSlicesBytes) continue;
      sizes[to] += size;
      reports[to].slices.push_back(slice);
      return true;
    }
    return false;
  };
  // A tensor that is announced must not be left out on the rank that has it. Rank 0 announces no
  // more than fits into the report of any rank, and there the slices go first that are not in that
  // rank's own plan.
  bool has_room = true;
  for (const auto& [at, slice] : of_files) has_room = put(at, slice) && has_room;
  for (const auto& [file, summary] : plan.files) {
    has_room = put(0, SliceOfFile(file, summary, /*held=*/false)) && has_room;
  }
  if (!has_room) {
    // This takes more than 10,000 files.
    MUSTER_LOG(Warning) << dir << ": the report of rank " << rank << " has no room for all of its "
                        << of_files.size() + plan.files.size()
                        << " files: the coordinator cannot prove that none is missing";
  }
  size_t announced = 0;
  for (const ShardSlice& slice : plan.tensors) announced += SizeOf(slice);
  has_room = announced <= kMaxSlicesBytes;
  for (const auto& [at, slice] : slices) {
    if (own.count(slice.tensor) == 0) (void)put(at, slice);
  }
  for (const auto& [at, slice] : slices) {
    if (own.count(slice.tensor) > 0) has_room = put(at, slice) && has_room;
  }
  for (const ShardSlice& slice : plan.tensors) {
    if (has_room) has_room = put(0, slice);
  }
  return reports;
}

// Whether the folder is the one that the record is about.
bool IsFolderOf(const std::string& dir, const RegisteredCheckpoint& record) {
  const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(dir);
  return seal.ok() && seal->sha256 == record.sha256 && seal->job == record.job;
}

// Whether the contents cannot be determined at the moment: see StaysUnreadable().
bool MayPass(const absl::Status& error) {
  return !error.ok() && !absl::IsNotFound(error) && !StaysUnreadable(error);
}

// Deletes the staging folder of what the registry has sealed and is about to forget. If a writer
// ended when it asked for the seal, only the registry knows that its folder is sealed: the folder
// gets the record first, or the next registry that is asked would take it for one that was never
// sealed.
absl::Status DeleteStagingOf(const RegisteredCheckpoint& record, const std::string& dir) {
  if (record.staging.empty()) return absl::OkStatus();
  std::vector<std::string> paths = {record.staging};
  // This node may have the project folder under another path than the node that saved.
  std::string here = JoinPath(dir, BaseName(record.staging));
  if (AbsolutePath(here) != record.staging) paths.push_back(std::move(here));
  for (const std::string& path : paths) {
    const std::string named =
        path == record.staging ? record.path : JoinPath(ParentPath(path), BaseName(record.path));
    MUSTER_RETURN_IF_ERROR(RemoveUnpublished(path, named, [&]() -> absl::Status {
      MUSTER_RETURN_IF_ERROR(WriteSeal(path, record));
      return SyncDirectory(path);
    }));
  }
  return absl::OkStatus();
}

// Deletes a checkpoint that the registry no longer keeps, but not one that has taken its name
// without the registry, because that folder is another checkpoint. `dir`: this node's folder of the
// job's checkpoints.
absl::Status DeleteFolderOf(const RegisteredCheckpoint& record, const std::string& dir,
                            Disposal* disposal) {
  if (!record.published) return DeleteStagingOf(record, dir);
  if (!PathExists(record.path)) return absl::OkStatus();
  if (const absl::Status seal = ReadSeal(record.path).status(); MayPass(seal)) return seal;
  if (HasPin(record.path)) {
    // A person has pinned it without the registry, which forgets it.
    MUSTER_LOG(Info) << record.path << " stays: it is pinned in its folder";
    return absl::OkStatus();
  }
  if (!IsFolderOf(record.path, record)) {
    // It may be a copy without its seal; older versions removed the seal first.
    const absl::StatusOr<Manifest> manifest = VerifyCheckpoint(record.path, VerifyLevel::kSizes);
    if (MayPass(manifest.status())) return manifest.status();
    if (PathExists(JoinPath(record.path, kSealName)) || !manifest.ok() ||
        manifest->info.step != record.step || manifest->info.iteration != record.iteration) {
      MUSTER_LOG(Warning) << record.path << " is not the checkpoint of step " << record.step
                          << " that may go now: it stays";
      return absl::OkStatus();
    }
  }
  return RemoveCheckpoint(record.path, disposal);
}

void DeleteSuperfluous(CheckpointRegistrar& registrar, const std::string& dir, Mutex* folder_mu,
                       Disposal* disposal, const std::vector<RegisteredCheckpoint>& records) {
  std::vector<uint64_t> deleted;
  for (const RegisteredCheckpoint& record : records) {
    const absl::Status removed = [&] {
      const OptionalLock lock(folder_mu);
      return DeleteFolderOf(record, dir, disposal);
    }();
    if (removed.ok()) {
      deleted.push_back(record.id);
    } else {
      // The next publication tries again.
      MUSTER_LOG(Warning) << removed.message();
    }
  }
  MUSTER_FAILPOINT("worker.checkpoint_deleted");
  if (deleted.empty()) return;
  if (const absl::Status told = registrar.Deleted(deleted); !told.ok()) {
    MUSTER_LOG(Warning) << told.message();
  }
}

// How many of the newest numbered checkpoints to leave so that `keep` of them are not pinned.
int KeepBesides(const CheckpointFolder& folder, const std::vector<int64_t>& numbers, int keep,
                const std::vector<std::string>& pinned) {
  int left = 0, counted = 0;
  for (auto number = numbers.rbegin(); number != numbers.rend() && counted < keep; ++number) {
    ++left;
    const std::string dir = folder.PathOf(*number);
    if (std::find(pinned.begin(), pinned.end(), dir) == pinned.end()) ++counted;
  }
  return std::max(left, keep);
}

// Returns null if the registry does not know it.
const RegisteredCheckpoint* RecordOf(const RegisteredCheckpoint& seal,
                                     const std::vector<RegisteredCheckpoint>& records) {
  const auto found = std::find_if(records.begin(), records.end(), [&](const auto& record) {
    return record.sha256 == seal.sha256 && record.job == seal.job;
  });
  return found == records.end() ? nullptr : &*found;
}

// Whether a resume may take the checkpoint of that seal, by its record or, if there is none, by the
// seal itself.
bool MayBeTaken(const RegisteredCheckpoint& seal,
                const std::vector<RegisteredCheckpoint>& records) {
  const RegisteredCheckpoint* const record = RecordOf(seal, records);
  return record == nullptr ? seal.promoted : record->promoted && !record->damage_in_contents;
}

// The staging folders in `dir`, of numbered checkpoints and of others, of which only the registry
// knows whether they are sealed, those with a live writer included.
std::vector<std::string> AskedIn(const std::string& dir) {
  std::vector<std::string> asked;
  for (const std::string& name : ListDirectory(dir).value_or(std::vector<std::string>())) {
    const std::string path = JoinPath(dir, name);
    if (HasMark(name, StemOf(name, kStagingMark), kStagingMark) && !IsDoomed(name) &&
        HasAskedForSeal(path)) {
      asked.push_back(path);
    }
  }
  return asked;
}

// Whether the registry, whose records these are, would have a record of the checkpoint that it was
// asked to seal if it had sealed it: it must be the registry that was asked, and not another one of
// its name that knows nothing yet. It forgets older records first, and those of a job with the job.
bool WouldKnow(const CheckpointRegistrar& registrar, const Sealing& asked,
               const std::vector<RegisteredCheckpoint>& records) {
  if (asked.registry.empty() || asked.registry != registrar.identity()) return false;
  // The records of earlier attempts are taken over, with the names of their jobs.
  const auto is_of_the_job = [&](const auto& record) { return record.job == asked.job; };
  const auto is_older = [&](const auto& record) { return record.id < asked.id; };
  return (asked.job == registrar.job() ||
          std::any_of(records.begin(), records.end(), is_of_the_job)) &&
         std::any_of(records.begin(), records.end(), is_older);
}

// Settles the folders of dead writers that had asked for a seal: the registry now says which of
// these are sealed. Such a folder gets its record, by which the next save or load renames it; one
// that is not sealed is removed by the next save. One that the registry does not know stays.
void SettleAsked(const CheckpointRegistrar& registrar, const std::vector<std::string>& asked,
                 const std::vector<RegisteredCheckpoint>& records) {
  for (const std::string& path : asked) {
    const OwnedFd lock(LockFolder(path, absl::ZeroDuration()));
    if (!lock.open()) continue;
    const absl::StatusOr<Sealing> sealing = ReadSealing(path);
    if (!sealing.ok() || sealing->state != Sealing::State::kAsked) continue;
    // Compare names only, which are random, because this node may have the project folder under
    // another path than the node that saved.
    const auto record = std::find_if(records.begin(), records.end(), [&](const auto& one) {
      return BaseName(one.staging) == BaseName(path);
    });
    absl::Status settled;
    if (record == records.end()) {
      if (!WouldKnow(registrar, *sealing, records)) continue;
      settled = ForgetSealing(path);
    } else if (!record->sha256.empty()) {  // also for one that the registry is about to forget
      settled = WriteSeal(path, *record);
    }
    if (settled.ok()) settled = SyncDirectory(path);
    if (!settled.ok()) MUSTER_LOG(Warning) << settled.message();
  }
}

// Applies retention also to checkpoints that were saved without this registry.
absl::Status DeleteUnregistered(const Publication& publication,
                                const std::vector<RegisteredCheckpoint>& records) {
  const CheckpointFolder& folder = *publication.folder;
  MUSTER_ASSIGN_OR_RETURN(std::vector<std::string> spared, PinnedIn(folder));
  bool resumable = false;
  for (const RegisteredCheckpoint& record : records) {
    // A pinned one stays even if its publication got no answer.
    if (!record.published && !record.pinned) continue;
    spared.push_back(JoinPath(folder.root(), BaseName(record.path)));
    resumable = resumable || (record.published && record.promoted && record.damage.empty() &&
                              ParentPath(record.path) == AbsolutePath(folder.root()));
  }
  const OptionalLock lock(publication.folder_mu);
  // If the registry knows none that a resume may take, a resume would now take one of the others.
  if (!resumable) {
    std::vector<std::string> left_out = spared;
    MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, folder.Numbers());
    for (const int64_t number : numbers) {
      const std::string path = folder.PathOf(number);
      const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(path);
      // It cannot be read now: it stays, beside the newest of the others.
      if (MayPass(seal.status())) {
        spared.push_back(path);
        left_out.push_back(path);
      }
      // Also leave out one that has just got its name, which the registry does not know yet.
      if (seal.ok() && !MayBeTaken(*seal, records)) left_out.push_back(path);
    }
    const absl::StatusOr<std::string> newest = folder.Newest(VerifyLevel::kSizes, left_out);
    if (MayPass(newest.status())) return newest.status();
    if (newest.ok()) spared.push_back(*newest);
  }
  absl::Status removed = folder.Rotate(publication.options.keep, publication.options.keep_every,
                                       spared, publication.options.disposal);
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> left, folder.SeenPublished());
  removed.Update(folder.RemoveAsked(left, publication.options.keep));
  return removed;
}

SaveTimes TimesOf(const Publication& publication) {
  return publication.times == nullptr ? SaveTimes() : publication.times();
}

// Registers a checkpoint after the rename. The checkpoint is whole and sealed in any case: a resume
// repeats what fails here.
void Register(const Publication& publication, const RegisteredCheckpoint& record) {
  CheckpointRegistrar& registrar = *publication.options.registrar;
  const bool numbered = publication.folder.has_value();
  const absl::StatusOr<std::vector<RegisteredCheckpoint>> superfluous =
      registrar.Publish(record.id, TimesOf(publication));
  if (!superfluous.ok()) {
    MUSTER_LOG(Warning) << publication.path << " is saved and sealed, but its publication is not "
                        << "registered yet: " << superfluous.status().message();
    return;
  }
  MUSTER_FAILPOINT("worker.checkpoint_registered");
  const std::string dir = ParentPath(publication.staging_path);
  DeleteSuperfluous(registrar, dir, publication.folder_mu, publication.options.disposal,
                    *superfluous);
  const bool rotates = numbered && publication.options.keep > 0;
  const std::vector<std::string> asked = AskedIn(dir);
  if (!rotates && asked.empty()) return;
  const absl::StatusOr<std::vector<RegisteredCheckpoint>> records = registrar.List();
  if (records.ok()) {
    const OptionalLock lock(publication.folder_mu);
    SettleAsked(registrar, asked, *records);
  }
  if (!rotates) return;
  const absl::Status rotated =
      records.ok() ? DeleteUnregistered(publication, *records) : records.status();
  if (!rotated.ok()) MUSTER_LOG(Warning) << rotated.message();
}

absl::Status CompleteStaging(Staging& staging, const Publication& publication, int world_size,
                             std::vector<ManifestFile> files) {
  Manifest manifest;
  manifest.info = publication.info;
  manifest.info.world_size = world_size;
  manifest.created = absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone());
  manifest.files = std::move(files);
  return staging.Complete(manifest);
}

// Begins a registration. Returns 0 if the registry keeps no record of the checkpoint, so that rank
// 0 makes it. `by_files`: gets whether rank 0's plan is by files.
absl::StatusOr<uint64_t> Begin(const Publication& publication, int ranks,
                               const std::vector<ManifestFile>& files, bool* by_files) {
  const PublishOptions& options = publication.options;
  const bool numbered = publication.folder.has_value();
  MUSTER_ASSIGN_OR_RETURN(const RankPlan plan, ReadPlan(publication.staging_path, 0, files));
  *by_files = !plan.files.empty();
  const std::string path = AbsolutePath(publication.path);
  if (!IsValidUtf8(path) && options.promote) {
    MUSTER_LOG(Warning) << Printable(path, path.size()) << " is saved without a record at the "
                        << "coordinator, which takes only names in UTF-8";
    return 0;
  }
  absl::StatusOr<uint64_t> id =
      options.registrar->Begin({.path = path,
                                .staging = AbsolutePath(publication.staging_path),
                                .iteration = publication.info.iteration,
                                .step = publication.info.step,
                                .plan = PlanDigest(files, plan),
                                .ranks = ranks,
                                .keep = numbered ? options.keep : 0,
                                .keep_every = numbered ? options.keep_every : 0,
                                .promote = options.promote});
  if (absl::IsUnimplemented(id.status())) {
    if (!options.promote) {
      return absl::FailedPreconditionError(
          "options.checkpoint.promote is false, but the coordinator, which is older than this "
          "program, keeps no record of checkpoints: leave the option out, or start a newer one");
    }
    MUSTER_LOG(Warning) << "the coordinator keeps no record of checkpoints, since it is older than "
                        << "this program: the folder alone counts";
    return 0;
  }
  if (absl::IsResourceExhausted(id.status()) && options.promote) {
    MUSTER_LOG(Warning) << publication.path << " is saved without a record at the coordinator: "
                        << id.status().message();
    return 0;
  }
  return id;
}

// On rank 0, if there is no registry: makes the record, before the folder has its name.
absl::Status SealByFolder(Staging& staging, const Publication& publication, int ranks,
                          const std::vector<ManifestFile>& files) {
  MUSTER_ASSIGN_OR_RETURN(
      const RegisteredCheckpoint record,
      MakeRecord(publication, staging.path(), ranks, files, PreviousRecords(publication.path)));
  MUSTER_RETURN_IF_ERROR(WriteSeal(staging.path(), record));
  return SyncDirectory(staging.path());
}

// On rank 0: gives the checkpoint its name, and removes older ones.
absl::Status FinishByFolder(Staging& staging, const Publication& publication) {
  const OptionalLock lock(publication.folder_mu);
  const PublishOptions& options = publication.options;
  MUSTER_RETURN_IF_ERROR(staging.Rename(options.disposal));
  if (!publication.folder.has_value() || options.keep <= 0) return absl::OkStatus();
  // The checkpoint exists; failing to delete an old one does not change that.
  const absl::Status rotated = [&]() -> absl::Status {
    MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> pinned, PinnedIn(*publication.folder));
    MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers,
                            publication.folder->SeenPublished());
    const int keep = KeepBesides(*publication.folder, numbers, options.keep, pinned);
    absl::Status removed = publication.folder->RotateAmong(numbers, keep, options.keep_every,
                                                           pinned, options.disposal);
    removed.Update(publication.folder->RemoveAsked(numbers, keep));
    return removed;
  }();
  if (!rotated.ok()) MUSTER_LOG(Warning) << rotated.message();
  return absl::OkStatus();
}

// Pins a checkpoint that a user has named, so that retention leaves it alone. Returns whether that
// succeeded: a named checkpoint that is not pinned must not be published, because retention would
// apply to it.
bool PinNamed(const RegisteredCheckpoint& record, CheckpointRegistrar& registrar) {
  const absl::Status pinned = registrar.Pin(record.id);
  if (pinned.ok()) return true;
  MUSTER_LOG(Warning) << record.path << " is whole and sealed, but the coordinator has not pinned "
                      << "it, and so does not register it yet: " << pinned.message();
  return false;
}

absl::Status Finish(Staging& staging, const Publication& publication,
                    const RegisteredCheckpoint& record) {
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_sealed");
  MUSTER_RETURN_IF_ERROR(WriteSeal(publication.staging_path, record));
  MUSTER_RETURN_IF_ERROR(SyncDirectory(publication.staging_path));
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_noted");
  // Retention is for numbered checkpoints: it removes none that a user has named.
  const bool may_register =
      publication.folder.has_value() || PinNamed(record, *publication.options.registrar);
  {
    const OptionalLock lock(publication.folder_mu);
    MUSTER_RETURN_IF_ERROR(staging.Rename(publication.options.disposal));
  }
  if (may_register) Register(publication, record);
  return absl::OkStatus();
}

// On rank 0, when all have reported: returns true if the checkpoint has its name, false if ranks
// must report again. Sends no messages to the other ranks in between: one of them may be gone,
// which is no reason to give up a sealed checkpoint.
absl::StatusOr<bool> SealAndFinish(Staging& staging, const Publication& publication, uint64_t id) {
  CheckpointRegistrar& registrar = *publication.options.registrar;
  // Once it is sealed, neither a full disk nor the end of this process may make it look as if it
  // were not.
  if (const absl::Status begun =
          BeginSealing(publication.staging_path,
                       {.job = registrar.job(), .registry = registrar.identity(), .id = id},
                       RoomForSeal(registrar.job(), AbsolutePath(publication.path)));
      !begun.ok()) {
    registrar.Abort(id, std::string(begun.message()));
    return begun;
  }
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_seal");
  const absl::StatusOr<std::optional<RegisteredCheckpoint>> record = registrar.Seal(id);
  if (!record.ok()) {
    // The seal was refused, or there is no answer that says whether it is sealed.
    if (absl::IsInvalidArgument(record.status()) || absl::IsNotFound(record.status())) {
      registrar.Abort(id, std::string(record.status().message()));
    } else {
      staging.Leave();
    }
    return record.status();
  }
  if (!record->has_value()) return false;
  // Also handles what it throws.
  const absl::Status finished = GuardRank([&] { return Finish(staging, publication, **record); });
  if (!finished.ok()) {
    if (staging.path().empty()) return finished;  // it has its name
    // It is the newest that the coordinator knows. The next load renames it, or reads it where it
    // is.
    staging.LetOthersRead();
    staging.Leave();
    return absl::Status(finished.code(),
                        absl::StrCat(finished.message(), "; the checkpoint is whole and sealed in ",
                                     publication.staging_path,
                                     ", and the next load gives it the name ", publication.path));
  }
  return true;
}

// Collective: all ranks report what they wrote, and rank 0 makes it a checkpoint.
absl::Status SealTogether(Comm& comm, Staging* staging, const Publication& publication, uint64_t id,
                          const std::vector<ManifestFile>& mine, bool by_files) {
  CheckpointRegistrar& registrar = *publication.options.registrar;
  for (int tries = 1;; ++tries) {
    const absl::Status reported = GuardRank([&]() -> absl::Status {
      MUSTER_FAILPOINT_STATUS("worker.checkpoint_report");
      MUSTER_ASSIGN_OR_RETURN(const std::vector<ShardFileReport> report,
                              ReportOf(publication.staging_path, comm.rank(), mine, by_files));
      return registrar.ReportShards(id, comm.rank(), report);
    });
    if (const absl::Status all = AgreeOnFiles(comm, reported, {}, nullptr); !all.ok()) {
      if (staging != nullptr) registrar.Abort(id, std::string(all.message()));
      return all;
    }
    bool done = false;
    absl::Status status;
    if (staging != nullptr) {
      status = GuardRank([&]() -> absl::Status {
        MUSTER_ASSIGN_OR_RETURN(done, SealAndFinish(*staging, publication, id));
        return absl::OkStatus();
      });
      if (status.ok() && !done && tries == kSealTries) {
        status = absl::UnavailableError(
            absl::StrCat("the coordinator has forgotten ", tries, " times what the ranks reported ",
                         "of ", publication.path, ": find out why it keeps restarting"));
        registrar.Abort(id, std::string(status.message()));
      }
    }
    MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, status));
    if (!comm.BroadcastBytes(done ? "done" : "", 0).empty()) return absl::OkStatus();
  }
}

// Returns what this rank plans and has written, from its files. `lists_tensors`: whether rank 0
// plans by tensors; the contents of files are then also reported by tensors.
absl::StatusOr<FileReport> ReportOfFiles(const std::string& dir, int rank,
                                         const std::vector<ManifestFile>& files,
                                         bool lists_tensors) {
  MUSTER_ASSIGN_OR_RETURN(const RankPlan plan, ReadPlan(dir, rank, files));
  FileReport report;
  report.planned = plan.files;
  std::set<absl::string_view> own;
  for (const ShardSlice& slice : plan.tensors) {
    own.insert(slice.tensor);
    report.planned[TensorKey(slice.tensor)] = TypeAndShape(slice);
  }
  for (const ManifestFile& file : files) {
    const auto part = plan.parts.find(file.name);
    const bool is_planned = part != plan.parts.end() || plan.files.count(file.name) > 0;
    const bool by_tensors =
        (lists_tensors || !own.empty()) && absl::EndsWith(file.name, kExtension);
    // Other files are in no plan.
    if (!is_planned && !by_tensors) continue;
    MUSTER_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                            ReadSafetensorsHeader(JoinPath(dir, file.name)));
    if (is_planned) report.held[file.name] = SummaryOf(header);
    if (!by_tensors || plan.files.count(file.name) > 0) continue;
    const std::string& whole = part == plan.parts.end() ? file.name : part->second;
    for (const SafetensorsEntry& entry : header.tensors) {
      const ShardSlice slice =
          SliceOf(NameOfSlice(whole, entry.name), SafetensorsTypeName(entry.type),
                  {entry.shape.begin(), entry.shape.end()}, /*held=*/true);
      if (!lists_tensors && own.count(slice.tensor) == 0) continue;
      if (report.held.try_emplace(TensorKey(slice.tensor), TypeAndShape(slice)).second) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(TensorKey(slice.tensor), " is in two files of rank ", rank));
    }
  }
  return report;
}

// Like ProveTogether(), also for a plan for a registry, which may list tensors.
absl::Status Prove(Comm& comm, const std::string& staging_path,
                   const std::vector<ManifestFile>& mine, bool lists_tensors) {
  FileReport report;
  const absl::Status read = GuardRank([&]() -> absl::Status {
    MUSTER_ASSIGN_OR_RETURN(report, ReportOfFiles(staging_path, comm.rank(), mine, lists_tensors));
    return absl::OkStatus();
  });
  // Rank 0 does not send its plan, which has the files of all ranks: with one message that is much
  // longer than the others, gathering takes as many rounds as there are ranks.
  FileReport told = report;
  if (comm.rank() == 0) told.planned.clear();
  const std::vector<std::string> all = comm.AllGatherBytes(
      read.ok() ? absl::StrCat("+", told.Encode()) : absl::StrCat("-", read.message()));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!absl::StartsWith(all[rank], "+")) {
      return absl::InternalError(absl::StrCat("rank ", rank, ": ", all[rank].substr(1)));
    }
  }
  absl::Status proven;
  if (comm.rank() == 0) {
    proven = GuardRank([&]() -> absl::Status {
      std::vector<FileReport> reports = {report};
      for (size_t rank = 1; rank < all.size(); ++rank) {
        MUSTER_ASSIGN_OR_RETURN(FileReport parsed, FileReport::Parse(all[rank].substr(1)));
        reports.push_back(std::move(parsed));
      }
      return CheckPlannedFiles(reports);
    });
  }
  return StatusOfMain(comm, proven);
}

// Collective, if there is no registry: rank 0 makes the record of what the ranks have proven, and
// gives the checkpoint its name.
absl::Status PublishByFolder(Comm& comm, Staging* staging, const Publication& publication,
                             const std::vector<ManifestFile>& mine,
                             const std::vector<ManifestFile>& all, bool lists_tensors) {
  MUSTER_RETURN_IF_ERROR(Prove(comm, publication.staging_path, mine, lists_tensors));
  absl::Status done;
  if (staging != nullptr) {
    done = GuardRank([&]() -> absl::Status {
      MUSTER_RETURN_IF_ERROR(SealByFolder(*staging, publication, comm.size(), all));
      MUSTER_RETURN_IF_ERROR(FinishByFolder(*staging, publication));
      CountUnrecorded(publication, all);
      return absl::OkStatus();
    });
  }
  return StatusOfMain(comm, done);
}

absl::Status PublishRegistered(Comm& comm, Staging* staging, const Publication& publication,
                               const std::vector<ManifestFile>& mine,
                               const std::vector<ManifestFile>& all) {
  uint64_t id = 0;
  bool by_files = false;
  absl::Status begun;
  if (staging != nullptr) {
    begun = GuardRank([&]() -> absl::Status {
      MUSTER_ASSIGN_OR_RETURN(id, Begin(publication, comm.size(), all, &by_files));
      MUSTER_FAILPOINT_STATUS("worker.checkpoint_begun");
      return absl::OkStatus();
    });
  }
  MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, begun));
  const std::string told = comm.BroadcastBytes(absl::StrCat(id, by_files ? kByFiles : ""), 0);
  by_files = absl::EndsWith(told, kByFiles);
  TORCH_CHECK(absl::SimpleAtoi(absl::StripSuffix(told, kByFiles), &id), "save_state: rank 0 sent ",
              told);
  if (id == 0) {
    return PublishByFolder(comm, staging, publication, mine, all, /*lists_tensors=*/!by_files);
  }
  return SealTogether(comm, staging, publication, id, mine, by_files);
}

absl::Status Moved(const std::string& path) {
  return absl::AbortedError(absl::StrCat(
      path, " has changed while it was checked: another process is renaming or removing it"));
}

// Returns where a sealed checkpoint without its name is, after renaming it if possible. Verifies
// its contents first, because its publication lets older ones be removed.
absl::StatusOr<std::string> NameUnnamed(const RegisteredCheckpoint& record) {
  MUSTER_ASSIGN_OR_RETURN(const bool is_newer, IsNewerCheckpoint(record.path, record.staging));
  if (is_newer) {
    return absl::NotFoundError(absl::StrCat(record.path, " was saved after ", record.staging,
                                            ", which was to have its name"));
  }
  // Verify before it is locked, because another load would wait for a writer that does not exist.
  const bool was_there = PathExists(record.staging);
  const absl::Status whole = VerifyCheckpoint(record.staging, VerifyLevel::kContents).status();
  if (!whole.ok()) return was_there && !PathExists(record.staging) ? Moved(record.staging) : whole;
  return NameStaging(record.path, record.staging, [&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(WriteSeal(record.staging, record));
    return SyncDirectory(record.staging);
  });
}

// Returns where the sealed checkpoint is, after renaming it if necessary: see NameStaging().
// Errors: NOT_FOUND if it is gone, or if a newer one has its name.
absl::StatusOr<std::string> NameSealed(const RegisteredCheckpoint& record,
                                       CheckpointRegistrar& registrar) {
  bool has_name = IsFolderOf(record.path, record);
  if (!has_name) {
    const absl::StatusOr<std::string> path = NameUnnamed(record);
    if (path.ok() && *path != record.path) return path;
    // Another process may have renamed it meanwhile.
    has_name = !path.ok() && IsFolderOf(record.path, record);
    if (!has_name) MUSTER_RETURN_IF_ERROR(path.status());
  }
  if (has_name) {
    MUSTER_RETURN_IF_ERROR(VerifyCheckpoint(record.path, VerifyLevel::kContents).status());
  }
  // Its writer may have ended before it pinned a checkpoint that the program had named.
  if (!IsNumberedName(BaseName(record.path)) && !record.pinned && !PinNamed(record, registrar)) {
    return record.path;
  }
  absl::StatusOr<std::vector<RegisteredCheckpoint>> superfluous =
      registrar.Publish(record.id, SaveTimes());
  if (!superfluous.ok()) {
    MUSTER_LOG(Warning) << superfluous.status().message();
  } else {
    // This one is about to be loaded. Registries from before 2026-12 may list it, too, if they do
    // not know yet that newer ones are damaged or gone.
    std::erase_if(*superfluous, [&](const auto& other) { return other.id == record.id; });
    DeleteSuperfluous(registrar, ParentPath(record.path), /*folder_mu=*/nullptr,
                      /*disposal=*/nullptr, *superfluous);
  }
  return record.path;
}

// Checks the chosen checkpoint again, because it may have got its name while the others were
// examined.
absl::Status CheckChosen(const std::string& path,
                         const std::vector<RegisteredCheckpoint>& records) {
  const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(path);
  if (absl::IsNotFound(seal.status())) return PathExists(path) ? absl::OkStatus() : Moved(path);
  if (MayPass(seal.status())) return seal.status();
  return seal.ok() && MayBeTaken(*seal, records) ? absl::OkStatus() : Moved(path);
}

struct HeldBack {
  std::vector<std::string> paths;
  // Why it is unknown whether one of them was held back, or what the registry knows to be damaged.
  absl::Status unreadable;
};

// Returns the checkpoints that no resume may take: those that are held back or damaged according to
// `records`, those in none of these that were held back when they were sealed, and those that may
// have been. Includes those in `unnamed`, from PublishSealed(). Does not look at `damaged`. Leaves
// out those whose seal.json may be readable later: CheckChosen() reads it if one of them is chosen.
// Errors: those of the folder; ABORTED if one of `unnamed` no longer exists.
absl::StatusOr<HeldBack> HeldBackIn(const CheckpointFolder& folder,
                                    const std::vector<std::string>& unnamed,
                                    const std::vector<RegisteredCheckpoint>& records,
                                    const std::vector<std::string>& damaged) {
  HeldBack held_back;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, folder.Numbers());
  std::vector<std::string> paths = unnamed;
  for (const int64_t number : numbers) paths.push_back(folder.PathOf(number));
  for (const std::string& path : paths) {
    if (std::find(damaged.begin(), damaged.end(), path) != damaged.end()) continue;
    const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(path);
    if (absl::IsNotFound(seal.status())) {
      // The unnamed ones had a seal.
      if (std::find(unnamed.begin(), unnamed.end(), path) != unnamed.end()) return Moved(path);
      continue;
    }
    // This is no reason not to take a newer one.
    if (MayPass(seal.status())) continue;
    if (seal.ok() && MayBeTaken(*seal, records)) continue;
    if (!seal.ok()) {
      MUSTER_LOG(Warning) << "passing over " << path << ": " << seal.status().message()
                          << "; it is unknown whether it was held back: load_state(\"" << path
                          << "\") loads it";
      held_back.unreadable.Update(seal.status());
      held_back.paths.push_back(path);
      continue;
    }
    held_back.paths.push_back(path);
    if (const RegisteredCheckpoint* const record = RecordOf(*seal, records); record != nullptr) {
      if (record->promoted) held_back.unreadable.Update(absl::DataLossError(record->damage));
      continue;
    }
    MUSTER_LOG(Warning) << path << " was held back when it was saved, and no coordinator says that "
                        << "it was promoted: load_state(\"" << path << "\") loads it";
  }
  return held_back;
}

// Warns of numbers above that of the checkpoint that is taken which the registry does not know.
void WarnOfNewer(const CheckpointFolder& folder, const RegisteredCheckpoint& taken,
                 const std::vector<RegisteredCheckpoint>& records) {
  std::set<std::string> known;
  for (const RegisteredCheckpoint& record : records) known.insert(BaseName(record.path));
  const absl::StatusOr<std::vector<int64_t>> numbers = folder.Numbers();
  if (!numbers.ok()) return;
  for (const int64_t number : *numbers) {
    const std::string path = folder.PathOf(number);
    if (number <= taken.iteration || known.count(BaseName(path)) > 0 ||
        !PathExists(JoinPath(path, kManifestName))) {
      continue;
    }
    MUSTER_LOG(Warning) << path << " is newer than " << taken.path
                        << ", which the coordinator says to take, and was saved without the "
                        << "coordinator: name it to load it";
  }
}

}  // namespace

absl::Status ProveTogether(Comm& comm, const std::string& staging_path,
                           const std::vector<ManifestFile>& mine) {
  return Prove(comm, staging_path, mine, /*lists_tensors=*/false);
}

ChainEnd PreviousRecords(const std::string& path) {
  return ReadChainEnd(ParentPath(path), absl::Now());
}

absl::StatusOr<RegisteredCheckpoint> MakeRecord(const Publication& publication,
                                                const std::string& dir, int ranks,
                                                const std::vector<ManifestFile>& files,
                                                const ChainEnd& previous) {
  RegisteredCheckpoint record;
  record.state = RegisteredCheckpoint::State::kSealed;
  record.id = previous.highest_id + 1;
  record.path = AbsolutePath(publication.path);
  record.iteration = publication.info.iteration;
  record.step = publication.info.step;
  MUSTER_ASSIGN_OR_RETURN(const RankPlan plan, ReadPlan(dir, 0, files));
  record.plan = PlanDigest(files, plan);
  record.ranks = ranks;
  record.promoted = true;
  record.created_us = static_cast<uint64_t>(absl::ToUnixMicros(absl::Now()));
  if (previous.last.has_value()) record.previous_sha256 = previous.last->sha256;
  MUSTER_RETURN_IF_ERROR(SealFiles(dir, files, &record));
  if (publication.options.key_file.empty()) return record;
  const std::string& file = publication.options.key_file;
  MUSTER_ASSIGN_OR_RETURN(const std::string pem, ReadSecretFile(file, "MUSTER_CHECKPOINT_KEY",
                                                                "private key", kLargestKeyFile));
  MUSTER_ASSIGN_OR_RETURN(
      const SigningKey key,
      SigningKey::Parse(pem, absl::StrCat("MUSTER_CHECKPOINT_KEY: '", file, "'")));
  record.signature = absl::BytesToHexString(key.Sign(absl::HexStringToBytes(record.sha256)));
  return record;
}

void CountUnrecorded(const Publication& publication, const std::vector<ManifestFile>& files) {
  if (publication.options.registrar == nullptr) return;
  uint64_t bytes = 0;
  for (const ManifestFile& file : files) bytes += file.digest.bytes;
  publication.options.registrar->CountUnrecorded(bytes, TimesOf(publication));
}

absl::Status PublishTogether(Comm& comm, Staging* staging, const Publication& publication,
                             const absl::Status& written, const std::vector<ManifestFile>& mine) {
  std::vector<ManifestFile> all;
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, written, mine, &all));
  absl::Status completed;
  if (staging != nullptr) {
    completed = GuardRank([&] { return CompleteStaging(*staging, publication, comm.size(), all); });
  }
  MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, completed));
  if (publication.options.registrar == nullptr) {
    return PublishByFolder(comm, staging, publication, mine, all, /*lists_tensors=*/false);
  }
  return PublishRegistered(comm, staging, publication, mine, all);
}

absl::StatusOr<std::string> FindCheckpointToResume(const CheckpointFolder& folder,
                                                   CheckpointRegistrar* registrar,
                                                   const std::vector<std::string>& damaged) {
  std::vector<std::string> unnamed;
  const auto by_folder =
      [&](const std::vector<RegisteredCheckpoint>& records,
          const std::vector<std::string>& also_left_out) -> absl::StatusOr<std::string> {
    MUSTER_ASSIGN_OR_RETURN(HeldBack left_out, HeldBackIn(folder, unnamed, records, damaged));
    left_out.paths.insert(left_out.paths.end(), also_left_out.begin(), also_left_out.end());
    left_out.paths.insert(left_out.paths.end(), damaged.begin(), damaged.end());
    absl::StatusOr<std::string> newest =
        folder.Newest(VerifyLevel::kSizes, left_out.paths, unnamed);
    // Not the same as "none yet", after which training would begin from scratch.
    if (absl::IsNotFound(newest.status()) && !left_out.unreadable.ok()) {
      return absl::DataLossError(left_out.unreadable.message());
    }
    if (newest.ok()) MUSTER_RETURN_IF_ERROR(CheckChosen(*newest, records));
    return newest;
  };
  if (registrar == nullptr) {
    MUSTER_ASSIGN_OR_RETURN(unnamed, folder.PublishSealed());
    return by_folder({}, {});
  }
  const absl::StatusOr<std::vector<RegisteredCheckpoint>> records = registrar->List();
  if (!records.ok()) {
    MUSTER_LOG(Warning) << "cannot ask the coordinator which checkpoint to resume from ("
                        << records.status().message() << "): the newest that is complete in "
                        << folder.root() << " is taken";
    MUSTER_ASSIGN_OR_RETURN(unnamed, folder.PublishSealed());
    return by_folder({}, {});
  }
  SettleAsked(*registrar, AskedIn(folder.root()), *records);
  MUSTER_ASSIGN_OR_RETURN(unnamed, folder.PublishSealed());
  const std::string root = AbsolutePath(folder.root());
  std::vector<std::string> left_out;  // no run resumes from them
  bool any = false, any_damaged = false;
  for (auto record = records->rbegin(); record != records->rend(); ++record) {
    if (ParentPath(record->path) != root ||
        (record->state != RegisteredCheckpoint::State::kSealed &&
         record->state != RegisteredCheckpoint::State::kPublished)) {
      continue;
    }
    std::string path = JoinPath(folder.root(), BaseName(record->path));
    const auto known_damaged = [&] {
      return std::find(damaged.begin(), damaged.end(), path) != damaged.end();
    };
    // A transient error is no reason to continue training from an older one.
    if (const absl::Status seal = ReadSeal(path).status(); !known_damaged() && MayPass(seal)) {
      return seal;
    }
    if (!record->promoted || record->damage_in_contents) {
      if (!IsFolderOf(path, *record)) continue;
      left_out.push_back(path);
      if (!record->promoted) continue;
      any_damaged = true;
      MUSTER_LOG(Warning)
          << "passing over " << path << " of step " << record->step
          << ", which the coordinator knows as damaged: " << record->damage
          << "; if it has been repaired, report that with muster checkpoints verify --report";
      continue;
    }
    any = true;
    if (known_damaged()) {
      any_damaged = true;
      continue;
    }
    absl::Status status;
    if (record->state == RegisteredCheckpoint::State::kSealed) {
      const absl::StatusOr<std::string> named = NameSealed(*record, *registrar);
      status = named.status();
      // The path of a link is where the link leads to.
      if (named.ok()) {
        path = ParentPath(*named) == root ? JoinPath(folder.root(), BaseName(*named)) : *named;
      }
      if (known_damaged()) {
        any_damaged = true;
        continue;
      }
    } else if (!IsFolderOf(path, *record)) {
      const absl::Status seal = ReadSeal(path).status();
      status =
          seal.ok() || absl::IsNotFound(seal)
              ? absl::NotFoundError(absl::StrCat(
                    "it is not there", PathExists(path) ? ": another checkpoint has its name" : ""))
              : seal;
    }
    if (status.ok()) {
      const bool is_its_folder = IsFolderOf(path, *record);
      status = VerifyCheckpoint(path, VerifyLevel::kSizes).status();
      if (!status.ok() && (!PathExists(path) || (is_its_folder && !IsFolderOf(path, *record)))) {
        return Moved(path);
      }
      // It is damage, because the record and its seal exist.
      if (absl::IsNotFound(status)) status = absl::DataLossError(status.message());
      any_damaged = any_damaged || !status.ok();
      const bool changed = status.ok() ? !record->damage.empty() : absl::IsDataLoss(status);
      if (changed) registrar->Verified(*record, status.message(), /*contents=*/false);
    }
    if (status.ok()) {
      // It was held back when it was sealed and has been promoted since: from now on the folder
      // says so, also to runs without this registry.
      if (const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(path);
          seal.ok() && !seal->promoted) {
        if (const absl::Status noted = WriteSeal(path, *record); !noted.ok()) {
          MUSTER_LOG(Warning) << noted.message();
        }
      }
      WarnOfNewer(folder, *record, *records);
      return path;
    }
    if (MayPass(status)) return status;
    MUSTER_LOG(Warning) << "passing over " << path << " of step " << record->step << ": "
                        << status.message();
  }
  absl::StatusOr<std::string> newest = by_folder(*records, left_out);
  // Not the same as "none yet", after which training would begin from scratch.
  if (absl::IsNotFound(newest.status()) && any_damaged) {
    return absl::DataLossError(newest.status().message());
  }
  if (newest.ok()) {
    MUSTER_LOG(Info) << "the coordinator knows "
                     << (any ? "no other checkpoint that is whole" : "no checkpoint") << " of "
                     << folder.root() << ": the newest that is complete there is taken, "
                     << *newest;
  }
  return newest;
}

void ReportDamage(const std::string& path, CheckpointRegistrar* registrar,
                  absl::string_view damage) {
  if (registrar == nullptr) return;
  const absl::StatusOr<std::vector<RegisteredCheckpoint>> records = registrar->List();
  if (!records.ok()) return;
  for (const RegisteredCheckpoint& record : *records) {
    if (IsFolderOf(path, record)) registrar->Verified(record, damage, /*contents=*/true);
  }
}

}  // namespace muster
