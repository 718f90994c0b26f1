#include "worker/job/checkpoint_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/job/fake_coordinator.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class CheckpointClientTest : public ::testing::Test {
 protected:
  void SetUp() override { Connect(absl::Seconds(60)); }

  // Connects a world of one.
  void Connect(absl::Duration call_timeout) {
    CoordinatorClient::Options options;
    options.address = fake_->address();
    options.job = "job";
    options.worker_id = "w";
    options.heartbeat_period = absl::ZeroDuration();
    options.call_timeout = options.outage_tolerance = call_timeout;
    auto client = CoordinatorClient::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    JoinOptions join;
    join.min_workers = join.max_workers = 1;
    const auto seat = client_->Join(join);
    ASSERT_TRUE(seat.ok()) << seat.status();
    registrar_ = MakeCoordinatorRegistrar(client_);
  }

  uint64_t Begin(const std::string& path, int64_t step) {
    CheckpointRegistration registration;
    registration.path = path;
    registration.staging = path + ".tmp-1";
    registration.step = step;
    const auto id = registrar_->Begin(registration);
    EXPECT_TRUE(id.ok()) << id.status();
    return id.value_or(0);
  }
  // Returns files whose slices fill `parts` parts.
  static std::vector<ShardFileReport> Files(int parts) {
    std::vector<ShardFileReport> files;
    for (int i = 0; i < parts; ++i) {
      ShardFileReport& file = files.emplace_back();
      file.name = absl::StrCat("f", i);
      file.xxh3 = std::string(32, 'a');
      for (int k = 0; k < 600; ++k) {
        file.slices.emplace_back().tensor = absl::StrCat(std::string(1000, 't'), i, "/", k);
      }
    }
    return files;
  }
  uint64_t Save(const std::string& path, int64_t step) {
    const uint64_t id = Begin(path, step);
    EXPECT_TRUE(registrar_->ReportShards(id, 0, Files(1)).ok());
    const auto sealed = registrar_->Seal(id);
    EXPECT_TRUE(sealed.ok() && sealed->has_value()) << sealed.status();
    return id;
  }

  std::unique_ptr<FakeCoordinator> fake_ = std::make_unique<FakeCoordinator>();
  std::shared_ptr<CoordinatorClient> client_;
  std::unique_ptr<CheckpointRegistrar> registrar_;
};

TEST_F(CheckpointClientTest, AnswersThatAreLost_ChangeNothing) {
  // Every call is carried out twice.
  fake_->LoseCheckpointAnswers();
  const uint64_t first = Begin("/c/1", 1);
  EXPECT_TRUE(registrar_->ReportShards(first, 0, Files(3)).ok());
  EXPECT_THAT(fake_->reports(),
              ElementsAre("rank 0 part 0", "rank 0 part 1", "rank 0 part 2 last"));
  const auto sealed = registrar_->Seal(first);
  ASSERT_TRUE(sealed.ok() && sealed->has_value()) << sealed.status();
  EXPECT_EQ((*sealed)->path, "/c/1");
  EXPECT_EQ((*sealed)->job, "job");
  EXPECT_EQ((*registrar_->Seal(first))->sha256, (*sealed)->sha256);
  ASSERT_TRUE(registrar_->Publish(first, SaveTimes()).ok());
  const uint64_t second = Save("/c/2", 2);
  const auto superfluous = registrar_->Publish(second, SaveTimes());
  ASSERT_TRUE(superfluous.ok()) << superfluous.status();
  ASSERT_THAT(*superfluous, SizeIs(1));
  EXPECT_EQ(superfluous->front().id, first);
  EXPECT_TRUE(registrar_->Deleted({first}).ok());
  EXPECT_TRUE(registrar_->Pin(second).ok());
  Save("/c/3", 3);
  const auto records = registrar_->List();
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_THAT(*records, SizeIs(2));
  EXPECT_TRUE(records->front().pinned);
  EXPECT_EQ(records->front().state, RegisteredCheckpoint::State::kPublished);
  EXPECT_EQ(records->back().state, RegisteredCheckpoint::State::kSealed);
}

TEST_F(CheckpointClientTest, CheckpointWithoutARecord_IsCounted) {
  registrar_->CountUnrecorded(100,
                              {.stall = absl::Microseconds(7), .save = absl::Microseconds(20)});
  EXPECT_THAT(fake_->reports(), ElementsAre("unrecorded: 100 bytes, 7 of 20 us"));
}

