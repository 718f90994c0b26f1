// Barriers that not all ranks reach, with real processes: through the public API, and by jobs of
// two agents with three workers each whose workers print the answers they got.
#include <grpcpp/client_context.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <set>

#include "base/identity.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr absl::Duration kLong = absl::Minutes(5);

using AcceleratorBarrierTest = LaunchFixture;

TEST_F(AcceleratorBarrierTest, RankThatNeverComes_IsNamedWithAllThatIsKnownOfIt) {
  const auto run = Muster(
      {"launch", "--cpu", "--num_processes", "2", "--", Runfile("tests/e2e/absent_rank"), "stuck"});
  EXPECT_NE(run->Wait(), 0);
  const std::string text = run->err_text();
  // The barrier is reported at the soft deadline once in the launcher's log, then at the deadline
  // to every waiter.
  int soft = 0;
  for (const std::string& line : run->err()) {
    if (absl::StrContains(line, "barrier \"saved\" counter 0 has waited 4") &&
        absl::StrContains(line, "s for 1 of 2 ranks: rank 1 (")) {
      ++soft;
    }
  }
  EXPECT_EQ(soft, 1) << text;
  EXPECT_THAT(run->err(),
              Contains(AllOf(
                  HasSubstr("barrier \"saved\" counter 0 timed out after 8s: 1 of 2 ranks did not "
                            "arrive: "),
                  HasSubstr(HostName()), HasSubstr(", pid "), HasSubstr(", step 2"),
                  HasSubstr(", last collective "), HasSubstr(", last heard of "),
                  HasSubstr(", sleeping"))));
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1 did not arrive; its stack"),
                          HasSubstr("AugmentImagesForever()")));
}

TEST_F(AcceleratorBarrierTest, Stacks_ShowWhereEveryRankIsWithoutEndingTheJob) {
  const auto run = Muster({"launch", "--cpu", "--num_processes", "2", "--job_name", "stuck", "--",
                           Runfile("tests/e2e/absent_rank"), "hang"});
  run->WaitForLine("[1]: rank 1 hangs");
  const auto shown = Muster({"stacks", "stuck"});
  EXPECT_EQ(shown->Wait(), 0) << shown->err_text();
  EXPECT_THAT(shown->out_text(), AllOf(HasSubstr("rank 0 ("), HasSubstr("rank 1 ("),
                                       HasSubstr("step 2"), HasSubstr("AugmentImagesForever()")));
  EXPECT_THAT(shown->out_text(), Not(HasSubstr("grpc_event_engine")));
  EXPECT_THAT(shown->out_text(), HasSubstr("idle threads of the libraries (--threads shows them)"));
  const auto with_false = Muster({"stacks", "stuck", "--threads=false", "--each=false"});
  EXPECT_EQ(with_false->Wait(), 0) << with_false->err_text();
  EXPECT_THAT(with_false->out_text(), HasSubstr("(--threads shows them)"));
  const auto one = Muster({"stacks", "stuck", "--rank", "1", "-o", "json"});
  EXPECT_EQ(one->Wait(), 0) << one->err_text();
  const auto rows = nlohmann::json::parse(one->out_text());
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["rank"], 1);
  EXPECT_THAT(rows[0]["stack"].get<std::string>(), HasSubstr("AugmentImagesForever()"));
  const auto top = Muster({"top", "stuck", "--interval", "100ms", "--count", "2"});
  EXPECT_EQ(top->Wait(), 0) << top->err_text();
  EXPECT_THAT(top->out(), Contains(ContainsRegex("^stuck +1 +SEALED +2 +2 ")));
  EXPECT_THAT(top->out(), Contains(ContainsRegex("^1 .* RUNNING +2 +0.00 ")));
  const auto wrong = Muster({"stacks", "stuck", "--rank", "7"});
  EXPECT_EQ(wrong->Wait(), 2);
  EXPECT_THAT(wrong->err_text(), HasSubstr("has the ranks 0 to 1, and no rank 7"));
  EXPECT_EQ(Muster({"stacks", "stuk"})->Wait(), 3);
  run->Signal(SIGKILL);
}

TEST_F(AcceleratorBarrierTest, RanksInDifferentBarriers_AreToldSoAtOnce) {
  const auto run = Muster({"launch", "--cpu", "--num_processes", "2", "--",
                           Runfile("tests/e2e/absent_rank"), "desync"});
  EXPECT_NE(run->Wait(), 0);
  EXPECT_THAT(run->err_text(), AllOf(HasSubstr("saved"), HasSubstr("evaluated"),
                                     HasSubstr("absent_rank.cc:"), Not(HasSubstr("timed out"))));
}

