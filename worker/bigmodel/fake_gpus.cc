#include "worker/bigmodel/fake_gpus.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/EmptyTensor.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/detail/PrivateUse1HooksInterface.h"
#include "ATen/native/Resize.h"
#include "ATen/ops/_reshape_alias_native.h"
#include "ATen/ops/as_strided_native.h"
#include "ATen/ops/convolution.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/unfold_native.h"
#include "ATen/ops/view_native.h"
#include "c10/core/Allocator.h"
#include "c10/core/CPUAllocator.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "torch/library.h"
#include "worker/bigmodel/ivalue_tensors.h"
#include "worker/bigmodel/max_memory.h"

namespace muster {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current = 0;

struct Counts {
  std::atomic<int64_t> bytes = 0;
  std::atomic<int64_t> operators = 0;
  std::atomic<int64_t> limit = -1;
};
std::array<Counts, kFakeGpus> counts;

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, std::exchange(current, device.index())};
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT,
                       {kType, device.has_index() ? device.index() : current});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  void destroyEvent(void* /*event*/, c10::DeviceIndex /*device*/) const noexcept override {}
  void record(void** event, const c10::Stream& /*stream*/, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    *event = this->event();
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeEvent(void* /*event*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {}
  void recordDataPtrOnStream(const c10::DataPtr& /*memory*/,
                             const c10::Stream& /*stream*/) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return kFakeGpus; }

 private:
  static void* event() {
    static char one = 0;
    return &one;
  }
};

// The code that frees memory has to know its device.
struct Block {
  void* data;
  int64_t bytes;
  c10::DeviceIndex device;
};

void FreeBlock(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  counts[block->device].bytes -= block->bytes;
  std::free(block->data);
}

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t kAlignment = 64;
    const c10::Device device(kType, current);
    if (bytes == 0) return {nullptr, device};
    const int64_t limit = counts[current].limit;
    TORCH_CHECK_WITH(OutOfMemoryError,
                     limit < 0 || counts[current].bytes + static_cast<int64_t>(bytes) <= limit,
                     "fake GPU ", int{current}, " has no room for ", bytes, " bytes");
    void* const data = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    // Fill it with bytes that a test would not take for a value.
    std::memset(data, 0x5a, bytes);
    counts[current].bytes += static_cast<int64_t>(bytes);
    return {data, new Block{data, static_cast<int64_t>(bytes), current}, &FreeBlock, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& /*memory*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    constexpr size_t kAll = size_t{1} << 30;
    return {kAll, kAll};
  }
};

Memory& TheMemory() {
  static auto& memory = *new Memory;
  return memory;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kFakeGpus; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  // Operators draw from the CPU's generator.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current, device);
  }
};

bool IsFake(const at::Tensor& tensor) { return tensor.device().type() == kType; }

c10::Device DeviceOr(std::optional<c10::Device> device) {
  return {kType, device.has_value() && device->has_index() ? device->index() : current};
}

at::Tensor Empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(DeviceOr(device));
  return at::detail::empty_generic(sizes, &TheMemory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   type.value_or(at::kFloat), format);
}

at::Tensor EmptyStrided(at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::optional<at::ScalarType> type, std::optional<at::Layout> /*layout*/,
                        std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  const c10::DeviceGuard guard(DeviceOr(device));
  return at::detail::empty_strided_generic(sizes, strides, &TheMemory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           type.value_or(at::kFloat));
}

// Returns the same memory as a tensor of the CPU.
at::Tensor OnHost(const at::Tensor& tensor) {
  if (!tensor.defined() || !IsFake(tensor)) return tensor;
  return at::for_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes())
      .strides(tensor.strides())
      .options(at::TensorOptions().dtype(tensor.scalar_type()))
      .target_device(at::kCPU)
      .make_tensor();
}

at::Tensor& CopyFrom(at::Tensor& to, const at::Tensor& from, bool /*non_blocking*/) {
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor host = OnHost(to);
  host.copy_(OnHost(from));
  return to;
}

