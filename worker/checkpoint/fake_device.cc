#include "worker/checkpoint/fake_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "ATen/ops/from_blob.h"
#include "base/mutex.h"
#include "torch/library.h"

namespace muster {
namespace {

struct Copies {
  Mutex mu;
  std::vector<FakeStreams::Point> from ABSL_GUARDED_BY(mu), to ABSL_GUARDED_BY(mu);
};

struct Memory {
  Mutex mu;
  FakeDeviceMemory taken ABSL_GUARDED_BY(mu);
  int64_t limit ABSL_GUARDED_BY(mu) = -1;
};

Memory& TheMemory() {
  static auto* const memory = new Memory();
  return *memory;
}

Copies& TheCopies() {
  static auto* const copies = new Copies();
  return *copies;
}

// Aligned as LibTorch's is; `freed` is called after it.
at::Tensor NewTensor(const at::IntArrayRef sizes, at::OptionalIntArrayRef strides,
                     at::ScalarType type, std::function<void()> freed = nullptr) {
  constexpr size_t kAlignment = 64;
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  char* const data =
      static_cast<char*>(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment));
  return at::for_blob(data, sizes)
      .strides(strides)
      .deleter([freed = std::move(freed)](void* memory) {
        std::free(memory);
        if (freed) freed();
      })
      .options(at::TensorOptions(FakeDevice().device()).dtype(type))
      .target_device(FakeDevice().device())
      .make_tensor();
}

at::Tensor& CopyFrom(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  TORCH_CHECK(to.is_contiguous() && from.is_contiguous() && to.nbytes() == from.nbytes());
  std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  FakeStreams& device = FakeDevice();
  const FakeStreams::Point point = device.Operate();
  const bool with_host = to.is_cpu() || from.is_cpu();
  if (with_host && !non_blocking) device.synchronizeStream(device.Current());
  Copies& copies = TheCopies();
  MutexLock lock(&copies.mu);
  if (to.is_cpu()) copies.from.push_back(point);
  if (from.is_cpu()) copies.to.push_back(point);
  return to;
}

at::Tensor Taken(at::IntArrayRef sizes, at::OptionalIntArrayRef strides,
                 std::optional<at::ScalarType> type) {
  const at::ScalarType dtype = type.value_or(at::kFloat);
  const auto bytes = static_cast<int64_t>(c10::multiply_integers(sizes) * c10::elementSize(dtype));
  Memory& memory = TheMemory();
  {
    MutexLock lock(&memory.mu);
    TORCH_CHECK_WITH(OutOfMemoryError, memory.limit < 0 || memory.taken.now + bytes <= memory.limit,
                     "the fake device has no room for ", bytes, " bytes");
    memory.taken.now += bytes;
    memory.taken.peak = std::max(memory.taken.peak, memory.taken.now);
  }
  at::Tensor made = NewTensor(sizes, strides, dtype, [bytes] {
    Memory& memory = TheMemory();
    MutexLock lock(&memory.mu);
    memory.taken.now -= bytes;
  });
  constexpr char kNothing = 0x5a;
  std::memset(made.data_ptr(), kNothing, static_cast<size_t>(bytes));
  return made;
}

at::Tensor Empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  return Taken(sizes, std::nullopt, type);
}

at::Tensor EmptyStrided(at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::optional<at::ScalarType> type, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>) {
  return Taken(sizes, strides, type);
}

at::Tensor Clone(const at::Tensor& from, std::optional<at::MemoryFormat>) {
  FakeDevice().Operate();
  at::Tensor made = Taken(from.sizes(), std::nullopt, from.scalar_type());
  std::memcpy(made.data_ptr(), from.const_data_ptr(), from.nbytes());
  return made;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", &CopyFrom);
  m.impl("empty.memory_format", &Empty);
  m.impl("empty_strided", &EmptyStrided);
  m.impl("clone", &Clone);
}

}  // namespace

FakeStreams& FakeDevice() { return FakeStreams::Install(c10::DeviceType::PrivateUse1); }

at::Tensor OnFakeDevice(const std::vector<float>& values) {
  at::Tensor made = NewTensor({static_cast<int64_t>(values.size())}, std::nullopt, at::kFloat);
  std::memcpy(made.data_ptr(), values.data(), values.size() * sizeof(float));
  return made;
}

std::vector<float> ValuesOf(const at::Tensor& tensor) {
  const auto* const data = static_cast<const float*>(tensor.const_data_ptr());
  return std::vector<float>(data, data + tensor.numel());
}

void SetValues(const at::Tensor& tensor, float value) {
  FakeDevice().Operate();
  std::fill_n(static_cast<float*>(tensor.data_ptr()), tensor.numel(), value);
  tensor.unsafeGetTensorImpl()->bump_version();
}

std::vector<FakeStreams::Point> CopiesFromFakeDevice() {
  Copies& copies = TheCopies();
  MutexLock lock(&copies.mu);
  return copies.from;
}

std::vector<FakeStreams::Point> CopiesToFakeDevice() {
  Copies& copies = TheCopies();
  MutexLock lock(&copies.mu);
  return copies.to;
}

FakeDeviceMemory MemoryOfFakeDevice() {
  Memory& memory = TheMemory();
  MutexLock lock(&memory.mu);
  return memory.taken;
}

void LimitFakeDevice(int64_t bytes) {
  Memory& memory = TheMemory();
  MutexLock lock(&memory.mu);
  memory.limit = bytes;
  memory.taken.peak = memory.taken.now;
}

}  // namespace muster
