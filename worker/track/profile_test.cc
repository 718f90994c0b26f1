#include "worker/track/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ATen/core/Tensor.h"
#include "ATen/ops/ones.h"
#include "base/file.h"
#include "base/json.h"

namespace muster {
namespace {

std::string Scratch() { return JoinPath(testing::TempDir(), "profile-" + RandomHex()); }

TEST(Profile, Scope_WritesATraceOfForwardAndBackward) {
  const std::string folder = Scratch();
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
  const std::string folder = Scratch();
  {
    Profile outer({.output_dir = folder});
    EXPECT_THROW(Profile inner({.output_dir = folder}), c10::Error);
  }
  EXPECT_TRUE(PathExists(JoinPath(folder, "profile_0.json"))) << "left scope writes too";
  EXPECT_TRUE(RemoveTree(folder).ok());
}

TEST(Profile, FolderThatCannotBeMade_IsAnError) {
  Profile profile({.output_dir = "/proc/nowhere"});
  EXPECT_FALSE(profile.Stop().ok());
}

}  // namespace
}  // namespace muster
