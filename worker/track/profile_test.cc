#include "worker/track/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <stdexcept>

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
    const absl::Status status = waiting.Stop().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("none of the 1 step(s)"));
  }
  {
    Profile warming({.output_dir = folder, .schedule = {.warmup = 5, .active = 1}});
    EXPECT_EQ(warming.Stop().status().code(), absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_FALSE(PathExists(folder));
  EXPECT_THROW(Profile({.schedule = {.wait = 1}}), c10::Error);
  EXPECT_THROW(Profile({.schedule = {.active = -1}}), c10::Error);
}

TEST(Profile, ProfileThatWaitsInItsSchedule_IsRunning) {
  const TestFolder scratch;
  {
    Profile waiting({.output_dir = scratch.Path("a"), .schedule = {.wait = 1, .active = 1}});
    try {
      Profile second({.output_dir = scratch.Path("b")});
      ADD_FAILURE() << "made";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("end it first"));
    }
    at::ones({2, 2});
    waiting.step();
    waiting.step();
    EXPECT_TRUE(waiting.Stop().ok());
    Profile after({.output_dir = scratch.Path("b")});
    EXPECT_TRUE(after.Stop().ok());
  }
  EXPECT_THROW(Profile({.schedule = {.active = -1}}), c10::Error);
  EXPECT_TRUE(Profile({.output_dir = scratch.Path("c")}).Stop().ok()) << "a refused one holds none";
}

TEST(Profile, CallbackThatThrows_IsTheResultAndDoesNotEndTheProcess) {
  const TestFolder scratch;
  const auto fails = [](const std::string&) { throw std::runtime_error("no room"); };
  { Profile left({.output_dir = scratch.Path("a"), .on_trace_ready = fails}); }
  Profile profile({.output_dir = scratch.Path("b"), .on_trace_ready = fails});
  EXPECT_EQ(profile.Stop().status().message(), "no room");
}

TEST(Profile, TraceThatCannotBeWritten_IsReportedWhateverFollows) {
  const TestFolder scratch;
  const std::string folder = scratch.Path("profile");
  Profile profile({.output_dir = folder, .schedule = {.active = 1}});
  // A folder in the place of the second trace.
  ASSERT_TRUE(MakeDirectories(JoinPath(folder, "profile_0_1.json/x")).ok());
  for (int i = 0; i < 3; ++i) {
    at::ones({2, 2});
    profile.step();
  }
  EXPECT_THAT(std::string(profile.Stop().status().message()),
              testing::HasSubstr("profile_0_1.json"));
  EXPECT_THAT(*ListDirectory(folder), testing::ElementsAre("profile_0.json", "profile_0_1.json",
                                                           "profile_0_2.json", "profile_0_3.json"));
}

TEST(Profile, FullDisk_IsNamedAndLeavesNothing) {
  const TestFolder scratch;
  const std::string folder = scratch.Path("profile");
  Profile profile({.output_dir = folder});
  for (int i = 0; i < 1000; ++i) at::ones({2, 2});
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit full = {1000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &full);
  const absl::Status status = profile.Stop().status();
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("is the disk full?"));
  EXPECT_THAT(*ListDirectory(folder), testing::ElementsAre());
}

TEST(Profile, FolderThatCannotBeMade_IsAnError) {
  Profile profile({.output_dir = "/proc/nowhere"});
  EXPECT_FALSE(profile.Stop().ok());
}

}  // namespace
}  // namespace muster
