#include "worker/job/generation_end.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/job/fake_coordinator.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<CoordinatorClient> Seated(const FakeCoordinator& fake) {
  CoordinatorClient::Options options;
  options.address = fake.address();
  options.job = "j";
  options.worker_id = "w0";
  options.heartbeat_period = absl::ZeroDuration();
  auto client = CoordinatorClient::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->Join({}).ok());
  return *std::move(client);
}

TEST(AwaitGenerationEnd, Ended_SaysWhich) {
  FakeCoordinator fake;
  const auto client = Seated(fake);
  fake.EndGeneration("rank 1 was killed");
  const auto why = AwaitGenerationEnd(*client, absl::Hours(1));
  ASSERT_TRUE(why.ok()) << why.status();
  EXPECT_THAT(*why, HasSubstr("generation 1 "));
}

TEST(AwaitGenerationEnd, Continues_IsNoLoss) {
  FakeCoordinator fake;
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(AwaitGenerationEnd(*Seated(fake), absl::Milliseconds(1)).status()));
}

}  // namespace
}  // namespace muster
