#include "worker/checkpoint/memory_tier.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/digest.h"

namespace muster {
namespace {

// Of what is sent to ranks of other nodes at a time.
constexpr size_t kPieceBytes = size_t{8} << 20;

// Numbers and texts that ranks tell each other.
void Put(uint64_t value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
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

absl::string_view ContentsOf(const AlignedMemory& memory, const MemoryRecord& record, size_t file) {
  return absl::string_view(memory.data() + record.offsets[file],
                           record.manifest.files[file].digest.bytes);
}

std::string NameOf(const CheckpointInfo& info) {
  return absl::StrCat("the checkpoint of step ", info.step, " in memory");
}

// What a reader reads, and what keeps it alive.
struct Contents {
  std::vector<std::shared_ptr<const AlignedMemory>> memories;
  std::vector<std::unique_ptr<std::string>> received;
};

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

absl::StatusOr<std::unique_ptr<MemoryTier>> MemoryTier::Open(Comm& comm, const std::string& socket,
                                                             const std::string& worker_id) {
  const absl::Status mine = GuardRank([&]() -> absl::Status {
    if (socket.empty()) {
      return absl::FailedPreconditionError(
          "no agent holds memory for this process: muster launch and muster-agent do");
    }
    MUSTER_RETURN_IF_ERROR(TakeHeldMemory(socket).status());
    if (!Workers::Get().Add(socket + worker_id)) {
      return absl::FailedPreconditionError(
          "another Accelerator of this process saves to memory: only one can");
    }
    return absl::OkStatus();
  });
  std::unique_ptr<MemoryTier> tier;
  if (mine.ok()) tier.reset(new MemoryTier(comm, socket, worker_id));
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, mine, {}, nullptr));
  return tier;
}

MemoryTier::MemoryTier(const Comm& comm, std::string socket, std::string worker_id)
    : socket_(std::move(socket)),
      worker_id_(std::move(worker_id)),
      rank_(comm.rank()),
      size_(comm.size()) {
  thread_ = std::thread([this] { Run(); });
}

MemoryTier::~MemoryTier() {
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
    if (piece.worker_id != worker_id_) continue;
    MUSTER_ASSIGN_OR_RETURN(AlignedMemory memory, AlignedMemory::OfFile(piece.fd.get()));
    Slot& slot = slots_[piece.slot];
    slot.fd = std::move(piece.fd);
    slot.snapshot = std::make_unique<Snapshot>(std::move(memory), kMemoryHeaderBytes);
    const absl::StatusOr<MemoryRecord> record = ReadMemoryRecord(
        absl::string_view(slot.snapshot->memory().data(), slot.snapshot->memory().size()));
    if (record.ok()) sequence_ = std::max(sequence_, record->save.sequence);
  }
  adopted_ = true;
  return absl::OkStatus();
}

// Whatever the reason is, there is no memory to save to.
absl::Status MemoryTier::Prepare(int number) {
  const absl::Status mine = Reserve(number);
  return mine.ok() ? mine : absl::ResourceExhaustedError(mine.message());
}

absl::Status MemoryTier::Reserve(int number) {
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
  MutexLock lock(&mu_);
  while (pending_ != nullptr) changed_.Wait(&mu_);
  return status_;
}

void MemoryTier::WaitForCopy() {
  if (last_deferred_ == nullptr) return;
  last_deferred_->RunWhileTrainingWaits(clock_);
  last_deferred_.reset();
}

absl::Status MemoryTier::Save(Comm& comm, const CheckpointInfo& info, int64_t since_disk, bool lazy,
                              absl::FunctionRef<absl::Status(StateWriter&)> write) {
  WaitForCopy();
  absl::Status mine = Wait();
  if (const absl::Status adopted = Adopt(); !adopted.ok()) {
    mine.Update(absl::ResourceExhaustedError(adopted.message()));
  }
  std::string told;
  Put(sequence_, &told);
  Put(rank_ == 0 ? RandomId() : 0, &told);
  Put(static_cast<uint64_t>(mine.code()), &told);
  told.append(mine.message().data(), mine.message().size());
  MemorySaveId save;
  absl::Status before;
  bool no_memory = false;
  const std::vector<std::string> all = comm.AllGatherBytes(told);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    absl::string_view text = all[rank];
    save.sequence = std::max(save.sequence, Take(&text));
    const uint64_t nonce = Take(&text);
    if (rank == 0) save.nonce = nonce;
    const auto code = static_cast<absl::StatusCode>(Take(&text));
    if (code == absl::StatusCode::kOk) continue;
    no_memory |= code == absl::StatusCode::kResourceExhausted;
    before.Update(absl::Status(code, absl::StrCat("rank ", rank, ": ", text)));
  }
  if (no_memory) return absl::ResourceExhaustedError(before.message());
  // All ranks know the same of the save before. One that failed anywhere is overwritten.
  if (before.ok() && current_ >= 0) good_ = current_;
  current_ = good_ == 0 ? 1 : 0;
  sequence_ = ++save.sequence;

  auto pending = std::make_unique<Pending>();
  pending->slot = current_;
  pending->save = save;
  pending->info = info;
  pending->since_disk = since_disk;
  const absl::Status copied = GuardRank([&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(Prepare(current_));
    StateWriter writer(slots_[current_].snapshot.get(), rank_, lazy);
    return write(writer);
  });
  MutexLock lock(&mu_);
  status_ = copied;
  if (!copied.ok()) return before;  // the others hear of it at the next save
  last_deferred_ = pending->deferred = slots_[current_].snapshot->TakeDeferred();
  pending_ = std::move(pending);
  changed_.SignalAll();
  return before;
}

