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
  std::vector<FakeStreams::Point> points ABSL_GUARDED_BY(mu);
  size_t to_device ABSL_GUARDED_BY(mu) = 0;
};

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

at::Tensor& Copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  TORCH_CHECK(to.is_contiguous() && from.is_contiguous() && to.nbytes() == from.nbytes());
  std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  FakeStreams& device = FakeDevice();
  const FakeStreams::Point point = device.Operate();
  if (!non_blocking) device.synchronizeStream(device.Current());
  Copies& copies = TheCopies();
  MutexLock lock(&copies.mu);
  if (to.is_cpu()) {
    copies.points.push_back(point);
  } else {
    ++copies.to_device;
  }
  return to;
}

at::Tensor Clone(const at::Tensor& from, std::optional<at::MemoryFormat>) {
  const auto* const data = static_cast<const char*>(from.const_data_ptr());
  FakeDevice().Operate();
  return Own(std::make_shared<std::vector<char>>(data, data + from.nbytes()), from.sizes(),
             from.scalar_type());
}

at::Tensor Empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  const size_t bytes =
      c10::multiply_integers(sizes) * c10::elementSize(type.value_or(at::ScalarType::Float));
  // At least one, whose address is known.
  return Own(std::make_shared<std::vector<char>>(std::max<size_t>(bytes, 1)), sizes,
             type.value_or(at::ScalarType::Float));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &Empty);
  m.impl("copy_", &Copy);
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
  return copies.points;
}

size_t CopiesToFakeDevice() {
  Copies& copies = TheCopies();
  MutexLock lock(&copies.mu);
  return copies.to_device;
}

}  // namespace muster
