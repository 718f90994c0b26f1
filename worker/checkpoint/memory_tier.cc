#include "worker/checkpoint/memory_tier.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/peer_file.h"
#include "base/status_macros.h"
#include "base/thread_priority.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/agreement.h"

namespace muster {
namespace {

// The bytes that are sent to ranks of other nodes at a time.
constexpr size_t kPieceBytes = size_t{8} << 20;

// Encode and decode the numbers and texts that ranks exchange.
void Put(uint64_t value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void PutText(absl::string_view text, std::string* to) {
  Put(text.size(), to);
  to->append(text.data(), text.size());
}

uint64_t Take(absl::string_view* from) {
  uint64_t value = 0;
  TORCH_CHECK(from->size() >= sizeof(value), "ranks disagree about the memory of checkpoints");
  std::memcpy(&value, from->data(), sizeof(value));
  from->remove_prefix(sizeof(value));
  return value;
}

absl::string_view TakeText(absl::string_view* from) {
  const uint64_t size = Take(from);
  TORCH_CHECK(from->size() >= size, "ranks disagree about the memory of checkpoints");
  const absl::string_view text = from->substr(0, size);
  from->remove_prefix(size);
  return text;
}

void PutStatus(const absl::Status& status, std::string* to) {
  Put(static_cast<uint64_t>(status.code()), to);
  PutText(status.message(), to);
}

absl::Status TakeStatus(absl::string_view* from) {
  const auto code = static_cast<absl::StatusCode>(Take(from));
  return absl::Status(code, TakeText(from));
}

// Whether no later mirror can succeed after this error.
bool EndsMirrors(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status);
}

// Notes the first failure, with its rank. One for which `goes_first` is true replaces another.
void Note(size_t rank, const absl::Status& status, bool goes_first, absl::Status* first) {
  if (status.ok() || (!first->ok() && !goes_first)) return;
  *first = absl::Status(status.code(), absl::StrCat("rank ", rank, ": ", status.message()));
}

absl::string_view ContentsOf(const AlignedMemory& memory, const MemoryRecord& record, size_t file) {
  return MemoryFile(memory.view(), record, file);
}

std::string NameOf(const CheckpointInfo& info) {
  return absl::StrCat("the checkpoint of step ", info.step, " in memory");
}

// Converts an error: an agent that does not answer may answer later; any other reason means that
// there is no memory for a save.
absl::Status WhyNoMemory(const absl::Status& status) {
  if (status.ok() || absl::IsUnavailable(status)) return status;
  return absl::ResourceExhaustedError(status.message());
}

// A file in memory, mapped.
struct MappedFile {
  OwnedFd fd;
  AlignedMemory memory;
};

// The files that a reader reads, and the memory that it keeps alive.
struct Contents {
  std::map<std::string, absl::string_view> files;
  std::vector<std::shared_ptr<const AlignedMemory>> memories;
  MappedFile received;
  uint64_t copied_bytes = 0;
};

// Maps a file in memory of a rank of this host.
absl::StatusOr<MappedFile> MapPeerFile(const std::string& place) {
  MappedFile file;
  MUSTER_ASSIGN_OR_RETURN(file.fd, OpenPeerFile(place, O_RDWR));
  MUSTER_ASSIGN_OR_RETURN(file.memory, AlignedMemory::OfFile(file.fd.get()));
  return file;
}

// The workers whose memory an object of this process uses.
class Workers {
 public:
  static Workers& Get() {
    static auto* const all = new Workers;
    return *all;
  }
  bool Add(const std::string& worker) {
    MutexLock lock(&mu_);
    return in_use_.insert(worker).second;
  }
  void Remove(const std::string& worker) {
    MutexLock lock(&mu_);
    in_use_.erase(worker);
  }

 private:
  Mutex mu_;
  std::set<std::string> in_use_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

struct MemoryTier::SaveAnnouncement {
  bool begins = false;  // it knows the state of its memory
  uint64_t sequence = 0;
  uint64_t nonce = 0;   // rank 0's is used
  absl::Status status;  // of the previous save
  bool mirroring = false;
  absl::Status mirror;  // of the last mirror

