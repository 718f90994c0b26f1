// Offload of a device's parameters, or only of its gradients, through the Accelerator, on a device
// that computes without a GPU: the same bits as without offload, and memory that is free between
// steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/internal/core.h"
#include "muster/optim.h"
#include "muster/test_net.h"
#include "muster/utils.h"
#include "torch/nn/modules/container/sequential.h"
#include "worker/bigmodel/fake_gpus.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/test_error.h"
#include "worker/train/offloaded_state.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Weights = std::map<std::string, at::Tensor>;

struct Kind {
  std::string strategy = "zero3";
  Offload parameters = Offload::kNone, optimizer = Offload::kNone;
  bool in_backward = false;
  Offload gradients = Offload::kNone;
};

struct Outcome {
  Weights weights;
  int64_t bytes = 0;  // on the device between two steps
};

class DeviceOffloadTest : public testing::Test {
 protected:
  // Makes windows of one parameter or two.
  void SetUp() override {
    InstallFakeGpus();
    OffloadedState::SetDefaultWindowBytes(512);
  }
  void TearDown() override { OffloadedState::SetDefaultWindowBytes(OffloadedState::kWindowBytes); }

  // `ranks`: the number on this machine.
  static Accelerator On(const c10::Device& device, const AcceleratorOptions& options,
                        int ranks = 1) {
    JoinedProcess process;
    process.environment.local_world_size.value = ranks;
    process.comm = std::make_unique<LocalComm>();
    process.device = device;
    return Accelerator(std::make_shared<internal::Core>(options, std::move(process)));
  }

  // Trains six steps, with a checkpoint after three that another Accelerator loads.
  static Outcome Train(const Kind& kind) {
    const TestFolder folder;
    AcceleratorOptions options;
    options.sharding = ParseSharding(kind.strategy, 1);
    options.sharding->offload_parameters = kind.parameters;
    options.sharding->offload_parameters_path = folder.Path("parameters");
    options.sharding->offload_optimizer = kind.optimizer;
    options.sharding->offload_optimizer_path = folder.Path("optimizer");
    options.sharding->offload_gradients = kind.gradients;
    options.sharding->offload_gradients_path = folder.Path("gradients");
    options.sharding->optimizer_in_backward = kind.in_backward;
    Outcome outcome;
    for (const bool continued : {false, true}) {
      const int64_t before = BytesOnFakeGpu(0);
      Accelerator a = On(FakeGpu(0), options);
      torch::nn::Sequential net = MakeNet();
      const std::vector<at::Tensor> all = net->parameters();
      FusedAdamW adam({{{all[0], all[2]}, {.lr = 0.01}},
                       {{all[1], all[3], all[4], all[5]}, {.lr = 0.02, .weight_decay = 0}}});
      auto [model, optimizer] = a.prepare(net, adam);
      if (continued) {
        const absl::Status loaded = a.load_state(folder.Path("state"));
        EXPECT_TRUE(loaded.ok()) << loaded;
      }
      for (int step = continued ? 3 : 0; step < (continued ? 6 : 3); ++step) {
        const at::Tensor x = Random({12, 5}, 100 + step).to(a.device());
        const at::Tensor y = Random({12, 3}, 200 + step).to(a.device());
        a.backward((model(x) - y).square().sum());
        if (!kind.in_backward) a.clip_grad_norm_(model.parameters(), 0.5);
        optimizer.step();
        optimizer.zero_grad();
      }
      if (!continued) {
        const absl::Status saved = a.save_state(folder.Path("state"));
        EXPECT_TRUE(saved.ok()) << saved;
      }
      outcome.bytes = BytesOnFakeGpu(0) - before;
      a.summon_full_params(model, [&net = net] {
        const at::NoGradGuard no_grad;
        net->parameters()[3].add_(1);
      });
      outcome.weights.clear();
      for (const auto& [name, tensor] : a.get_state_dict(model)) {
        outcome.weights[name] = tensor.cpu().clone();
      }
    }
    return outcome;
  }

  // Returns prepare()'s error for a model whose first layer is on `first`, and the others on
  // `others`, and that is not moved.
  static std::string ErrorOfModelOn(const c10::Device& first, const c10::Device& others) {
    AcceleratorOptions options;
    options.device_placement = false;
    options.sharding = ParseSharding("zero3", 1);
    options.sharding->offload_parameters = Offload::kCpu;
    Accelerator a = On(FakeGpu(0), options);
    torch::nn::Sequential net = MakeNet();
    net->to(others);
    net[0]->to(first);
    return ErrorOf([&] {
      FusedAdamW adam(net->parameters());
      auto prepared = a.prepare(net, adam);
    });
  }

  static void ExpectEqual(const Weights& got, const Weights& want) {
    ASSERT_EQ(got.size(), want.size());
    for (const auto& [name, tensor] : want) EXPECT_TRUE(got.at(name).equal(tensor)) << name;
  }
};

