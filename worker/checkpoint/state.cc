#include "worker/checkpoint/state.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <variant>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "c10/core/DeviceGuard.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/block_transfers.h"
#include "worker/checkpoint/device_copies.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/file_plans.h"
#include "worker/checkpoint/node_exchange.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/plan_pieces.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/sealing.h"
#include "worker/checkpoint/shared_files.h"
#include "worker/checkpoint/snapshot.h"
#include "worker/checkpoint/staged_save.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/transfer.h"

namespace muster {
namespace {

bool IsStagingFolder(const std::string& path) {
  const std::string name = BaseName(path);
  return HasMark(name, StemOf(name, kStagingMark), kStagingMark);
}

// Collective.
absl::Status SaveStaged(Comm& comm, Publication publication, NodeGroups groups,
                        absl::FunctionRef<absl::Status(StateWriter&)> write) {
  MUSTER_RETURN_IF_ERROR(CheckPublishable(groups, publication.options));
  const Clock& clock = Clock::Real();
  publication.times = [&clock, start = clock.Now()] {
    const absl::Duration took = clock.Now() - start;
    return SaveTimes{.stall = took, .save = took};
  };
  MUSTER_ASSIGN_OR_RETURN(StagedSave staged,
                          StagedSave::Begin(comm, publication.path, std::move(groups),
                                            /*replaces=*/!publication.folder.has_value(),
                                            publication.options.disposal));
  StateWriter writer(staged.path(), comm.rank());
  std::unique_ptr<SaveProgress::Save> progress;
  if (SaveProgress* const all = publication.options.progress; all != nullptr) {
    progress = all->Begin(publication.path, publication.info.step, /*asynchronous=*/false,
                          /*logs=*/comm.rank() == 0);
    writer.ReportTo(progress.get());
  }
  // Call `write` even if it cannot write, because other ranks may wait for what it exchanges before
  // it writes.
  writer.Refuse(staged.CheckVisible());
  absl::Status written = GuardRank([&] { return write(writer); });
  written.Update(writer.refused());
  return staged.Publish(comm, std::move(publication), written, writer.files());
}

// Copies the parts on a device block by block to the memory from which they are written, while
// earlier blocks are written. Throws c10::Error if the device fails.
absl::Status StreamTo(const SafetensorsPlan& plan, DirectFileStream& stream) {
  const at::NoGradGuard no_grad;
  MUSTER_RETURN_IF_ERROR(stream.Append(plan.layout.prefix));
  for (size_t i = 0; i < plan.sources.size(); ++i) {
    const uint64_t bytes = plan.layout.tensors[i].end - plan.layout.tensors[i].begin;
    if (bytes == 0) continue;
    const at::Tensor& source = plan.sources[i];
    if (DeviceCopies::Takes(source)) {
      MUSTER_RETURN_IF_ERROR(
          stream.AppendBy(bytes, [&source](char* to, uint64_t offset, size_t size) {
            const auto count = static_cast<int64_t>(size);
            auto* const from = static_cast<char*>(source.data_ptr()) + offset;
            at::from_blob(to, {count}, at::kByte)
                .copy_(at::for_blob(from, {count})
                           .options(at::TensorOptions(source.device()).dtype(at::kByte))
                           .target_device(source.device())
                           .make_tensor());
          }));
      continue;
    }
    const at::Tensor tensor = source.resolve_conj().resolve_neg().to(at::kCPU).contiguous();
    MUSTER_RETURN_IF_ERROR(
        stream.Append(absl::string_view(static_cast<const char*>(tensor.const_data_ptr()), bytes)));
  }
  return absl::OkStatus();
}

// Returns the error for a folder that HoldInPlace() could not hold.
absl::Status IsLocked(const std::string& path) {
  return absl::AbortedError(absl::StrCat(path, ": ", LockHolderOf(path), " has it locked"));
}

absl::Status NumberIsFree(const CheckpointFolder& folder, int64_t iteration, int total_limit) {
  if (total_limit < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("total_limit is ", total_limit, "; it must not be negative"));
  }
  const std::string dir = folder.PathOf(iteration);
  const absl::Status there = ReadManifest(dir).status();
  if (absl::IsNotFound(there)) return absl::OkStatus();
  if (!there.ok() && !StaysUnreadable(there)) return there;
  return absl::AlreadyExistsError(absl::StrCat(
      "checkpoint ", dir, " exists; load it first to continue after it, or name another folder"));
}

}  // namespace

