#include "worker/job/coordinator_client.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutate.h"
#include "base/mutex.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/random_message.h"
#include "worker/collective/progress_board.h"
#include "worker/job/fake_coordinator.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

CoordinatorClient::Options OptionsFor(const FakeCoordinator& fake, int n = 0) {
  CoordinatorClient::Options options;
  options.address = fake.address();
  options.job = "job";
  options.worker_id = "w" + std::to_string(n);
  options.heartbeat_period = absl::ZeroDuration();
  return options;
}

std::unique_ptr<CoordinatorClient> ConnectTo(const FakeCoordinator& fake, int n = 0) {
  auto client = CoordinatorClient::Connect(OptionsFor(fake, n));
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

JoinOptions World(int size, int rank) {
  JoinOptions join;
  join.min_workers = size;
  join.max_workers = size;
  join.preferred_rank = rank;
  return join;
}

// Runs fn(client, seat) for `n` seated workers.
void RunSeated(const FakeCoordinator& fake, int n,
               const std::function<void(CoordinatorClient&, const Seat&)>& fn) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) {
    threads.emplace_back([&, i] {
      auto client = ConnectTo(fake, i);
      const auto seat = client->Join(World(n, i));
      ASSERT_TRUE(seat.ok()) << seat.status();
      EXPECT_EQ(seat->rank, i);
      fn(*client, *seat);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(CoordinatorClient, NoCoordinator_UnavailableNamesTheAddress) {
  CoordinatorClient::Options options;
  options.address = "127.0.0.1:1";
  options.job = "job";
  options.worker_id = "w";
  options.connect_timeout = absl::Milliseconds(50);
  const auto client = CoordinatorClient::Connect(options);
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("127.0.0.1:1"));
}

TEST(CoordinatorClient, MissingIdentityOrBadAddress_IsRefused) {
  FakeCoordinator fake;
  auto options = OptionsFor(fake);
  options.job = "";
  EXPECT_THAT(std::string(CoordinatorClient::Connect(options).status().message()),
              HasSubstr("job is empty"));
  options = OptionsFor(fake);
  options.worker_id = "";
  EXPECT_THAT(std::string(CoordinatorClient::Connect(options).status().message()),
              HasSubstr("worker_id is empty"));
  options = OptionsFor(fake);
  options.address = "nowhere";
  EXPECT_EQ(CoordinatorClient::Connect(options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CoordinatorClient, Join_GivesSeatsAndTheRankTable) {
  FakeCoordinator fake;
  RunSeated(fake, 3, [](CoordinatorClient& client, const Seat& seat) {
    EXPECT_EQ(seat.world_size, 3);
    EXPECT_EQ(seat.generation, 1u);
    EXPECT_EQ(seat.key_prefix, "gen/1/");
    const auto peers = client.Peers();
    ASSERT_TRUE(peers.ok()) << peers.status();
    ASSERT_EQ(peers->size(), 3u);
    EXPECT_EQ((*peers)[2].worker_id, "w2");
    EXPECT_EQ((*peers)[seat.rank].incarnation, client.incarnation());
    EXPECT_NE(client.incarnation(), 0u);
  });
}

TEST(CoordinatorClient, UnchangedRankTable_IsNotFetchedAgain) {
  FakeCoordinator fake;
  RunSeated(fake, 3, [&](CoordinatorClient& client, const Seat& seat) {
    if (seat.rank != 1) return;
    ASSERT_EQ(client.Peers()->size(), 3u);
    EXPECT_EQ(fake.rows_sent(), 3);
    const auto again = client.Peers();
    ASSERT_TRUE(again.ok()) << again.status();
    ASSERT_EQ(again->size(), 3u);
    EXPECT_EQ((*again)[2].worker_id, "w2");
    EXPECT_EQ(fake.rows_sent(), 3) << "the digest was enough";
  });
}

TEST(CoordinatorClient, JoinThatNobodyElseComesTo_TimesOut) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  JoinOptions join = World(2, 0);
  join.timeout = absl::Milliseconds(50);
  const auto seat = client->Join(join);
  EXPECT_EQ(seat.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(seat.status().message()), HasSubstr("rendezvous: 1 of 2 workers came"));
}

TEST(CoordinatorClient, KeyValue_EveryOperation) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  EXPECT_FALSE((*client->Find("a")).has_value());
  ASSERT_TRUE(client->Set("a", std::string("x\0y", 3)).ok());
  EXPECT_EQ(client->Find("a")->value(), std::string("x\0y", 3));
  EXPECT_EQ(*client->Add("n", 3), 3);
  EXPECT_EQ(*client->Add("n", -5), -2);
  EXPECT_EQ(client->Find("n")->value(), "-2");
  ASSERT_TRUE(client->Append("a", "z").ok());
  ASSERT_TRUE(client->SetAll({{"p/1", "one"}, {"p/2", "two"}}).ok());
  EXPECT_THAT(*client->List("p/"), ElementsAre(Pair("p/1", "one"), Pair("p/2", "two")));
  EXPECT_THAT(*client->List("p/", true), ElementsAre(Pair("p/1", ""), Pair("p/2", "")));
  EXPECT_TRUE(*client->AllExist({"a", "p/1"}));
  EXPECT_FALSE(*client->AllExist({"a", "p/3"}));
  EXPECT_TRUE(*client->AllExist({}));
  EXPECT_TRUE(*client->Delete("a"));
  EXPECT_FALSE(*client->Delete("a"));
  EXPECT_THAT(*client->Wait({"p/2", "p/1"}, absl::Seconds(1)), ElementsAre("two", "one"));
  EXPECT_THAT(*client->Wait({}, absl::Seconds(1)), IsEmpty());
}

TEST(CoordinatorClient, CompareSet_AsC10d) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  EXPECT_EQ(*client->CompareSet("k", "old", "new"), "old") << "absent";
  EXPECT_FALSE(*client->AllExist({"k"}));
  EXPECT_EQ(*client->CompareSet("k", "", "one"), "one");
  EXPECT_EQ(*client->CompareSet("k", "", "two"), "one");
  EXPECT_EQ(*client->CompareSet("k", "zero", "two"), "one");
  EXPECT_EQ(*client->CompareSet("k", "one", ""), "");
  EXPECT_EQ(*client->CompareSet("k", "", "three"), "three") << "empty counts as absent";
}

TEST(CoordinatorClient, WaitForAKeyThatNeverComes_NamesIt) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  const auto got = client->Wait({"never"}, absl::Milliseconds(20));
  EXPECT_EQ(got.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(got.status().message()), HasSubstr("'never'"));
}