  std::string Encode() const {
    std::string text;
    Put(begins ? 1 : 0, &text);
    Put(sequence, &text);
    Put(nonce, &text);
    PutStatus(status, &text);
    Put(mirroring ? 1 : 0, &text);
    PutStatus(mirror, &text);
    return text;
  }
  static SaveAnnouncement Decode(absl::string_view text) {
    SaveAnnouncement word;
    word.begins = Take(&text) == 1;
    word.sequence = Take(&text);
    word.nonce = Take(&text);
    word.status = TakeStatus(&text);
    word.mirroring = Take(&text) == 1;
    word.mirror = TakeStatus(&text);
    return word;
  }
};

absl::StatusOr<std::unique_ptr<MemoryTier>> MemoryTier::Open(Comm& comm, const std::string& socket,
                                                             const std::string& worker_id,
                                                             const MirrorOptions& mirror) {
  std::unique_ptr<MemoryTier> tier;
  const absl::Status mine = GuardRank([&]() -> absl::Status {
    if (socket.empty()) {
      return absl::FailedPreconditionError(
          "no agent holds memory for this process: start it with muster launch or muster-agent");
    }
    MUSTER_RETURN_IF_ERROR(TakeHeldMemory(socket).status());
    if (!Workers::Get().Add(socket + worker_id)) {
      return absl::FailedPreconditionError(
          "another Accelerator of this process saves to memory: only one can");
    }
    try {
      tier.reset(new MemoryTier(comm, socket, worker_id));
    } catch (...) {
      Workers::Get().Remove(socket + worker_id);
      throw;
    }
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, mine, {}, nullptr));
  tier->OpenMirror(comm, mirror);
  return tier;
}

void MemoryTier::OpenMirror(Comm& comm, const MirrorOptions& options) {
  const std::vector<std::string> nodes = comm.AllGatherBytes(socket_);
  const std::vector<std::string> workers = comm.AllGatherBytes(worker_id_);
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    if (nodes[rank] == socket_) workers_here_.insert(workers[rank]);
  }
  tidies_ = std::find(nodes.begin(), nodes.end(), socket_) - nodes.begin() == rank_;
  if (options.connect == nullptr || std::count(nodes.begin(), nodes.end(), nodes[0]) == size_) {
    return;
  }
  absl::StatusOr<MirrorPeers> peers = PlanMirror(nodes, rank_);
  absl::Status opened = peers.status();
  if (opened.ok()) {
    const absl::Status mine = GuardRank([&]() -> absl::Status {
      MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<Comm> between, options.connect());
      mirror_ = std::make_unique<MemoryMirror>(std::move(between), *std::move(peers), socket_,
                                               worker_id_, options.before_piece);
      return absl::OkStatus();
    });
    opened = AgreeOnFiles(comm, mine, {}, nullptr);
    if (!opened.ok()) mirror_.reset();
  }
  if (!opened.ok() && rank_ == 0) {
    MUSTER_LOG(Warning) << "checkpoints in memory are not mirrored to other nodes: "
                        << opened.message();
  }
}

MemoryTier::MemoryTier(const Comm& comm, std::string socket, std::string worker_id)
    : socket_(std::move(socket)),
      worker_id_(std::move(worker_id)),
      rank_(comm.rank()),
      size_(comm.size()) {
  thread_ = std::thread([this] { Run(); });
}

MemoryTier::~MemoryTier() {
  // Log it, because no later save reports it.
  if (const absl::Status last = Wait(); !last.ok()) {
    MUSTER_LOG(Warning) << "the last checkpoint in memory was lost: " << last.message();
  }
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.SignalAll();
  }
  thread_.join();
  Workers::Get().Remove(socket_ + worker_id_);
}

absl::Status MemoryTier::Adopt() {
  if (adopted_) return absl::OkStatus();
  MUSTER_ASSIGN_OR_RETURN(std::vector<HeldMemory> held, TakeHeldMemory(socket_));
  for (HeldMemory& piece : held) {
    MUSTER_ASSIGN_OR_RETURN(AlignedMemory memory, AlignedMemory::OfFile(piece.fd.get()));
    // Look also at what other workers have left here, so that new saves get higher numbers.
    const absl::StatusOr<MemoryRecord> record = ReadMemoryRecord(memory.view());
    if (record.ok()) sequence_ = std::max(sequence_, record->save.sequence);
    if (piece.worker_id != worker_id_) continue;
    if (piece.slot < kOwnSlots) {
      Slot& slot = slots_[piece.slot];
      slot.fd = std::move(piece.fd);
      slot.snapshot = std::make_unique<Snapshot>(std::move(memory), kMemoryHeaderBytes);
    } else if (mirror_ != nullptr) {
      MUSTER_RETURN_IF_ERROR(mirror_->Adopt(std::move(piece)));
    }
  }
  adopted_ = true;
  return absl::OkStatus();
}

absl::Status MemoryTier::Prepare(int number) {
  Slot& slot = slots_[number];
  if (slot.snapshot == nullptr) {
    MUSTER_ASSIGN_OR_RETURN(slot.fd, CreateHoldableMemory(absl::StrCat("muster-", worker_id_)));
    MUSTER_ASSIGN_OR_RETURN(AlignedMemory memory, AlignedMemory::OfFile(slot.fd.get()));
    MUSTER_RETURN_IF_ERROR(HoldMemory(socket_, number, slot.fd.get()));
    slot.snapshot = std::make_unique<Snapshot>(std::move(memory), kMemoryHeaderBytes);
  }
  ForgetMemoryRecord(slot.snapshot->memory());
  slot.snapshot->Clear();
  return absl::OkStatus();
}

absl::Status MemoryTier::Wait() {
  FinishPending();
  MutexLock lock(&mu_);
  return status_;
}

absl::Status MemoryTier::Settle(Comm& comm) {
  const absl::Status last = AgreeOnFiles(comm, Wait(), {}, nullptr);
  if (last.ok()) return last;
  current_ = -1;
  MutexLock lock(&mu_);
  status_ = absl::OkStatus();  // reported now, so not by the next save
  return last;
}