absl::Status StateWriter::CheckName(const std::string& name) const {
  MUSTER_RETURN_IF_ERROR(refused_);
  // The coordinator accepts no control characters, and a file whose name has the mark of one that
  // is being written counts as a remain of its writer.
  const bool has_control =
      std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  if (!IsPlainName(name) || has_control || name == kSealName || name == kSealingName ||
      name == kPinName || HasMark(name, StemOf(name, kStagingMark), kStagingMark)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", Printable(name),
        "\" is not a valid name for a checkpoint's file: use 1 to 255 bytes "
        "of UTF-8 without '/' and control characters, and no name of the checkpoint's own"));
  }
  const auto has_name = [&name](const auto& file) { return file.name == name; };
  if (std::any_of(files_.begin(), files_.end(), has_name) ||
      (snapshot_ != nullptr &&
       std::any_of(snapshot_->files().begin(), snapshot_->files().end(), has_name))) {
    return absl::InvalidArgumentError(absl::StrCat("file ", name, " was written already"));
  }
  return absl::OkStatus();
}

void StateWriter::CopyLater(const at::Tensor& tensor) {
  if (snapshot_ != nullptr && lazy_) snapshot_->CopyLater(tensor);
}

absl::Status StateWriter::Put(const std::string& name, const PlannedStateFile& file) {
  const auto* const plan = std::get_if<SafetensorsPlan>(&file);
  const std::string path = JoinPath(staging_, name);
  DirectFileOptions options{.in_flight = TransferThreads()};
  if (progress_ != nullptr) {
    progress_->Begin(plan == nullptr ? std::get<std::string>(file).size() : plan->file_bytes());
    options.wrote = [this](uint64_t bytes) { progress_->Wrote(bytes); };
  }
  const auto put = [&](absl::StatusOr<DirectFileWritten> written) {
    if (written.ok()) files_.push_back(FileOf(name, rank_, *std::move(written)));
    return written.status();
  };
  if (plan == nullptr) return put(WriteDirectFile(path, std::get<std::string>(file), options));
  if (const auto pieces = PlanPieces::Of(*plan); pieces.has_value()) {
    return put(pieces->Write(
        path, "no other thread of the program may change it until save_state() returns", options));
  }
  // Set the device, because a CUDA call of a thread, such as one that pins memory, concerns its
  // current device.
  c10::OptionalDeviceGuard on_device;
  for (const at::Tensor& source : plan->sources) {
    // For a single block it is not worth it.
    if (!source.is_cuda() || plan->file_bytes() <= options.block_bytes) continue;
    on_device.reset_device(source.device());
    options.pinning = HostPinning::Cuda();
    break;
  }
  MUSTER_ASSIGN_OR_RETURN(const std::unique_ptr<DirectFileStream> stream,
                          DirectFileStream::Create(path, plan->file_bytes(), options));
  MUSTER_RETURN_IF_ERROR(StreamTo(*plan, *stream));
  return put(stream->Finish());
}

absl::Status StateWriter::Write(const std::string& name, const StateDict& state,
                                SharedTensors shared) {
  MUSTER_RETURN_IF_ERROR(CheckName(name));
  if (snapshot_ != nullptr) return snapshot_->Add(name, state, shared, plans_);
  MUSTER_ASSIGN_OR_RETURN(
      const PlannedStateFile file,
      PlanStateDict(JoinPath(staging_, name), state, shared, kDirectAlignment, plans_));
  return Put(name, file);
}

absl::Status StateWriter::WriteModel(const std::string& name, const NamedTensors& tensors) {
  MUSTER_RETURN_IF_ERROR(CheckName(name));
  WriteSafetensorsOptions options{.metadata = SafetensorsMetadata{{"format", "pt"}}};
  if (snapshot_ != nullptr) return snapshot_->Add(name, tensors, options, plans_);
  options.data_alignment = kDirectAlignment;
  MUSTER_ASSIGN_OR_RETURN(SafetensorsPlan plan,
                          PlanFile(plans_, JoinPath(staging_, name), tensors, options));
  return Put(name, PlannedStateFile(std::move(plan)));
}

