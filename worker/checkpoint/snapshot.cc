#include "worker/checkpoint/snapshot.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "c10/core/DeviceGuard.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/file_plans.h"
#include "worker/checkpoint/plan_pieces.h"

namespace muster {
namespace {

// The memory of a device that copies of small tensors (buffers, statistics) may take temporarily.
constexpr size_t kMostCloned = size_t{64} << 20;

}  // namespace

// A file whose tensors are kept elsewhere.
struct Snapshot::Kept {
  SafetensorsPlan plan;
  std::optional<PlanPieces> pieces = std::nullopt;  // the pieces of `plan`
};

absl::StatusOr<char*> Snapshot::Append(const std::string& name, size_t bytes) {
  const auto last = std::find_if(files_.rbegin(), files_.rend(),
                                 [](const File& file) { return file.kept == nullptr; });
  const size_t offset =
      DirectAlignedUp(last == files_.rend() ? reserved_ : last->offset + last->bytes);
  if (const absl::Status grown = memory_.Grow(offset + bytes); !grown.ok()) {
    const std::string why(grown.message());
    return absl::Status(grown.code(),
                        stays_in_memory_
                            ? absl::StrCat("cannot copy ", name, " for a save in memory: ", why)
                            : absl::StrCat("cannot copy ", name, " for an asynchronous save: ", why,
                                           "; save synchronously"));
  }
  files_.push_back({.name = name, .offset = offset, .bytes = bytes});
  return memory_.data() + offset;
}

absl::Status Snapshot::AddKept(const std::string& name, const SafetensorsPlan& plan) {
  auto file = std::make_shared<Kept>(Kept{.plan = plan});
  // A tensor with several names is copied only once.
  std::unordered_map<const void*, size_t> known;
  for (size_t i = 0; i < plan.sources.size(); ++i) {
    const at::Tensor& source = plan.sources[i];
    const auto [same, added] = known.try_emplace(source.const_data_ptr(), i);
    if (const at::Tensor& other = plan.sources[same->second];
        !added && source.dtype() == other.dtype() && source.sizes() == other.sizes() &&
        source.strides() == other.strides() && source.is_conj() == other.is_conj() &&
        source.is_neg() == other.is_neg()) {
      file->plan.sources[i] = file->plan.sources[same->second];
      continue;
    }
    absl::StatusOr<at::Tensor> kept = keep_(source);
    if (!kept.ok()) {
      return absl::Status(kept.status().code(),
                          absl::StrCat("cannot copy ", name,
                                       " for an asynchronous save: ", kept.status().message()));
    }
    file->plan.sources[i] = *std::move(kept);
  }
  file->pieces = PlanPieces::Of(file->plan);
  TORCH_INTERNAL_ASSERT(file->pieces.has_value(), "a tensor of ", name, " is not kept contiguous");
  const size_t bytes = file->plan.file_bytes();
  files_.push_back({.name = name, .bytes = bytes, .kept = std::move(file)});
  return absl::OkStatus();
}

absl::StatusOr<DirectFileWritten> Snapshot::Write(const File& file, const std::string& path,
                                                  const DirectFileOptions& options) const {
  if (file.kept == nullptr) return WriteDirectFile(path, Contents(file), options);
  return file.kept->pieces->Write(
      path, "what save_state() passes to a hook may not change until the save has ended", options);
}

absl::Status Snapshot::AddTensors(const std::string& name, const SafetensorsPlan& plan) {
  if (keep_ != nullptr) return AddKept(name, plan);
  const auto on_gpu = std::find_if(plan.sources.begin(), plan.sources.end(),
                                   [](const at::Tensor& source) { return source.is_cuda(); });
  if (on_gpu != plan.sources.end()) gpu_ = on_gpu->device();
  MUSTER_ASSIGN_OR_RETURN(char* const to, Append(name, plan.file_bytes()));
  const size_t data = to - memory_.data() + plan.layout.prefix.size();
  CopySafetensors(plan, to, [&](size_t i) {
    const at::Tensor& source = plan.sources[i];
    if (!DeferredCopy::Takes(source)) return false;
    const bool changes = !later_.contains(source.const_data_ptr());
    // Only for the CPU: a thread that copied from a device now would wait for all its queued work.
    if (changes && source.is_cpu()) return false;
    const at::Tensor kept = changes ? Clone(source) : source;
    if (!kept.defined()) return false;
    const SafetensorsEntry& entry = plan.layout.tensors[i];
    left_->Add(absl::StrCat("\"", Printable(entry.name), "\" of ", name), kept, data + entry.begin);
    return true;
  });
  return absl::OkStatus();
}

at::Tensor Snapshot::Clone(const at::Tensor& source) {
  if (later_.empty() || cloned_ + source.nbytes() > kMostCloned) return {};
  try {
    at::Tensor clone = source.clone();
    cloned_ += source.nbytes();
    return clone;
  } catch (const c10::OutOfMemoryError&) {
    // A save must not need memory that training has taken. Each failed try makes LibTorch release
    // its cached memory, so do not try again.
    cloned_ = kMostCloned;
    return {};
  }
}

void Snapshot::PinIfFromGpu() {
  if (!gpu_.has_value()) return;
  const HostPinning* const cuda = HostPinning::Cuda();
  if (cuda == nullptr) return;
  try {
    // Set the device, because a CUDA call concerns the thread's current device and creates a
    // context there.
    const c10::DeviceGuard on(*gpu_);
    memory_.Pin(*cuda);
  } catch (const c10::Error&) {
    // The device is lost, which its next operation reports.
  }
}

void Snapshot::CopyLater(const at::Tensor& tensor) {
  if (tensor.defined() && DeferredCopy::Takes(tensor)) later_.insert(tensor.const_data_ptr());
}

std::unique_ptr<DeferredCopy> Snapshot::TakeDeferred() {
  std::vector<DeferredCopy::Digested> digested;
  for (const File& file : files_) {
    if (stays_in_memory_) digested.push_back({.offset = file.offset, .bytes = file.bytes});
  }
  left_->Start(memory_.data(), digested);
  later_.clear();
  cloned_ = 0;
  return std::exchange(left_, std::make_unique<DeferredCopy>());
}

void Snapshot::Clear() {
  files_.clear();
  left_ = std::make_unique<DeferredCopy>();
  later_.clear();
  cloned_ = 0;
  keep_ = nullptr;
}

absl::Status Snapshot::Add(const std::string& name, const NamedTensors& tensors,
                           WriteSafetensorsOptions options, FilePlans* plans) {
  options.data_alignment = kDirectAlignment;
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsPlan plan, PlanFile(plans, name, tensors, options));
  return AddTensors(name, plan);
}

absl::Status Snapshot::Add(const std::string& name, const StateDict& state, SharedTensors shared,
                           FilePlans* plans) {
  MUSTER_ASSIGN_OR_RETURN(const PlannedStateFile file,
                          PlanStateDict(name, state, shared, kDirectAlignment, plans));
  if (const auto* const plan = std::get_if<SafetensorsPlan>(&file)) return AddTensors(name, *plan);
  return AddText(name, std::get<std::string>(file));
}

absl::Status Snapshot::AddText(const std::string& name, const std::string& text) {
  MUSTER_ASSIGN_OR_RETURN(char* const to, Append(name, text.size()));
  std::memcpy(to, text.data(), text.size());
  return absl::OkStatus();
}

uint64_t Snapshot::bytes() const {
  uint64_t bytes = 0;
  for (const File& file : files_) bytes += file.bytes;
  return bytes;
}

}  // namespace muster