void MemoryTier::FinishPending() {
  MutexLock lock(&mu_);
  if (pending_ == nullptr) return;
  const std::shared_ptr<DeferredCopy> copy = pending_->deferred;
  const auto is_there = [&] { return pending_ != nullptr && pending_->deferred == copy; };
  mu_.Unlock();
  copy->Run();
  mu_.Lock();
  while (is_there() && pending_->completing) changed_.Wait(&mu_);
  if (!is_there()) return;
  pending_->completing = true;
  const Pending& pending = *pending_;
  mu_.Unlock();
  const absl::Status done =
      WithoutMemory(pending.slot, GuardRank([&] { return Complete(pending); }));
  if (pending.mirrored) {
    const absl::string_view memory = slots_[pending.slot].snapshot->memory().view();
    if (done.ok()) {
      mirror_->Offer(memory.substr(0, MemoryRecordEnd(memory)));
    } else {
      mirror_->Offer(done);
    }
  }
  mu_.Lock();
  status_ = done;
  pending_.reset();
  changed_.SignalAll();
}

void MemoryTier::WaitForCopy() {
  if (last_deferred_ == nullptr) return;
  last_deferred_->RunWhileTrainingWaits(clock_);
  last_deferred_.reset();
}

absl::Status MemoryTier::WaitForMirror() {
  (void)Wait();
  return mirror_ == nullptr ? absl::OkStatus() : mirror_->Wait();
}

absl::Status MemoryTier::WithoutMemory(int slot, const absl::Status& status) {
  if (slot < kPlainSlots || !absl::IsResourceExhausted(status)) return status;
  MutexLock lock(&mu_);
  no_mirror_ = status;
  return absl::UnavailableError(status.message());
}

void MemoryTier::LearnOfMirror(bool busy, const absl::Status& status) {
  if (mirror_ == nullptr) {
    if (absl::IsResourceExhausted(status)) mirrored_ = -1;
    return;
  }
  if (EndsMirrors(status)) {
    if (rank_ == 0) {
      MUSTER_LOG(Warning) << "checkpoints in memory are no longer mirrored to other nodes: "
                          << status.message();
    }
    mirror_.reset();
    mirroring_ = -1;
    // If a peer was lost, the job is about to end, and the mirrored save may be all that is left.
    if (absl::IsResourceExhausted(status)) {
      mirrored_ = -1;
      ReturnMirrorsMemory();
    }
    return;
  }
  if (busy || mirroring_ < 0) return;
  if (status.ok()) {
    mirrored_ = mirroring_;
    kept_mirror_ = mirroring_save_;
    has_mirrored_ = true;
  } else if (rank_ == 0) {
    MUSTER_LOG(Warning) << "a checkpoint in memory was not mirrored, the next one is tried: "
                        << status.message();
  }
  mirroring_ = -1;
}

void MemoryTier::ReturnMirrorsMemory() {
  const absl::StatusOr<std::vector<HeldMemory>> held = TakeHeldMemory(socket_);
  if (!held.ok()) return;
  for (const HeldMemory& piece : *held) {
    if (piece.worker_id != worker_id_ || piece.slot < kPlainSlots || piece.slot == good_ ||
        piece.slot == current_) {
      continue;
    }
    // The agent drops the memory that it held for the slot before.
    const absl::StatusOr<OwnedFd> nothing = CreateHoldableMemory("muster-nothing");
    if (!nothing.ok() || !HoldMemory(socket_, piece.slot, nothing->get()).ok()) return;
    if (piece.slot < kOwnSlots) slots_[piece.slot] = {};
  }
}

void MemoryTier::DropWhatOthersLeft() {
  tidies_ = false;
  const absl::StatusOr<std::vector<HeldMemory>> held = TakeHeldMemory(socket_);
  if (!held.ok()) return;
  for (const HeldMemory& piece : *held) {
    if (workers_here_.count(piece.worker_id) != 0) continue;
    // If that fails, the memory only stays in use.
    (void)DropHeldMemory(socket_, piece.worker_id, piece.slot);
  }
}

int MemoryTier::FreeSlot() const {
  int slot = 0;
  while (slot == good_ || slot == mirrored_ || slot == mirroring_) ++slot;
  return slot;
}

