#include "worker/train/seed.h"

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Context.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

TEST(SetSeed, SameSeed_SameNumbers) {
  EXPECT_EQ(SetSeed(7, /*rank=*/3), 7u);
  const at::Tensor first = at::rand({4});
  SetSeed(7, /*rank=*/1);
  EXPECT_TRUE(at::rand({4}).equal(first));
}

TEST(SetSeed, DeviceSpecific_AddsTheRank) {
  EXPECT_EQ(SetSeed(7, /*rank=*/3, {.device_specific = true}), 10u);
  const at::Tensor first = at::rand({4});
  SetSeed(10);
  EXPECT_TRUE(at::rand({4}).equal(first));
}

TEST(SetSeed, Deterministic_IsSwitchedOn) {
  SetSeed(7, 0, {.deterministic = true});
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  at::globalContext().setDeterministicAlgorithms(false, false);
}

TEST(RngState, SaveAndRestore_RepeatsTheNumbers) {
  SetSeed(1);
  at::rand({3});
  const auto states = SaveRngState();
  const at::Tensor first = at::rand({4});
  EXPECT_EQ(RestoreRngState(states), "");
  EXPECT_TRUE(at::rand({4}).equal(first));
}

TEST(RngState, DevicesThatDoNotMatch_AreNamed) {
  auto states = SaveRngState();
  states["cuda.99"] = at::zeros({8}, at::kByte);
  EXPECT_EQ(RestoreRngState(states), "cuda.99 is not on this machine");
  states.erase("cuda.99");
  states.erase("cpu");
  EXPECT_NE(RestoreRngState(states).find("cpu is not in the saved state"), std::string::npos);
  EXPECT_THROW(RestoreRngState({{"cpu", at::zeros({3})}}), c10::Error);
}

TEST(SynchronizeGenerator, AllRanks_DrawAsTheRoot) {
  std::vector<at::Tensor> draws(3);
  RunRanks(3, [&](Comm& comm) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(100 + comm.rank());
    SynchronizeGenerator(comm, generator, 1);
    draws[comm.rank()] = at::rand({5}, generator);
  });
  EXPECT_TRUE(draws[0].equal(draws[1]));
  EXPECT_TRUE(draws[2].equal(draws[1]));
  EXPECT_TRUE(draws[1].equal(at::rand({5}, at::make_generator<at::CPUGeneratorImpl>(101))));
}

}  // namespace
}  // namespace muster