TEST(CoordinatorClient, LostAnswers_EveryChangeHappensOnce) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  fake.LoseAnswers(3);
  EXPECT_EQ(*client->Add("n", 1), 1);
  fake.LoseAnswers(2);
  EXPECT_EQ(*client->Add("n", 1), 2);
  EXPECT_EQ(fake.writes(), 2);
}

TEST(CoordinatorClient, RetryAfter_IsWaitedFor) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  // Longer than the client would wait otherwise.
  fake.Overload(absl::Milliseconds(400));
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_EQ(*client->Add("n", 1), 1);
  EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(400));
}

TEST(CoordinatorClient, Barrier_RepeatsByNameAndCarriesPayloads) {
  FakeCoordinator fake;
  RunSeated(fake, 3, [](CoordinatorClient& client, const Seat& seat) {
    for (int round = 0; round < 3; ++round) {
      const auto result =
          client.Barrier("epoch", absl::Seconds(60), "r" + std::to_string(seat.rank));
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_THAT(result->payloads, ElementsAre("r0", "r1", "r2"));
    }
  });
}

TEST(CoordinatorClient, NameThatIsNotUtf8_IsRefusedAndNamesTheField) {
  FakeCoordinator fake;
  RunSeated(fake, 1, [](CoordinatorClient& client, const Seat&) {
    const absl::Status status = client.Barrier("caf\xe9", absl::Minutes(1)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("barrier_id is not UTF-8: \"caf\\xe9\""));
    // Text that only people read is sent anyway.
    EXPECT_TRUE(client.Leave("what() is caf\xe9").ok());
  });
}