absl::Status MemoryTier::Save(Comm& comm, const CheckpointInfo& info, int64_t since_disk, bool lazy,
                              absl::FunctionRef<absl::Status(StateWriter&)> write,
                              absl::Status* earlier) {
  WaitForCopy();
  SaveAnnouncement mine;
  mine.status = Wait();
  const absl::Status adopted = WhyNoMemory(Adopt());
  mine.begins = adopted.ok();
  if (!adopted.ok()) mine.status = adopted;
  mine.sequence = sequence_;
  mine.nonce = rank_ == 0 ? RandomId() : 0;
  const MemoryMirror::State state = mirror_ == nullptr ? MemoryMirror::State() : mirror_->state();
  mine.mirroring = state.busy;
  {
    MutexLock lock(&mu_);
    mine.mirror = no_mirror_.ok() ? state.status : no_mirror_;
  }
  MemorySaveId save;
  absl::Status before, mirror;
  bool begins = true, mirroring = false;
  const std::vector<std::string> all = comm.AllGatherBytes(mine.Encode());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const SaveAnnouncement word = SaveAnnouncement::Decode(all[rank]);
    begins &= word.begins;
    save.sequence = std::max(save.sequence, word.sequence);
    if (rank == 0) save.nonce = word.nonce;
    Note(rank, word.status, absl::IsResourceExhausted(word.status), &before);
    mirroring |= word.mirroring;
    Note(rank, word.mirror, EndsMirrors(word.mirror), &mirror);
  }
  // Stop here: a rank that does not know what its memory holds could overwrite the last whole save.
  if (absl::IsResourceExhausted(before) || !begins) return before;
  *earlier = before;
  // All ranks have the same result of the previous save. One that failed on any rank is
  // overwritten.
  if (before.ok() && current_ >= 0) {
    good_ = current_;
    whole_ = true;
  }
  LearnOfMirror(mirroring, mirror);
  if (tidies_ && (mirror_ == nullptr ? whole_ : has_mirrored_)) DropWhatOthersLeft();
  current_ = FreeSlot();
  sequence_ = ++save.sequence;

  auto pending = std::make_unique<Pending>();
  pending->slot = current_;
  pending->save = save;
  pending->info = info;
  pending->since_disk = since_disk;
  pending->mirrored = mirror_ != nullptr && mirroring_ < 0;
  if (pending->mirrored) {
    mirroring_ = current_;
    mirroring_save_ = save;
    mirror_->Begin(save, kept_mirror_);
  }
  const absl::Status prepared = GuardRank([&] { return WhyNoMemory(Prepare(current_)); });
  // Call `write` even without memory, because other ranks may wait for what it exchanges before it
  // writes.
  const absl::Status mine_copied =
      WithoutMemory(current_, GuardRank([&]() -> absl::Status {
                      Snapshot* const snapshot = slots_[current_].snapshot.get();
                      StateWriter writer(snapshot, rank_, lazy && prepared.ok());
                      writer.Refuse(prepared);
                      MUSTER_RETURN_IF_ERROR(write(writer));
                      MUSTER_RETURN_IF_ERROR(prepared);
                      pending->deferred = snapshot->TakeDeferred();
                      return absl::OkStatus();
                    }));
  const absl::Status copied = AgreeOnFiles(comm, mine_copied, {}, nullptr);
  if (!copied.ok()) {
    if (pending->mirrored) mirror_->Offer(copied);
    current_ = -1;
    MutexLock lock(&mu_);
    status_ = absl::OkStatus();  // reported now, so not by the next save
    return copied;
  }
  MutexLock lock(&mu_);
  status_ = absl::OkStatus();
  last_deferred_ = pending->deferred;
  pending_ = std::move(pending);
  changed_.SignalAll();
  return absl::OkStatus();
}

absl::Status MemoryTier::Complete(const Pending& pending) {
  MUSTER_RETURN_IF_ERROR(pending.deferred->status());
  Snapshot& snapshot = *slots_[pending.slot].snapshot;
  MemoryRecord record;
  record.save = pending.save;
  record.rank = rank_;
  record.since_disk = pending.since_disk;
  record.manifest.info = pending.info;
  record.manifest.info.world_size = size_;
  const std::vector<Snapshot::File>& files = snapshot.files();
  const size_t end = files.empty() ? kMemoryHeaderBytes : files.back().offset + files.back().bytes;
  std::vector<size_t> by_name(files.size());
  std::iota(by_name.begin(), by_name.end(), size_t{0});
  std::sort(by_name.begin(), by_name.end(),
            [&](size_t a, size_t b) { return files[a].name < files[b].name; });
  for (const size_t i : by_name) {
    record.manifest.files.push_back({.name = files[i].name,
                                     .rank = rank_,
                                     .digest = {.bytes = files[i].bytes, .xxh3 = ""},
                                     .blocks = pending.deferred->digests()[i]});
    record.offsets.push_back(files[i].offset);
  }
  MUSTER_RETURN_IF_ERROR(WriteMemoryRecord(snapshot.memory(), end, record));
  snapshot.PinIfFromGpu();
  return absl::OkStatus();
}

void MemoryTier::Run() {
  // If training waits, it does the rest of the work itself.
  LowerThreadPriority(kIdleNice);
  while (true) {
    {
      MutexLock lock(&mu_);
      while (pending_ == nullptr && !stop_) changed_.Wait(&mu_);
      if (pending_ == nullptr) return;
      pending_->deferred->SetDeviceOfThisThread();
    }
    FinishPending();
  }
}

absl::StatusOr<std::vector<MemoryTier::Piece>> MemoryTier::PiecesHere() const {
  MUSTER_ASSIGN_OR_RETURN(const std::vector<HeldMemory> held, TakeHeldMemory(socket_));
  std::vector<Piece> pieces;
  for (const HeldMemory& held_piece : held) {
    MUSTER_ASSIGN_OR_RETURN(AlignedMemory mapped, AlignedMemory::OfFile(held_piece.fd.get()));
    auto memory = std::make_shared<AlignedMemory>(std::move(mapped));
    absl::StatusOr<MemoryRecord> record = ReadMemoryRecord(memory->view());
    if (record.ok() && record->manifest.info.world_size == size_) {
      pieces.push_back({absl::StrCat(held_piece.slot, " of ", held_piece.worker_id),
                        std::move(memory), *std::move(record)});
    } else if (record.ok() && held_piece.worker_id == worker_id_ && rank_ == 0) {
      MUSTER_LOG(Warning) << "passing over " << NameOf(record->manifest.info) << ": it is of "
                          << record->manifest.info.world_size << " ranks, which are " << size_
                          << " now";
    } else if (!record.ok() && !absl::IsNotFound(record.status())) {
      MUSTER_LOG(Warning) << "passing over the memory of " << held_piece.worker_id << ": "
                          << record.status().message();
    }
  }
  return pieces;
}