TEST_F(DeviceOffloadTest, Parameters_TrainAndContinueAsThoseOnTheDevice) {
  for (const bool in_backward : {false, true}) {
    const Outcome want = Train({.in_backward = in_backward});
    for (const Offload parameters : {Offload::kCpu, Offload::kDisk}) {
      for (const Offload optimizer : {Offload::kNone, Offload::kCpu, Offload::kDisk}) {
        SCOPED_TRACE(c10::str(in_backward, " ", static_cast<int>(parameters), " ",
                              static_cast<int>(optimizer)));
        const Outcome got =
            Train({.parameters = parameters, .optimizer = optimizer, .in_backward = in_backward});
        ExpectEqual(got.weights, want.weights);
        EXPECT_LT(got.bytes, want.bytes);
      }
    }
  }
}

TEST_F(DeviceOffloadTest, Gradients_TrainAndContinueAsThoseOnTheDevice) {
  const Outcome want = Train({.strategy = "zero2"});
  for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
    for (const Offload optimizer : {Offload::kNone, Offload::kCpu, Offload::kDisk}) {
      for (const Offload gradients : {Offload::kCpu, Offload::kDisk}) {
        SCOPED_TRACE(
            c10::str(strategy, " ", static_cast<int>(gradients), " ", static_cast<int>(optimizer)));
        const Outcome got =
            Train({.strategy = strategy, .optimizer = optimizer, .gradients = gradients});
        ExpectEqual(got.weights, want.weights);
      }
    }
  }
}

TEST_F(DeviceOffloadTest, GradientsOfManyUnits_LeaveTheDeviceButForTwo) {
  constexpr int64_t kLayers = 12, kWidth = 64, kLayerBytes = kWidth * (kWidth + 1) * 4;
  for (const std::string strategy : {"zero2", "zero3"}) {
    std::map<Offload, int64_t> bytes;
    for (const Offload gradients : {Offload::kNone, Offload::kCpu, Offload::kDisk}) {
      const TestFolder folder;
      AcceleratorOptions options;
      options.sharding = ParseSharding(strategy, 1);
      options.sharding->offload_gradients = gradients;
      options.sharding->offload_gradients_path = folder.path();
      const int64_t before = BytesOnFakeGpu(0);
      Accelerator a = On(FakeGpu(0), options);
      torch::nn::Sequential net;
      for (int64_t i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
      FusedAdamW adam(net->parameters());
      auto [model, optimizer] = a.prepare(net, adam);
      a.backward(model(Random({2, kWidth}, 1).to(a.device())).square().sum());
      bytes[gradients] = BytesOnFakeGpu(0) - before;
    }
    for (const Offload gradients : {Offload::kCpu, Offload::kDisk}) {
      EXPECT_LE(bytes[gradients], bytes[Offload::kNone] - (kLayers - 3) * kLayerBytes)
          << strategy << " " << static_cast<int>(gradients);
    }
  }
}

TEST_F(DeviceOffloadTest, GradientsForWhichTheHostHasNoRoom_AreRefused) {
  for (const std::string strategy : {"zero2", "zero3"}) {
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, 1);
    options.sharding->offload_gradients = Offload::kCpu;
    Accelerator a = On(FakeGpu(0), options, std::numeric_limits<int>::max());
    EXPECT_THAT(ErrorOf([&] {
                  torch::nn::Sequential net = MakeNet();
                  net->to(FakeGpu(0));
                  auto model = a.prepare(net);
                }),
                AllOf(HasSubstr("offload_gradients to the memory of the host"),
                      HasSubstr("this process's parts of the gradients"),
                      HasSubstr("left for 2147483647 processes")));
  }
}

TEST_F(DeviceOffloadTest, StatesForWhichTheHostHasNoRoom_AreRefused) {
  // The remaining memory is divided among this many processes.
  for (const int ranks : {1, std::numeric_limits<int>::max()}) {
    for (const bool optimizer_first : {false, true}) {
      AcceleratorOptions options;
      options.sharding = ParseSharding("zero2", 1);
      options.sharding->offload_optimizer = Offload::kCpu;
      Accelerator a = On(FakeGpu(0), options, ranks);
      const std::string error = ErrorOf([&] {
        torch::nn::Sequential net = MakeNet();
        net->to(FakeGpu(0));
        FusedAdamW adam(net->parameters());
        if (optimizer_first) {
          auto optimizer = a.prepare(adam);
          auto model = a.prepare(net);
        } else {
          auto prepared = a.prepare(net, adam);
        }
      });
      if (ranks == 1) {
        EXPECT_EQ(error, "no error");
      } else {
        EXPECT_THAT(error, AllOf(HasSubstr("offload_optimizer to the memory of the host"),
                                 HasSubstr("left for 2147483647 processes")));
      }
    }
  }
}

TEST_F(DeviceOffloadTest, ModelsOfTwoDevices_AreRefused) {
  for (const bool first : {false, true}) {
    const std::string name = first ? "parameter '0.weight'" : "parameter '2.weight'";
    const c10::Device here = first ? at::kCPU : FakeGpu(0), others = first ? FakeGpu(0) : at::kCPU;
    EXPECT_THAT(ErrorOfModelOn(here, others),
                AllOf(HasSubstr(name + " is on cpu"), HasSubstr("the whole model")));
  }
  EXPECT_THAT(ErrorOfModelOn(FakeGpu(1), FakeGpu(0)), HasSubstr("the whole model"));
}

}  // namespace
}  // namespace muster
