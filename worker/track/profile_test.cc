#include "worker/track/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ATen/core/Tensor.h"
#include "ATen/ops/ones.h"
#include "base/file.h"
#include "base/json.h"
#include "base/test_folder.h"

namespace muster {
namespace {

TEST(Profile, Scope_WritesATraceOfForwardAndBackward) {
  const TestFolder scratch;
  const std::string folder = scratch.Path("profile");
  Profile profile({.output_dir = folder, .rank = 3, .record_shapes = true});
  at::Tensor weight = at::ones({8, 8}).requires_grad_();
  weight.mm(at::ones({8, 8})).sum().backward();
  const auto path = profile.Stop();
  ASSERT_TRUE(path.ok()) << path.status();
  EXPECT_EQ(*path, JoinPath(folder, "profile_3.json"));
  EXPECT_EQ(*profile.Stop(), *path);
  const auto trace = ParseJson(*ReadFile(*path), *path, {.max_bytes = size_t{256} << 20});
  ASSERT_TRUE(trace.ok()) << trace.status();
  std::set<std::string> names;
  for (const auto& event : trace->at("traceEvents")) {
    if (event.contains("name")) names.insert(event["name"].get<std::string>());
  }
  EXPECT_TRUE(names.count("aten::mm") > 0);
  EXPECT_TRUE(names.count("MmBackward0") > 0) << "the backward thread is in the trace";
  EXPECT_EQ(ListDirectory(folder)->size(), 1u);
  EXPECT_TRUE(RemoveTree(folder).ok());
}

TEST(Profile, SecondOneInside_IsRefused) {
  const TestFolder scratch;
  const std::string folder = scratch.Path("profile");
  {
    Profile outer({.output_dir = folder});
    EXPECT_THROW(Profile inner({.output_dir = folder}), c10::Error);
  }
  EXPECT_TRUE(PathExists(JoinPath(folder, "profile_0.json"))) << "left scope writes too";
  EXPECT_TRUE(RemoveTree(folder).ok());
}

TEST(ProfileActionAt, Steps_FollowTorchsSchedule) {
  const auto letters = [](const ProfileSchedule& schedule, int64_t steps) {
    std::string text;
    for (int64_t i = 0; i < steps; ++i) {
      text += "-wRS"[static_cast<int>(ProfileActionAt(schedule, i))];
    }
    return text;
  };
  EXPECT_EQ(letters({.wait = 1, .warmup = 1, .active = 2, .repeat = 2, .skip_first = 2}, 12),
            "---wRS-wRS--");
  EXPECT_EQ(letters({.active = 1}, 3), "SSS");
  EXPECT_EQ(letters({.warmup = 1, .active = 3}, 6), "wRRSwR");
}

TEST(Profile, Schedule_WritesATracePerRoundOfItsActiveSteps) {
  const TestFolder scratch;
  const std::string folder = scratch.Path("profile");
  std::vector<std::string> ready;
  Profile profile({.output_dir = folder,
                   .schedule = {.wait = 1, .warmup = 1, .active = 1, .repeat = 2},
                   .on_trace_ready = [&](const std::string& path) { ready.push_back(path); }});
  for (int64_t i = 0; i < 8; ++i) {
    // The size identifies the steps in the traces.
    at::ones({i + 1, i + 1}).mm(at::ones({i + 1, i + 1}));
    profile.step();
  }
  const auto last = profile.Stop();
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_THAT(ready, testing::ElementsAre(JoinPath(folder, "profile_0.json"),
                                          JoinPath(folder, "profile_0_1.json")));
  EXPECT_EQ(*last, ready[1]);
  for (const std::string& path : ready) {
    const auto trace = ParseJson(*ReadFile(path), path, {.max_bytes = size_t{256} << 20});
    ASSERT_TRUE(trace.ok()) << trace.status();
    int64_t products = 0;
    for (const auto& event : trace->at("traceEvents")) {
      products += event.value("name", "") == "aten::mm" ? 1 : 0;
    }
    EXPECT_EQ(products, 1) << path;
  }
  EXPECT_TRUE(RemoveTree(folder).ok());
}

TEST(Profile, ScheduleThatRecordsNothing_SaysSo) {
  const TestFolder scratch;
  const std::string folder = scratch.Path("profile");
  {
    Profile waiting({.output_dir = folder, .schedule = {.wait = 5, .active = 1}});
    waiting.step();
    EXPECT_EQ(waiting.Stop().status().code(), absl::StatusCode::kFailedPrecondition);
  }
  {
    Profile warming({.output_dir = folder, .schedule = {.warmup = 5, .active = 1}});
    EXPECT_EQ(warming.Stop().status().code(), absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_FALSE(PathExists(folder));
  EXPECT_THROW(Profile({.schedule = {.wait = 1}}), c10::Error);
  EXPECT_THROW(Profile({.schedule = {.active = -1}}), c10::Error);
}

TEST(Profile, FolderThatCannotBeMade_IsAnError) {
  Profile profile({.output_dir = "/proc/nowhere"});
  EXPECT_FALSE(profile.Stop().ok());
}

}  // namespace
}  // namespace muster