// The embedded coordinator learns of it too, and logs nothing.
class ToldOnceTest : public LaunchFixture {
 protected:
  // Starts two workers that have joined and wait; returns the pid of the second.
  int Start() {
    launch_ =
        Launch({"--num_processes", "2", "--cpu"},
               absl::StrCat("echo pid $$; exec ", Runfile("tests/e2e/barrier_worker"), " slow"));
    launch_->WaitForLine("[0]: stepped");
    launch_->WaitForLine("[1]: stepped");
    return Numbers(launch_->WaitForLine("[1]: pid")).at(0);
  }
  std::unique_ptr<Command> launch_;
};

TEST_F(ToldOnceTest, WorkerKilled_ByTheLauncherAlone) {
  kill(Start(), SIGKILL);
  EXPECT_EQ(launch_->Wait(), 1);
  int told = 0;
  for (const std::string& line : launch_->err()) {
    told +=
        absl::StrContains(line, "rank 1 (") && absl::StrContains(line, "was killed by signal 9");
  }
  EXPECT_EQ(told, 1) << launch_->err_text();
}

TEST_F(ToldOnceTest, JobStopped_InOneLine) {
  Start();
  launch_->Signal(SIGINT);
  EXPECT_EQ(launch_->Wait(), 130);
  EXPECT_THAT(launch_->err(), ElementsAre(StartsWith("muster: stopping (SIGINT)")));
}

class BarrierTest : public ClusterFixture {
 protected:
  void SetUp() override {
    ClusterFixture::SetUp();
    coordinator_ = StartCoordinator();
    channel_ = *rpc::Connect(address_);
  }
  void Run(const std::string& what) {
    for (int node = 0; node < 2; ++node) {
      nodes_.push_back(Agent("j", 2, 6, {Runfile("tests/e2e/barrier_worker"), what},
                             {"--machine_rank", absl::StrCat(node)}));
    }
  }
  void ExpectSuccess() {
    for (const auto& node : nodes_) EXPECT_EQ(node->Wait(), 0) << node->err_text();
  }
  // Returns what follows "[rank]: `prefix`" in the lines of each rank, in order.
  std::map<int, std::vector<std::string>> Said(absl::string_view prefix) const {
    std::map<int, std::vector<std::string>> said;
    for (const auto& node : nodes_) {
      for (const std::string& line : node->out()) {
        const size_t end = line.find("]: ");
        if (end == std::string::npos) continue;
        const absl::string_view rest = absl::string_view(line).substr(end + 3);
        if (!absl::StartsWith(rest, prefix)) continue;
        said[std::stoi(line.substr(1, end - 1))].push_back(std::string(rest.substr(prefix.size())));
      }
    }
    return said;
  }
  std::string SaidText() const {
    std::string text;
    for (const auto& node : nodes_) absl::StrAppend(&text, node->out_text(), node->err_text());
    return text;
  }
  // Expects that all of `ranks` said one and the same line that begins with `prefix`; returns its
  // rest.
  std::string ExpectSame(absl::string_view prefix, const std::set<int>& ranks) {
    const auto said = Said(prefix);
    std::set<std::string> lines;
    for (const int rank : ranks) {
      const auto it = said.find(rank);
      EXPECT_TRUE(it != said.end() && it->second.size() == 1) << rank << "\n" << SaidText();
      if (it != said.end()) lines.insert(it->second.begin(), it->second.end());
    }
    EXPECT_THAT(lines, SizeIs(1)) << prefix;
    return lines.empty() ? "" : *lines.begin();
  }
  v1::BarrierReport Describe(const std::string& name) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, kLong);
    v1::DescribeBarrierRequest request;
    request.set_job_id("j");
    request.set_barrier_id(name);
    v1::DescribeBarrierReply reply;
    v1::Barrier::NewStub(channel_)->Describe(&context, request, &reply);
    return reply.report();
  }
  void AwaitArrivals(const std::string& name, int count) {
    while (Describe(name).arrived() < count) {
    }
  }
  void Put(const std::string& key) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, kLong);
    v1::TxnRequest request;
    request.mutable_fence()->set_job_id("j");
    request.add_then()->mutable_put()->set_key(key);
    v1::TxnReply reply;
    EXPECT_TRUE(v1::KeyValueStore::NewStub(channel_)->Txn(&context, request, &reply).ok());
  }
  nlohmann::json Status() {
    const auto status = Muster({"status", "j", "--json", "--coordinator", address_});
    EXPECT_EQ(status->Wait(), 0) << status->err_text();
    return nlohmann::json::parse(status->out_text())["jobs"][0];
  }

  std::unique_ptr<Command> coordinator_;
  std::vector<std::unique_ptr<Command>> nodes_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(BarrierTest, OneRankHangs_EveryWaiterOnBothNodesGetsTheSameBytes) {
  Run("hang");
  nodes_[1]->WaitForLine("[4]: hanging");
  // At the soft deadline every node gets the same message.
  const std::string soft = "barrier \"saved\" counter 0 has waited 3";
  const std::set<int> waiters = {0, 1, 2, 3, 5};
  nodes_[0]->WaitForLine("[0]: report ");
  nodes_[0]->WaitForLine("[1]: report ");
  nodes_[0]->WaitForLine("[2]: report ");
  nodes_[1]->WaitForLine("[3]: report ");
  nodes_[1]->WaitForLine("[5]: report ");
  std::set<std::string> told;
  for (const auto& node : nodes_) {
    int lines = 0;
    for (const std::string& line : node->err()) {
      const size_t at = line.find(soft);
      if (at == std::string::npos) continue;
      told.insert(line.substr(at));
      ++lines;
    }
    EXPECT_EQ(lines, 1) << node->err_text();
  }
  EXPECT_THAT(told, ElementsAre(HasSubstr("s for 1 of 6 ranks: rank 4 (")));

  const std::string error = ExpectSame("error ", waiters);
  EXPECT_THAT(error, AllOf(StartsWith("DEADLINE_EXCEEDED "),
                           HasSubstr("timed out after 8s: 1 of 6 ranks did not arrive: rank 4 (")));
  ExpectSame("detail ", waiters);
  const v1::BarrierReport report = Describe("saved");
  const std::string bytes = report.SerializeAsString();
  EXPECT_EQ(ExpectSame("report ", waiters),
            absl::StrCat(bytes.size(), "-", absl::Hex(std::hash<std::string>()(bytes))));

  EXPECT_EQ(report.state(), v1::BARRIER_STATE_TIMED_OUT);
  EXPECT_THAT(report.missing_ranks(), ElementsAre(4));
  ASSERT_EQ(report.culprits_size(), 1);
  const v1::Culprit& culprit = report.culprits(0);
  EXPECT_EQ(culprit.rank(), 4);
  EXPECT_EQ(culprit.host(), HostName());
  EXPECT_GT(culprit.pid(), 0);
  EXPECT_EQ(culprit.process_state(), "sleeping");
  EXPECT_EQ(culprit.last_step(), 7);
  EXPECT_EQ(culprit.last_collective(), "AllReduce #1 (1,024 Float)");
  EXPECT_TRUE(culprit.has_heartbeat_age());
  EXPECT_LT(culprit.heartbeat_age().seconds(), 60);
  EXPECT_THAT(culprit.native_stack(), HasSubstr("ReadShardForever()"));

  // The operator sees it too.
  const auto shown = Muster({"barrier", "j", "saved", "--coordinator", address_});
  EXPECT_EQ(shown->Wait(), 0) << shown->err_text();
  EXPECT_THAT(shown->out_text(), AllOf(HasSubstr(report.message()), HasSubstr("rank 4 is at"),
                                       HasSubstr("ReadShardForever()")));
  for (const auto& node : nodes_) node->Signal(SIGKILL);
}

