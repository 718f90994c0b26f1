#include "worker/checkpoint/memory_mirror.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/thread_priority.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/checkpoint/agreement.h"

namespace muster {
namespace {

constexpr size_t kPieceBytes = size_t{8} << 20;
// How long training may delay a peer's copy. A peer that dies closes its connections, and the
// destructor does not wait.
constexpr std::chrono::milliseconds kPatience = std::chrono::hours(24 * 7);

// The tags of a save's exchanges; kPieces is the first of those of pieces. kNothing is never sent.
enum Tag : int { kNothing, kAnnouncement, kRoom, kHeader, kPieces };

struct Announced {
  uint64_t sequence = 0;
  uint64_t nonce = 0;
  uint64_t bytes = 0;  // 0: the rank has no part
};

c10::intrusive_ptr<c10d::Backend> BackendOf(Comm& comm) {
  TORCH_CHECK(comm.process_group() != nullptr, "a mirror needs a process group");
  return comm.process_group()->getBackend(c10::DeviceType::CPU);
}

std::vector<int> All(const MirrorPeers& peers) {
  std::vector<int> all = peers.from;
  all.push_back(peers.to);
  return all;
}

// Converts an error, because an agent that does not answer may answer later.
absl::Status WhyNoRoom(const absl::Status& status) {
  return absl::IsUnavailable(status) ? absl::AbortedError(status.message())
                                     : absl::ResourceExhaustedError(status.message());
}

}  // namespace

absl::StatusOr<MirrorPeers> PlanMirror(const std::vector<std::string>& nodes, int rank) {
  std::map<std::string, size_t> known;
  std::vector<std::vector<int>> ranks;  // by node
  for (size_t r = 0; r < nodes.size(); ++r) {
    const auto [it, is_new] = known.emplace(nodes[r], ranks.size());
    if (is_new) ranks.emplace_back();
    ranks[it->second].push_back(static_cast<int>(r));
  }
  if (ranks.size() < 2) return absl::FailedPreconditionError("all ranks are on one node");
  MirrorPeers peers;
  for (size_t node = 0; node < ranks.size(); ++node) {
    const std::vector<int>& next = ranks[(node + 1) % ranks.size()];
    const size_t most = (ranks[node].size() + next.size() - 1) / next.size();
    if (most > MemoryMirror::kMostSources) {
      return absl::FailedPreconditionError(
          absl::StrCat("a node has ", ranks[node].size(), " ranks and the next one ", next.size(),
                       ": each of these would hold the saves of ", most, "; the most is ",
                       MemoryMirror::kMostSources));
    }
    for (size_t i = 0; i < ranks[node].size(); ++i) {
      const int to = next[i % next.size()];
      if (ranks[node][i] == rank) peers.to = to;
      if (to == rank) peers.from.push_back(ranks[node][i]);
    }
  }
  return peers;
}

MemoryMirror::MemoryMirror(std::unique_ptr<Comm> comm, MirrorPeers peers, std::string socket,
                           std::string worker_id, std::function<void()> before_piece)
    : peers_(std::move(peers)),
      size_(comm->size()),
      socket_(std::move(socket)),
      worker_id_(std::move(worker_id)),
      before_piece_(std::move(before_piece)),
      comm_(std::move(comm)),
      watch_(BackendOf(*comm_), All(peers_), kNothing) {
  thread_ = std::thread([this] { Run(); });
}

MemoryMirror::~MemoryMirror() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.SignalAll();
  }
  watch_.Abort();
  thread_.join();
}

absl::Status MemoryMirror::Adopt(HeldMemory piece) {
  MUSTER_ASSIGN_OR_RETURN(AlignedMemory memory, AlignedMemory::OfFile(piece.fd.get()));
  held_[piece.slot] = {.fd = std::move(piece.fd), .memory = std::move(memory)};
  return absl::OkStatus();
}

void MemoryMirror::Begin(const MemorySaveId& save, const std::optional<MemorySaveId>& keep) {
  MutexLock lock(&mu_);
  task_ = {.save = save, .keep = keep, .part = std::nullopt};
}

void MemoryMirror::Offer(absl::StatusOr<absl::string_view> part) {
  MutexLock lock(&mu_);
  task_->part = std::move(part);
  changed_.SignalAll();
}

MemoryMirror::State MemoryMirror::state() const {
  MutexLock lock(&mu_);
  return {.busy = task_.has_value(), .status = status_};
}

absl::Status MemoryMirror::Wait() const {
  MutexLock lock(&mu_);
  while (task_.has_value()) changed_.Wait(&mu_);
  return status_;
}

