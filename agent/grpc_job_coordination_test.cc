#include "agent/grpc_job_coordination.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/fake_sessions.h"
#include "agent/node_uplink.h"
#include "base/identity.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/random_message.h"
#include "rpc/server.h"
#include "rpc/session/duration.h"

namespace muster::agent {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Reports hosts whose machines this job does not take, and later none.
class FakeAdmin final : public v1::Admin::Service {
 public:
  void Quarantine(const std::string& job, const std::string& host, int times) {
    MutexLock lock(&mu_);
    job_ = job;
    host_ = host;
    times_ = times;
  }
  int asked() {
    MutexLock lock(&mu_);
    return asked_;
  }

  grpc::Status Status(grpc::ServerContext*, const v1::StatusRequest*,
                      v1::StatusReply* reply) override {
    MutexLock lock(&mu_);
    v1::JobStatus* const job = reply->add_jobs();
    job->set_job_id(job_);
    if (asked_++ < times_) job->add_quarantined()->set_host(host_);
    return grpc::Status::OK;
  }

 private:
  Mutex mu_;
  std::string job_ ABSL_GUARDED_BY(mu_);
  std::string host_ ABSL_GUARDED_BY(mu_);
  int times_ ABSL_GUARDED_BY(mu_) = 0;
  int asked_ ABSL_GUARDED_BY(mu_) = 0;
};

class GrpcJobCoordinationTest : public ::testing::Test {
 protected:
  void StartCoordinator() {
    server_ = *rpc::Server::Start({.listen = address_, .insecure = true}, {&sessions_, &admin_});
    address_ = server_->address();
  }
  void StopCoordinator() {
    server_->Shutdown(absl::ZeroDuration());
    server_ = nullptr;
  }
  // The coordinator may not be reachable yet.
  void MakeCoordination(int num_nodes, absl::Duration join_timeout, int node_rank = -1) {
    NodeUplink::Options options;
    options.coordinator = address_;
    options.outage_tolerance = absl::Milliseconds(1);
    options.quarantine_timeout = absl::Minutes(5);  // a busy machine is slow
    session_ = *NodeUplink::Start(std::move(options));
    coordination_ = MakeGrpcJobCoordination({.coordinator = address_,
                                             .job = "job",
                                             .num_nodes = num_nodes,
                                             .min_nodes = min_nodes_,
                                             .node_rank = node_rank,
                                             .another_is_first = another_is_first_,
                                             .hosts_coordinator = hosts_coordinator_,
                                             .counts_restarts = counts_restarts_,
                                             .settings = "num_processes 2",
                                             .debug = debug_,
                                             .join_timeout = join_timeout,
                                             .outage_tolerance = absl::Milliseconds(1),
                                             .tell_after = absl::ZeroDuration()},
                                            session_.get());
  }
  // Takes an address without a listener.
  void TakeAddress() {
    StartCoordinator();
    StopCoordinator();
  }
  // This machine is the second of two; answers with what the first one and the coordinator wrote.
  void AnswerWith(const std::string& settings, const std::string& end) {
    sessions_.SetAnswer([settings, end](const v1::Op& op, v1::OpResult* result) {
      if (op.has_join()) {
        result->mutable_join()->set_rank(1);
        result->mutable_join()->set_generation(1);
        result->mutable_join()->set_generation_prefix("gen/1/");
      }
      if (!op.has_wait()) return true;
      const bool is_end = op.wait().keys(0) == "gen/1/end";
      if (is_end && end.empty()) return false;
      result->mutable_wait()->add_kvs()->set_value(is_end ? end : settings);
      return true;
    });
  }
  void TearDown() override {
    coordination_.reset();
    session_.reset();
    if (server_ != nullptr) StopCoordinator();
  }

  // This machine is the second of two in a running attempt.
  void RunBeside(const v1::Member& other) {
    StartCoordinator();
    AnswerAsElastic(1, 2, {other});
    MakeCoordination(3, absl::Minutes(2));
    ASSERT_TRUE(coordination_->Meet(0, {}).ok());
    coordination_->Watch([](AttemptEnd) {});
  }

  // This machine is `rank` of `world_size`; `members` are the machines of the job.
  void AnswerAsElastic(int rank, int world_size, std::vector<v1::Member> members) {
    min_nodes_ = 1;
    sessions_.SetAnswer([=, this, special = special_](const v1::Op& op, v1::OpResult* result) {
      if (special && special(op, result)) return true;
      if (op.has_join()) {
        EXPECT_EQ(op.join().spec().min_workers(), 1);
        EXPECT_EQ(op.join().spec().max_workers(), 3);
        result->mutable_join()->set_rank(rank);
        result->mutable_join()->set_world_size(world_size);
        result->mutable_join()->set_generation(1);
        result->mutable_join()->set_generation_prefix("gen/1/");
      }
      if (op.has_get_members()) {
        for (const v1::Member& member : members) {
          *result->mutable_get_members()->add_members() = member;
        }
      }
      if (op.has_txn() && op.txn().compares_size() == 2) {
        EXPECT_EQ(op.txn().compares(0).key(), "gen/1/end");
        EXPECT_EQ(op.txn().compares(1).key(), "gen/1/done");
        result->mutable_txn()->set_succeeded(looks_++ > 0);  // a machine seems to be done
      }
      if (op.has_wait() && op.wait().keys(0) == "gen/1/end") return false;
      if (op.has_wait()) {
        result->mutable_wait()->add_kvs()->set_value(
            R"({"settings": "num_processes 2", "master_addr": "10.0.0.1", "master_port": 1234,)"
            R"( "attempt": 5, "counted": 2, "classes": {"OUT_OF_MEMORY": 1, "NONE": 3},)"
            R"( "launch": "l7"})");
      }
      return true;
    });
  }
  static void SetError(v1::ErrorReason reason, v1::OpResult* result,
                       const std::string& message = "it has ended",
                       absl::StatusCode code = absl::StatusCode::kFailedPrecondition) {
    result->mutable_error()->set_code(static_cast<int>(code));
    result->mutable_error()->set_message(message);
    result->mutable_error()->mutable_detail()->set_reason(reason);
  }
  AttemptEnd WaitForEnd() {
    Notification ended;
    AttemptEnd end;
    coordination_->Watch([&](AttemptEnd told) {
      end = std::move(told);
      ended.Notify();
    });
    ended.WaitForNotification();
    return end;
  }
  static v1::Member Machine(int rank, v1::WorkerState state, absl::Duration heard_ago) {
    v1::Member member;
    member.set_rank(rank);
    member.set_worker_id(absl::StrCat("node-", rank));
    member.set_incarnation(100 + rank);
    member.set_state(state);
    member.set_host("h");
    *member.mutable_heartbeat_age() = rpc::ToProto(heard_ago);
    return member;
  }

