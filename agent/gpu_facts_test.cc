#include "agent/gpu_facts.h"

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class GpuFactsTest : public ::testing::Test {
 protected:
  ~GpuFactsTest() override { unsetenv("FAKE_NVML"); }
  absl::StatusOr<GpuFacts> Read(const char* kind) {
    setenv("FAKE_NVML", kind, 1);
    return ReadGpuFacts("agent/libfake_nvml.so");
  }
};

TEST_F(GpuFactsTest, Gpus_HaveTheirMemoryAndTheFabricOfAll) {
  const absl::StatusOr<GpuFacts> facts = Read("");
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_THAT(facts->memory_bytes, ElementsAre(int64_t{40} << 30, int64_t{80} << 30));
  EXPECT_EQ(facts->nvlink_domain, "abababababababababababababababab.7");
}

TEST_F(GpuFactsTest, WhatTheLibraryDoesNotSay_IsUnknown) {
  const absl::StatusOr<GpuFacts> facts = Read("one");
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_THAT(facts->memory_bytes, ElementsAre(0));
  EXPECT_EQ(facts->nvlink_domain, "");
}

TEST_F(GpuFactsTest, GpusOfTwoCliques_AreInNoDomain) {
  const absl::StatusOr<GpuFacts> facts = Read("cliques");
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(facts->nvlink_domain, "");
}

TEST_F(GpuFactsTest, LibraryThatDoesNotStart_SaysWhy) {
  const absl::Status status = Read("none").status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("nvmlInit: Driver Not Loaded (9)"));
}

TEST_F(GpuFactsTest, NoLibrary_IsNotFound) {
  EXPECT_TRUE(absl::IsNotFound(ReadGpuFacts("agent/libthere_is_none.so").status()));
}

TEST_F(GpuFactsTest, LibraryOfAnotherKind_IsUnavailable) {
  const absl::Status status = ReadGpuFacts("libm.so.6").status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
}

}  // namespace
}  // namespace muster::agent
