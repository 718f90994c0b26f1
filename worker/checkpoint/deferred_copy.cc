#include "worker/checkpoint/deferred_copy.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <time.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

// Smaller tensors take less time to copy than to record.
constexpr size_t kMinBytes = 4096;
// Threads share a larger tensor if nothing is digested.
constexpr size_t kPartBytes = size_t{8} << 20;
// The number of bytes that are digested and then copied while they are still in the core's cache.
constexpr size_t kCachedBytes = size_t{64} << 10;

// Bypasses the caches, because the copy is not read soon, and training needs the caches.
void CopyPastCaches(char* to, const char* from, size_t bytes) {
#ifdef __SSE2__
  const size_t head = std::min(bytes, (-reinterpret_cast<uintptr_t>(to)) % 64);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    __m128i line[4];
    std::memcpy(line, from + at, sizeof(line));
    auto* const target = reinterpret_cast<__m128i*>(to + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, line[i]);
  }
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

absl::Duration CpuOfThisThread() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return absl::DurationFromTimespec(time);
}

// Makes the earlier copies visible to other threads, as they would be with memcpy().
void EndCopiesPastCaches() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace

bool DeferredCopy::Takes(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return DeviceCopies::Takes(tensor);
  return tensor.layout() == at::kStrided && tensor.nbytes() >= kMinBytes &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() && !tensor.is_inference();
}

DeferredCopy::Samples DeferredCopy::SamplesOf(const char* data, size_t bytes) {
  Samples samples;
  const size_t last = bytes - sizeof(uint64_t);
  for (size_t i = 0; i < kSamples; ++i) {
    std::memcpy(&samples[i], data + last / (kSamples - 1) * i, sizeof(uint64_t));
  }
  return samples;
}

void DeferredCopy::Add(std::string name, at::Tensor source, size_t offset) {
  if (on_device_(source)) {
    device_.Add(std::move(name), std::move(source), offset);
    return;
  }
  Copied copied{.name = std::move(name),
                // Keeps the memory, and counts the changes, even if the program gives the tensor
                // another storage (set_data()).
                .source = source.detach(),
                .from = nullptr,
                .offset = offset,
                .bytes = 0,
                .version = 0,
                .samples = {}};
  copied.from = static_cast<const char*>(copied.source.const_data_ptr());
  copied.bytes = copied.source.nbytes();
  copied.version = copied.source._version();
  copied.samples = SamplesOf(copied.from, copied.bytes);
  tensors_.push_back(std::move(copied));
}

void DeferredCopy::Start(char* base, const std::vector<Digested>& files) {
  base_ = base;
  device_.Start(base);
  copies_ = !tensors_.empty();
  std::sort(tensors_.begin(), tensors_.end(),
            [](const Copied& a, const Copied& b) { return a.offset < b.offset; });
  if (files.empty()) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const size_t end = tensors_[i].offset + tensors_[i].bytes;
      for (size_t begin = tensors_[i].offset; begin < end; begin += kPartBytes) {
        parts_.push_back({.begin = begin, .end = std::min(begin + kPartBytes, end), .tensor = i});
      }
    }
    return;
  }
  digests_.resize(files.size());
  for (size_t file = 0; file < files.size(); ++file) {
    const auto& [offset, bytes] = files[file];
    BlockDigests& blocks = digests_[file];
    blocks.block_bytes = kBlockBytes;
    blocks.xxh3.resize((bytes + kBlockBytes - 1) / kBlockBytes);
    for (size_t i = 0; i < blocks.xxh3.size(); ++i) {
      const size_t begin = offset + i * kBlockBytes;
      const auto first = std::partition_point(
          tensors_.begin(), tensors_.end(),
          [&](const Copied& copied) { return copied.offset + copied.bytes <= begin; });
      parts_.push_back({.begin = begin,
                        .end = std::min(begin + kBlockBytes, offset + bytes),
                        .tensor = static_cast<size_t>(first - tensors_.begin()),
                        .digest = &blocks.xxh3[i]});
    }
  }
}

void DeferredCopy::Fill(const Part& part, BlockDigester* digester) const {
  size_t at = part.begin;
  for (size_t i = part.tensor; at < part.end;) {
    const Copied* const next = i < tensors_.size() ? &tensors_[i] : nullptr;
    if (next == nullptr || at < next->offset) {
      const size_t end = next == nullptr ? part.end : std::min(part.end, next->offset);
      if (part.digest != nullptr) digester->Update(absl::string_view(base_ + at, end - at));
      at = end;
      continue;
    }
    const size_t copied = at - next->offset;
    const size_t bytes = std::min({part.end - at, next->bytes - copied, kCachedBytes});
    const absl::string_view source(next->from + copied, bytes);
    if (part.digest != nullptr) digester->Update(source);
    CopyPastCaches(base_ + at, source.data(), bytes);
    at += bytes;
    if (copied + bytes == next->bytes) ++i;
  }
  if (part.digest != nullptr) *part.digest = digester->Finish();
}

absl::Status DeferredCopy::Check(const Copied& copied) const {
  if (copied.source._version() == copied.version &&
      SamplesOf(copied.from, copied.bytes) == copied.samples) {
    return absl::OkStatus();
  }
  return WasChangedDuringItsCopy(copied.name);
}

void DeferredCopy::CopyParts() {
  // The copies of a device are digested at their destination, so wait for them.
  if (!digests_.empty()) device_.Wait();
  const absl::Duration start = CpuOfThisThread();
  size_t mine = 0;
  BlockDigester digester;
  for (size_t i = next_.fetch_add(1); i < parts_.size(); i = next_.fetch_add(1)) {
    Fill(parts_[i], &digester);
    ++mine;
  }
  EndCopiesPastCaches();
  const absl::Duration cpu = CpuOfThisThread() - start;
  MutexLock lock(&mu_);
  cpu_ += cpu;
  copied_ += mine;
  while (copied_ < parts_.size() && !parts_done_) changed_.Wait(&mu_);
  if (parts_done_) return;
  for (const Copied& copied : tensors_) status_.Update(Check(copied));
  // Release the tensors: they may be large, and their module may be gone.
  tensors_.clear();
  parts_done_ = true;
  changed_.SignalAll();
}

void DeferredCopy::Run() {
  // Queue first, so that the devices work while this thread copies.
  device_.Queue();
  CopyParts();
  device_.Wait();
}

void DeferredCopy::Wait() {
  device_.Wait();
  MutexLock lock(&mu_);
  while (!parts_done_ && !parts_.empty()) changed_.Wait(&mu_);
}

absl::Status DeferredCopy::status() const {
  absl::Status status = device_.status();
  MutexLock lock(&mu_);
  status.Update(status_);
  return status;
}

void DeferredCopy::RunWhileTrainingWaits(const Clock& clock) {
  bool parts = false;
  {
    MutexLock lock(&mu_);
    parts = copies_ && !parts_done_;
    if (!parts && device_.empty()) return;
  }
  const absl::Time start = clock.Now();
  device_.LetChange();
  if (parts) CopyParts();
  const absl::Duration waited = clock.Now() - start;
  MutexLock lock(&mu_);
  waited_ += waited;
}

absl::Duration DeferredCopy::waited() const {
  MutexLock lock(&mu_);
  return waited_;
}

absl::Duration DeferredCopy::cpu() const {
  MutexLock lock(&mu_);
  return cpu_;
}

}  // namespace muster