  int min_nodes_ = 0;
  bool counts_restarts_ = false;
  bool another_is_first_ = false;
  bool hosts_coordinator_ = false;
  std::string debug_;
  // Returns true for operations that the next AnswerAsElastic must not answer as usual.
  FakeSessions::Answer special_;
  std::atomic<int> looks_{0};
  FakeSessions sessions_;
  FakeAdmin admin_;
  std::string address_ = "127.0.0.1:0";
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<NodeUplink> session_;
  std::unique_ptr<JobCoordination> coordination_;
};

constexpr char kSettings[] =
    R"({"settings": "num_processes 2", "master_addr": "10.0.0.1", "master_port": 1234})";

TEST_F(GrpcJobCoordinationTest, NobodyThere_SaysWhereAndWhatToLookAt) {
  TakeAddress();
  MakeCoordination(1, absl::Milliseconds(20));
  EXPECT_THAT(std::string(coordination_->Meet(0, {}).status().message()),
              HasSubstr(absl::StrCat("no coordinator answers at ", address_,
                                     " after 20ms: is it running, and is the address right? (")));
  coordination_.reset();
  MakeCoordination(2, absl::Milliseconds(20));
  EXPECT_THAT(std::string(coordination_->Meet(0, {}).status().message()),
              HasSubstr("is machine 0 launched"));
}

TEST_F(GrpcJobCoordinationTest, NobodyThere_SaysSoWhileItWaits) {
  TakeAddress();
  MakeCoordination(2, absl::Milliseconds(300));
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(coordination_->Meet(0, {}).ok());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr(absl::StrCat("no coordinator answers at ", address_, " for ")),
                    HasSubstr("is machine 0 launched"), HasSubstr("Waiting up to 300ms"),
                    HasSubstr("Connection refused")));
}

// A string field must be UTF-8; otherwise no receiver can read the message, however often it is
// sent.
TEST_F(GrpcJobCoordinationTest, WorkerWroteWhatIsNotUtf8_CoordinatorHearsOfItsEndAndOfWhatFollows) {
  StartCoordinator();
  AnswerWith(kSettings, "");
  MakeCoordination(2, absl::Minutes(2));
  ASSERT_TRUE(coordination_->Meet(0, {}).ok());
  WorkerEnd end;
  end.worker_id = "w0";
  end.host = "h\xff";
  end.last_lines = {"caf\xe9", std::string(2000, 'x'), "caf\xc3\xa9"};
  coordination_->ReportEnd(end);
  coordination_->Fail({"rank 0 wrote \xff", {"\xff"}});
  // Otherwise the operations submitted after it would not arrive, either.
  const v1::AgentFrame frame = sessions_.WaitFor([](const v1::AgentFrame& frame) {
    if (!frame.has_ops()) return false;
    const v1::Op& op = frame.ops().ops(0);
    return op.has_report_exit() || (op.txn().then_size() > 0 && op.txn().then(0).has_put());
  });
  const v1::ExitCause& cause = frame.ops().ops(0).report_exit().cause();
  EXPECT_THAT(cause.message(), HasSubstr("on h\\xff"));
  EXPECT_THAT(cause.last_log_lines(),
              ElementsAre("caf\\xe9", std::string(1024, 'x') + "...", "caf\xc3\xa9"));
}

// Machine 0's launch was refused, stopped or failed while this one waited for the others.
TEST_F(GrpcJobCoordinationTest, CoordinatorEndsForGood_MeetEndsWithItsReason) {
  sessions_.SetAnswer([](const v1::Op&, v1::OpResult*) { return false; });
  sessions_.SayGoodbye("stopped by SIGINT");
  StartCoordinator();
  MakeCoordination(2, absl::Hours(1));
  const absl::Status status = coordination_->Meet(0, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("has ended: stopped by SIGINT"));
  EXPECT_EQ(coordination_->Meet(1, {}).status(), status) << "nobody comes back";
}

TEST_F(GrpcJobCoordinationTest, CoordinatorThatComesLate_IsWaitedFor) {
  TakeAddress();
  MakeCoordination(1, absl::Minutes(2));
  std::thread late([this] { StartCoordinator(); });
  EXPECT_TRUE(coordination_->Meet(0, {}).ok());
  late.join();
}

TEST_F(GrpcJobCoordinationTest, Cancel_EndsTheWaitForACoordinator) {
  TakeAddress();
  MakeCoordination(2, absl::Hours(1));
  std::thread user([this] { coordination_->Cancel(); });
  EXPECT_EQ(coordination_->Meet(0, {}).status().code(), absl::StatusCode::kCancelled);
  user.join();
}

TEST_F(GrpcJobCoordinationTest,
       CoordinatorGoneTooLong_EndsTheAttemptAndTheNextOneJoinsOnItsReturn) {
  StartCoordinator();
  AnswerWith(kSettings, "");
  MakeCoordination(2, absl::Minutes(2));
  const absl::StatusOr<Meeting> first = coordination_->Meet(0, {});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->node_rank, 1);
  EXPECT_EQ(first->master_addr, "10.0.0.1");
  EXPECT_EQ(first->master_port, 1234);
  Notification ended;
  std::string why;
  coordination_->Watch([&](AttemptEnd end) {
    why = end.why;
    ended.Notify();
  });
  StopCoordinator();
  ended.WaitForNotification();
  EXPECT_THAT(why, HasSubstr(absl::StrCat("the coordinator at ", address_, " has been away")));

  std::thread operator_again([this] { StartCoordinator(); });
  const absl::StatusOr<Meeting> second = coordination_->Meet(1, {});
  operator_again.join();
  ASSERT_TRUE(second.ok()) << second.status();
  std::atomic<bool> told{false};
  coordination_->Watch([&](AttemptEnd) { told = true; });
  EXPECT_TRUE(coordination_->Finish().ok());
  EXPECT_FALSE(told) << "an outage that is over ends no attempt";
}

