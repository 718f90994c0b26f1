#include "worker/checkpoint/fake_device.h"

#include <algorithm>
#include <cstring>
#include <memory>

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

at::Tensor Own(std::shared_ptr<std::vector<char>> memory, const at::IntArrayRef sizes,
               at::ScalarType type) {
  char* const data = memory->data();
  return at::for_blob(data, sizes)
      .deleter([memory = std::move(memory)](void*) {})
      .options(at::TensorOptions(FakeDevice().device()).dtype(type))
      .target_device(FakeDevice().device())
      .make_tensor();
}

at::Tensor& CopyFrom(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  TORCH_CHECK(to.is_contiguous() && from.is_contiguous() && to.nbytes() == from.nbytes());
  std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  FakeStreams& device = FakeDevice();
  const FakeStreams::Point point = device.Operate();
  if (!non_blocking) device.synchronizeStream(device.Current());
  Copies& copies = TheCopies();
  MutexLock lock(&copies.mu);
  (to.is_cpu() ? copies.from : copies.to).push_back(point);
  return to;
}

at::Tensor Empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
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
  constexpr char kNothing = 0x5a;
  return Own(std::shared_ptr<std::vector<char>>(
                 new std::vector<char>(static_cast<size_t>(bytes), kNothing),
                 [bytes](const std::vector<char>* given) {
                   delete given;
                   Memory& memory = TheMemory();
                   MutexLock lock(&memory.mu);
                   memory.taken.now -= bytes;
                 }),
             sizes, dtype);
}

at::Tensor Clone(const at::Tensor& from, std::optional<at::MemoryFormat>) {
  const auto* const data = static_cast<const char*>(from.const_data_ptr());
  FakeDevice().Operate();
  return Own(std::make_shared<std::vector<char>>(data, data + from.nbytes()), from.sizes(),
             from.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", &CopyFrom);
  m.impl("empty.memory_format", &Empty);
  m.impl("clone", &Clone);
}

}  // namespace

FakeStreams& FakeDevice() { return FakeStreams::Install(c10::DeviceType::PrivateUse1); }

at::Tensor OnFakeDevice(const std::vector<float>& values) {
  const auto* const data = reinterpret_cast<const char*>(values.data());
  return Own(std::make_shared<std::vector<char>>(data, data + values.size() * sizeof(float)),
             {static_cast<int64_t>(values.size())}, at::kFloat);
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
