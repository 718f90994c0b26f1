#include "worker/checkpoint/fake_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "ATen/EmptyTensor.h"
#include "ATen/ops/from_blob.h"
#include "base/mutex.h"
#include "c10/core/Allocator.h"
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

// Aligned like LibTorch's memory.
char* TakeHostMemory(size_t bytes) {
  constexpr size_t kAlignment = 64;
  return static_cast<char*>(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment));
}

// The allocator of storages of the device, as LibTorch's caching allocator is for CUDA.
class FakeAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, FakeDevice().device()};
    Memory& memory = TheMemory();
    {
      const auto more = static_cast<int64_t>(bytes);
      MutexLock lock(&memory.mu);
      TORCH_CHECK_WITH(OutOfMemoryError,
                       memory.limit < 0 || memory.taken.now + more <= memory.limit,
                       "the fake device has no room for ", bytes, " bytes");
      memory.taken.now += more;
      memory.taken.peak = std::max(memory.taken.peak, memory.taken.now);
    }
    auto* const piece = new Piece{TakeHostMemory(bytes), bytes};
    constexpr char kNothing = 0x5a;
    std::memset(piece->data, kNothing, bytes);
    return {piece->data, piece, &Delete, FakeDevice().device()};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Piece {
    char* data;
    size_t bytes;
  };
  static void Delete(void* context) {
    auto* const piece = static_cast<Piece*>(context);
    Memory& memory = TheMemory();
    {
      MutexLock lock(&memory.mu);
      memory.taken.now -= static_cast<int64_t>(piece->bytes);
    }
    std::free(piece->data);
    delete piece;
  }
};

FakeAllocator& TheAllocator() {
  static auto* const allocator = new FakeAllocator();
  return *allocator;
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

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor Taken(at::IntArrayRef sizes, std::optional<at::ScalarType> type) {
  return at::detail::empty_generic(sizes, &TheAllocator(), kKeys, type.value_or(at::kFloat),
                                   std::nullopt);
}

at::Tensor Empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  return Taken(sizes, type);
}

at::Tensor EmptyStrided(at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::optional<at::ScalarType> type, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &TheAllocator(), kKeys,
                                           type.value_or(at::kFloat));
}

at::Tensor Clone(const at::Tensor& from, std::optional<at::MemoryFormat>) {
  FakeDevice().Operate();
  at::Tensor made = Taken(from.sizes(), from.scalar_type());
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
  const size_t bytes = values.size() * sizeof(float);
  char* const data = TakeHostMemory(bytes);
  std::memcpy(data, values.data(), bytes);
  return at::for_blob(data, {static_cast<int64_t>(values.size())})
      .deleter(&std::free)
      .options(at::TensorOptions(FakeDevice().device()).dtype(at::kFloat))
      .target_device(FakeDevice().device())
      .make_tensor();
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