TEST_F(GrpcJobCoordinationTest, AnotherMachineWroteTheEnd_AttemptEndsWithItsWords) {
  StartCoordinator();
  AnswerWith(kSettings, R"({"why": "rank 0 died", "last_lines": ["a", "b"], "class": "HANG"})");
  MakeCoordination(2, absl::Minutes(2));
  ASSERT_TRUE(coordination_->Meet(0, {}).ok());
  Notification ended;
  AttemptEnd end;
  coordination_->Watch([&](AttemptEnd told) {
    end = std::move(told);
    ended.Notify();
  });
  ended.WaitForNotification();
  EXPECT_EQ(end.why, "rank 0 died");
  EXPECT_THAT(end.last_lines, ElementsAre("a", "b"));
  EXPECT_EQ(end.end_class, v1::END_CLASS_HANG);
}

TEST_F(GrpcJobCoordinationTest, ValuesThatAreNoneOfOurs_EndTheAttemptWithoutACrash) {
  StartCoordinator();
  for (const char* const end : {"{", "[]", "{\"why\": 3}", "{\"why\": [\"a\"], \"last_lines\": {}}",
                                "{\"why\": \"w\", \"last_lines\": [1, null, \"x\"]}", "\xff\xfe"}) {
    AnswerWith(kSettings, end);
    MakeCoordination(2, absl::Minutes(2));
    ASSERT_TRUE(coordination_->Meet(0, {}).ok());
    Notification ended;
    coordination_->Watch([&](AttemptEnd) { ended.Notify(); });
    ended.WaitForNotification();
    coordination_.reset();
    session_.reset();
  }
  for (const char* const settings :
       {"", "{", "7", "{\"settings\": 7}", "{\"settings\": \"num_processes 2\"}",
        "{\"settings\": \"num_processes 2\", \"master_addr\": 4, \"master_port\": \"x\"}",
        "{\"settings\": \"num_processes 2\", \"master_port\": 123456789012}"}) {
    AnswerWith(settings, "");
    MakeCoordination(2, absl::Minutes(2));
    EXPECT_FALSE(coordination_->Meet(0, {}).ok()) << settings;
    coordination_.reset();
    session_.reset();
  }
}

// A process that fails because the machine of another one is lost is not counted as a failure.
TEST_F(GrpcJobCoordinationTest, FailureWhileAMachineIsLost_IsThatLoss) {
  StartCoordinator();
  AnswerAsElastic(1, 2, {Machine(0, v1::WORKER_STATE_LOST, absl::Seconds(7))});
  MakeCoordination(3, absl::Minutes(2));
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(0, {});
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_EQ(meeting->num_nodes, 2);
  EXPECT_EQ(meeting->attempt, 5) << "as the others count";
  EXPECT_EQ(meeting->counted.total, 2);
  coordination_->Watch([](AttemptEnd) {});
  const AttemptEnd end = coordination_->Fail({"rank 1 exited with code 1", {}});
  EXPECT_EQ(end.cause, AttemptEnd::Cause::kMachineLost);
  EXPECT_EQ(end.why, "machine 0 on h is lost, and rank 1 exited with code 1");
}

TEST_F(GrpcJobCoordinationTest, StoppedWhileAFailureIsJudged_OthersDoNotCountIt) {
  RunBeside(Machine(0, v1::WORKER_STATE_RUNNING, absl::Hours(1)));
  coordination_->Cancel();
  const AttemptEnd end = coordination_->Fail({"rank 1 exited with code 1", {}});
  EXPECT_EQ(end.cause, AttemptEnd::Cause::kMachineLeft);
  EXPECT_THAT(end.why, AllOf(HasSubstr("the launch was stopped on "),
                             HasSubstr(" after rank 1 exited with code 1")));
}

TEST_F(GrpcJobCoordinationTest, NewcomerGetsNumberZero_ItTakesOverTheCountsOfTheOthers) {
  StartCoordinator();
  AnswerAsElastic(0, 2, {});
  MakeCoordination(3, absl::Minutes(2));
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(0, {});
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_EQ(meeting->node_rank, 0);
  EXPECT_EQ(meeting->attempt, 5);
  EXPECT_EQ(meeting->counted.total, 2);
  ASSERT_EQ(meeting->counted.by_class.size(), 1);
  EXPECT_EQ(meeting->counted.by_class[0].end_class(), v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(meeting->counted.by_class[0].count(), 1);
}

TEST_F(GrpcJobCoordinationTest, MachinesAreMissing_TheyAreNotCalledRanksOrWorkers) {
  StartCoordinator();
  sessions_.SetAnswer([](const v1::Op& op, v1::OpResult* result) {
    if (op.has_join()) {
      SetError(
          v1::ERROR_REASON_RENDEZVOUS_TIMEOUT, result,
          "job \"job.agents\": 1 of 3 workers joined within 2s; missing: rank 1, rank 2: start "
          "the missing workers or lower min_workers",
          absl::StatusCode::kDeadlineExceeded);
    }
    return true;
  });
  MakeCoordination(3, absl::Seconds(2), 0);
  EXPECT_EQ(
      coordination_->Meet(0, {}).status().message(),
      "not all 3 machines arrived within 2s: job \"job.agents\": 1 of 3 machines joined within "
      "2s; missing: machine 1, machine 2: start the missing machines");
}

// Each machine gives a long reason: the coordinator does not put all of them into one answer.
TEST_F(GrpcJobCoordinationTest, NineHundredMachinesSayWhyTheyEnded_AllCountsAreTaken) {
  constexpr int kMachines = 900;
  constexpr size_t kMostOfAnswer = 15 << 18;  // KvStore::kMaxAnswerBytes
  StartCoordinator();
  special_ = [](const v1::Op& op, v1::OpResult* result) {
    if (op.has_join()) {
      result->mutable_join()->set_rank(0);
      result->mutable_join()->set_world_size(kMachines);
      result->mutable_join()->set_generation(1);
      result->mutable_join()->set_generation_prefix("gen/1/");
      return true;
    }
    if (!op.has_wait() || !op.wait().keys(0).starts_with("gen/1/count/")) return false;
    size_t bytes = 0;
    for (const std::string& key : op.wait().keys()) {
      v1::KeyValue* const kv = result->mutable_wait()->add_kvs();
      kv->set_key(key);
      const std::string attempt = key.substr(std::string("gen/1/count/").size());
      kv->set_value(absl::StrCat(R"({"attempt": )", attempt, R"(, "counted": )", attempt,
                                 R"(, "last": {"why": "rank )", attempt,
                                 R"( exited with code 2", "last_lines": [")",
                                 std::string(8000, 'x'), R"("], "class": "USER_ERROR"}})"));
      bytes += 64 + key.size() + kv->value().size();
    }
    if (bytes > kMostOfAnswer) {
      SetError(v1::ERROR_REASON_LIMIT, result, "wait for fewer at a time",
               absl::StatusCode::kInvalidArgument);
    }
    return true;
  };
  AnswerAsElastic(0, kMachines, {});
  MakeCoordination(kMachines, absl::Minutes(2));
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(0, {});
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_EQ(meeting->attempt, kMachines - 1);
  EXPECT_EQ(meeting->counted.total, kMachines - 1);
  EXPECT_EQ(meeting->counted.last.why, "rank 1 exited with code 2");
}