// Returns the first file whose digest does not match; empty if there is none.
std::string MemoryTier::DamagedFile(const Piece& piece) {
  for (size_t i = 0; i < piece.record.offsets.size(); ++i) {
    const ManifestFile& file = piece.record.manifest.files[i];
    if (!IsWhole(ContentsOf(*piece.memory, piece.record, i), file)) return file.name;
  }
  return "";
}

// The steps of Find(), in which all ranks take part together.
class MemoryTier::Search {
 public:
  Search(Comm& comm, const std::string& node, const std::vector<Piece>& here,
         const FindOptions& options)
      : comm_(comm),
        rank_(comm.rank()),
        size_(comm.size()),
        node_(node),
        here_(here),
        options_(options) {}

  // Collective. Learns which parts of saves are on the nodes of which ranks.
  absl::Status Exchange();
  // Returns the saves that Exchange() has found with a part of every rank, newest first.
  std::vector<MemorySaveId> WholeSaves() const;
  // Returns the newest save of which two nodes have each part.
  std::optional<MemorySaveId> MirroredSave() const;
  // Collective. Checks that the files of a whole save have their digests on at least one node. A
  // node's copy of a part that does not match no longer counts. `manifest` gets the files of all
  // parts.
  absl::Status Check(const MemorySaveId& save, Manifest* manifest);
  // Collective. Provides the files of a whole save: this node's in place, and a copy of the others.
  absl::Status Gather(const MemorySaveId& save, Contents* contents);
  // Whether the last Check() has found a damaged part.
  bool damaged() const { return damaged_; }
  // Whether this rank's own part is on its node, with its digests if Check() has looked.
  bool HasOwnPart(const MemorySaveId& save) const {
    return saves_.at(save).at(rank_).on.count(rank_) > 0;
  }
  // Returns how many saves before it the last one went to the disk.
  int64_t SinceDisk(const MemorySaveId& save) const {
    return saves_.at(save).begin()->second.since_disk;
  }

 private:
  // One rank's part of a save.
  struct Part {
    std::set<int> on;  // ranks whose node has it
    int64_t since_disk = 0;
    std::string text;  // its manifest
    Manifest manifest;
  };
  using Parts = std::map<int, Part>;  // by owner

  absl::Status Learn(const std::vector<std::string>& all);
  // A rank's result for a part that it checks for its node.
  struct Checked {
    std::string place;    // place of a whole copy; empty: there is none
    std::string damaged;  // the first file of another copy with another digest; empty: none
  };
  // Returns null if it is not on this node. After Check(), returns the whole copy.
  const Piece* Find(const MemorySaveId& save, int owner) const;
  // Returns the results for the parts that this rank checks, by owner.
  std::map<int, Checked> CheckParts(const MemorySaveId& save) const;
  // Takes note of a rank's result for a part. Errors: DATA_LOSS if no copy is left.
  absl::Status Learn(int rank, int owner, const Checked& checked, Part* part);
  // Discards the copy of the part on the node of `rank`, where `file` is damaged. Errors: DATA_LOSS
  // if it was the last one.
  absl::Status DropCopy(const std::string& file, int rank, Part* part) const;
  // Returns the rank of a node that checks the node's copy of a part: the owner, or one of those
  // that have it.
  int CheckerOf(int owner, const Part& part, const std::string& node) const;
  // Returns the rank that speaks for a part.
  static int SpeakerOf(int owner, const Part& part) {
    return part.on.count(owner) > 0 ? owner : *part.on.begin();
  }
  // Returns the first rank of a rank's node that lacks the same parts: it makes the copy of them.
  int CopierFor(const Parts& parts, int rank) const;
  // Makes memory for the parts that this node lacks.
  absl::Status MakeRoom(uint64_t bytes, MappedFile* room) const;
  // Collective. Determines where the copy of missing parts goes: into memory of this rank, or of
  // its copier.
  absl::Status AgreeOnRoom(const Parts& parts, uint64_t bytes, Contents* contents);
  // Collective. Sends the file from `root` to all; `to` is null on a rank that does not want it.
  absl::Status Bring(absl::string_view from, uint64_t bytes, int root, char* to);

  Comm& comm_;
  const int rank_;
  const int size_;
  const std::string& node_;
  const std::vector<Piece>& here_;
  const FindOptions& options_;
  std::vector<std::string> nodes_;  // by rank
  std::map<MemorySaveId, Parts> saves_;
  std::map<int, std::string> places_;  // places of whole copies on this node, by owner
  bool damaged_ = false;
};