TEST(CoordinatorClient, ArrivalThatIsRepeated_SaysHowLongItHasWaited) {
  FakeCoordinator fake;
  RunSeated(fake, 1, [&](CoordinatorClient& client, const Seat&) {
    ASSERT_TRUE(client.Barrier("b", absl::Seconds(60)).ok());
    EXPECT_EQ(fake.waited_us(), 0);
    EXPECT_EQ(fake.revision_seen(), FakeCoordinator::kRevision);
    fake.LoseArrivals(2);
    ASSERT_TRUE(client.Barrier("b", absl::Seconds(60)).ok());
    EXPECT_GT(fake.waited_us(), 0);
  });
}

TEST(CoordinatorClient, JoinOrWaitThatIsRepeated_SaysHowLongItHasWaited) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  fake.LoseArrivals(1);
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  EXPECT_GT(fake.waited_us(), 0);
  ASSERT_TRUE(client->Set("k", "v").ok());
  ASSERT_TRUE(client->Wait({"k"}, absl::Seconds(60)).ok());
  EXPECT_EQ(fake.waited_us(), 0);
  fake.LoseArrivals(1);
  ASSERT_TRUE(client->Wait({"k"}, absl::Seconds(60)).ok());
  EXPECT_GT(fake.waited_us(), 0);
}

TEST(CoordinatorClient, BarrierThatOneRankNeverReaches_NamesIt_NextOneWorks) {
  FakeCoordinator fake;
  Notification failed;
  RunSeated(fake, 2, [&](CoordinatorClient& client, const Seat& seat) {
    if (seat.rank == 0) {
      const auto result = client.Barrier("b", absl::Milliseconds(50));
      EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
      EXPECT_THAT(std::string(result.status().message()),
                  AllOf(HasSubstr("barrier 'b': "), HasSubstr("missing: rank 1")));
      failed.Notify();
    } else {
      failed.WaitForNotification();
      EXPECT_EQ(client.Barrier("b", absl::Seconds(60)).status().code(),
                absl::StatusCode::kDeadlineExceeded)
          << "the late one hears the same";
    }
    EXPECT_TRUE(client.Barrier("b", absl::Seconds(60)).ok());
  });
}

TEST(CoordinatorClient, BeforeJoin_BarrierAndTriggersSaySo) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  EXPECT_THAT(std::string(client->Barrier("b", absl::Seconds(1)).status().message()),
              HasSubstr("join the rendezvous first"));
  EXPECT_FALSE(client->PollTriggers({}).ok());
  EXPECT_FALSE(client->Peers().ok());
  EXPECT_FALSE(client->seat().has_value());
}

TEST(CoordinatorClient, Trigger_ReachesEveryRankOnceAcknowledged) {
  FakeCoordinator fake;
  RunSeated(fake, 2, [](CoordinatorClient& client, const Seat& seat) {
    EXPECT_THAT(*client.PollTriggers({}), IsEmpty());
    ASSERT_TRUE(client.Barrier("a", absl::Seconds(60)).ok());
    if (seat.rank == 1) {
      ASSERT_TRUE(client.RaiseTrigger("stop", "now").ok());
    }
    ASSERT_TRUE(client.Barrier("a", absl::Seconds(60)).ok());
    auto triggers = client.PollTriggers({});
    ASSERT_TRUE(triggers.ok() && triggers->size() == 1u);
    EXPECT_EQ((*triggers)[0].name, "stop");
    EXPECT_EQ((*triggers)[0].payload, "now");
    EXPECT_FALSE((*triggers)[0].decided);
    const uint64_t id = (*triggers)[0].id;
    ASSERT_TRUE(client.PollTriggers({.step = 3 + seat.rank, .pending = {id}}).ok());
    ASSERT_TRUE(client.Barrier("a", absl::Seconds(60)).ok());
    triggers = client.PollTriggers({.step = 3});
    ASSERT_TRUE(triggers.ok() && triggers->size() == 1u);
    EXPECT_TRUE((*triggers)[0].decided);
    EXPECT_EQ((*triggers)[0].effective_step, 5);
    EXPECT_THAT(*client.PollTriggers({.step = 5, .acknowledged = {id}}), IsEmpty());
  });
}