TEST_F(GrpcJobCoordinationTest, Launch_HasOneNameForAllMachinesAndAttempts) {
  StartCoordinator();
  MakeCoordination(1, absl::Minutes(2));
  const absl::StatusOr<Meeting> alone = coordination_->Meet(0, {});
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_NE(alone->launch, "");
  EXPECT_EQ(coordination_->Meet(1, {})->launch, alone->launch);
  // The others learn it, even those of a machine 0 that is new.
  for (const int rank : {1, 0}) {
    coordination_.reset();
    AnswerAsElastic(rank, 2, {});
    MakeCoordination(3, absl::Minutes(2));
    const absl::StatusOr<Meeting> meeting = coordination_->Meet(0, {});
    ASSERT_TRUE(meeting.ok()) << meeting.status();
    EXPECT_EQ(meeting->launch, "l7") << rank;
  }
  sessions_.WaitFor([](const v1::AgentFrame& one) {
    return one.has_ops() && one.ops().ops(0).has_txn() && one.ops().ops(0).txn().then_size() > 0 &&
           one.ops().ops(0).txn().then(0).put().key() == "gen/1/settings" &&
           absl::StrContains(one.ops().ops(0).txn().then(0).put().value(), "\"launch\":\"l7\"");
  });
}

// The number of machines is fixed.
TEST_F(GrpcJobCoordinationTest, RestartsAreCounted_MachinesAgreeOnThem) {
  StartCoordinator();
  AnswerWith(R"({"settings": "num_processes 2", "master_addr": "10.0.0.1", "master_port": 29501,)"
             R"( "attempt": 5, "counted": 3, "classes": {"OUT_OF_MEMORY": 2},)"
             R"( "last": {"why": "rank 0 exited with code 2", "class": "USER_ERROR"}})",
             "");
  counts_restarts_ = true;
  MakeCoordination(2, absl::Minutes(1));
  RestartCounts counted;
  counted.total = 4;
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(4, counted);
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_EQ(meeting->attempt, 5);
  EXPECT_EQ(meeting->counted.total, 4) << "the larger one";
  ASSERT_EQ(meeting->counted.by_class.size(), 1);
  EXPECT_EQ(meeting->counted.by_class[0].count(), 2);
  EXPECT_EQ(meeting->counted.last.why, "rank 0 exited with code 2");
  EXPECT_EQ(meeting->counted.last.end_class, v1::END_CLASS_USER_ERROR);
  const v1::AgentFrame told = sessions_.WaitFor([](const v1::AgentFrame& one) {
    return one.has_ops() && one.ops().ops(0).has_txn() &&
           one.ops().ops(0).txn().then(0).put().key() == "gen/1/count/1";
  });
  EXPECT_THAT(told.ops().ops(0).txn().then(0).put().value(), HasSubstr("\"counted\":4"));
}

