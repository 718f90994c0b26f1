// make_optimizer() and make_scheduler(): the sections of a DeepSpeed configuration in a loop.
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muster/accelerator.h"
#include "muster/optim.h"
#include "muster/test_ranks.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/sgd.h"

namespace muster {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// Returns what each rank threw under a DeepSpeed config of stage 1 with its `sections`.
std::vector<std::string> ErrorsUnderEach(const std::vector<std::string>& sections,
                                         const std::function<void(Accelerator&)>& function,
                                         const AcceleratorOptions& options = {}) {
  const int ranks = static_cast<int>(sections.size());
  std::vector<std::string> errors(ranks);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunGlooRanks(ranks, [&](Comm& comm) {
    const std::string file = TestPath("deepspeed" + std::to_string(comm.rank()) + ".json");
    std::ofstream(file) << R"({"train_micro_batch_size_per_gpu": 1, )"
                        << R"("zero_optimization": {"stage": 1})" << sections[comm.rank()] << "}";
    JoinedProcess process;
    process.environment.rank.value = process.environment.local_rank.value = comm.rank();
    process.environment.world_size.value = process.environment.local_world_size.value = ranks;
    process.environment.engine_variables = {{"ACCELERATE_USE_DEEPSPEED", "true"},
                                            {"ACCELERATE_DEEPSPEED_CONFIG_FILE", file}};
    process.store = store;
    process.comm = std::make_unique<BorrowedComm>(comm);
    try {
      Accelerator accelerator(std::make_shared<internal::Core>(options, std::move(process)));
      function(accelerator);
    } catch (const c10::Error& error) {
      errors[comm.rank()] = error.what_without_backtrace();
    }
    comm.Barrier();
  });
  return errors;
}

// The same with a config that is the same on all ranks.
std::vector<std::string> ErrorsUnder(const std::string& sections,
                                     const std::function<void(Accelerator&)>& function,
                                     int ranks = 1, const AcceleratorOptions& options = {}) {
  return ErrorsUnderEach(std::vector<std::string>(ranks, sections), function, options);
}

torch::nn::Linear OneWeight() {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  const at::NoGradGuard no_grad;
  net->weight.fill_(2);
  return net;
}

// Returns the hyper-parameters of the optimizer that a section makes, as in a checkpoint.
PlainState GroupsOf(const std::string& section, const OptimizerArguments& arguments = {}) {
  PlainState groups;
  EXPECT_THAT(
      ErrorsUnder(R"(, "optimizer": )" + section,
                  [&](Accelerator& a) {
                    groups =
                        a.make_optimizer(OneWeight()->parameters(), arguments)->SaveState().groups;
                  }),
      Each(""));
  return groups;
}

// Each machine reads its own file.
TEST(ConfigFiles, ThatDiffer_AreNamedOnEveryRank) {
  const auto nothing = [](Accelerator&) {};
  const std::string adam = R"(, "optimizer": {"type": "Adam", "params": {"lr": )";
  const std::string warmup =
      R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": )";
  const std::vector<std::tuple<std::string, std::string, std::string>> files = {
      {R"(, "gradient_clipping": 1.0)", R"(, "gradient_clipping": 0.5)", "gradient_clipping=0.5"},
      {R"(, "gradient_clipping": 1.0)", "", "gradient_clipping=1.0"},
      {adam + "0.25}}", adam + "0.125}}", "optimizer.lr=0.125"},
      {adam + "0.25}}", adam + R"("auto"}})", "optimizer.params.lr=auto"},
      {adam + "0.25}}" + warmup + "8}}", adam + "0.25}}" + warmup + "9}}",
       "scheduler.warmup_steps=9"}};
  for (const auto& [first, other, named] : files) {
    EXPECT_THAT(ErrorsUnderEach({first, other}, nothing),
                Each(testing::AllOf(HasSubstr(named), HasSubstr("the same settings"))));
    EXPECT_THAT(ErrorsUnderEach({other, other}, nothing), Each(""));
  }
}

TEST(AccumulationSteps, OfTheLoop_AreTheConfigs) {
  const std::string sections = R"(, "gradient_accumulation_steps": 4)";
  AcceleratorOptions options;
  options.accumulation.num_steps = 4;
  EXPECT_THAT(ErrorsUnder(
                  sections, [](Accelerator&) {}, 1, options),
              Each(""));
  options.accumulation.num_steps = 1;
  EXPECT_THAT(ErrorsUnder(
                  sections, [](Accelerator&) {}, 1, options),
              Each(HasSubstr("gradient_accumulation_steps 4, and the process has 1")));
  options.accumulation.num_steps = 2;
  EXPECT_THAT(ErrorsUnder(R"(, "gradient_accumulation_steps": 1)", [](Accelerator&) {}, 1, options),
              Each(HasSubstr("gradient_accumulation_steps 1, and the process has 2")));
}

TEST(MakeOptimizer, WhatTheSectionLeavesOut_HasDeepSpeedsDefault) {
  PlainState groups = GroupsOf(R"({"type": "AdamW"})", {.lr = 7, .weight_decay = 7});
  EXPECT_EQ(groups.at("0.lr"), std::vector<double>{1e-3});
  EXPECT_EQ(groups.at("0.weight_decay"), std::vector<double>{0});
  EXPECT_EQ(groups.at("0.betas"), (std::vector<double>{0.9, 0.999}));
  EXPECT_EQ(groups.at("0.eps"), std::vector<double>{1e-8});
  groups = GroupsOf(R"({"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.25, )"
                    R"("betas": [0.8, 0.95], "eps": 1e-6}})");
  EXPECT_EQ(groups.at("0.lr"), std::vector<double>{0.5});
  EXPECT_EQ(groups.at("0.weight_decay"), std::vector<double>{0.25});
  EXPECT_EQ(groups.at("0.betas"), (std::vector<double>{0.8, 0.95}));
  EXPECT_EQ(groups.at("0.eps"), std::vector<double>{1e-6});
  groups = GroupsOf(R"({"type": "SGD", "params": {"momentum": 0.9, "nesterov": true}})");
  EXPECT_EQ(groups.at("0.momentum"), std::vector<double>{0.9});
  EXPECT_EQ(groups.at("0.nesterov"), std::vector<double>{1});
  groups = GroupsOf(R"({"type": "Adagrad"})");
  EXPECT_EQ(groups.at("0.lr"), std::vector<double>{1e-2});
}

