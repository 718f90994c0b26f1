// One model on two GPUs. On a machine with one, the tests run on that alone, and say so: then they
// do not test two GPUs. The rules are tested without a GPU, in
// worker/bigmodel/divided_dispatch_test.cc and muster/divided_lm_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/test_folder.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "muster/models.h"
#include "muster/offload.h"
#include "muster/test_decoder.h"
#include "tests/gpu/gpu_environment.h"
#include "worker/bigmodel/dispatch.h"
#include "worker/bigmodel/max_memory.h"
#include "worker/bigmodel/module_description.h"
#include "worker/bigmodel/test_nets.h"

namespace muster {
namespace {

const c10::Device kFirst(c10::kCUDA, 0);

class SeveralGpus : public testing::Test {
 protected:
  void SetUp() override {
    testing_support::NeedGpu();
    if (HasFatalFailure()) return;
    RecordProperty("gpus", CountGpus());
    if (CountGpus() > 1) return;
    std::printf("ONE GPU: this test ran on it alone, and says nothing about two GPUs\n");
    second_ = "0";
  }

  std::string second_ = "1";
};

// A folder with a model of eight layers.
class TextModelOnTwo : public SeveralGpus {
 protected:
  void SetUp() override {
    SeveralGpus::SetUp();
    if (HasFatalFailure()) return;
    ASSERT_TRUE(WriteTestDecoder(folder_.path(), /*layers=*/8).ok());
  }
  OffloadedCausalLm Load(const DeviceMapChoice& map, BigModelOptions options = {}) {
    auto loaded = load_offloaded_causal_lm(folder_.path(), map, options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *std::move(loaded);
  }
  static at::Tensor Logits(const OffloadedCausalLm& loaded) {
    const at::NoGradGuard no_grad;
    return models::CausalLm(loaded.model)
        ->forward({.input_ids = TestDecoderIds().to(loaded.weights->main_device())})
        .logits.cpu();
  }
  static at::Tensor Tokens(OffloadedCausalLm& loaded) {
    return generate(loaded.model, TestDecoderIds(), {}, {.max_new_tokens = 16}).tokens.cpu();
  }

  const TestFolder folder_;
};

TEST_F(TextModelOnTwo, Placements_SayTheSameBits) {
  OffloadedCausalLm whole = Load(DeviceEntries{{"", "0"}});
  const at::Tensor logits = Logits(whole), tokens = Tokens(whole);
  const DeviceEntries halves = {{"", second_},
                                {"model.embed_tokens", "0"},
                                {"model.layers.0", "0"},
                                {"model.layers.1", "0"},
                                {"model.layers.2", "0"}};
  DeviceEntries with_others = halves;
  with_others.insert(with_others.end(),
                     {{"model.layers.1.mlp", "cpu"}, {"model.layers.6", "disk"}});
  for (const DeviceEntries& map : {halves, with_others}) {
    OffloadedCausalLm divided = Load(map, {.ring_bytes = uint64_t{2} << 20});
    for (int pass = 0; pass < 3; ++pass) EXPECT_TRUE(at::equal(Logits(divided), logits));
    EXPECT_TRUE(at::equal(Tokens(divided), tokens));
  }
}

TEST_F(TextModelOnTwo, PlanWithLimits_IsCarriedOut) {
  OffloadedCausalLm whole = Load(DeviceEntries{{"", "0"}});
  BigModelOptions options;
  options.max_memory = {{"0", 6e6}, {"cpu", 1e9}};
  if (second_ == "1") options.max_memory.emplace_back("1", 6e6);
  OffloadedCausalLm divided = Load("auto", options);
  EXPECT_EQ(divided.weights->resident().size(), second_ == "1" ? 2u : 1u);
  EXPECT_TRUE(at::equal(Logits(divided), Logits(whole)));
}

TEST_F(TextModelOnTwo, ManyPassesThatTheHostQueuesAhead_StayInOrder) {
  OffloadedCausalLm whole = Load(DeviceEntries{{"", "0"}});
  OffloadedCausalLm divided =
      Load(DeviceEntries{{"", second_}, {"model.embed_tokens", "0"}, {"model.layers.0", "0"}});
  const at::Tensor logits = Logits(whole);
  const at::NoGradGuard no_grad;
  const at::Tensor ids = TestDecoderIds().to(kFirst);
  std::vector<at::Tensor> passes;
  for (int pass = 0; pass < 100; ++pass) {
    passes.push_back(divided.model->forward({.input_ids = ids}).logits);
  }
  for (const at::Tensor& pass : passes) EXPECT_TRUE(at::equal(pass.cpu(), logits));
}

TEST_F(TextModelOnTwo, Adapters_GetTheGradientsOfTheWholeModel) {
  const auto run = [&](const DeviceEntries& map) {
    OffloadedCausalLm loaded = Load(map);
    models::AddLora(*loaded.model, {.rank = 2});
    at::manual_seed(4);
    for (at::Tensor& parameter : models::LoraParameters(*loaded.model)) {
      const at::NoGradGuard no_grad;
      parameter.copy_(at::randn(parameter.sizes()));
    }
    const at::Tensor ids = TestDecoderIds().to(kFirst);
    loaded.model->forward({.input_ids = ids, .labels = ids}).loss.backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : models::LoraParameters(*loaded.model)) {
      gradients.push_back(parameter.grad().cpu());
    }
    return gradients;
  };
  const auto whole = run({{"", "0"}});
  const auto divided = run({{"", "0"}, {"model.layers.3", second_}, {"model.layers.4", second_}});
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(at::allclose(divided[i], whole[i], 1e-4, 1e-5)) << i;
  }
}

// Runs a module that knows nothing of devices on two threads, each of which has its own stream of
// each GPU.
TEST_F(SeveralGpus, AnyModule_ComputesTheSameOnSeveralThreads) {
  TextNet whole(50, 64, 4), divided(50, 64, 4);
  {
    const at::NoGradGuard no_grad;
    const auto from = whole->named_parameters();
    for (const auto& to : divided->named_parameters()) to.value().copy_(from[to.key()]);
  }
  const auto on_one = DispatchModel(*whole, {{"", "0"}});
  ASSERT_TRUE(on_one.ok()) << on_one.status();
  const auto on_two =
      DispatchModel(*divided, {{"", "0"}, {"layers.1", second_}, {"layers.3", second_}});
  ASSERT_TRUE(on_two.ok()) << on_two.status();
  const at::Tensor ids = at::arange(24).view({2, 12}).to(kFirst);
  const auto compute = [&](TextNet& net) {
    const at::NoGradGuard no_grad;
    return net->forward(ids).cpu();
  };
  const at::Tensor expected = compute(whole);
  // The work of the default streams is visible to other streams.
  const c10::impl::VirtualGuardImpl gpus(c10::kCUDA);
  const std::vector<c10::DeviceIndex> used =
      second_ == "0" ? std::vector<c10::DeviceIndex>{0} : std::vector<c10::DeviceIndex>{0, 1};
  for (const c10::DeviceIndex gpu : used) gpus.synchronizeDevice(gpu);
  std::vector<int> wrong(2, 0);
  std::vector<std::thread> threads;
  for (int& count : wrong) {
    threads.emplace_back([&] {
      std::vector<c10::Stream> streams;
      for (const c10::DeviceIndex gpu : used) {
        streams.push_back(gpus.getStreamFromGlobalPool({c10::kCUDA, gpu}));
      }
      const c10::MultiStreamGuard guard(streams);
      for (int pass = 0; pass < 50; ++pass) count += at::equal(compute(divided), expected) ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, testing::Each(0));
  EXPECT_EQ(std::to_string(divided->layers->ptr(1)->as<BlockImpl>()->up->weight.device().index()),
            second_);
}

TEST_F(SeveralGpus, GpuBeyondTheLast_IsRefused) {
  TextNet net(50, 64, 4);
  const auto refused = DispatchModel(*net, {{"", std::to_string(CountGpus())}});
  EXPECT_THAT(std::string(refused.status().message()), testing::HasSubstr("does not exist"));
}

}  // namespace
}  // namespace muster