const at::Tensor& Resize(const at::Tensor& tensor, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> /*format*/) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = (static_cast<size_t>(c10::multiply_integers(sizes)) +
                        static_cast<size_t>(tensor.storage_offset())) *
                       tensor.element_size();
  if (bytes > storage->nbytes()) {
    const c10::DeviceGuard guard(tensor.device());
    c10::DataPtr memory = TheMemory().allocate(bytes);
    if (storage->nbytes() > 0) std::memcpy(memory.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

// Called by set_data(), for modules that move and for tensors that get another storage.
bool Compatible(const at::Tensor& /*tensor*/, const at::Tensor& /*from*/) { return true; }

// Makes a tensor of the CPU one of a device.
at::Tensor Given(const at::Tensor& host, const c10::Device& device) {
  at::Tensor made = EmptyStrided(host.sizes(), host.strides(), host.scalar_type(), std::nullopt,
                                 device, std::nullopt);
  CopyFrom(made, host, false);
  return made;
}

// Computes an operator on the CPU.
void Compute(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
             torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  std::optional<c10::Device> device;
  const bool takes_host = schema.name() == "aten::index" ||
                          schema.name() == "aten::_index_put_impl_" ||
                          schema.name() == "aten::_foreach_norm";
  for (size_t i = 0; i < count; ++i) {
    VisitTensors((*stack)[first + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (!IsFake(tensor)) {
        TORCH_CHECK(tensor.dim() == 0 || takes_host, op.operator_name(),
                    " takes a tensor of the host beside those of a device");
        return;
      }
      TORCH_CHECK(!device.has_value() || *device == tensor.device(), op.operator_name(),
                  " takes tensors of ", *device, " and ", tensor.device());
      device = tensor.device();
    });
  }
  struct Pair {
    at::Tensor fake, host;
  };
  std::vector<Pair> pairs;
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isDevice() && value.toDevice().type() == kType) {
      device = device.value_or(DeviceOr(value.toDevice()));
      value = c10::Device(at::kCPU);
      continue;
    }
    const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    value = WithTensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !IsFake(tensor)) return tensor;
      // Whether it is a result to which the operator gives its size.
      const bool is_open = write && tensor.numel() == 0;
      at::Tensor host = is_open ? at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()))
                                : OnHost(tensor);
      pairs.push_back({tensor, host});
      return host;
    });
  }
  TORCH_CHECK(device.has_value(), op.operator_name(), " takes nothing of a fake GPU");
  ++counts[device->index()].operators;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (const Pair& pair : pairs) {
    if (pair.fake.numel() > 0 || pair.host.numel() == 0) continue;
    Resize(pair.fake, pair.host.sizes(), std::nullopt);
    at::Tensor to = pair.fake;
    CopyFrom(to, pair.host, false);
  }
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    (*stack)[i] = WithTensors((*stack)[i], [&](const at::Tensor& result) {
      if (!result.defined()) return result;
      for (const Pair& pair : pairs) {
        if (pair.host.is_same(result)) return pair.fake;
        TORCH_CHECK(result.numel() == 0 || !pair.host.is_alias_of(result), op.operator_name(),
                    " gives a view, which fake GPUs do not have");
      }
      return Given(result, *device);
    });
  }
}

// Computes an operator that exists only on GPUs: `lstm` and `gru` call it by the type of the
// device.
at::Tensor Gates(const at::Tensor& input, const at::Tensor& hidden,
                 const std::optional<at::Tensor>& input_bias,
                 const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = input + hidden;
  if (input_bias.has_value()) gates = gates + *input_bias;
  return hidden_bias.has_value() ? gates + *hidden_bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> LstmCell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const at::Tensor gates = Gates(input, hidden, input_bias, hidden_bias);
  const std::vector<at::Tensor> parts = gates.chunk(4, 1);
  const at::Tensor next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

std::tuple<at::Tensor, at::Tensor> GruCell(const at::Tensor& input, const at::Tensor& hidden,
                                           const at::Tensor& state,
                                           const std::optional<at::Tensor>& input_bias,
                                           const std::optional<at::Tensor>& hidden_bias) {
  const std::vector<at::Tensor> from_input =
      (input_bias.has_value() ? input + *input_bias : input).chunk(3, 1);
  const std::vector<at::Tensor> from_state =
      (hidden_bias.has_value() ? hidden + *hidden_bias : hidden).chunk(3, 1);
  const at::Tensor reset = (from_input[0] + from_state[0]).sigmoid();
  const at::Tensor update = (from_input[1] + from_state[1]).sigmoid();
  const at::Tensor next = (from_input[2] + reset * from_state[2]).tanh();
  return {next + update * (state - next), input};
}

at::Tensor Convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(
      input.device() == weight.device() && (!bias.has_value() || bias->device() == weight.device()),
      "convolution takes tensors of two devices");
  const at::AutoDispatchBelowADInplaceOrView below;
  return Given(at::convolution(OnHost(input), OnHost(weight),
                               bias.has_value() ? std::optional(OnHost(*bias)) : std::nullopt,
                               stride, padding, dilation, transposed, output_padding, groups),
               weight.device());
}

void Register() {
  // Lives as long as the process, like the operators.
  static auto& all = *new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1,
                                         __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&Compute>());
  static auto& aten = *new torch::Library(torch::Library::IMPL, "aten",
                                          c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  aten.impl("empty.memory_format", &Empty);
  aten.impl("empty_strided", &EmptyStrided);
  aten.impl("copy_", &CopyFrom);
  aten.impl("resize_", &Resize);
  aten.impl("_has_compatible_shallow_copy_type", &Compatible);
  aten.impl("view", &at::native::view);
  aten.impl("as_strided", &at::native::as_strided_tensorimpl);
  aten.impl("_reshape_alias", &at::native::_reshape_alias);
  aten.impl("unfold", &at::native::unfold);
  aten.impl("convolution_overrideable", &Convolution);
  aten.impl("_thnn_fused_lstm_cell", &LstmCell);
  aten.impl("_thnn_fused_gru_cell", &GruCell);
}

}  // namespace

void InstallFakeGpus() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("fakegpu");
    static const Guard guard;
    static const c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);
    c10::SetAllocator(kType, &TheMemory());
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    Register();
    SetGpuTypeForTest(kType);
  });
}

c10::Device FakeGpu(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

int64_t BytesOnFakeGpu(int index) { return counts.at(index).bytes; }

void LimitFakeGpu(int index, int64_t bytes) { counts.at(index).limit = bytes; }

int64_t OperatorsOnFakeGpu(int index) { return counts.at(index).operators; }

}  // namespace muster