// Shows that the coordinator is the one that was asked, and not one that has started again.
TEST_F(CheckpointClientTest, Identity_IsTheClustersAndThatOfItsCopy) {
  EXPECT_EQ(registrar_->identity(), "");
  Begin("/c/1", 1);
  EXPECT_EQ(registrar_->identity(), "0000000000000051/0");
  // Two restores of one backup may have the same terms.
  fake_->BecomeRestored(0xabc);
  Begin("/c/2", 2);
  EXPECT_EQ(registrar_->identity(), "0000000000000051/abc");
  fake_->BecomeRestored(0xabd);
  Begin("/c/3", 3);
  EXPECT_EQ(registrar_->identity(), "0000000000000051/abd");
}

// Reports of ranks are not in the journal.
TEST_F(CheckpointClientTest, CoordinatorRestartedBetweenParts_GetsAllOfThemAgain) {
  const uint64_t id = Begin("/c/1", 1);
  fake_->ForgetReports(3);
  const absl::Status reported = registrar_->ReportShards(id, 0, Files(3));
  ASSERT_TRUE(reported.ok()) << reported;
  EXPECT_THAT(fake_->reports(), ElementsAre("rank 0 part 0", "rank 0 part 1", "rank 0 part 0",
                                            "rank 0 part 1", "rank 0 part 2 last"));
  const auto sealed = registrar_->Seal(id);
  EXPECT_TRUE(sealed.ok() && sealed->has_value()) << sealed.status();
}

TEST_F(CheckpointClientTest, CoordinatorRestartedAfterTheReports_AsksForThemInSeal) {
  const uint64_t id = Begin("/c/1", 1);
  const uint64_t other = Begin("/c/2", 2);
  ASSERT_TRUE(registrar_->ReportShards(id, 0, Files(1)).ok());
  fake_->ForgetReports(1);
  ASSERT_TRUE(registrar_->ReportShards(other, 0, Files(1)).ok());
  const auto missing = registrar_->Seal(id);
  ASSERT_TRUE(missing.ok()) << missing.status();
  EXPECT_FALSE(missing->has_value());
  ASSERT_TRUE(registrar_->ReportShards(id, 0, Files(1)).ok());
  EXPECT_TRUE((*registrar_->Seal(id)).has_value());
}

TEST_F(CheckpointClientTest, LeftoversInTheWayOfBegin_AreGivenUp) {
  const uint64_t unfinished = Begin("/c/1", 1);
  EXPECT_NE(Begin("/c/1", 2), unfinished);
  EXPECT_THAT(*registrar_->List(), SizeIs(1));
  const uint64_t old = Save("/c/2", 3);
  ASSERT_TRUE(registrar_->Publish(old, SaveTimes()).ok());
  const uint64_t next = Save("/c/3", 4);
  ASSERT_THAT(*registrar_->Publish(next, SaveTimes()), SizeIs(1));
  // Its deletion was not reported.
  EXPECT_NE(Begin("/c/2", 5), old);
}

TEST_F(CheckpointClientTest, GenerationThatIsOver_IsRefused) {
  const uint64_t id = Begin("/c/1", 1);
  fake_->EndGeneration("a worker was lost");
  EXPECT_FALSE(registrar_->ReportShards(id, 0, Files(1)).ok());
  const auto sealed = registrar_->Seal(id);
  EXPECT_TRUE(absl::IsFailedPrecondition(sealed.status())) << sealed.status();
  EXPECT_THAT(std::string(sealed.status().message()), HasSubstr("generation"));
  CheckpointRegistration registration;
  registration.path = "/c/2";
  EXPECT_FALSE(registrar_->Begin(registration).ok());
}

TEST_F(CheckpointClientTest, NoSuchCheckpoint_IsNotFound) {
  EXPECT_TRUE(absl::IsNotFound(registrar_->ReportShards(7, 0, Files(1))));
  EXPECT_TRUE(absl::IsNotFound(registrar_->Seal(7).status()));
  EXPECT_TRUE(registrar_->Deleted({7}).ok());
}

TEST_F(CheckpointClientTest, AbsentCoordinator_IsAnErrorThatNamesIt) {
  Connect(absl::Milliseconds(50));
  const std::string address = fake_->address();
  fake_.reset();
  const absl::Status reported = registrar_->ReportShards(1, 0, Files(1));
  EXPECT_FALSE(reported.ok());
  EXPECT_THAT(std::string(reported.message()), HasSubstr(address));
  EXPECT_FALSE(registrar_->List().ok());
  registrar_->Abort(1, "the coordinator is away");  // does not wait for it
}

}  // namespace
}  // namespace muster