absl::Status MemoryTier::Search::Exchange() {
  std::string parts_here;
  uint64_t count = 0;
  for (const Piece& piece : here_) {
    // Remove block digests, which only the node itself compares: all ranks get this text.
    Manifest files = piece.record.manifest;
    for (ManifestFile& file : files.files) file.blocks = BlockDigests();
    const absl::StatusOr<std::string> text = EncodeManifest(files);
    if (!text.ok()) continue;
    ++count;
    Put(piece.record.save.sequence, &parts_here);
    Put(piece.record.save.nonce, &parts_here);
    Put(piece.record.rank, &parts_here);
    Put(piece.record.since_disk, &parts_here);
    PutText(*text, &parts_here);
  }
  std::string told;
  PutText(node_, &told);
  Put(count, &told);
  told.append(parts_here);
  const std::vector<std::string> all = comm_.AllGatherBytes(told);
  return AgreeOnFiles(comm_, GuardRank([&] { return Learn(all); }), {}, nullptr);
}

absl::Status MemoryTier::Search::Learn(const std::vector<std::string>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    absl::string_view text = all[rank];
    nodes_.emplace_back(TakeText(&text));
    for (uint64_t left = Take(&text); left > 0; --left) {
      MemorySaveId save;
      save.sequence = Take(&text);
      save.nonce = Take(&text);
      const uint64_t owner = Take(&text);
      const auto since_disk = static_cast<int64_t>(Take(&text));
      const std::string manifest(TakeText(&text));
      if (owner >= static_cast<uint64_t>(size_)) continue;
      Part& part = saves_[save][static_cast<int>(owner)];
      part.on.insert(static_cast<int>(rank));
      part.since_disk = since_disk;
      part.text = manifest;
    }
  }
  return absl::OkStatus();
}

std::vector<MemorySaveId> MemoryTier::Search::WholeSaves() const {
  std::vector<MemorySaveId> whole;
  for (auto it = saves_.rbegin(); it != saves_.rend(); ++it) {
    if (static_cast<int>(it->second.size()) == size_) whole.push_back(it->first);
  }
  return whole;
}

std::optional<MemorySaveId> MemoryTier::Search::MirroredSave() const {
  for (const MemorySaveId& save : WholeSaves()) {
    const Parts& parts = saves_.at(save);
    const bool mirrored = std::all_of(parts.begin(), parts.end(), [&](const auto& item) {
      const std::set<int>& on = item.second.on;
      return std::any_of(on.begin(), on.end(),
                         [&](int rank) { return nodes_[rank] != nodes_[*on.begin()]; });
    });
    if (mirrored) return save;
  }
  return std::nullopt;
}

const MemoryTier::Piece* MemoryTier::Search::Find(const MemorySaveId& save, int owner) const {
  const auto place = places_.find(owner);
  for (const Piece& piece : here_) {
    if (piece.record.save != save || piece.record.rank != owner) continue;
    if (place == places_.end() || place->second == piece.place) return &piece;
  }
  return nullptr;
}

int MemoryTier::Search::CheckerOf(int owner, const Part& part, const std::string& node) const {
  std::vector<int> there;
  for (const int rank : part.on) {
    if (nodes_[rank] != node) continue;
    if (rank == owner) return rank;
    there.push_back(rank);
  }
  return there.empty() ? -1 : there[owner % there.size()];
}

std::map<int, MemoryTier::Search::Checked> MemoryTier::Search::CheckParts(
    const MemorySaveId& save) const {
  std::map<int, Checked> all;
  for (const Piece& piece : here_) {
    const auto part = saves_.at(save).find(piece.record.rank);
    if (piece.record.save != save || part == saves_.at(save).end() ||
        CheckerOf(part->first, part->second, nodes_[rank_]) != rank_) {
      continue;
    }
    Checked& checked = all[part->first];
    if (!checked.place.empty()) continue;
    const std::string damaged = DamagedFile(piece);
    if (damaged.empty()) {
      checked.place = piece.place;
    } else if (checked.damaged.empty()) {
      checked.damaged = damaged;
    }
  }
  return all;
}

absl::Status MemoryTier::Search::Learn(int rank, int owner, const Checked& checked, Part* part) {
  damaged_ |= !checked.damaged.empty();
  if (checked.place.empty()) return DropCopy(checked.damaged, rank, part);
  if (!checked.damaged.empty() && rank_ == rank) {
    MUSTER_LOG(Warning) << checked.damaged
                        << " in memory has another digest: taking another copy of this node";
  }
  if (nodes_[rank] == node_) places_[owner] = checked.place;
  return absl::OkStatus();
}

absl::Status MemoryTier::Search::DropCopy(const std::string& file, int rank, Part* part) const {
  std::erase_if(part->on, [&](int other) { return nodes_[other] == nodes_[rank]; });
  const std::string damage =
      absl::StrCat(file, " in memory has another digest on the node of rank ", rank);
  if (part->on.empty()) return absl::DataLossError(damage);
  if (rank_ == 0) MUSTER_LOG(Warning) << damage << ": taking the copy of another node";
  return absl::OkStatus();
}

