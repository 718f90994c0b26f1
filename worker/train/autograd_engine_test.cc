#include "worker/train/autograd_engine.h"

#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/variable.h"

namespace muster {
namespace {

using torch::autograd::Engine;

const c10::Device kDevice(c10::kPrivateUse1, 0);

void BackwardOnCpu() {
  const at::Tensor x = at::ones({2}).requires_grad_();
  x.mul(3).sum().backward();
  EXPECT_EQ(x.grad().sum().item<float>(), 6);
}

// A step of a backward pass on a device, which runs in that device's thread.
struct OnDevice : torch::autograd::Node {
  OnDevice() {
    add_input_metadata(at::TensorOptions(kDevice).dtype(at::kFloat), c10::SymIntArrayRef({}),
                       /*is_tensor_subclass=*/false, /*is_nested=*/false, std::nullopt);
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    thread = std::this_thread::get_id();
    return {};
  }
  std::thread::id thread;
};

// The previous step, on the CPU. It has no gradient to pass on: no tensor can be made there.
struct OnCpu : torch::autograd::Node {
  explicit OnCpu(const std::shared_ptr<Node>& next) {
    add_input_metadata(at::ones({}));
    add_next_edge({next, 0});
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    return {at::Tensor()};
  }
};

// A backward pass in a step of another one, nested to a given depth.
struct Nested : torch::autograd::Node {
  explicit Nested(int depth) : depth(depth) { add_input_metadata(at::ones({})); }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    if (depth > 0) Run(depth - 1);
    return {};
  }
  static void Run(int depth) {
    Engine::get_default_engine().execute({{std::make_shared<Nested>(depth), 0}}, {at::ones({})},
                                         false, false, true, {});
  }
  const int depth;
};

int64_t Threads() {
  const std::filesystem::directory_iterator all("/proc/self/task");
  return std::distance(begin(all), end(all));
}

class Doubled : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override { tensor_ = tensor.detach().mul(2); }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  at::Tensor tensor_;
};

thread_local bool doubles = false;
std::unique_ptr<torch::autograd::SavedVariableHooks> Hooks() {
  return doubles ? std::make_unique<Doubled>() : nullptr;
}

// Only one test, because an engine belongs to the whole process, and the order of events matters.
TEST(InstallAutogradEngine, DeviceThatComesAfterABackwardPass_GetsAThreadAndHooksAreAsked) {
  BackwardOnCpu();  // LibTorch's engine counts the devices: none
  ASSERT_TRUE(InstallAutogradEngine());
  Nested::Run(100);  // beyond the depth at which LibTorch continues in another thread
  const int64_t threads = Threads();
  for (int i = 0; i < 40; ++i) Nested::Run(100);
  EXPECT_LT(Threads(), threads + 20) << "those of the first passes serve the others";

  const c10::impl::DeviceGuardImplRegistrar device(
      kDevice.type(), new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>());
  ASSERT_TRUE(InstallAutogradEngine()) << "again";
  BackwardOnCpu();

  const auto node = std::make_shared<OnDevice>();
  Engine::get_default_engine().execute({{std::make_shared<OnCpu>(node), 0}}, {at::ones({})}, false,
                                       false, true, {});
  EXPECT_NE(node->thread, std::thread::id());
  EXPECT_NE(node->thread, std::this_thread::get_id());

  ASSERT_TRUE(InstallAutogradEngine(&Hooks));
  doubles = true;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x.mul(x).sum();
  doubles = false;
  y.backward();
  EXPECT_EQ(x.grad().sum().item<float>(), 8);
  ASSERT_TRUE(InstallAutogradEngine()) << "keeps the hooks";
  BackwardOnCpu();
}

}  // namespace
}  // namespace muster