void MemoryMirror::Run() {
  LowerThreadPriority(kIdleNice);
  MutexLock lock(&mu_);
  while (true) {
    while ((!task_.has_value() || !task_->part.has_value()) && !stop_) changed_.Wait(&mu_);
    if (stop_) return;
    const Task task = *task_;
    mu_.Unlock();
    const absl::Status done = Copy(task);
    mu_.Lock();
    status_ = done;
    task_.reset();
    changed_.SignalAll();
  }
}

struct MemoryMirror::Buffers {
  std::vector<Incoming> incoming;
  Announced mine;
  std::vector<Announced> theirs;
  std::vector<char> takes;
  char taken = 0;
};

absl::Status MemoryMirror::Copy(const Task& task) {
  if (comm_ == nullptr) return absl::UnavailableError("a peer was lost");
  // Declared here, because posted messages may still arrive until the connections are closed.
  Buffers buffers;
  absl::Status done;
  const absl::Status connected = GuardRank([&] {
    done = Exchange(task, &buffers);
    return absl::OkStatus();
  });
  if (connected.ok()) return done;
  posted_.clear();
  // Closing the connections tells this rank's other peers at once.
  watch_.Release();
  comm_.reset();
  return absl::UnavailableError(connected.message());
}

// Needed because Abort() does not stop messages that are fast enough.
void MemoryMirror::CheckGoesOn() {
  MutexLock lock(&mu_);
  TORCH_CHECK(!stop_, "the mirror ends");
}

template <class Start>
void MemoryMirror::Post(int peer, const void* bytes, size_t size, Start start) {
  CheckGoesOn();
  std::vector<at::Tensor> tensors = {
      at::from_blob(const_cast<void*>(bytes), {static_cast<int64_t>(size)}, at::kByte)};
  posted_.push_back(watch_.Add(peer, start(*BackendOf(*comm_), tensors)));
}

void MemoryMirror::Send(const void* bytes, size_t size, int to, int tag) {
  Post(to, bytes, size, [&](c10d::Backend& gloo, std::vector<at::Tensor>& tensors) {
    return gloo.send(tensors, to, tag);
  });
}

void MemoryMirror::Receive(void* bytes, size_t size, int from, int tag) {
  Post(from, bytes, size, [&](c10d::Backend& gloo, std::vector<at::Tensor>& tensors) {
    return gloo.recv(tensors, from, tag);
  });
}

void MemoryMirror::Finish() {
  for (PeerWatch::Message& message : posted_) watch_.Wait(&message, kPatience);
  posted_.clear();
}

absl::Status MemoryMirror::Exchange(const Task& task, Buffers* buffers) {
  std::vector<Incoming>& incoming = buffers->incoming;
  incoming.resize(peers_.from.size());
  for (size_t i = 0; i < incoming.size(); ++i) incoming[i].from = peers_.from[i];
  Announce(task, buffers);
  const bool sends = AgreeOnRoom(task, buffers);
  MovePieces(sends ? **task.part : absl::string_view(), &incoming);
  absl::Status status;
  if (!task.part->ok()) status = absl::AbortedError(task.part->status().message());
  for (Incoming& part : incoming) {
    if (part.status.ok()) part.status = GuardRank([&] { return Complete(task, part); });
    // An error after which no later copy can succeed takes precedence.
    if (part.status.ok() || (!status.ok() && !absl::IsResourceExhausted(part.status))) continue;
    status = absl::Status(part.status.code(), absl::StrCat("the part of rank ", part.from, ": ",
                                                           part.status.message()));
  }
  return status;
}

void MemoryMirror::Announce(const Task& task, Buffers* buffers) {
  buffers->mine = {.sequence = task.save.sequence,
                   .nonce = task.save.nonce,
                   .bytes = task.part->ok() ? (*task.part)->size() : 0};
  std::vector<Announced>& theirs = buffers->theirs;
  theirs.resize(buffers->incoming.size());
  Send(&buffers->mine, sizeof(Announced), peers_.to, kAnnouncement);
  for (size_t i = 0; i < theirs.size(); ++i) {
    Receive(&theirs[i], sizeof(Announced), buffers->incoming[i].from, kAnnouncement);
  }
  Finish();
  for (size_t i = 0; i < theirs.size(); ++i) {
    Incoming& part = buffers->incoming[i];
    TORCH_CHECK((MemorySaveId{theirs[i].sequence, theirs[i].nonce}) == task.save, "rank ",
                part.from, " sends another save");
    part.bytes = theirs[i].bytes;
    if (part.bytes < kMemoryHeaderBytes) part.status = absl::AbortedError("it has none");
  }
}