absl::Status MemoryTier::Search::Check(const MemorySaveId& save, Manifest* manifest) {
  Parts& parts = saves_.at(save);
  std::string told;
  absl::Status checked = GuardRank([&]() -> absl::Status {
    for (auto& [owner, part] : parts) {
      MUSTER_ASSIGN_OR_RETURN(part.manifest, ParseManifest(part.text, "a part in memory"));
      manifest->info = part.manifest.info;
      manifest->files.insert(manifest->files.end(), part.manifest.files.begin(),
                             part.manifest.files.end());
    }
    std::sort(manifest->files.begin(), manifest->files.end(),
              [](const ManifestFile& a, const ManifestFile& b) { return a.name < b.name; });
    for (const auto& [owner, found] : CheckParts(save)) {
      Put(static_cast<uint64_t>(owner), &told);
      PutText(found.place, &told);
      PutText(found.damaged, &told);
    }
    return absl::OkStatus();
  });
  const std::vector<std::string> all = comm_.AllGatherBytes(told);
  damaged_ = false;
  places_.clear();
  checked.Update(GuardRank([&]() -> absl::Status {
    for (int rank = 0; rank < size_; ++rank) {
      for (absl::string_view text = all[rank]; !text.empty();) {
        const auto part = parts.find(static_cast<int>(Take(&text)));
        Checked found;
        found.place = std::string(TakeText(&text));
        found.damaged = std::string(TakeText(&text));
        if (part == parts.end()) continue;
        MUSTER_RETURN_IF_ERROR(Learn(rank, part->first, found, &part->second));
      }
    }
    for (const auto& [owner, part] : parts) {
      if (part.on.count(rank_) == 0 || Find(save, owner) != nullptr) continue;
      return absl::DataLossError("a part is no longer in the memory of this node");
    }
    return absl::OkStatus();
  }));
  return AgreeOnFiles(comm_, checked, {}, nullptr);
}

int MemoryTier::Search::CopierFor(const Parts& parts, int rank) const {
  for (int other = 0; other < rank; ++other) {
    const bool same = nodes_[other] == nodes_[rank] &&
                      std::all_of(parts.begin(), parts.end(), [&](const auto& item) {
                        return item.second.on.count(other) == item.second.on.count(rank);
                      });
    if (same) return other;
  }
  return rank;
}

absl::Status MemoryTier::Search::MakeRoom(uint64_t bytes, MappedFile* room) const {
  const std::string name = "muster-received";
  if (options_.create != nullptr) {
    MUSTER_ASSIGN_OR_RETURN(room->fd, options_.create(name));
  } else {
    MUSTER_ASSIGN_OR_RETURN(room->fd, CreateHoldableMemory(name));
  }
  MUSTER_ASSIGN_OR_RETURN(room->memory, AlignedMemory::OfFile(room->fd.get()));
  return room->memory.Grow(bytes);
}

absl::Status MemoryTier::Search::AgreeOnRoom(const Parts& parts, uint64_t bytes,
                                             Contents* contents) {
  const int copier = CopierFor(parts, rank_);
  absl::Status mine;
  std::string place;
  if (bytes > 0 && copier == rank_) {
    mine = GuardRank([&] { return MakeRoom(bytes, &contents->received); });
    contents->copied_bytes = bytes;
    if (mine.ok()) place = PlaceOfFile(contents->received.fd.get()).value_or("");
  }
  const std::vector<std::string> places = comm_.AllGatherBytes(place);
  if (bytes > 0 && copier != rank_) {
    mine = GuardRank([&]() -> absl::Status {
      absl::StatusOr<MappedFile> shared = MapPeerFile(places[copier]);
      if (shared.ok() && shared->memory.size() >= bytes) {
        contents->received = *std::move(shared);
        return absl::OkStatus();
      }
      contents->copied_bytes = bytes;
      return MakeRoom(bytes, &contents->received);
    });
  }
  return AgreeOnFiles(comm_, mine, {}, nullptr);
}

absl::Status MemoryTier::Search::Bring(absl::string_view from, uint64_t bytes, int root, char* to) {
  absl::Status mine;
  for (uint64_t at = 0; at < bytes; at += kPieceBytes) {
    const uint64_t size = std::min<uint64_t>(kPieceBytes, bytes - at);
    std::string sent;
    // A rank that fails continues, because the others are in the same exchange.
    if (rank_ == root) {
      mine.Update(GuardRank([&]() -> absl::Status {
        sent = std::string(from.substr(at, size));
        return absl::OkStatus();
      }));
    }
    const std::string got = comm_.BroadcastBytes(sent, root);
    if (got.size() != size) {
      mine.Update(absl::DataLossError(
          absl::StrCat("rank ", root, " sent ", got.size(), " of ", size, " bytes in memory")));
    } else if (to != nullptr) {
      std::memcpy(to + at, got.data(), size);
    }
  }
  return mine;
}

