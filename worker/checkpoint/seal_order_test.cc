#include "worker/checkpoint/seal_order.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/sealing.h"

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

// Ids of jobs of one name begin anew with each coordinator.
TEST_F(SealOrderTest, TwoOfJobs_AreInTheOrderOfTheirChainAlone) {
  const std::string first = Put("a", "night", 9, ""), second = Put("b", "night", 1, "sha of a");
  const std::string other = Put("c", "night", 20, "sha of b");
  EXPECT_EQ(IsSealedAfter(second, first), true);
  EXPECT_EQ(IsSealedAfter(first, second), false);
  EXPECT_EQ(IsSealedAfter(other, first), std::nullopt);
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