TEST(MakeOptimizer, Auto_IsTheArgument) {
  const PlainState groups =
      GroupsOf(R"({"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto"}})",
               {.lr = 0.5, .weight_decay = 0.25});
  EXPECT_EQ(groups.at("0.lr"), std::vector<double>{0.5});
  EXPECT_EQ(groups.at("0.weight_decay"), std::vector<double>{0.25});
}

TEST(MakeOptimizer, TheType_IsThatOfTheUpdate) {
  // One step from the weight 2 with the gradient 1 and a decay of 0.5: decoupled, and not.
  const auto weight = [](const std::string& type) {
    double after = 0;
    EXPECT_THAT(ErrorsUnder(R"(, "optimizer": {"type": ")" + type +
                                R"(, "params": {"lr": 0.1, "weight_decay": 0.5}})",
                            [&](Accelerator& a) {
                              torch::nn::Linear net = OneWeight();
                              auto made = a.make_optimizer(net->parameters());
                              auto [model, optimizer] = a.prepare(net, made);
                              a.backward(model(at::ones({1, 1})).sum());
                              optimizer.step();
                              after = net->weight.item<double>();
                            }),
                Each(""));
    return after;
  };
  EXPECT_NEAR(weight(R"(AdamW")"), 2 * (1 - 0.1 * 0.5) - 0.1, 1e-6);
  EXPECT_NEAR(weight(R"(Adam")"), 2 * (1 - 0.1 * 0.5) - 0.1, 1e-6);
  EXPECT_NEAR(weight(R"(SGD")"), 2 - 0.1 * (1 + 0.5 * 2), 1e-6);
  EXPECT_NEAR(weight(R"(Adagrad")"), 2 - 0.1, 1e-6);
}

TEST(MakeOptimizer, Groups_DifferWhereTheySay) {
  EXPECT_THAT(ErrorsUnder(R"(, "optimizer": {"type": "SGD", "params": {"weight_decay": 0.5}})",
                          [](Accelerator& a) {
                            torch::nn::Linear net(2, 2);
                            auto sgd = a.make_optimizer(std::vector<ConfiguredGroup>{
                                {.params = {net->weight}},
                                {.params = {net->bias}, .lr = 0.5, .weight_decay = 0}});
                            EXPECT_EQ(sgd->lr(0), 1e-3);
                            EXPECT_EQ(sgd->lr(1), 0.5);
                            const PlainState groups = sgd->SaveState().groups;
                            EXPECT_EQ(groups.at("0.weight_decay"), std::vector<double>{0.5});
                            EXPECT_EQ(groups.at("1.weight_decay"), std::vector<double>{0});
                          }),
              Each(""));
}

constexpr char kAdam[] = R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}})";
constexpr char kWarmup[] =
    R"(, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", )"
    R"("warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", )"
    R"("total_num_steps": "auto"}})";

TEST(MakeScheduler, Auto_IsResolvedAsAccelerateDoes) {
  for (const bool split : {false, true}) {
    AcceleratorOptions options;
    options.data_loader.split_batches = split;
    std::vector<double> rates;
    EXPECT_THAT(ErrorsUnder(
                    std::string(kAdam) + kWarmup,
                    [&](Accelerator& a) {
                      torch::nn::Linear net = OneWeight();
                      auto adam = a.make_optimizer(net->parameters());
                      auto warmup =
                          a.make_scheduler(*adam, {.total_num_steps = 11, .warmup_num_steps = 2});
                      auto [model, optimizer, scheduler] = a.prepare(net, adam, warmup);
                      for (int step = 0; step < 8; ++step) {
                        if (a.is_main_process()) rates.push_back(optimizer.lr());
                        a.backward(model(at::ones({1, 1})).sum());
                        optimizer.step();
                        scheduler.step();
                        optimizer.zero_grad();
                      }
                    },
                    2, options),
                Each(""));
    // 11 steps on two processes are 6 on each; the warm-up is not divided.
    const double total = split ? 11 : 6;
    std::vector<double> want = {0, 0, 0.005};
    for (int i = 2; i < 7; ++i) want.push_back(0.01 * std::max(0.0, (total - i) / (total - 2)));
    ASSERT_EQ(rates.size(), want.size());
    for (size_t s = 0; s < want.size(); ++s) EXPECT_NEAR(rates[s], want[s], 1e-12) << split << s;
  }
}