absl::Status MemoryTier::Search::Gather(const MemorySaveId& save, Contents* contents) {
  const Parts& parts = saves_.at(save);
  uint64_t missing = 0;
  for (const auto& [owner, part] : parts) {
    if (part.on.count(rank_) > 0) continue;
    for (const ManifestFile& file : part.manifest.files) missing += file.digest.bytes;
  }
  MUSTER_RETURN_IF_ERROR(AgreeOnRoom(parts, missing, contents));
  absl::Status mine;
  char* room = contents->received.memory.data();
  for (const auto& [owner, part] : parts) {
    const Piece* const piece = part.on.count(rank_) > 0 ? Find(save, owner) : nullptr;
    if (piece != nullptr) contents->memories.push_back(piece->memory);
    const bool everywhere = static_cast<int>(part.on.size()) == size_;
    for (size_t i = 0; i < part.manifest.files.size(); ++i) {
      const ManifestFile& file = part.manifest.files[i];
      const absl::string_view here = piece != nullptr ? ContentsOf(*piece->memory, piece->record, i)
                                                      : absl::string_view(room, file.digest.bytes);
      contents->files[file.name] = here;
      const bool copies = piece == nullptr && contents->copied_bytes > 0;
      if (!everywhere) {
        mine.Update(
            Bring(here, file.digest.bytes, SpeakerOf(owner, part), copies ? room : nullptr));
      }
      if (piece == nullptr) room += file.digest.bytes;
    }
  }
  // Wait, so that no rank reads what its copier has not copied yet.
  return AgreeOnFiles(comm_, mine, {}, nullptr);
}

absl::StatusOr<std::optional<MemoryTier::Found>> MemoryTier::Find(Comm& comm,
                                                                  const FindOptions& options) {
  WaitForCopy();
  (void)Wait();
  std::vector<Piece> here;
  const absl::Status looked = GuardRank([&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(Adopt());
    MUSTER_ASSIGN_OR_RETURN(here, PiecesHere());
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, looked, {}, nullptr));
  Search search(comm, socket_, here, options);
  MUSTER_RETURN_IF_ERROR(search.Exchange());
  for (const MemorySaveId& save : search.WholeSaves()) {
    Manifest manifest;
    const auto contents = std::make_shared<Contents>();
    absl::Status usable = search.Check(save, &manifest);
    const std::string name = NameOf(manifest.info);
    // The saves that follow are older.
    if (usable.ok() && manifest.info.step < options.from_step) break;
    if (usable.ok()) usable = search.Gather(save, contents.get());
    if (absl::IsResourceExhausted(usable)) {
      if (rank_ == 0) MUSTER_LOG(Warning) << "passing over " << name << ": " << usable.message();
      break;
    }
    // Other errors are no reason to continue training from an older save.
    if (!usable.ok() && !absl::IsDataLoss(usable)) {
      return absl::Status(usable.code(),
                          absl::StrCat("cannot read ", name, ": ", usable.message()));
    }
    if (!usable.ok()) {
      if (rank_ == 0) MUSTER_LOG(Warning) << "passing over " << name << ": " << usable.message();
      continue;
    }
    return std::optional<Found>(
        Found{.reader = StateReader::OfMemory(name, std::move(manifest), contents->files, contents),
              .since_disk = search.SinceDisk(save),
              .save = save,
              // A damaged part may be read from a mirror of this save, which then has to stay.
              .mirrored = search.damaged() ? save : search.MirroredSave().value_or(save),
              .own_part_is_here = search.HasOwnPart(save),
              .copied_bytes = contents->copied_bytes});
  }
  return std::optional<Found>();
}

void MemoryTier::Keep(const Found& found) {
  good_ = current_ = mirrored_ = -1;
  for (int i = 0; i < kOwnSlots; ++i) {
    if (slots_[i].snapshot == nullptr) continue;
    const absl::StatusOr<MemoryRecord> record =
        ReadMemoryRecord(slots_[i].snapshot->memory().view());
    if (!record.ok()) continue;
    if (record->save == found.save && found.own_part_is_here) good_ = i;
    if (record->save == found.mirrored && mirror_ != nullptr) mirrored_ = i;
  }
  kept_mirror_ = found.mirrored;
  MutexLock lock(&mu_);
  status_ = absl::OkStatus();
}

absl::Status MemoryTier::Forget(Comm& comm) {
  WaitForCopy();
  (void)WaitForMirror();
  // Discards everything that this node's agent holds, also for workers that run elsewhere now. No
  // rank saves before all ranks have read it.
  std::vector<AlignedMemory> here;
  const absl::Status found = GuardRank([&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(Adopt());
    MUSTER_ASSIGN_OR_RETURN(const std::vector<HeldMemory> held, TakeHeldMemory(socket_));
    for (const HeldMemory& piece : held) {
      MUSTER_ASSIGN_OR_RETURN(here.emplace_back(), AlignedMemory::OfFile(piece.fd.get()));
    }
    return absl::OkStatus();
  });
  // A later load may find what one rank cannot reach now.
  if (const absl::Status all = AgreeOnFiles(comm, found, {}, nullptr); !all.ok()) {
    return absl::Status(all.code(), absl::StrCat("cannot discard the checkpoints in memory, which "
                                                 "a later load would take for the newest: ",
                                                 all.message()));
  }
  for (AlignedMemory& memory : here) ForgetMemoryRecord(memory);
  for (Slot& slot : slots_) {
    if (slot.snapshot != nullptr) ForgetMemoryRecord(slot.snapshot->memory());
  }
  good_ = current_ = mirrored_ = mirroring_ = -1;
  kept_mirror_.reset();
  MutexLock lock(&mu_);
  status_ = absl::OkStatus();
  return absl::OkStatus();
}

}  // namespace muster