absl::Status StateWriter::WriteText(const std::string& name, const std::string& text) {
  MUSTER_RETURN_IF_ERROR(CheckName(name));
  if (snapshot_ != nullptr) return snapshot_->AddText(name, text);
  return Put(name, PlannedStateFile(text));
}

ManifestFile FileOf(const std::string& name, int rank, DirectFileWritten written) {
  // The digest of a single block says no more than that of the file.
  if (written.blocks.xxh3.size() <= 1) written.blocks = {};
  return {.name = name,
          .rank = rank,
          .digest = std::move(written.digest),
          .blocks = std::move(written.blocks)};
}

absl::StatusOr<StateReader> StateReader::Open(const std::string& dir) {
  absl::StatusOr<Manifest> manifest = VerifyCheckpoint(dir, VerifyLevel::kSizes);
  if (absl::IsNotFound(manifest.status()) && !PathExists(dir)) {
    return absl::NotFoundError(absl::StrCat(manifest.status().message(), HintAtUnnamed(dir)));
  }
  MUSTER_RETURN_IF_ERROR(manifest.status());
  return StateReader(dir, *std::move(manifest));
}

StateReader StateReader::OfMemory(std::string name, Manifest manifest,
                                  std::map<std::string, absl::string_view> files,
                                  std::shared_ptr<const void> keep) {
  StateReader reader(std::move(name), std::move(manifest));
  reader.files_ = std::move(files);
  reader.keep_ = std::move(keep);
  return reader;
}

int StateReader::Count(std::string (*name)(int)) const {
  int count = 0;
  while (Has(name(count))) ++count;
  return count;
}

absl::StatusOr<StateDict> StateReader::Read(absl::string_view name) const {
  const ManifestFile* const file = manifest_.Find(name);
  if (file == nullptr) {
    const std::string names = absl::StrJoin(
        manifest_.files, ", ",
        [](std::string* out, const ManifestFile& entry) { absl::StrAppend(out, entry.name); });
    return absl::NotFoundError(
        absl::StrCat("checkpoint ", dir_, " has no ", name, " (it has ", names, ")"));
  }
  if (in_memory()) return ParseStateDict(files_.at(file->name), JoinPath(dir_, name));
  const std::string path = JoinPath(dir_, name);
  const std::string shared = shared_ == nullptr ? "" : shared_->PathOf(name);
  if (!shared.empty() && file->blocks.empty()) {
    // It is a small file, of any kind.
    absl::StatusOr<std::string> contents = ReadFile(shared);
    if (!contents.ok()) return Renamed(contents.status(), shared, NameOfShared(path));
    return ParseStateDict(*contents, path);
  }
  if (!shared.empty()) {
    const bool in_place = in_place_ && IsHere(name);
    absl::StatusOr<StateDict> mapped = MapStateDict(shared, in_place ? path : NameOfShared(path));
    // Not every file system maps files: then it takes memory after all.
    if (mapped.ok() || !in_place) return mapped;
  }
  if (!IsHere(name)) {
    const auto fetched = fetched_.find(file->name);
    if (fetched != fetched_.end()) return ParseStateDict(fetched->second, path);
    return absl::InternalError(
        absl::StrCat(path, ": is on the disk of another node, and was not fetched"));
  }
  return ReadStateDict(path, file->digest, file->blocks);
}

StateReader StateReader::InParts(int rank, std::string dir, Manifest manifest, FilesOnNodes nodes) {
  StateReader reader(std::move(dir), std::move(manifest));
  reader.rank_ = rank;
  reader.nodes_ = std::make_shared<const FilesOnNodes>(std::move(nodes));
  return reader;
}

bool StateReader::IsHere(absl::string_view name) const {
  return !in_parts() || nodes_->Has(rank_, name);
}

bool StateReader::HasAnyHere() const { return !in_parts() || nodes_->HasAny(rank_); }

