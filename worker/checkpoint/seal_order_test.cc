#include "worker/checkpoint/seal_order.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/sealing.h"

namespace {

int seals_opened = 0;

// Counts the opens of seal.json; never makes them fail.
bool CountSeals(const char* path, int /*flags*/) {
  if (muster::PathHas(path, "seal.json")) ++seals_opened;
  return false;
}

}  // namespace

MUSTER_REPLACE_OPEN(open, CountSeals)
MUSTER_REPLACE_OPEN(open64, CountSeals)

namespace muster {
namespace {

class SealOrderTest : public testing::Test {
 protected:
  std::string Put(const std::string& name, const std::string& job, int id,
                  const std::string& previous, const char* file = kSealName) {
    const std::string dir = folder_.Path(name);
    EXPECT_TRUE(MakeDirectories(dir).ok());
    const nlohmann::json seal = {{"format", kSealFormat},
                                 {"job", job},
                                 {"id", id},
                                 {"sha256", "sha of " + name},
                                 {"previous", previous}};
    EXPECT_TRUE(WriteFileAtomically(JoinPath(dir, file), seal.dump()).ok());
    return dir;
  }

  const TestFolder folder_;
};

TEST_F(SealOrderTest, TwoOfRank0_AreInTheOrderOfTheirIds) {
  const std::string first = Put("a", "", 3, ""), second = Put("b", "", 5, "", kSealingName);
  EXPECT_EQ(IsSealedAfter(second, first), true);
  EXPECT_EQ(IsSealedAfter(first, second), false);
  EXPECT_EQ(IsSealedAfter(first, first), std::nullopt);
}

// Ids of jobs with the same name begin again with each coordinator.
TEST_F(SealOrderTest, TwoOfJobs_AreInTheOrderOfTheirChainAlone) {
  const std::string first = Put("a", "night", 9, ""), second = Put("b", "night", 1, "sha of a");
  const std::string other = Put("c", "night", 20, "sha of what is gone");
  EXPECT_EQ(IsSealedAfter(second, first), true);
  EXPECT_EQ(IsSealedAfter(first, second), false);
  EXPECT_EQ(IsSealedAfter(other, first), std::nullopt);
}

TEST_F(SealOrderTest, TwoWithOthersBetween_AreInTheOrderOfTheChainAsLongAsThoseAreThere) {
  const std::string first = Put("best", "night", 9, "");
  Put("checkpoint_1", "night", 10, "sha of best");
  // The next coordinator begins with lower ids.
  Put("checkpoint_2.tmp-0123456789abcdef", "night", 1, "sha of checkpoint_1", kSealingName);
  const std::string last =
      Put("best.tmp-0123456789abcdef", "night", 2, "sha of checkpoint_2.tmp-0123456789abcdef");
  EXPECT_EQ(IsSealedAfter(last, first), true);
  EXPECT_EQ(IsSealedAfter(first, last), false);
  ASSERT_TRUE(RemoveTree(folder_.Path("checkpoint_1")).ok());
  EXPECT_EQ(IsSealedAfter(last, first), std::nullopt);
  EXPECT_EQ(IsSealedAfter(first, last), std::nullopt);
}

// A save compares folders that others have left with each checkpoint of their names.
TEST_F(SealOrderTest, RecordsBetween_AreReadOnce) {
  const std::string first = Put("best", "night", 1, "");
  std::string last = first;
  for (int i = 2; i <= 50; ++i) {
    last = Put("checkpoint_" + std::to_string(i), "night", i, "sha of " + BaseName(last));
  }
  EXPECT_EQ(IsSealedAfter(last, first), true);
  seals_opened = 0;
  EXPECT_EQ(IsSealedAfter(last, first), true);
  EXPECT_EQ(seals_opened, 2) << "those that are compared";
}

TEST_F(SealOrderTest, ChainThatIsACircle_SaysNothing) {
  const std::string first = Put("a", "night", 1, ""), second = Put("b", "night", 2, "sha of c");
  Put("c", "night", 3, "sha of b");
  EXPECT_EQ(IsSealedAfter(second, first), std::nullopt);
}

TEST_F(SealOrderTest, WithoutARecordThatSaysIt_NothingIsKnown) {
  const std::string sealed = Put("a", "", 3, ""), damaged = folder_.Path("damaged");
  EXPECT_EQ(IsSealedAfter(sealed, damaged), std::nullopt);
  ASSERT_TRUE(MakeDirectories(damaged).ok());
  for (const char* text : {"{", "{}", R"({"format":"muster-seal"})"}) {
    ASSERT_TRUE(WriteFileAtomically(JoinPath(damaged, kSealName), text).ok());
    EXPECT_EQ(IsSealedAfter(sealed, damaged), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace muster