TEST_F(BarrierTest, OtherName_IsNamedToBothSides) {
  Run("other_name");
  ExpectSuccess();
  ExpectSame("error FAILED_PRECONDITION barrier 'evaluated': ", {1, 2, 3, 4, 5});
  const auto first = Said("error FAILED_PRECONDITION barrier 'saved': ");
  const auto others = Said("error FAILED_PRECONDITION barrier 'evaluated': ");
  ASSERT_TRUE(first.count(0) == 1 && others.count(5) == 1) << SaidText();
  EXPECT_EQ(first.at(0), others.at(5));
  EXPECT_THAT(first.at(0), ElementsAre(AllOf(HasSubstr("ranks disagree about the next call"),
                                             HasSubstr("\"saved\""), HasSubstr("\"evaluated\""),
                                             HasSubstr("barrier_worker.cc:"))));
}

TEST_F(BarrierTest, OtherLine_BothPlacesAreNamed) {
  Run("other_line");
  ExpectSuccess();
  EXPECT_THAT(ExpectSame("error ", {0, 1, 2, 3, 4, 5}),
              ContainsRegex("from different places: rank [0-5] from \"barrier_worker.cc:[0-9]+\", "
                            "rank [0-5] from \"barrier_worker.cc:[0-9]+\""));
}

