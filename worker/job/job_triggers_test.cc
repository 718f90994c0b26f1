#include "worker/job/job_triggers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10/util/Exception.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/thread_comm.h"
#include "worker/job/fake_coordinator.h"
#include "worker/job/stop_signal.h"

namespace muster {
namespace {

std::shared_ptr<CoordinatorClient> ConnectTo(const FakeCoordinator& fake, int rank) {
  CoordinatorClient::Options options;
  options.address = fake.address();
  options.job = "job";
  options.worker_id = "w" + std::to_string(rank);
  auto client = CoordinatorClient::Connect(std::move(options));
  EXPECT_TRUE(client.ok()) << client.status();
  return std::shared_ptr<CoordinatorClient>(*std::move(client));
}

TEST(JobTriggers, Alone_RaisedIsToldOnce) {
  LocalComm comm;
  JobTriggers triggers(nullptr, &comm, {.stop_on_sigterm = false});
  EXPECT_FALSE(triggers.Check("checkpoint", 1).has_value());
  ASSERT_TRUE(triggers.Raise("checkpoint", "now").ok());
  EXPECT_FALSE(triggers.Check("profile", 1).has_value());
  const std::optional<Trigger> told = triggers.Check("checkpoint", 1);
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->payload, "now");
  EXPECT_EQ(told->raised_by, 0);
  EXPECT_FALSE(triggers.Check("checkpoint", 1).has_value());
}

TEST(JobTriggers, Stop_StaysTrue) {
  LocalComm comm;
  JobTriggers triggers(nullptr, &comm, {.stop_on_sigterm = false});
  EXPECT_FALSE(triggers.ShouldStop(1));
  ASSERT_TRUE(triggers.Raise("stop", "enough").ok());
  EXPECT_TRUE(triggers.ShouldStop(2));
  EXPECT_TRUE(triggers.ShouldStop(3));
  EXPECT_EQ(triggers.stop()->payload, "enough");
}

TEST(JobTriggers, WithoutCoordinator_AllRanksHearOfItAtTheSameCheck) {
  RunRanks(3, [](Comm& comm) {
    JobTriggers triggers(nullptr, &comm, {.stop_on_sigterm = false});
    EXPECT_FALSE(triggers.Check("checkpoint", 0).has_value());
    if (comm.rank() != 1) {
      ASSERT_TRUE(triggers.Raise("checkpoint", std::to_string(comm.rank())).ok());
    }
    // One after the other, beginning with the lowest rank's.
    for (const int from : {0, 2}) {
      const std::optional<Trigger> told = triggers.Check("checkpoint", 0);
      ASSERT_TRUE(told.has_value());
      EXPECT_EQ(told->raised_by, from);
      EXPECT_EQ(told->payload, std::to_string(from));
    }
    EXPECT_FALSE(triggers.Check("checkpoint", 0).has_value());
  });
}

TEST(JobTriggers, WithoutCoordinator_RaisedInTheSameWordsByAll_IsToldOnce) {
  RunRanks(3, [](Comm& comm) {
    JobTriggers triggers(nullptr, &comm, {.stop_on_sigterm = false});
    for (const char* payload : {"now", "again", "now"}) {
      ASSERT_TRUE(triggers.Raise("checkpoint", payload).ok());
    }
    for (const char* payload : {"now", "again"}) {
      const std::optional<Trigger> told = triggers.Check("checkpoint", 0);
      ASSERT_TRUE(told.has_value());
      EXPECT_EQ(told->payload, payload);
      EXPECT_EQ(told->raised_by, 0);
    }
    EXPECT_FALSE(triggers.Check("checkpoint", 0).has_value());
  });
}

TEST(JobTriggers, WithoutCoordinator_DifferentNames_AreAnErrorOnEveryRank) {
  RunRanks(2, [](Comm& comm) {
    JobTriggers triggers(nullptr, &comm, {.stop_on_sigterm = false});
    ASSERT_TRUE(triggers.Raise(comm.rank() == 0 ? "checkpoint" : "other", "").ok());
    try {
      triggers.Check(comm.rank() == 0 ? "checkpoint" : "profile", 0);
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(),
                  testing::HasSubstr("rank 0 checks checkpoint; rank 1 checks profile"));
    }
    // It is still there.
    EXPECT_TRUE(triggers.Check("checkpoint", 0).has_value());
  });
}

TEST(JobTriggers, WithCoordinator_AllRanksActAtTheSameStep) {
  FakeCoordinator fake;
  std::vector<int64_t> acted(3);
  RunRanks(3, [&](Comm& comm) {
    const auto client = ConnectTo(fake, comm.rank());
    JoinOptions join;
    join.min_workers = join.max_workers = 3;
    join.preferred_rank = comm.rank();
    const auto seat = client->Join(join);
    ASSERT_TRUE(seat.ok()) << seat.status();
    JobTriggers triggers(client, &comm, {.stop_on_sigterm = false});
    int64_t finished = 0;
    for (; !triggers.ShouldStop(finished); ++finished) {
      if (finished == 5 && comm.rank() == 1) {
        ASSERT_TRUE(triggers.Raise("stop", "enough").ok());
      }
    }
    EXPECT_EQ(triggers.stop()->payload, "enough");
    acted[comm.rank()] = finished;
    // No rank's answers are needed any more once all are here.
    comm.Barrier();
  });
  EXPECT_EQ(acted[0], acted[1]);
  EXPECT_EQ(acted[0], acted[2]);
  EXPECT_GE(acted[1], 5);
}

TEST(JobTriggers, BadNameOrPayload_IsRefused) {
  LocalComm comm;
  JobTriggers triggers(nullptr, &comm, {});
  EXPECT_EQ(triggers.Raise("", "").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(triggers.Raise(std::string(200, 'n'), "").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(triggers.Raise("x", std::string(1 << 20, 'p')).code(),
            absl::StatusCode::kInvalidArgument);
}

// No test that expects no SIGTERM may follow, because the process has received it then.
TEST(JobTriggers, SigtermWhileTheCoordinatorIsAway_DoesNotHoldUpTheExit) {
  auto fake = std::make_unique<FakeCoordinator>();
  CoordinatorClient::Options options;
  options.address = fake->address();
  options.job = "job";
  options.worker_id = "w0";
  options.outage_tolerance = absl::Hours(10);
  options.exit_patience = absl::Milliseconds(20);
  const std::shared_ptr<CoordinatorClient> client = *CoordinatorClient::Connect(std::move(options));
  ASSERT_TRUE(client->Join(JoinOptions()).ok());
  LocalComm comm;
  JobTriggers triggers(client, &comm, {.stop_on_sigterm = true});
  EXPECT_FALSE(triggers.ShouldStop(0));
  fake.reset();
  raise(SIGTERM);
  triggers.Close();  // while the trigger "stop" waits to be raised
  EXPECT_FALSE(client->Leave("training ended").ok());
}

// The coordinator must treat it as one trigger of all ranks.
TEST(JobTriggers, Sigterm_IsRaisedInWordsThatSayNothingOfTheRank) {
  FakeCoordinator fake;
  const auto client = ConnectTo(fake, 0);
  ASSERT_TRUE(client->Join(JoinOptions()).ok());
  LocalComm comm;
  JobTriggers triggers(client, &comm, {.stop_on_sigterm = true});
  for (int64_t finished = 0; !triggers.ShouldStop(finished); ++finished) {
    if (!StopSignal::Received()) raise(SIGTERM);  // a second one would end the process
  }
  EXPECT_EQ(triggers.stop()->payload, "SIGTERM");
}

}  // namespace
}  // namespace muster