absl::Status StateReader::FetchHeaders(Comm& comm, const std::vector<std::string>& names) {
  headers_.clear();
  if (!in_parts()) return absl::OkStatus();
  std::vector<ManifestFile> files;
  for (const std::string& name : names) {
    const ManifestFile* const file = manifest_.Find(name);
    if (file != nullptr && !file->blocks.empty()) files.push_back(*file);
  }
  MUSTER_ASSIGN_OR_RETURN(headers_, GatherHeaders(comm, dir_, files, *nodes_));
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsHeader> StateReader::Header(absl::string_view name) const {
  const std::string& header = headers_.at(std::string(name));
  return ParseSafetensorsHeader(absl::string_view(header).substr(8),
                                manifest_.Find(name)->digest.bytes - header.size(),
                                JoinPath(dir_, name));
}

absl::Status StateReader::Fetch(Comm& comm, const std::vector<std::string>& names) {
  if (!in_parts()) return absl::OkStatus();
  MUSTER_ASSIGN_OR_RETURN(fetched_, GatherFiles(comm, dir_, manifest_, *nodes_, names));
  return absl::OkStatus();
}

absl::Status StateReader::ReadTogether(Comm& comm, const std::vector<std::string>& names) {
  return ReadTogether(comm, names, {});
}

absl::Status StateReader::ReadTogether(
    Comm& comm, const std::vector<std::string>& names,
    const std::map<std::string, std::vector<FileRange>>& ranges) {
  if (in_memory()) return absl::OkStatus();
  std::vector<ManifestFile> files;
  for (const std::string& name : names) {
    const ManifestFile* const file = manifest_.Find(name);
    if (file != nullptr && (in_parts() || !file->blocks.empty())) files.push_back(*file);
  }
  // The bytes before the tensors are there already.
  std::map<std::string, std::vector<FileRange>> wanted = ranges;
  for (auto& [name, of_file] : wanted) {
    const auto header = headers_.find(name);
    // The header of a file that is here is not used: the file may be used in place, and the header
    // that was checked was another node's.
    if (header == headers_.end() || IsHere(name)) continue;
    for (FileRange& range : of_file) {
      range.begin = std::max<uint64_t>(range.begin, header->second.size());
    }
  }
  SharedFiles::Options options{
      .read = {.in_flight = ReadingThreads()}, .ranges = wanted, .in_place = in_place_};
  if (in_parts()) {
    options.nodes = nodes_.get();
    options.headers = &headers_;
    options.scratch = scratch_.empty() ? ParentPath(dir_) : scratch_;
  }
  // Free the memory of the previous files first.
  shared_.reset();
  MUSTER_ASSIGN_OR_RETURN(shared_, SharedFiles::Read(comm, dir_, files, options));
  return absl::OkStatus();
}

std::string StateReader::PathOfShared(absl::string_view name) const {
  return shared_ == nullptr ? "" : shared_->PathOf(name);
}

uint64_t StateReader::bytes_read_together() const {
  return shared_ == nullptr ? 0 : shared_->bytes_read();
}

uint64_t StateReader::bytes_received_together() const {
  return shared_ == nullptr ? 0 : shared_->bytes_received();
}

absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            absl::FunctionRef<absl::Status(StateWriter&)> write,
                            std::optional<int> node) {
  return SaveCheckpoint(comm, dir, info, PublishOptions(), write, node);
}

absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            const PublishOptions& options,
                            absl::FunctionRef<absl::Status(StateWriter&)> write,
                            std::optional<int> node) {
  MUSTER_ASSIGN_OR_RETURN(NodeGroups groups, GroupsOf(comm, dir, node));
  MUSTER_RETURN_IF_ERROR(SettleNodes(comm, dir, groups));
  return SaveStaged(comm, {.options = options, .info = info, .path = dir, .staging_path = ""},
                    std::move(groups), write);
}

absl::Status CheckNumberIsFree(Comm& comm, const NodeGroups& groups, const CheckpointFolder& folder,
                               int64_t iteration, int total_limit) {
  absl::Status mine;
  if (groups.leads()) mine = NumberIsFree(folder, iteration, total_limit);
  return groups.nodes.size() == 1 ? StatusOfMain(comm, mine)
                                  : AgreeOnFiles(comm, mine, {}, nullptr);
}

absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, const PublishOptions& options,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write,
                                    std::optional<int> node) {
  const std::string dir = folder.PathOf(info.iteration);
  MUSTER_ASSIGN_OR_RETURN(NodeGroups groups, GroupsOf(comm, dir, node));
  MUSTER_RETURN_IF_ERROR(CheckNumberIsFree(comm, groups, folder, info.iteration, options.keep));
  return SaveStaged(
      comm, {.options = options, .info = info, .path = dir, .staging_path = "", .folder = folder},
      std::move(groups), write);
}

absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, int total_limit,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write,
                                    std::optional<int> node) {
  return SaveNumberedCheckpoint(comm, folder, info, PublishOptions{.keep = total_limit}, write,
                                node);
}

absl::Status CheckOpenedAlike(Comm& comm, const StateReader& reader, bool given) {
  const absl::StatusOr<std::string> text = EncodeManifest(reader.manifest());
  const std::vector<std::string> digests =
      comm.AllGatherBytes(text.ok() ? DigestBytes(*text).xxh3 : "");
  const auto other = std::find_if(digests.begin(), digests.end(),
                                  [&](const std::string& digest) { return digest != digests[0]; });
  if (other == digests.end()) return absl::OkStatus();
  // One folder may have several names: by a link, relative and absolute.
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::canonical(reader.dir(), error);
  const std::vector<std::string> dirs = comm.AllGatherBytes(reader.dir());
  const std::vector<std::string> folders = comm.AllGatherBytes(error ? "" : folder.string());
  const auto rank = static_cast<size_t>(other - digests.begin());
  if (given && !folders[rank].empty() && !folders[0].empty() && folders[rank] != folders[0]) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " opens ", dirs[rank], ", and rank 0 ", dirs[0],
                     ", which is another checkpoint: give all processes the same one"));
  }
  return absl::AbortedError(absl::StrCat(
      reader.dir(), ": another process has replaced it while the ranks opened it; start again"));
}

absl::StatusOr<StateReader> OpenCheckpoint(Comm& comm, const std::string& dir,
                                           const CheckpointFolder& folder,
                                           CheckpointRegistrar* registrar,
                                           const std::vector<std::string>& damaged,
                                           std::string* tried) {
  std::string found = dir;
  if (dir.empty()) {
    absl::Status status;
    if (comm.rank() == 0) {
      status = GuardRank([&]() -> absl::Status {
        MUSTER_ASSIGN_OR_RETURN(found, FindCheckpointToResume(folder, registrar, damaged));
        return absl::OkStatus();
      });
    }
    MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, status));
    found = comm.BroadcastBytes(found, 0);
  }
  if (tried != nullptr) *tried = found;
  // A folder without its final name is read only while no process of this machine can rename or
  // remove it.
  const bool unnamed = dir.empty() && IsStagingFolder(found);
  absl::StatusOr<StateReader> reader =
      !unnamed || HoldInPlace(found) ? StateReader::Open(found) : IsLocked(found);
  const absl::Status opened = AgreeOnFiles(comm, reader.status(), {}, nullptr);
  if (opened.ok()) {
    const absl::Status alike = CheckOpenedAlike(comm, *reader, /*given=*/!dir.empty());
    if (alike.ok()) return reader;
    ReleaseInPlace();
    return alike;
  }
  // Release it, because the next search may rename it. All ranks have released it when the
  // following exchange has ended.
  ReleaseInPlace();
  // A checkpoint that is missing for one rank and whole for another exists: the first one looks
  // elsewhere, or has an outdated view of a file server.
  const std::vector<std::string> wholes = comm.AllGatherBytes(reader.ok() ? found : "");
  const auto whole = std::find_if(wholes.begin(), wholes.end(),
                                  [](const std::string& path) { return !path.empty(); });
  const bool some = whole != wholes.end();
  if (dir.empty()) {
    const bool gone =
        !comm.BroadcastBytes(comm.rank() == 0 && !PathExists(found) ? "gone" : "", 0).empty();
    // Another process has renamed or removed it.
    if (gone || absl::IsAborted(opened) || (absl::IsNotFound(opened) && (unnamed || !some))) {
      return absl::AbortedError(opened.message());
    }
  }
  if ((absl::IsNotFound(opened) || absl::IsDataLoss(opened)) && some) {
    return absl::FailedPreconditionError(absl::StrCat(
        opened.message(), "; rank ", whole - wholes.begin(), " sees all of ", *whole,
        ": all ranks must see one folder (or set project.save_on_each_node); where they do, "
        "start again"));
  }
  return opened;
}

}  // namespace muster