// A machine that ends alone is waited for: machine 0, perhaps an older version, decides for all.
TEST_F(GrpcJobCoordinationTest, LastEndThatMachine0DoesNotKnow_IsNone_AndItsLinesAreCut) {
  StartCoordinator();
  AnswerWith(R"({"settings": "num_processes 2", "master_addr": "10.0.0.1", "master_port": 29501})",
             "");
  counts_restarts_ = true;
  MakeCoordination(2, absl::Minutes(1));
  RestartCounts counted;
  counted.total = 1;
  counted.last = {"rank 1 exited with code 2", {"oldest", std::string(100'000, 'x'), "newest"}};
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(1, counted);
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_EQ(meeting->counted.total, 1);
  EXPECT_EQ(meeting->counted.last.why, "");
  const v1::AgentFrame told = sessions_.WaitFor([](const v1::AgentFrame& one) {
    return one.has_ops() && one.ops().ops(0).has_txn() &&
           one.ops().ops(0).txn().then(0).put().key() == "gen/1/count/1";
  });
  const std::string value = told.ops().ops(0).txn().then(0).put().value();
  EXPECT_THAT(value, HasSubstr("newest"));
  EXPECT_LT(value.size(), 8192u);
}

// The key "end" was deleted with its generation before this machine had read it.
TEST_F(GrpcJobCoordinationTest, GenerationEndsBeforeItsKeyWasRead_CauseIsTheSame) {
  RunBeside(Machine(0, v1::WORKER_STATE_RUNNING, absl::ZeroDuration()));
  AttemptEnd given = {"rank 1 died", {}};
  given.end_class = v1::END_CLASS_OUT_OF_MEMORY;
  EXPECT_EQ(coordination_->Fail(given).cause, AttemptEnd::Cause::kFailed);
  ASSERT_TRUE(coordination_->Meet(1, {.total = 1}).ok());
  const v1::AgentFrame frame = sessions_.WaitFor([](const v1::AgentFrame& one) {
    return one.has_ops() && one.ops().ops(0).has_end_generation();
  });
  const std::string reason = frame.ops().ops(0).end_generation().reason();
  EXPECT_EQ(reason, "another attempt begins after a process ran out of memory: rank 1 died");

  special_ = [reason](const v1::Op& op, v1::OpResult* result) {
    if (!op.has_wait() || op.wait().keys(0) != "gen/1/end") return false;
    SetError(v1::ERROR_REASON_GENERATION_ENDED, result);
    result->mutable_error()->set_message(
        absl::StrCat("generation 1 has ended: ended on request: ", reason, "; join the next one"));
    return true;
  };
  AnswerAsElastic(1, 2, {});
  ASSERT_TRUE(coordination_->Meet(1, {.total = 1}).ok());
  const AttemptEnd end = WaitForEnd();
  EXPECT_EQ(end.cause, AttemptEnd::Cause::kFailed);
  EXPECT_EQ(end.end_class, v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(end.why, "rank 1 died");
}

TEST_F(GrpcJobCoordinationTest, MachineIsLost_IsNotCalledARank) {
  RunBeside(Machine(0, v1::WORKER_STATE_RUNNING, absl::ZeroDuration()));
  special_ = [](const v1::Op& op, v1::OpResult* result) {
    if (!op.has_wait() || op.wait().keys(0) != "gen/1/end") return false;
    SetError(v1::ERROR_REASON_GENERATION_ENDED, result,
             "generation 1 has ended: rank 1 (node1 on gpu-1, pid 7) gave no sign of life for 4s");
    result->mutable_error()->mutable_detail()->add_culprits()->set_rank(1);
    return true;
  };
  AnswerAsElastic(1, 2, {});
  ASSERT_TRUE(coordination_->Meet(1, {.total = 1}).ok());
  const AttemptEnd end = WaitForEnd();
  EXPECT_EQ(end.cause, AttemptEnd::Cause::kMachineLost);
  EXPECT_THAT(end.why, HasSubstr("machine 1 (node1 on gpu-1, pid 7) gave no sign"));
  EXPECT_THAT(end.why, Not(HasSubstr("rank 1")));
}

// The workers here are done, and those of another machine fail. The refusal of the barrier is all
// that this machine learns about it.
TEST_F(GrpcJobCoordinationTest, GenerationEndsWhileOthersAreAwaited_CauseIsTheSameForAll) {
  StartCoordinator();
  for (const auto& [reason, cause] :
       {std::pair{v1::ERROR_REASON_GENERATION_ENDED, AttemptEnd::Cause::kFailed},
        {v1::ERROR_REASON_LEASE_EXPIRED, AttemptEnd::Cause::kMachineLost}}) {
    special_ = [reason = reason](const v1::Op& op, v1::OpResult* result) {
      if (op.has_txn()) result->mutable_txn()->set_succeeded(true);
      if (!op.has_arrive()) return op.has_txn();
      SetError(reason, result,
               "generation 1 has ended: ended on request: another attempt begins after a failure: "
               "rank 0 died; join the next one");
      return true;
    };
    AnswerAsElastic(1, 2, {});
    MakeCoordination(3, absl::Minutes(2));
    ASSERT_TRUE(coordination_->Meet(0, {}).ok());
    std::vector<AttemptEnd> ends;
    coordination_->Watch([&](AttemptEnd end) { ends.push_back(std::move(end)); });
    EXPECT_FALSE(coordination_->Finish().ok());
    ASSERT_EQ(ends.size(), 1u) << "the end is reported before Finish returns";
    EXPECT_EQ(ends[0].cause, cause);
    EXPECT_THAT(ends[0].why, HasSubstr("rank 0 died"));
    coordination_.reset();
    session_.reset();
  }
}

// The coordinator's answers to the machine that hosts it and gets no place, `times` times: `looks`
// at the others, one after the other, and the key "finished".
FakeSessions::Answer WithoutAPlace(std::vector<std::vector<v1::Member>> looks,
                                   std::vector<std::string> finished, size_t times = 1) {
  struct State {
    size_t joins = 0, looks = 0, finished = 0;
  };
  auto state = std::make_shared<State>();
  return [=](const v1::Op& op, v1::OpResult* result) {
    if (op.has_join() && state->joins++ < times) {
      result->mutable_error()->set_code(static_cast<int>(absl::StatusCode::kDeadlineExceeded));
      result->mutable_error()->mutable_detail()->set_reason(v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
      return true;
    }
    if (op.has_get_members()) {
      for (const v1::Member& member : looks[std::min(state->looks++, looks.size() - 1)]) {
        *result->mutable_get_members()->add_members() = member;
      }
      return true;
    }
    if (!op.has_txn() || op.txn().then_size() == 0 || op.txn().then(0).get().key() != "finished") {
      return false;
    }
    result->mutable_txn()->set_succeeded(true);
    auto* const kvs = result->mutable_txn()->add_results()->mutable_kvs();
    const std::string& now = finished[std::min(state->finished++, finished.size() - 1)];
    if (!now.empty()) kvs->Add()->set_value(now);
    return true;
  };
}

TEST_F(GrpcJobCoordinationTest, HostOfTheCoordinatorWithoutAPlace_ServesTheOthersToTheirEnd) {
  StartCoordinator();
  hosts_coordinator_ = true;
  special_ = WithoutAPlace({{Machine(1, v1::WORKER_STATE_RUNNING, absl::ZeroDuration())},
                            {Machine(1, v1::WORKER_STATE_LEFT, absl::ZeroDuration())}},
                           {"gen/3/", "gen/3/", "gen/7/"});
  AnswerAsElastic(0, 2, {});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(1, {});
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_TRUE(meeting->finished);
}

TEST_F(GrpcJobCoordinationTest, HostOfTheCoordinatorWithoutAPlace_MeetsTheOthersAgain) {
  StartCoordinator();
  hosts_coordinator_ = true;
  special_ = WithoutAPlace({{Machine(1, v1::WORKER_STATE_JOINING, absl::ZeroDuration())}}, {""});
  AnswerAsElastic(0, 2, {});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(1, {});
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_FALSE(meeting->finished);
  EXPECT_EQ(meeting->num_nodes, 2);
}

// Until the next generation is sealed, members keep their seats in the ended one.
TEST_F(GrpcJobCoordinationTest, HostOfTheCoordinatorWithoutAPlace_SeesThatAGenerationHasEnded) {
  StartCoordinator();
  hosts_coordinator_ = true;
  for (const bool meets : {true, false}) {
    std::vector<v1::Member> look = {
        Machine(1, v1::WORKER_STATE_RUNNING, meets ? absl::ZeroDuration() : absl::Hours(1)),
        Machine(2, v1::WORKER_STATE_LOST, absl::ZeroDuration())};
    if (meets) {
      look.push_back(Machine(1, v1::WORKER_STATE_JOINING, absl::ZeroDuration()));
      look.back().set_rank(-1);
    }
    special_ = WithoutAPlace({look}, {""});
    AnswerAsElastic(0, 2, {});
    MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
    const absl::StatusOr<Meeting> meeting = coordination_->Meet(1, {});
    if (meets) {
      ASSERT_TRUE(meeting.ok()) << meeting.status();
      EXPECT_FALSE(meeting->finished);
    } else {
      EXPECT_EQ(meeting.status().code(), absl::StatusCode::kDeadlineExceeded) << "it is gone";
    }
    coordination_.reset();
    session_.reset();
  }
}

TEST_F(GrpcJobCoordinationTest, HostOfTheCoordinatorWithoutAPlace_EndsWhenNobodyIsLeft) {
  StartCoordinator();
  hosts_coordinator_ = true;
  special_ = WithoutAPlace({{Machine(1, v1::WORKER_STATE_LOST, absl::ZeroDuration())}}, {"gen/3/"});
  AnswerAsElastic(0, 2, {});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  EXPECT_EQ(coordination_->Meet(1, {}).status().code(), absl::StatusCode::kDeadlineExceeded);
}

// The others continue with fewer machines than allowed: this machine joins again when it may.
TEST_F(GrpcJobCoordinationTest, HostOfTheCoordinatorWithoutAPlace_AsksAgainWhenItsHostIsFree) {
  StartCoordinator();
  hosts_coordinator_ = true;
  admin_.Quarantine("job.agents", HostName(), 1);
  special_ = WithoutAPlace({{Machine(1, v1::WORKER_STATE_RUNNING, absl::ZeroDuration())}}, {""});
  AnswerAsElastic(0, 2, {});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(1, {});
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_FALSE(meeting->finished);
  EXPECT_EQ(meeting->num_nodes, 2);
  EXPECT_EQ(admin_.asked(), 2);
}

// The others fail for good while this machine waits for its place, and leave: it would begin their
// job again alone.
TEST_F(GrpcJobCoordinationTest, HostOfTheCoordinatorThatAsksAgain_DoesNotStartAloneAfterTheOthers) {
  StartCoordinator();
  hosts_coordinator_ = true;
  admin_.Quarantine("job.agents", HostName(), 0);
  special_ = WithoutAPlace({{Machine(1, v1::WORKER_STATE_RUNNING, absl::ZeroDuration())}}, {""});
  AnswerAsElastic(0, 1, {});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  const absl::Status status = coordination_->Meet(1, {}).status();
  ASSERT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no place among the machines of job job"));
  sessions_.WaitFor([](const v1::AgentFrame& one) {
    return one.has_ops() && one.ops().ops(0).has_end_generation() &&
           one.ops().ops(0).end_generation().reason() == "the others have ended";
  });
}

TEST_F(GrpcJobCoordinationTest, HostOfTheCoordinatorThatAsksInVain_SaysOnceWhyItStays) {
  StartCoordinator();
  hosts_coordinator_ = true;
  admin_.Quarantine("job.agents", HostName(), 0);
  const std::vector<v1::Member> runs = {Machine(1, v1::WORKER_STATE_RUNNING, absl::ZeroDuration())};
  special_ = WithoutAPlace({runs, runs, runs, runs, {}}, {""}, /*times=*/2);
  AnswerAsElastic(0, 2, {});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(coordination_->Meet(1, {}).status().code(), absl::StatusCode::kDeadlineExceeded);
  const std::string told = ::testing::internal::GetCapturedStderr();
  const size_t first = told.find("this machine hosts the coordinator, so it keeps serving");
  EXPECT_NE(first, std::string::npos) << told;
  EXPECT_EQ(told.rfind("this machine hosts the coordinator, so it keeps serving"), first) << told;
}

// The others finish while this machine waits for its place.
TEST_F(GrpcJobCoordinationTest, HostOfTheCoordinatorThatAsksAgain_EndsWithTheOthers) {
  StartCoordinator();
  hosts_coordinator_ = true;
  min_nodes_ = 2;
  admin_.Quarantine("job.agents", HostName(), 0);
  auto joins = std::make_shared<std::atomic<int>>(0);
  sessions_.SetAnswer(
      [joins,
       before = WithoutAPlace({{Machine(1, v1::WORKER_STATE_RUNNING, absl::ZeroDuration())}},
                              {"gen/3/"}),
       done = WithoutAPlace({{}}, {"gen/7/"})](const v1::Op& op, v1::OpResult* result) {
        if (op.has_join() && ++*joins > 1) return false;
        *joins > 1 ? done(op, result) : before(op, result);
        return true;
      });
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  const absl::StatusOr<Meeting> meeting = coordination_->Meet(1, {});
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_TRUE(meeting->finished);
  EXPECT_EQ(*joins, 2);
}

// Otherwise the machine would begin the job again alone, once the others have left.
TEST_F(GrpcJobCoordinationTest, OthersAreDoneWhileAMachineWaitsForAPlace_ItStartsNothing) {
  StartCoordinator();
  for (const bool done : {true, false}) {
    special_ = [answer = WithoutAPlace({{}}, {"gen/3/", done ? "gen/7/" : "gen/3/"})](
                   const v1::Op& op, v1::OpResult* result) {
      return !op.has_join() && answer(op, result);
    };
    AnswerAsElastic(0, 1, {});
    MakeCoordination(3, absl::Minutes(2));
    const absl::StatusOr<Meeting> meeting = coordination_->Meet(1, {});
    ASSERT_TRUE(meeting.ok()) << meeting.status();
    EXPECT_EQ(meeting->finished, done);
    coordination_.reset();
    session_.reset();
  }
}

TEST_F(GrpcJobCoordinationTest, MachineWasCutOff_ItComesBackWithoutAFailure) {
  StartCoordinator();
  for (const v1::ErrorReason reason :
       {v1::ERROR_REASON_STALE_GENERATION, v1::ERROR_REASON_NOT_MEMBER,
        v1::ERROR_REASON_LEASE_EXPIRED}) {
    // Once before the machines have agreed, and then while the attempt runs.
    special_ = [reason, waits = 0](const v1::Op& op, v1::OpResult* result) mutable {
      const bool refused = op.has_wait() && (waits++ == 0 || op.wait().keys(0) == "gen/1/end");
      if (refused) SetError(reason, result);
      return refused;
    };
    AnswerAsElastic(1, 2, {});
    MakeCoordination(3, absl::Minutes(2));
    const absl::StatusOr<Meeting> meeting = coordination_->Meet(0, {});
    ASSERT_TRUE(meeting.ok()) << meeting.status();
    EXPECT_EQ(WaitForEnd().cause, AttemptEnd::Cause::kMachineLost);
    coordination_.reset();
    session_.reset();
  }
}

TEST_F(GrpcJobCoordinationTest, NewcomerWithOtherSettings_IsRefusedBeforeItAsksForAPlace) {
  StartCoordinator();
  special_ = [](const v1::Op& op, v1::OpResult* result) {
    EXPECT_FALSE(op.has_join());
    if (!op.has_txn()) return false;
    v1::KeyValue* const kv = result->mutable_txn()->add_results()->add_kvs();
    kv->set_key("gen/7/settings");
    kv->set_value(R"({"settings": "num_processes 4"})");
    return true;
  };
  AnswerAsElastic(1, 2, {});
  MakeCoordination(3, absl::Minutes(2));
  EXPECT_EQ(coordination_->Meet(0, {}).status(),
            absl::InvalidArgumentError(
                "this machine was launched with num_processes 2, but machine 0 with num_processes "
                "4: launch all machines with the same settings"));
}

// Older versions do not report it.
TEST_F(GrpcJobCoordinationTest, Debug_IsComparedWhereBothMachinesSayIt) {
  StartCoordinator();
  debug_ = "false";
  AnswerWith(R"({"settings": "num_processes 2", "master_addr": "10.0.0.1", "master_port": 29501})",
             "");
  MakeCoordination(2, absl::Minutes(1));
  EXPECT_TRUE(coordination_->Meet(0, {}).ok());
  AnswerWith(R"({"settings": "num_processes 2", "debug": "true", "master_addr": "10.0.0.1",)"
             R"( "master_port": 29501})",
             "");
  coordination_.reset();
  MakeCoordination(2, absl::Minutes(1));
  EXPECT_EQ(coordination_->Meet(0, {}).status(),
            absl::InvalidArgumentError(
                "machine 1 was launched with num_processes 2, debug false, but machine 0 with "
                "num_processes 2, debug true: launch all machines with the same settings"));
}

TEST_F(GrpcJobCoordinationTest, CoordinatorIsAnotherLaunch_NoPlaceIsTakenBeforeItsOwn) {
  StartCoordinator();
  another_is_first_ = true;
  auto looks = std::make_shared<std::atomic<int>>(0);
  special_ = [looks](const v1::Op& op, v1::OpResult* result) {
    EXPECT_TRUE(!op.has_join() || *looks == 2);
    if (!op.has_get_members()) return false;
    v1::Member* const member = result->mutable_get_members()->add_members();
    member->set_worker_id(++*looks == 1 ? "node-h-1" : "node0");
    member->set_state(v1::WORKER_STATE_JOINING);
    return true;
  };
  AnswerAsElastic(1, 2, {});
  MakeCoordination(3, absl::Minutes(2));
  EXPECT_TRUE(coordination_->Meet(0, {}).ok());
  EXPECT_EQ(*looks, 2);
}

TEST_F(GrpcJobCoordinationTest, LaunchWithTheCoordinatorHasNoPlaceAnyMore_OthersStillCome) {
  another_is_first_ = true;
  StartCoordinator();
  AnswerAsElastic(1, 2, {Machine(0, v1::WORKER_STATE_RUNNING, absl::ZeroDuration())});
  MakeCoordination(3, absl::Minutes(2));
  EXPECT_TRUE(coordination_->Meet(0, {}).ok());
}

TEST_F(GrpcJobCoordinationTest, FailureWhileAllMachinesAreHeard_IsCounted) {
  RunBeside(Machine(0, v1::WORKER_STATE_RUNNING, absl::ZeroDuration()));
  const AttemptEnd end = coordination_->Fail({"rank 1 exited with code 1", {}});
  EXPECT_EQ(end.cause, AttemptEnd::Cause::kFailed);
  EXPECT_EQ(end.why, "rank 1 exited with code 1");
}

TEST_F(GrpcJobCoordinationTest, MachineWaitsForAPlace_AttemptEndsUnlessAMachineIsDone) {
  StartCoordinator();
  AnswerAsElastic(0, 2, {Machine(-1, v1::WORKER_STATE_JOINING, absl::ZeroDuration())});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  ASSERT_TRUE(coordination_->Meet(1, {}).ok());
  Notification ended;
  AttemptEnd end;
  coordination_->Watch([&](AttemptEnd told) {
    end = std::move(told);
    ended.Notify();
  });
  ended.WaitForNotification();
  EXPECT_EQ(end.cause, AttemptEnd::Cause::kMachineCame);
  EXPECT_THAT(end.why, HasSubstr("another machine has come, h, to the 2 of at most 3"));
  EXPECT_EQ(looks_, 2);
}

// The machine asks again and again, and would get no place.
TEST_F(GrpcJobCoordinationTest, MachineOnAQuarantinedHostWaits_AttemptEndsWhenTheHostIsFree) {
  StartCoordinator();
  admin_.Quarantine("job.agents", "h", 1);
  looks_ = 1;  // no machine is done
  AnswerAsElastic(0, 2, {Machine(-1, v1::WORKER_STATE_JOINING, absl::ZeroDuration())});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  ASSERT_TRUE(coordination_->Meet(1, {}).ok());
  EXPECT_EQ(WaitForEnd().cause, AttemptEnd::Cause::kMachineCame);
  EXPECT_EQ(admin_.asked(), 2);
}

TEST_F(GrpcJobCoordinationTest, MachineOnAQuarantinedHostWaits_TheOneBesideItComes) {
  StartCoordinator();
  admin_.Quarantine("job.agents", "h", 1'000'000);
  looks_ = 1;  // no machine is done
  v1::Member waits = Machine(-1, v1::WORKER_STATE_JOINING, absl::ZeroDuration());
  v1::Member second = waits, free = waits;
  second.set_incarnation(7);
  free.set_incarnation(8);
  free.set_host("free");
  AnswerAsElastic(0, 2, {waits, second, free, waits});
  MakeCoordination(3, absl::Minutes(2), /*node_rank=*/0);
  ASSERT_TRUE(coordination_->Meet(1, {}).ok());
  EXPECT_THAT(WaitForEnd().why, HasSubstr("another machine has come, free, to the 2"));
  EXPECT_EQ(admin_.asked(), 2) << "once for each host";
}

// The coordinator's answers to the second machine when it starts again: the barrier "finish" is in
// `state`, and these are the members.
FakeSessions::Answer Restarted(v1::BarrierState state, std::vector<v1::Member> members) {
  return [state, members](const v1::Op& op, v1::OpResult* result) {
    if (op.has_describe_barrier()) {
      EXPECT_EQ(op.describe_barrier().job_id(), "job.agents");
      EXPECT_EQ(op.describe_barrier().barrier_id(), "finish");
      result->mutable_describe_barrier()->mutable_report()->set_state(state);
    }
    if (op.has_get_members()) {  // one per page
      const int first = op.get_members().first();
      *result->mutable_get_members()->add_members() = members[first];
      if (first + 1 < static_cast<int>(members.size())) {
        result->mutable_get_members()->set_next(first + 1);
      }
    }
    if (op.has_join()) {
      result->mutable_join()->set_rank(1);
      result->mutable_join()->set_generation(2);
      result->mutable_join()->set_generation_prefix("gen/2/");
    }
    if (op.has_wait()) {
      if (op.wait().keys(0) == "gen/2/end") return false;
      result->mutable_wait()->add_kvs()->set_value(kSettings);
    }
    return true;
  };
}
v1::Member Node(const std::string& worker_id, v1::WorkerState state, int age_s = 1) {
  v1::Member member;
  member.set_worker_id(worker_id);
  member.set_state(state);
  member.mutable_heartbeat_age()->set_seconds(age_s);
  return member;
}

TEST_F(GrpcJobCoordinationTest, AgentDiedAfterAllHadFinished_ItsNextStartHasNothingToDo) {
  StartCoordinator();
  for (const v1::WorkerState state :
       {v1::WORKER_STATE_RUNNING, v1::WORKER_STATE_LOST, v1::WORKER_STATE_EXITED}) {
    sessions_.SetAnswer(Restarted(v1::BARRIER_STATE_PASSED,
                                  {Node("node0", v1::WORKER_STATE_LEFT), Node("node1", state)}));
    MakeCoordination(2, absl::Minutes(2), 1);
    const absl::StatusOr<Meeting> meeting = coordination_->Meet(0, {});
    ASSERT_TRUE(meeting.ok()) << meeting.status();
    EXPECT_TRUE(meeting->finished) << v1::WorkerState_Name(state);
    coordination_.reset();
    session_.reset();
  }
}

TEST_F(GrpcJobCoordinationTest, AnotherRunOfAFinishedJob_IsJoined) {
  StartCoordinator();
  const v1::Member other = Node("node0", v1::WORKER_STATE_LEFT);
  struct Case {
    const char* what;
    v1::BarrierState state;
    std::vector<v1::Member> members;
  };
  for (const Case& one : std::vector<Case>{
           {"it had left", v1::BARRIER_STATE_PASSED, {other, Node("node1", v1::WORKER_STATE_LEFT)}},
           {"it died long ago",
            v1::BARRIER_STATE_PASSED,
            {other, Node("node1", v1::WORKER_STATE_LOST, 3600)}},
           {"another machine waits for it",
            v1::BARRIER_STATE_PASSED,
            {other, Node("node1", v1::WORKER_STATE_LOST), Node("node0", v1::WORKER_STATE_JOINING)}},
           {"it is not of this job", v1::BARRIER_STATE_PASSED, {other}},
           {"the machines failed",
            v1::BARRIER_STATE_FAILED,
            {other, Node("node1", v1::WORKER_STATE_LOST)}},
       }) {
    sessions_.SetAnswer(Restarted(one.state, one.members));
    MakeCoordination(2, absl::Minutes(2), 1);
    const absl::StatusOr<Meeting> meeting = coordination_->Meet(0, {});
    ASSERT_TRUE(meeting.ok()) << meeting.status();
    EXPECT_FALSE(meeting->finished) << one.what;
    EXPECT_EQ(meeting->node_rank, 1);
    coordination_.reset();
    session_.reset();
  }
}

TEST_F(GrpcJobCoordinationTest, RandomAnswers_EveryCallReturns) {
  // An answer may still be made after the test's body has ended.
  const auto shared = std::make_shared<RandomMessage>(20261121);
  sessions_.SetAnswer([shared](const v1::Op&, v1::OpResult* result) {
    RandomMessage& random = *shared;
    const uint64_t op_id = result->op_id();
    const auto* const kind = result->GetDescriptor()->FindFieldByNumber(result->kind_case());
    result->Clear();
    switch (random.Draw(4)) {
      case 0:
        random.Fill(result->mutable_error());
        // A coordinator that stops answers later, on another stream.
        if (result->error().detail().reason() == v1::ERROR_REASON_STOPPING) {
          result->mutable_error()->clear_detail();
        }
        break;
      case 1:
        random.FillKind(result);
        break;
      default:
        random.FillKind(result, kind->name());
    }
    result->set_op_id(op_id);
    return true;
  });
  StartCoordinator();
  for (int round = 0; round < 8; ++round) {
    MakeCoordination(2, absl::Minutes(2), round % 4 == 0 ? 1 : -1);
    const absl::StatusOr<Meeting> meeting = coordination_->Meet(round % 2, {});
    coordination_->Watch([](AttemptEnd) {});
    coordination_->ReportEnd(WorkerEnd());
    coordination_->Fail({"why", {"line"}});
    coordination_->Finish().IgnoreError();
    coordination_.reset();
    session_.reset();
  }
}

}  // namespace
}  // namespace muster::agent
