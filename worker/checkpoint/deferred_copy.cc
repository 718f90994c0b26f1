#include "worker/checkpoint/deferred_copy.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

// Small tensors are copied in less time than it takes to note them.
constexpr size_t kMinBytes = 4096;
// Threads share a tensor of more.
constexpr size_t kPartBytes = size_t{8} << 20;

}  // namespace

bool DeferredCopy::Takes(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         tensor.nbytes() >= kMinBytes && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor.is_inference();
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
  Copied copied{.name = std::move(name),
                .source = std::move(source),
                .from = nullptr,
                .offset = offset,
                .bytes = 0,
                .version = 0,
                .samples = {}};
  copied.from = static_cast<const char*>(copied.source.const_data_ptr());
  copied.bytes = copied.source.nbytes();
  copied.version = copied.source._version();
  copied.samples = SamplesOf(copied.from, copied.bytes);
  for (size_t begin = 0; begin < copied.bytes; begin += kPartBytes) {
    parts_.push_back({tensors_.size(), begin, std::min(begin + kPartBytes, copied.bytes)});
  }
  tensors_.push_back(std::move(copied));
}

absl::Status DeferredCopy::Check(const Copied& copied) const {
  if (copied.source._version() == copied.version &&
      SamplesOf(copied.from, copied.bytes) == copied.samples) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      copied.name,
      " was changed by the program after save_state() and before the optimizer's next step, while "
      "its copy was still being made; set options.checkpoint.lazy = false, or change it right "
      "after "
      "the step"));
}

void DeferredCopy::Run() {
  size_t mine = 0;
  for (size_t i = next_.fetch_add(1); i < parts_.size(); i = next_.fetch_add(1)) {
    const Part& part = parts_[i];
    const Copied& copied = tensors_[part.tensor];
    std::memcpy(base_ + copied.offset + part.begin, copied.from + part.begin,
                part.end - part.begin);
    ++mine;
  }
  MutexLock lock(&mu_);
  copied_ += mine;
  while (copied_ < parts_.size() && !done_) changed_.Wait(&mu_);
  if (done_) return;
  for (const Copied& copied : tensors_) status_.Update(Check(copied));
  // The tensors may be large, and their module may be gone.
  tensors_.clear();
  done_ = true;
  changed_.SignalAll();
}

void DeferredCopy::Wait() const {
  MutexLock lock(&mu_);
  while (!done_ && !parts_.empty()) changed_.Wait(&mu_);
}

absl::Status DeferredCopy::status() const {
  MutexLock lock(&mu_);
  return status_;
}

void DeferredCopy::RunWhileTrainingWaits(const Clock& clock) {
  {
    MutexLock lock(&mu_);
    if (done_) return;
  }
  const absl::Time start = clock.Now();
  Run();
  const absl::Duration waited = clock.Now() - start;
  MutexLock lock(&mu_);
  waited_ += waited;
}

absl::Duration DeferredCopy::waited() const {
  MutexLock lock(&mu_);
  return waited_;
}

}  // namespace muster