absl::Status MemoryTier::Complete(const Pending& pending) {
  pending.deferred->Run();
  MUSTER_RETURN_IF_ERROR(pending.deferred->status());
  Snapshot& snapshot = *slots_[pending.slot].snapshot;
  MemoryRecord record;
  record.save = pending.save;
  record.rank = rank_;
  record.since_disk = pending.since_disk;
  record.manifest.info = pending.info;
  record.manifest.info.world_size = size_;
  std::vector<Snapshot::File> files = snapshot.files();
  const size_t end = files.empty() ? kMemoryHeaderBytes : files.back().offset + files.back().bytes;
  std::sort(files.begin(), files.end(),
            [](const Snapshot::File& a, const Snapshot::File& b) { return a.name < b.name; });
  for (const Snapshot::File& file : files) {
    record.manifest.files.push_back(
        {.name = file.name, .rank = rank_, .digest = DigestBytes(snapshot.Contents(file))});
    record.offsets.push_back(file.offset);
  }
  return WriteMemoryRecord(snapshot.memory(), end, record);
}

void MemoryTier::Run() {
  MutexLock lock(&mu_);
  while (true) {
    while (pending_ == nullptr && !stop_) changed_.Wait(&mu_);
    if (pending_ == nullptr) return;
    const Pending& pending = *pending_;
    mu_.Unlock();
    const absl::Status done = GuardRank([&] { return Complete(pending); });
    mu_.Lock();
    status_ = done;
    pending_.reset();
    changed_.SignalAll();
  }
}

absl::StatusOr<std::vector<MemoryTier::Piece>> MemoryTier::PiecesHere() const {
  MUSTER_ASSIGN_OR_RETURN(const std::vector<HeldMemory> held, TakeHeldMemory(socket_));
  std::vector<Piece> pieces;
  for (const HeldMemory& held_piece : held) {
    MUSTER_ASSIGN_OR_RETURN(AlignedMemory mapped, AlignedMemory::OfFile(held_piece.fd.get()));
    auto memory = std::make_shared<AlignedMemory>(std::move(mapped));
    absl::StatusOr<MemoryRecord> record =
        ReadMemoryRecord(absl::string_view(memory->data(), memory->size()));
    if (record.ok() && record->manifest.info.world_size == size_) {
      pieces.push_back({std::move(memory), *std::move(record)});
    } else if (!record.ok() && !absl::IsNotFound(record.status())) {
      MUSTER_LOG(Warning) << "passing over the memory of " << held_piece.worker_id << ": "
                          << record.status().message();
    }
  }
  return pieces;
}