TEST(CoordinatorClient, Heartbeats_CarryProgressAndTellOfTheEnd) {
  FakeCoordinator fake;
  auto options = OptionsFor(fake);
  options.heartbeat_period = absl::Milliseconds(5);
  Notification ended;
  std::string why;
  uint64_t generation = 0;
  options.on_generation_ended = [&](uint64_t ended_generation, const absl::Status& status) {
    generation = ended_generation;
    why = std::string(status.message());
    ended.Notify();
  };
  auto client = CoordinatorClient::Connect(options);
  ASSERT_TRUE(client.ok());
  (*client)->ReportProgress(41, "training", "all_reduce #7");
  const auto seat = (*client)->Join(World(1, 0));
  ASSERT_TRUE(seat.ok());
  EXPECT_EQ(fake.WaitForHeartbeat(), "41 training all_reduce #7");
  fake.EndGeneration("rank 1 was killed");
  ended.WaitForNotification();
  EXPECT_THAT(why, HasSubstr("rank 1 was killed"));
  EXPECT_EQ(generation, seat->generation);
  EXPECT_EQ((*client)->Set("k", "v").code(), absl::StatusCode::kFailedPrecondition) << "fenced";
  EXPECT_TRUE((*client)->Beat()->generation_ended);
}

TEST(CoordinatorClient, NewsOfTheFormerGeneration_DoNotEndTheNext) {
  FakeCoordinator fake;
  auto options = OptionsFor(fake);
  options.heartbeat_period = absl::Milliseconds(5);
  std::atomic<int> told = 0;
  options.on_generation_ended = [&](uint64_t, const absl::Status&) { ++told; };
  auto client = CoordinatorClient::Connect(options);
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE((*client)->Join(World(1, 0)).ok());
  fake.BeforeAnswer([&] {
    EXPECT_TRUE((*client)->Join(World(1, 0)).ok());
    (*client)->ReportProgress(1, "next", "");
  });
  fake.EndGeneration("rank 1 was killed");
  // The worker continues to send heartbeats in it.
  WaitUntil([&] { return told > 0 || fake.last_heartbeat() == "1 next "; });
  EXPECT_EQ(told, 0);
}

TEST(CoordinatorClient, CancellationInTheFormerGeneration_CountsNoBarrierOfTheNext) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  fake.BeforeAnswer([&] { EXPECT_TRUE(client->Join(World(1, 0)).ok()); });
  ASSERT_TRUE(client->CancelBarrier("b", "why not").ok());
  const auto passed = client->Barrier("b", absl::Seconds(60));
  EXPECT_TRUE(passed.ok()) << passed.status();
}

TEST(CoordinatorClient, Leave_ReportsWhatWasReachedSinceTheLastBeat) {
  FakeCoordinator fake;
  auto options = OptionsFor(fake);
  options.heartbeat_period = absl::Hours(1);
  auto client = *CoordinatorClient::Connect(options);
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  client->ReportProgress(39, "training", "all_reduce #7");
  ASSERT_TRUE(client->Leave("training ended").ok());
  EXPECT_EQ(fake.last_heartbeat(), "39 training all_reduce #7");
}

TEST(CoordinatorClient, NextClientOfTheSameProcess_IsNotTakenForTheFormer) {
  FakeCoordinator fake;
  auto options = OptionsFor(fake);
  options.incarnation = 7;
  auto client = *CoordinatorClient::Connect(options);
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  ASSERT_TRUE(client->Set("k", "first").ok());
  fake.EndGeneration("rank 1 was killed");
  client.reset();
  client = *CoordinatorClient::Connect(options);
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  ASSERT_TRUE(client->Set("k", "second").ok());
  EXPECT_EQ(fake.writes(), 2);
  EXPECT_EQ(client->Find("k")->value(), "second");
}