bool MemoryMirror::AgreeOnRoom(const Task& task, Buffers* buffers) {
  buffers->takes.assign(buffers->incoming.size(), 0);
  for (size_t i = 0; i < buffers->incoming.size(); ++i) {
    Incoming& part = buffers->incoming[i];
    if (part.status.ok()) {
      part.status = GuardRank([&]() -> absl::Status {
        MUSTER_ASSIGN_OR_RETURN(part.memory, MakeRoom(i, part.bytes, task.keep));
        part.header.resize(kMemoryHeaderBytes);
        return absl::OkStatus();
      });
    }
    buffers->takes[i] = part.status.ok() ? 1 : 0;
    Send(&buffers->takes[i], 1, part.from, kRoom);
  }
  Receive(&buffers->taken, 1, peers_.to, kRoom);
  Finish();
  return buffers->taken == 1 && task.part->ok();
}

void MemoryMirror::MovePieces(absl::string_view part, std::vector<Incoming>* incoming) {
  // No two ranks wait for each other, because all ranks are in the same exchange or in one that
  // waits for it.
  uint64_t longest = part.size();
  for (const Incoming& in : *incoming) {
    if (in.status.ok()) longest = std::max(longest, in.bytes);
  }
  if (!part.empty()) Send(part.data(), kMemoryHeaderBytes, peers_.to, kHeader);
  for (Incoming& in : *incoming) {
    if (in.status.ok()) Receive(in.header.data(), kMemoryHeaderBytes, in.from, kHeader);
  }
  Finish();
  int tag = kPieces;
  for (uint64_t at = kMemoryHeaderBytes; at < longest; at += kPieceBytes, ++tag) {
    if (before_piece_ != nullptr) before_piece_();
    if (at < part.size()) {
      Send(part.data() + at, std::min<uint64_t>(kPieceBytes, part.size() - at), peers_.to, tag);
    }
    for (Incoming& in : *incoming) {
      if (!in.status.ok() || at >= in.bytes) continue;
      Receive(in.memory->data() + at, std::min<uint64_t>(kPieceBytes, in.bytes - at), in.from, tag);
    }
    Finish();
  }
}

absl::Status MemoryMirror::Complete(const Task& task, const Incoming& in) const {
  const absl::string_view bytes(in.memory->data(), in.bytes);
  MUSTER_ASSIGN_OR_RETURN(const MemoryRecord record, ReadMemoryRecord(in.header, bytes));
  if (record.save != task.save || record.rank != in.from ||
      record.manifest.info.world_size != size_) {
    return absl::DataLossError("it arrived as that of another rank or save");
  }
  for (size_t i = 0; i < record.offsets.size(); ++i) {
    const ManifestFile& file = record.manifest.files[i];
    if (IsWhole(MemoryFile(bytes, record, i), file)) continue;
    return absl::DataLossError(absl::StrCat(file.name, " arrived with another digest"));
  }
  PutMemoryHeader(in.header, *in.memory);
  return absl::OkStatus();
}

absl::StatusOr<AlignedMemory*> MemoryMirror::MakeRoom(size_t source, uint64_t bytes,
                                                      const std::optional<MemorySaveId>& keep) {
  for (int which = 0; which < 2; ++which) {
    const int slot = kFirstSlot + 2 * static_cast<int>(source) + which;
    Held& held = held_[slot];
    const absl::StatusOr<MemoryRecord> record = ReadMemoryRecord(held.memory.view());
    if (keep.has_value() && record.ok() && record->save == *keep) continue;
    if (!held.fd.open()) {
      MUSTER_ASSIGN_OR_RETURN(OwnedFd fd,
                              CreateHoldableMemory(absl::StrCat("muster-mirror-", worker_id_)));
      MUSTER_ASSIGN_OR_RETURN(AlignedMemory memory, AlignedMemory::OfFile(fd.get()));
      if (const absl::Status given = HoldMemory(socket_, slot, fd.get()); !given.ok()) {
        return WhyNoRoom(given);
      }
      held = {.fd = std::move(fd), .memory = std::move(memory)};
    }
    ForgetMemoryRecord(held.memory);
    if (const absl::Status grown = held.memory.Grow(bytes); !grown.ok()) return WhyNoRoom(grown);
    return &held.memory;
  }
  return absl::AbortedError("both pieces of memory for it hold the save that is to be kept");
}

}  // namespace muster