TEST_F(BarrierTest, SkippedInstance_IsNamedToAll) {
  Run("other_counter");
  ExpectSuccess();
  const auto said = Said("error ");
  ASSERT_THAT(said, SizeIs(6)) << SaidText();
  for (const auto& [rank, lines] : said) {
    EXPECT_THAT(
        lines,
        ElementsAre(AllOf(StartsWith("FAILED_PRECONDITION "),
                          HasSubstr("rank 0 arrived at barrier \"saved\" counter 1 while counter 0 "
                                    "still waits for 1 of 6 ranks"))));
  }
}

TEST_F(BarrierTest, Subset_PassesWithoutTheOthers_AndAnOutsiderIsNamed) {
  Run("subset");
  ExpectSuccess();
  const auto pair = Said("pair ");
  ASSERT_THAT(pair, SizeIs(2)) << SaidText();
  for (const int rank : {0, 2}) EXPECT_THAT(pair.at(rank), ElementsAre("from 0, from 2"));
  EXPECT_THAT(ExpectSame("error ", {0, 1, 2}),
              HasSubstr("rank 1 arrived at barrier \"other\" counter 0, in which it does not take "
                        "part"));
}

TEST_F(BarrierTest, Cancelled_AllAreToldByWhomAndWhy) {
  Run("cancel");
  AwaitArrivals("saved", 5);
  EXPECT_EQ(Status()["open_barriers"][0]["arrived"], 5);
  const std::string why = Status()["workers"][3]["why_rank"];
  EXPECT_NE(why, "");
  const auto status = Muster({"status", "j", "--coordinator", address_});
  EXPECT_EQ(status->Wait(), 0) << status->err_text();
  EXPECT_THAT(status->out(), Contains("  ranks 0 to 5: " + why));
  const auto open = Muster({"barrier", "j", "--coordinator", address_});
  EXPECT_EQ(open->Wait(), 0) << open->err_text();
  EXPECT_THAT(open->out(), ElementsAre(StartsWith("saved counter 0: 5 of 6 ranks have arrived")));
  const auto cancel =
      Muster({"barrier", "j", "saved", "--cancel", "rank 4 is lost", "--coordinator", address_});
  EXPECT_EQ(cancel->Wait(), 0) << cancel->err_text();
  ExpectSuccess();
  const auto said = Said("error ");
  for (const int rank : {0, 1, 2, 3, 5}) {
    ASSERT_TRUE(said.count(rank) == 1) << SaidText();
    EXPECT_THAT(said.at(rank),
                ElementsAre(AllOf(StartsWith("CANCELLED "),
                                  HasSubstr("\"saved\" counter 0 was cancelled by an operator: "
                                            "rank 4 is lost")),
                            AllOf(StartsWith("CANCELLED "),
                                  HasSubstr("\"evaluated\" counter 0 was cancelled by rank 4: the "
                                            "scratch disk is full"))));
  }
  const auto again = Muster({"barrier", "j", "saved", "--cancel", "x", "--coordinator", address_});
  EXPECT_EQ(again->Wait(), 3);
  EXPECT_THAT(again->err(), ElementsAre(HasSubstr("no open barrier saved")));
}

TEST_F(BarrierTest, SlowRank_IsShownAsAStraggler) {
  Run("slow");
  nodes_[0]->WaitForLine("[2]: stepped");
  const nlohmann::json stragglers = Status()["stragglers"];
  EXPECT_EQ(stragglers[0]["rank"], 2) << stragglers;
  EXPECT_GE(stragglers[0]["times_last"], 10) << stragglers;
  const auto table = Muster({"status", "j", "--coordinator", address_});
  EXPECT_EQ(table->Wait(), 0);
  EXPECT_THAT(table->out_text(), HasSubstr("late at barriers: rank 2 by "));
  Put("shown");
  ExpectSuccess();
}

TEST_F(BarrierTest, QuarantinedHost_IsShownAndGetsNoSeatUntilItIsPardoned) {
  Run("slow");
  nodes_[0]->WaitForLine("[2]: stepped");
  EXPECT_THAT(Status()["quarantined"], SizeIs(0));
  const auto quarantine = Muster({"quarantine", "j", HostName(), "--for", "1h", "--reason",
                                  "memory errors", "--coordinator", address_});
  EXPECT_EQ(quarantine->Wait(), 0) << quarantine->err_text();
  const nlohmann::json shown = Status()["quarantined"];
  ASSERT_THAT(shown, SizeIs(1));
  EXPECT_EQ(shown[0]["host"], HostName());
  EXPECT_EQ(shown[0]["reason"], "memory errors");
  EXPECT_EQ(shown[0]["automatic"], false);
  // The generation continues; no next one is formed.
  Put("shown");
  ExpectSuccess();
  nodes_.clear();
  Run("slow");
  for (int waiting = 0; waiting < 6;) waiting = Status()["waiting"];
  const auto lift = Muster({"quarantine", "j", HostName(), "--lift", "--coordinator", address_});
  EXPECT_EQ(lift->Wait(), 0) << lift->err_text();
  nodes_[0]->WaitForLine("[2]: stepped");
  EXPECT_EQ(Status()["generation"], 2);
  EXPECT_THAT(Status()["quarantined"], SizeIs(0));
  Put("shown");
  ExpectSuccess();
}