TEST(CoordinatorClient, BeatsOfRankZero_SayWhenTheStateWasLoadedAndAStepDone) {
  FakeCoordinator fake;
  std::vector<std::unique_ptr<CoordinatorClient>> clients;
  std::vector<std::thread> threads;
  const auto board = std::make_shared<ProgressBoard>();
  for (int rank = 0; rank < 2; ++rank) {
    auto options = OptionsFor(fake, rank);
    options.progress = board;
    clients.push_back(*CoordinatorClient::Connect(std::move(options)));
    threads.emplace_back([&, client = clients.back().get(), rank] {
      EXPECT_TRUE(client->Join(World(2, rank)).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto beat = [&](int rank) {
    EXPECT_TRUE(clients[rank]->Beat().ok());
    return fake.last_heartbeat();
  };
  EXPECT_EQ(beat(0), "0  ");
  board->SetRestored();
  EXPECT_EQ(beat(0), "0   restored");
  board->SetStep(41);
  EXPECT_EQ(beat(0), "41   restored stepped");
  EXPECT_EQ(beat(1), "41  ");
}

TEST(CoordinatorClient, Beats_TellTheCountOfProgress) {
  FakeCoordinator fake;
  auto options = OptionsFor(fake, 0);
  const auto board = std::make_shared<ProgressBoard>();
  options.progress = board;
  const auto of_board = *CoordinatorClient::Connect(options);
  ASSERT_TRUE(of_board->Join(World(1, 0)).ok());
  board->SetPhase("backward");
  ASSERT_TRUE(of_board->Beat().ok());
  EXPECT_EQ(fake.last_progress(), board->Read().progress);
}

TEST(CoordinatorClient, Beats_TellTheCheckpointThatIsWritten) {
  FakeCoordinator fake;
  auto options = OptionsFor(fake, 0);
  const auto saves = std::make_shared<SaveProgress>();
  options.saves = saves;
  const auto client = *CoordinatorClient::Connect(options);
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  const auto beat = [&] {
    EXPECT_TRUE(client->Beat().ok());
    return fake.last_heartbeat();
  };
  EXPECT_EQ(beat(), "0  ");
  const uint64_t before = fake.last_progress();
  auto save = saves->Begin("/c/checkpoint_7", 70, /*asynchronous=*/false, /*logs=*/false);
  save->Expect(100);
  save->Wrote(30);
  EXPECT_EQ(beat(), "0   saving /c/checkpoint_7 of step 70, 30 of 100");
  EXPECT_EQ(fake.last_progress(), before + 1) << "a block is a sign of progress";
  save.reset();
  EXPECT_EQ(beat(), "0  ");
}

TEST(CoordinatorClient, ProgressThatIsReported_CountsWhatIsNew) {
  FakeCoordinator fake;
  const auto client = *CoordinatorClient::Connect(OptionsFor(fake, 0));
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  const auto count = [&] {
    EXPECT_TRUE(client->Beat().ok());
    return fake.last_progress();
  };
  const uint64_t before = count();
  EXPECT_NE(before, 0u);
  client->ReportProgress(1, "training");
  EXPECT_EQ(count(), before + 1);
  client->ReportProgress(1, "training");
  EXPECT_EQ(count(), before + 1) << "the same again";
  client->ReportProgress(1, "waiting");
  client->ReportProgress(1, "training");
  EXPECT_EQ(count(), before + 3);
}

TEST(CoordinatorClient, ExitWhileTheCoordinatorIsAway_IsNotHeldUp) {
  auto fake = std::make_unique<FakeCoordinator>();
  auto options = OptionsFor(*fake);
  options.outage_tolerance = options.call_timeout = absl::Hours(10);
  options.heartbeat_period = absl::Milliseconds(1);
  options.exit_patience = absl::Milliseconds(20);
  auto client = *CoordinatorClient::Connect(std::move(options));
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  fake->WaitForHeartbeat();
  fake.reset();
  // The calls of the thread that polls for triggers after SIGTERM.
  absl::Status raised, polled;
  std::thread polls([&] {
    raised = client->RaiseTrigger("stop").status();
    polled = client->PollTriggers({}).status();
  });
  client->BeginExit();
  polls.join();
  EXPECT_EQ(raised.code(), absl::StatusCode::kUnavailable) << raised;
  EXPECT_EQ(polled.code(), absl::StatusCode::kUnavailable) << polled;
  EXPECT_EQ(client->Leave("done").code(), absl::StatusCode::kUnavailable);
  client.reset();  // with a beat in flight
}

TEST(CoordinatorClient, ExitWithACoordinator_CallsGoThrough) {
  FakeCoordinator fake;
  auto client = ConnectTo(fake);
  ASSERT_TRUE(client->Join(World(1, 0)).ok());
  client->BeginExit();
  EXPECT_TRUE(client->RaiseTrigger("stop").ok());
  EXPECT_TRUE(client->PollTriggers({}).ok());
  EXPECT_TRUE(client->Leave("done").ok());
}

// A coordinator that answers every method with random, mutated or no messages.
class WildCoordinator final : public grpc::CallbackGenericService {
 public:
  WildCoordinator() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterCallbackGenericService(this);
    server_ = builder.BuildAndStart();
  }
  ~WildCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    // "/muster.v1.Barrier/Arrive"
    std::string name = context->method().substr(1);
    std::replace(name.begin(), name.end(), '/', '.');
    const auto* const pool = google::protobuf::DescriptorPool::generated_pool();
    MutexLock lock(&mu_);
    return new Reactor(pool->FindMethodByName(name), random_.generator()());
  }

 private:
  class Reactor final : public grpc::ServerGenericBidiReactor {
   public:
    Reactor(const google::protobuf::MethodDescriptor* method, uint64_t seed)
        : method_(method), random_(seed) {
      MutexLock lock(&mu_);
      StartRead(&in_);
    }
    void OnReadDone(bool) override {
      MutexLock lock(&mu_);
      if (random_.Draw(6) == 0) {
        v1::ErrorDetail detail;
        random_.Fill(&detail);
        std::string bytes = detail.SerializeAsString();
        if (random_.Draw(2) == 0) bytes = Mutate(std::move(bytes), random_.generator());
        // Not UNAVAILABLE, because then the client repeats the call until the deadline.
        const int codes[] = {2, 3, 5, 6, 7, 8, 9, 10, 13, 15, 16};
        Finish(grpc::Status(static_cast<grpc::StatusCode>(codes[random_.Draw(11)]), "so be it",
                            bytes));
        return;
      }
      const std::unique_ptr<google::protobuf::Message> reply(
          google::protobuf::MessageFactory::generated_factory()
              ->GetPrototype(method_->output_type())
              ->New());
      random_.Fill(reply.get());
      std::string bytes = reply->SerializeAsString();
      if (random_.Draw(3) == 0) bytes = Mutate(std::move(bytes), random_.generator());
      const grpc::Slice slice(bytes);
      out_ = grpc::ByteBuffer(&slice, 1);
      StartWriteAndFinish(&out_, grpc::WriteOptions(), grpc::Status::OK);
    }
    void OnDone() override {
      { MutexLock lock(&mu_); }  // after OnReadDone
      delete this;
    }

   private:
    Mutex mu_;
    const google::protobuf::MethodDescriptor* const method_ ABSL_GUARDED_BY(mu_);
    RandomMessage random_ ABSL_GUARDED_BY(mu_);
    grpc::ByteBuffer in_ ABSL_GUARDED_BY(mu_), out_ ABSL_GUARDED_BY(mu_);
  };

  Mutex mu_;
  RandomMessage random_ ABSL_GUARDED_BY(mu_){20261121};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

TEST(CoordinatorClient, MutatedAnswers_EveryCallReturns) {
  WildCoordinator wild;
  CoordinatorClient::Options options;
  options.address = wild.address();
  options.job = "job";
  options.worker_id = "w";
  options.heartbeat_period = absl::Milliseconds(1);
  options.call_timeout = options.outage_tolerance = absl::ZeroDuration();
  options.on_generation_ended = [](uint64_t, const absl::Status&) {};
  int ok = 0;
  for (int round = 0; round < 20; ++round) {
    auto client = *CoordinatorClient::Connect(options);
    for (int i = 0; i < 10; ++i) {
      ok += client->Join(World(2, 0)).ok();
      ok += client->Peers().ok();
      ok += client->Set("k", "v").ok();
      ok += client->Find("k").ok();
      ok += client->Wait({"a", "b"}, absl::Milliseconds(1)).ok();
      ok += client->Add("n", 1).ok();
      ok += client->Append("a", "x").ok();
      ok += client->Delete("k").ok();
      ok += client->AllExist({"a"}).ok();
      ok += client->CompareSet("k", i % 2 == 0 ? "" : "v", "w").ok();
      ok += client->List("").ok();
      ok += client->Barrier("b", absl::Milliseconds(1)).ok();
      ok += client->DescribeBarrier("b").ok();
      ok += client->CancelBarrier("b", "why").ok();
      ok += client->RaiseTrigger("stop").ok();
      ok += client->PollTriggers({}).ok();
      ok += client->Beat().ok();
    }
    ok += client->Leave("done").ok();
  }
  EXPECT_GT(ok, 500);
}

}  // namespace
}  // namespace muster