absl::StatusOr<std::optional<MemoryTier::Found>> MemoryTier::Find(Comm& comm) {
  WaitForCopy();
  (void)Wait();
  std::vector<Piece> here;
  const absl::Status looked = GuardRank([&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(Adopt());
    MUSTER_ASSIGN_OR_RETURN(here, PiecesHere());
    return absl::OkStatus();
  });
  if (!looked.ok()) MUSTER_LOG(Warning) << "no checkpoint in memory here: " << looked.message();
  // Each rank tells which parts its node has.
  std::string parts_here;
  uint64_t count = 0;
  for (const Piece& piece : here) {
    const absl::StatusOr<std::string> text = EncodeManifest(piece.record.manifest);
    if (!text.ok()) continue;
    ++count;
    Put(piece.record.save.sequence, &parts_here);
    Put(piece.record.save.nonce, &parts_here);
    Put(piece.record.rank, &parts_here);
    Put(text->size(), &parts_here);
    parts_here.append(*text);
  }
  std::string told;
  Put(count, &told);
  told.append(parts_here);
  // By save: the part's owner, who has it on their node, and what it is.
  struct Part {
    std::set<int> on;
    std::string text;
  };
  std::map<MemorySaveId, std::map<int, Part>> saves;
  const std::vector<std::string> all = comm.AllGatherBytes(told);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    absl::string_view text = all[rank];
    for (uint64_t left = Take(&text); left > 0; --left) {
      MemorySaveId save;
      save.sequence = Take(&text);
      save.nonce = Take(&text);
      const uint64_t owner = Take(&text);
      const std::string manifest(TakeText(&text));
      if (owner >= static_cast<uint64_t>(size_)) continue;
      Part& part = saves[save][static_cast<int>(owner)];
      part.on.insert(static_cast<int>(rank));
      part.text = manifest;
    }
  }
  for (auto it = saves.rbegin(); it != saves.rend(); ++it) {
    const auto& [save, parts] = *it;
    if (static_cast<int>(parts.size()) != size_) continue;
    const auto find = [&, &id = save](int owner) -> const Piece* {
      for (const Piece& piece : here) {
        if (piece.record.save == id && piece.record.rank == owner) return &piece;
      }
      return nullptr;
    };
    // A part is checked by one rank that has it.
    Manifest manifest;
    const absl::Status checked = GuardRank([&]() -> absl::Status {
      for (const auto& [owner, part] : parts) {
        MUSTER_ASSIGN_OR_RETURN(Manifest one, ParseManifest(part.text, "a part in memory"));
        manifest.info = one.info;
        for (ManifestFile& file : one.files) manifest.files.push_back(std::move(file));
        const Piece* const piece = find(owner);
        const int checker = part.on.count(owner) > 0 ? owner : *part.on.begin();
        if (piece == nullptr || checker != rank_) continue;
        for (size_t i = 0; i < piece->record.offsets.size(); ++i) {
          const ManifestFile& file = piece->record.manifest.files[i];
          if (DigestBytes(ContentsOf(*piece->memory, piece->record, i)) == file.digest) continue;
          return absl::DataLossError(absl::StrCat(file.name, " in memory has another digest"));
        }
      }
      return absl::OkStatus();
    });
    const absl::Status agreed = AgreeOnFiles(comm, checked, {}, nullptr);
    if (!agreed.ok()) {
      if (rank_ == 0) {
        MUSTER_LOG(Warning) << "passing over " << NameOf(manifest.info) << ": " << agreed.message();
      }
      continue;
    }
    std::sort(manifest.files.begin(), manifest.files.end(),
              [](const ManifestFile& a, const ManifestFile& b) { return a.name < b.name; });
    auto contents = std::make_shared<Contents>();
    std::map<std::string, absl::string_view> files;
    for (const auto& [owner, part] : parts) {
      const Piece* const piece = find(owner);
      if (piece != nullptr) contents->memories.push_back(piece->memory);
      const bool everywhere = static_cast<int>(part.on.size()) == size_;
      const int root = part.on.count(owner) > 0 ? owner : *part.on.begin();
      MUSTER_ASSIGN_OR_RETURN(const Manifest one, ParseManifest(part.text, "a part in memory"));
      for (size_t i = 0; i < one.files.size(); ++i) {
        const ManifestFile& file = one.files[i];
        if (piece != nullptr) files[file.name] = ContentsOf(*piece->memory, piece->record, i);
        if (everywhere) continue;
        std::string received;
        for (uint64_t at = 0; at < file.digest.bytes; at += kPieceBytes) {
          const uint64_t bytes = std::min<uint64_t>(kPieceBytes, file.digest.bytes - at);
          const std::string got = comm.BroadcastBytes(
              rank_ == root ? std::string(files[file.name].substr(at, bytes)) : "", root);
          if (piece == nullptr) received.append(got);
        }
        if (piece != nullptr) continue;
        contents->received.push_back(std::make_unique<std::string>(std::move(received)));
        files[file.name] = *contents->received.back();
      }
    }
    const Piece* const own = find(rank_);
    int64_t since_disk = own == nullptr ? 0 : own->record.since_disk;
    // One that has none of its own learns it from rank 0's node.
    const std::string main = comm.BroadcastBytes(absl::StrCat(since_disk), 0);
    TORCH_CHECK(absl::SimpleAtoi(main, &since_disk), "rank 0 sent ", main);
    const std::string name = NameOf(manifest.info);
    return std::optional<Found>(
        Found{StateReader::OfMemory(name, std::move(manifest), std::move(files), contents),
              since_disk, save});
  }
  return std::optional<Found>();
}

void MemoryTier::Keep(const MemorySaveId& save) {
  good_ = current_ = -1;
  for (int i = 0; i < kHeldSlots; ++i) {
    if (slots_[i].snapshot == nullptr) continue;
    const AlignedMemory& memory = slots_[i].snapshot->memory();
    const absl::StatusOr<MemoryRecord> record =
        ReadMemoryRecord(absl::string_view(memory.data(), memory.size()));
    if (record.ok() && record->save == save) good_ = i;
  }
  MutexLock lock(&mu_);
  status_ = absl::OkStatus();
}

void MemoryTier::Forget() {
  WaitForCopy();
  (void)Wait();
  // What cannot be adopted cannot be found by others either.
  (void)Adopt();
  for (Slot& slot : slots_) {
    if (slot.snapshot != nullptr) ForgetMemoryRecord(slot.snapshot->memory());
  }
  good_ = current_ = -1;
  MutexLock lock(&mu_);
  status_ = absl::OkStatus();
}

}  // namespace muster