TEST_F(BarrierTest, Remove_OfAJob_OnlyWhenItIsOver) {
  const auto remove = [&] {
    auto command = Muster({"remove", "j", "--coordinator", address_});
    const int code = command->Wait();
    return std::make_pair(code, code == 0 ? command->out_text() : command->err_text());
  };
  Run("slow");
  nodes_[0]->WaitForLine("[2]: stepped");
  const auto [refused, why] = remove();
  EXPECT_EQ(refused, 4);
  EXPECT_THAT(why, HasSubstr("has workers"));
  Put("shown");
  ExpectSuccess();
  nodes_.clear();
  EXPECT_EQ(remove(), std::make_pair(0, std::string("job j is removed")));
  EXPECT_EQ(remove().first, 3);
}

// Workers without an agent, which would end the job with the first of them: the test does what an
// agent would.
class WorkersTest : public BarrierTest {
 protected:
  void Start(const std::string& id, int rank, const std::string& what, bool spare = false) {
    std::map<std::string, std::string> env = env_;
    env["MUSTER_COORDINATOR"] = address_;
    env["MUSTER_JOB"] = "j";
    env["MUSTER_WORKER_ID"] = id;
    env["MUSTER_INCARNATION"] = absl::StrCat(100 + rank);
    env["RANK"] = absl::StrCat(rank);
    env["WORLD_SIZE"] = "3";
    if (spare) env["SPARE"] = "1";
    workers_[id] = std::make_unique<Command>(
        *host_, std::vector<std::string>{Runfile("tests/e2e/barrier_worker"), what}, env);
  }
  void KillAndReport(const std::string& id, uint64_t incarnation) {
    workers_.at(id)->Signal(SIGKILL);
    EXPECT_EQ(workers_.at(id)->Wait(), -SIGKILL);
    grpc::ClientContext context;
    rpc::SetTimeout(context, kLong);
    v1::ReportExitRequest request;
    request.mutable_fence()->set_job_id("j");
    request.set_worker_id(id);
    request.set_incarnation(incarnation);
    request.mutable_cause()->set_signal(SIGKILL);
    v1::ReportExitReply reply;
    EXPECT_TRUE(v1::Membership::NewStub(channel_)->ReportExit(&context, request, &reply).ok());
  }

  std::map<std::string, std::unique_ptr<Command>> workers_;
};

TEST_F(WorkersTest, AgreeAlive_ARankDiesInside_AllOthersGetTheSameSet) {
  for (int rank = 0; rank < 3; ++rank) Start(absl::StrCat("w", rank), rank, "alive");
  workers_["w0"]->WaitForLine("entering");
  workers_["w1"]->WaitForLine("entering");
  KillAndReport("w1", 101);
  Put("killed");
  for (const char* id : {"w0", "w2"}) {
    EXPECT_EQ(workers_[id]->Wait(), 0) << workers_[id]->err_text();
    EXPECT_THAT(workers_[id]->out(),
                ElementsAre("entering", "alive 0:64 2:66", "entering", "alive 0:64 2:66"));
  }
}

TEST_F(WorkersTest, LostWorkerOfAnElasticJob_IsReplacedByTheSpareAtItsRank) {
  Start("s", 9, "elastic", true);
  for (int rank = 0; rank < 3; ++rank) Start(absl::StrCat("w", rank), rank, "elastic");
  workers_["w1"]->WaitForLine("seated 1 of 3 in generation 1");
  KillAndReport("w1", 101);
  const std::pair<const char*, std::vector<std::string>> kExpected[] = {
      {"w0", {"seated 0 of 3 in generation 1", "seated 0 of 3 in generation 2"}},
      {"w2", {"seated 2 of 3 in generation 1", "seated 2 of 3 in generation 2"}},
      {"s", {"seated 1 of 3 in generation 2"}}};
  for (const auto& [id, lines] : kExpected) {
    EXPECT_EQ(workers_[id]->Wait(), 0) << workers_[id]->err_text();
    EXPECT_EQ(workers_[id]->out(), lines);
  }
}

}  // namespace
}  // namespace muster
