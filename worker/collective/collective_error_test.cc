#include "worker/collective/collective_error.h"

#include <stdexcept>
#include <string>

#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LostCollective, TransportsWords_AreTold) {
  EXPECT_TRUE(
      IsLostCollective("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
                       "600000ms for recv operation to complete"));
  EXPECT_TRUE(IsLostCollective("[../gloo/transport/tcp/pair.cc] Connection closed by peer"));
  EXPECT_TRUE(IsLostCollective("all_reduce #4 of 8 bytes on rank 0: rank 1 (pid 7) has died"));
  EXPECT_TRUE(IsLostCollective("all_reduce #4 on rank 0: rank 1 (pid 7) did not arrive in time"));
  EXPECT_FALSE(IsLostCollective("ranks disagree about a collective: rank 0 called Barrier #1"));
  EXPECT_FALSE(
      IsLostCollective("AllReduce #5: the group is unusable since AllReduce #4: Timed out"));
}

TEST(RethrowExplained, LostCollective_IsExplainedOthersPass) {
  const CollectiveExplainer explain = [](absl::string_view) { return "explained"; };
  const auto thrown = [&](const std::function<void()>& raise) -> std::string {
    try {
      try {
        raise();
      } catch (...) {
        RethrowExplained(explain);
      }
    } catch (const c10::DistBackendError& error) {
      return std::string("distributed ") + error.what_without_backtrace();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "nothing";
  };
  EXPECT_EQ(thrown([] { throw std::runtime_error("Connection reset by peer"); }),
            "distributed explained");
  EXPECT_EQ(thrown([] { throw std::runtime_error("out of luck"); }), "out of luck");
  EXPECT_THAT(thrown([] { TORCH_CHECK(false, "a shape is wrong"); }),
              HasSubstr("a shape is wrong"));
}

}  // namespace
}  // namespace muster
