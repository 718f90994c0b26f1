#include "agent/job_gpus.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

// "DEVICE@INDEX ..." or the error.
std::string Chosen(const std::optional<std::string>& visible, int found, int wanted = -1,
                   const std::vector<std::string>& uuids = {}) {
  std::vector<Gpu> machine;
  for (int i = 0; i < found; ++i) {
    machine.push_back({i, "", i < static_cast<int>(uuids.size()) ? uuids[i] : ""});
  }
  const auto gpus = ChooseJobGpus(visible, machine, wanted);
  if (!gpus.ok()) return std::string(gpus.status().message());
  std::string text;
  for (const JobGpu& gpu : *gpus) absl::StrAppend(&text, gpu.device, "@", gpu.index, " ");
  return text;
}

TEST(ChooseJobGpus, WithoutTheVariable_AreThoseOfTheMachine) {
  EXPECT_EQ(Chosen(std::nullopt, 2), "0@0 1@1 ");
  EXPECT_EQ(Chosen(std::nullopt, 2, 1), "0@0 ");
  EXPECT_EQ(Chosen(std::nullopt, 2, 0), "");
  EXPECT_EQ(Chosen(std::nullopt, 0), "");
  EXPECT_EQ(Chosen(std::nullopt, 0, 2), "0@0 1@1 ") << "as somebody says who knows";
}

TEST(ChooseJobGpus, Subset_IsItsEntries) {
  EXPECT_EQ(Chosen("2,3", 4), "2@2 3@3 ");
  EXPECT_EQ(Chosen(" 3, 2", 4), "3@3 2@2 ");
  EXPECT_EQ(Chosen("2,3", 4, 1), "2@2 ");
  EXPECT_EQ(Chosen("2,3", 0, 2), "2@2 3@3 ");
  EXPECT_EQ(Chosen("2,-1,3", 4), "2@2 ");
  EXPECT_EQ(Chosen("GPU-6f2a,MIG-GPU-1/2/0", 4), "GPU-6f2a@-1 MIG-GPU-1/2/0@-1 ");
}

TEST(ChooseJobGpus, Uuids_AreThoseOfTheMachine) {
  const std::vector<std::string> uuids = {"GPU-6f2a", "GPU-6f41", "GPU-77"};
  EXPECT_EQ(Chosen("GPU-77,GPU-6f2a", 3, -1, uuids), "GPU-77@2 GPU-6f2a@0 ");
  EXPECT_EQ(Chosen("GPU-6f4,GPU-7,0", 3, -1, uuids), "GPU-6f4@1 GPU-7@2 0@0 ");
  EXPECT_THAT(Chosen("GPU-6f", 3, -1, uuids), HasSubstr("start of GPU-6f2a and of GPU-6f41"));
}

TEST(ChooseJobGpus, OneGpuInTwoWritings_IsRefused) {
  const std::vector<std::string> uuids = {"GPU-6f2a", "GPU-6f41"};
  EXPECT_THAT(Chosen("0,GPU-6f2", 2, -1, uuids), HasSubstr("names 0 twice (as GPU-6f2)"));
  EXPECT_THAT(Chosen("GPU-6f2a,GPU-6f2", 2, -1, uuids), HasSubstr("names GPU-6f2a twice"));
  EXPECT_THAT(Chosen("GPU-6f,GPU-6f2a", 2), HasSubstr("names GPU-6f twice (as GPU-6f2a)"));
  EXPECT_THAT(Chosen("0,GPU-6f2a", 2), HasSubstr("0 and GPU-6f2a may be the same GPU"));
}

TEST(MemoryOfJobGpus, KnownGpu_HasItsMemoryAndOthersZero) {
  EXPECT_EQ(MemoryOfJobGpus({{"2", 2}, {"GPU-6f", 0}, {"MIG-1", -1}, {"9", 9}}, {10, 11, 12}),
            (std::vector<int64_t>{12, 10, 0, 0}));
}

TEST(ChooseJobGpus, NoneVisible_HasThoseThatAreAskedFor) {
  EXPECT_EQ(Chosen("", 4), "");
  EXPECT_EQ(Chosen("", 4, 2), "0@0 1@1 ");
  EXPECT_EQ(Chosen("2,3", 0), "");
}

TEST(ChooseJobGpus, MoreThanNamed_AndOneTwice_AreRefused) {
  EXPECT_THAT(Chosen("2,3", 4, 3), HasSubstr("--gpus 3: this agent's CUDA_VISIBLE_DEVICES names "
                                             "only 2: 2,3"));
  EXPECT_THAT(Chosen("2,2", 4), HasSubstr("names 2 twice"));
  EXPECT_THAT(Chosen("1,01", 4), HasSubstr("names 1 twice"));
  EXPECT_EQ(Chosen("2,2", 4, 1), "2@2 ");
}

}  // namespace
}  // namespace muster::agent
