#include "worker/collective/process_group.h"

#include <cstdlib>
#include <thread>

#include "ATen/ops/full.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(MakeGlooGroup, TwoRanks_AllReduce) {
  // There is one recorder for all groups of a process, which is unsafe across threads.
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      GlooOptions options;
      options.rank = rank;
      options.size = 2;
      // The route towards a loopback address is loopback: the result of one host, by the code for
      // several.
      options.single_host = rank == 0;
      options.towards = "127.0.0.1:29400";
      auto group = MakeGlooGroup(store, options);
      EXPECT_EQ(group->getRank(), rank);
      EXPECT_EQ(group->getBackendName(), "gloo");
      std::vector<at::Tensor> tensors = {at::full({3}, rank + 1.0)};
      group->getBackend(c10::DeviceType::CPU)->allreduce(tensors)->wait();
      EXPECT_EQ(tensors[0][2].item<double>(), 3);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(MakeGlooGroup, D30_TimeoutIsHonouredAsGiven_AlsoADefaultOne) {
  for (const auto timeout : {std::chrono::milliseconds(1234), std::chrono::milliseconds(600000),
                             std::chrono::milliseconds(1800000)}) {
    GlooOptions options;
    options.timeout = timeout;
    auto group = MakeGlooGroup(c10::make_intrusive<c10d::HashStore>(), options);
    EXPECT_EQ(group->getDefaultBackend()->getBackendOptions()->timeout, timeout);
  }
}

TEST(MakeGlooGroup, APeerThatNeverComes_TimesOutNamingTheGroup) {
  GlooOptions options;
  options.size = 2;
  options.single_host = true;
  options.timeout = std::chrono::milliseconds(50);
  options.name = "lonely";
  try {
    MakeGlooGroup(c10::make_intrusive<c10d::HashStore>(), options);
    ADD_FAILURE() << "must throw";
  } catch (const c10::Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("Gloo group 'lonely': rank 0 of 2 at 127.0.0.1"));
  }
}

TEST(MakeGlooGroup, BadOptions_AreRefused) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THROW(MakeGlooGroup(store, {.rank = 2, .size = 2}), c10::Error);
  EXPECT_THROW(MakeGlooGroup(store, {.rank = 0, .size = 2}), c10::Error) << "no way to choose";
  EXPECT_THROW(MakeGlooGroup(store, {.timeout = std::chrono::milliseconds(0)}), c10::Error);
  EXPECT_THROW(MakeGlooGroup(nullptr, {}), c10::Error);
}

}  // namespace
}  // namespace muster