TEST(MakeScheduler, WithoutAMaximum_EachGroupHasItsOwn) {
  EXPECT_THAT(
      ErrorsUnder(std::string(kAdam) +
                      R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}})",
                  [&](Accelerator& a) {
                    torch::nn::Linear net(1, 1);
                    std::vector<ConfiguredGroup> groups(2);
                    groups[0].params = {net->weight};
                    groups[0].lr = 0.5;
                    groups[1].params = {net->bias};
                    auto adam = a.make_optimizer(std::move(groups));
                    const double second = adam->lr(1);
                    const auto warmup = a.make_scheduler(*adam);
                    EXPECT_DOUBLE_EQ(warmup->Lr(9, 0.5), 0.5);
                    EXPECT_DOUBLE_EQ(warmup->Lr(9, second), second);
                    EXPECT_NE(second, 0.5);
                    const auto prepared = a.prepare(net, adam, warmup);
                  }),
      Each(""));
}

TEST(MakeScheduler, WithoutALength_IsRefused) {
  EXPECT_THAT(ErrorsUnder(std::string(kAdam) + kWarmup,
                          [](Accelerator& a) {
                            auto adam = a.make_optimizer(OneWeight()->parameters());
                            (void)a.make_scheduler(*adam);
                          }),
              Each(HasSubstr("total_num_steps of the DeepSpeed config is \"auto\"")));
}

TEST(MakeOptimizer, WithoutTheSection_IsRefused) {
  EXPECT_THAT(
      ErrorsUnder("", [](Accelerator& a) { (void)a.make_optimizer(OneWeight()->parameters()); }),
      Each(HasSubstr("needs a DeepSpeed config with the section \"optimizer\"")));
  EXPECT_THAT(ErrorsUnder("",
                          [](Accelerator& a) {
                            FusedSGD sgd(OneWeight()->parameters());
                            (void)a.make_scheduler(sgd);
                          }),
              Each(HasSubstr("needs a DeepSpeed config with the section \"scheduler\"")));
}

TEST(ConfiguredSections, ThatAProgramDoesNotAskFor_AreRefused) {
  EXPECT_THAT(ErrorsUnder(kAdam,
                          [](Accelerator& a) {
                            torch::nn::Linear net = OneWeight();
                            torch::optim::SGD sgd(net->parameters(), 0.1);
                            (void)a.prepare(net, sgd);
                          }),
              Each(HasSubstr("prepares an optimizer of its own")));
  EXPECT_THAT(ErrorsUnder(kAdam,
                          [](Accelerator& a) {
                            torch::nn::Linear net = OneWeight();
                            FusedSGD sgd(net->parameters());
                            (void)a.prepare(net, sgd);
                          }),
              Each(HasSubstr("prepares an optimizer of its own")));
  EXPECT_THAT(ErrorsUnder(kAdam,
                          [](Accelerator& a) {
                            torch::nn::Linear net = OneWeight();
                            auto model = a.prepare(net);
                            a.backward(model(at::ones({1, 1})).sum());
                          }),
              Each(HasSubstr("without a prepared optimizer")));
  EXPECT_THAT(ErrorsUnder(kWarmup,
                          [](Accelerator& a) {
                            torch::nn::Linear net = OneWeight();
                            FusedSGD sgd(net->parameters());
                            (void)a.prepare(net, sgd, StepLR(10));
                          }),
              Each(HasSubstr("prepares a schedule of its own")));
  EXPECT_THAT(ErrorsUnder(kWarmup,
                          [](Accelerator& a) {
                            torch::nn::Linear net = OneWeight();
                            FusedSGD sgd(net->parameters());
                            auto [model, optimizer] = a.prepare(net, sgd);
                            a.backward(model(at::ones({1, 1})).sum());
                            optimizer.step();
                          }),
              Each(HasSubstr("without a schedule of this optimizer")));
  // A process that trains nothing.
  EXPECT_THAT(ErrorsUnder(std::string(kAdam) + kWarmup,
                          [](Accelerator& a) {
                            torch::nn::Linear net = OneWeight();
                            auto model = a.prepare(net);
                            const at::NoGradGuard no_grad;
                            EXPECT_EQ(model(at::ones({1, 1})).item<double>(), 2);
                          }),
              Each(""));
}

}  // namespace
}  // namespace muster
