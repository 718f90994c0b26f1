#include "worker/bigmodel/weight_readers.h"

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/train/guard.h"
#include "worker/train/tensor_ranges.h"

namespace muster {
namespace {

// Together with the blocks at both ends it fills 1 MiB of scratch memory, which is still in the
// cache of the processor when it is copied from there; several pieces at a time keep a disk busy.
constexpr int64_t kCopiedBytes = (int64_t{1} << 20) - 2 * int64_t{kDirectAlignment};
// The larger a piece that is read in place, the less its system call costs.
constexpr int64_t kInPlaceBytes = int64_t{4} << 20;
// With pieces this long, the calls cost the host nothing, and a link is fastest with long copies.
constexpr int64_t kQueuedBytes = int64_t{64} << 20;
// The stack of a thread: the usual 8 MiB count where memory is limited (ulimit -d, -v).
constexpr size_t kStackBytes = size_t{1} << 20;

at::Tensor Over(const char* data, int64_t count, at::ScalarType type, at::Device device) {
  return at::for_blob(const_cast<char*>(data), {count})
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

absl::Status FillOrThrow(const WeightPiece& piece, ReadScratch& scratch) {
  const at::ScalarType type = piece.source->type(piece.index);
  const uint64_t width = c10::elementSize(type);
  const uint64_t begin = static_cast<uint64_t>(piece.first) * width;
  const size_t bytes = static_cast<size_t>(piece.count) * width;
  if (piece.device.is_cpu() && type == piece.type) {
    return piece.source->Read(piece.index, begin, bytes, piece.to, scratch);
  }
  MUSTER_ASSIGN_OR_RETURN(const char* const from,
                          piece.source->Fetch(piece.index, begin, bytes, scratch));
  c10::OptionalDeviceGuard on_device;
  if (!piece.device.is_cpu()) {
    on_device.reset_device(piece.device);
    // A GPU copies unpinned memory through a buffer of its driver, and not while the host
    // continues.
    if (const HostPinning* const cuda = HostPinning::Cuda()) scratch.Pin(*cuda);
  }
  const at::NoGradGuard no_grad;
  try {
    Over(piece.to, piece.count, piece.type, piece.device)
        .copy_(Over(from, piece.count, type, at::kCPU), /*non_blocking=*/true);
    const bool is_queued =
        piece.may_end_later && piece.source->is_in_memory() && type == piece.type;
    if (!piece.device.is_cpu() && !is_queued) {
      // Wait, because the scratch memory is needed again.
      const c10::impl::VirtualGuardImpl guard(piece.device.type());
      guard.synchronizeStream(guard.getStream(piece.device));
    }
  } catch (const c10::Error& error) {
    return absl::InternalError(absl::StrCat(piece.source->Describe(piece.index),
                                            ": cannot copy to ", piece.device.str(), ": ",
                                            error.what_without_backtrace()));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<WeightPiece> PiecesOf(const WeightSource& source, size_t index, char* to,
                                  at::ScalarType type, at::Device device) {
  const auto width = static_cast<int64_t>(c10::elementSize(source.type(index)));
  const auto wide = static_cast<int64_t>(c10::elementSize(type));
  const auto count = static_cast<int64_t>(source.bytes(index)) / width;
  // All but the first begin where a block of the disk does.
  const auto remainder = static_cast<int64_t>(source.Remainder(index));
  const bool in_place =
      device.is_cpu() && type == source.type(index) &&
      reinterpret_cast<uintptr_t>(to) % kDirectAlignment == source.Remainder(index);
  const bool is_queued = !device.is_cpu() && source.is_in_memory() && type == source.type(index);
  const int64_t piece = in_place ? kInPlaceBytes : is_queued ? kQueuedBytes : kCopiedBytes;
  int64_t next = (piece - (remainder % width == 0 ? remainder : 0)) / width;
  std::vector<WeightPiece> pieces;
  for (int64_t first = 0; first < count; first = next, next += piece / width) {
    pieces.push_back({.source = &source,
                      .index = index,
                      .first = first,
                      .count = std::min(next, count) - first,
                      .to = to + first * wide,
                      .type = type,
                      .device = device});
  }
  return pieces;
}

absl::Status FillPiece(const WeightPiece& piece, ReadScratch& scratch) {
  // An exception on a reading thread would end the process.
  absl::Status status;
  const absl::Status thrown = Guard([&] { status = FillOrThrow(piece, scratch); });
  if (thrown.ok()) return status;
  return absl::Status(thrown.code(),
                      absl::StrCat(piece.source->Describe(piece.index), ": ", thrown.message()));
}

WeightReaders::WeightReaders(int threads) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  int error = 0;
  for (int i = 0; i < threads && error == 0; ++i) {
    pthread_t thread;
    error = pthread_create(
        &thread, &attributes,
        [](void* readers) -> void* {
          static_cast<WeightReaders*>(readers)->Run();
          return nullptr;
        },
        this);
    if (error == 0) threads_.push_back(thread);
  }
  pthread_attr_destroy(&attributes);
  if (threads_.empty()) {
    ThrowIfError(absl::ResourceExhaustedError(
        absl::StrCat("cannot start a thread that reads weights (", std::strerror(error),
                     "): raise the limit of processes or memory (ulimit -u, ulimit -d)")));
  }
}

WeightReaders::~WeightReaders() {
  std::deque<Task> dropped;
  {
    MutexLock lock(&mu_);
    stopped_ = true;
    dropped.swap(tasks_);
    changed_.SignalAll();
  }
  for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
}

void WeightReaders::Submit(std::vector<Task> tasks, bool urgent) {
  MutexLock lock(&mu_);
  tasks_.insert(urgent ? tasks_.begin() : tasks_.end(), std::make_move_iterator(tasks.begin()),
                std::make_move_iterator(tasks.end()));
  changed_.SignalAll();
}

void WeightReaders::Run() {
  // There are other threads: do not divide a conversion further.
  const OneThread one_thread;
  ReadScratch scratch;
  for (;;) {
    Task task;
    {
      MutexLock lock(&mu_);
      while (tasks_.empty() && !stopped_) changed_.Wait(&mu_);
      if (stopped_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task(scratch);
  }
}

absl::Status WeightReaders::Fill(const std::vector<WeightPiece>& pieces) {
  // The memory may belong to tensors that a device still has to use on the caller's stream, and the
  // threads have streams of their own.
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    std::vector<at::Device> waited;
    for (const WeightPiece& piece : pieces) {
      if (piece.device.is_cpu()) continue;
      if (std::find(waited.begin(), waited.end(), piece.device) != waited.end()) continue;
      waited.push_back(piece.device);
      const c10::impl::VirtualGuardImpl guard(piece.device.type());
      guard.synchronizeStream(guard.getStream(piece.device));
    }
  }));
  struct Progress {
    Mutex mu;
    CondVar changed;
    size_t left ABSL_GUARDED_BY(mu) = 0;
    absl::Status status ABSL_GUARDED_BY(mu);
  };
  const auto progress = std::make_shared<Progress>();
  std::vector<Task> tasks;
  for (const WeightPiece& piece : pieces) {
    tasks.push_back([progress, piece](ReadScratch& scratch) {
      bool skip = false;
      {
        MutexLock lock(&progress->mu);
        skip = !progress->status.ok();
      }
      const absl::Status status = skip ? absl::OkStatus() : FillPiece(piece, scratch);
      MutexLock lock(&progress->mu);
      progress->status.Update(status);
      if (--progress->left == 0) progress->changed.SignalAll();
    });
  }
  {
    MutexLock lock(&progress->mu);
    progress->left = pieces.size();
  }
  Submit(std::move(tasks), /*urgent=*/false);
  MutexLock lock(&progress->mu);
  while (progress->left > 0) progress->changed.Wait(&progress->mu);
  return progress->status;
}

}  // namespace muster
