#include "coordinator/jobs/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(1);

class ScheduleTest : public testing::Test {
 protected:
  ScheduleTest() { question_.now = kNow; }

  void AddNode(const std::string& name, int cpus) {
    v1::NodeInfo& info = infos_.emplace_back();
    CandidateNode node{.info = &info, .uid = 7, .space = {}};
    node.space.cpus = cpus;
    question_.nodes[name] = node;
  }
  v1::JobRecord& Record(const std::string& id, int processes, int priority) {
    v1::JobRecord& record = records_.emplace_back();
    record.set_job_id(id);
    record.set_sequence(records_.size());
    v1::JobSpec* const spec = record.mutable_spec();
    spec->set_min_processes(processes);
    spec->set_max_processes(processes);
    spec->mutable_per_process()->set_cpus(1);
    spec->set_priority(priority);
    return record;
  }
  v1::JobRecord& Queue(const std::string& id, int processes, int priority = 0) {
    v1::JobRecord& record = Record(id, processes, priority);
    question_.queued.push_back({&record});
    return record;
  }
  // Adds a job that runs on `node` and takes its space.
  v1::JobRecord& Running(const std::string& id, const std::string& node, int processes,
                         int priority = 0, absl::Time ends_by = absl::InfiniteFuture()) {
    v1::JobRecord& record = Record(id, processes, priority);
    v1::JobAttempt* const attempt = record.add_history();
    v1::Placement* const placement = attempt->add_placements();
    placement->set_node(node);
    placement->set_processes(processes);
    placement->set_state(v1::PLACEMENT_STATE_RUNNING);
    question_.nodes.at(node).space.Take(*placement, record.spec().per_process());
    question_.active.push_back({&record, attempt, ends_by});
    return record;
  }
  // Adds a running job that is being stopped to come back with up to `most` processes.
  v1::JobRecord& StopsToGrow(const std::string& id, const std::string& node, int processes,
                             int most) {
    v1::JobRecord& record = Running(id, node, processes);
    record.mutable_spec()->set_max_processes(most);
    record.mutable_history(0)->set_stop(true);
    record.mutable_history(0)->mutable_end()->set_end_class(v1::END_CLASS_RESIZED);
    return record;
  }
  // Keeps room on `node` for the next attempt of the job.
  void Keep(v1::JobRecord* record, const std::string& node, int processes) {
    v1::Placement* const spare = record->add_spares();
    spare->set_node(node);
    spare->set_processes(processes);
    record->mutable_spec()->set_spare_nodes(record->spares_size());
    question_.nodes.at(node).space.Take(*spare, record->spec().per_process());
  }
  std::vector<std::string> Starts() {
    decision_ = Schedule(question_);
    std::vector<std::string> ids;
    for (const auto& start : decision_.starts) ids.push_back(start.job_id);
    return ids;
  }
  std::string WhyWaits(const std::string& id) {
    for (const auto& [job, why] : decision_.waits) {
      if (job == id) return why;
    }
    return "";
  }

  std::deque<v1::NodeInfo> infos_;
  std::deque<v1::JobRecord> records_;
  ScheduleQuestion question_;
  ScheduleDecision decision_;
};

using Ids = std::vector<std::string>;

TEST_F(ScheduleTest, Jobs_StartInOrderOfPriorityThenSubmission) {
  AddNode("a", 2);
  Queue("first", 1);
  Queue("second", 1);
  Queue("urgent", 1, 5);
  EXPECT_EQ(Starts(), (Ids{"urgent", "first"}));
  EXPECT_EQ(WhyWaits("second"), "room for 1 process with 1 CPU: no node has it");
}

TEST_F(ScheduleTest, SmallJob_ThatWouldDelayTheFirst_Waits) {
  AddNode("a", 4);
  Running("old", "a", 2);
  Queue("large", 4);
  Queue("small", 1);
  EXPECT_EQ(Starts(), Ids{});
  EXPECT_EQ(WhyWaits("small"),
            "large, which came first or has a higher priority, to start: it needs the room that is "
            "free now");
}

TEST_F(ScheduleTest, SmallJob_ThatEndsBeforeTheFirstCanStart_IsBackfilled) {
  AddNode("a", 4);
  Running("old", "a", 2, 0, kNow + absl::Minutes(30));
  Queue("large", 4);
  Queue("small", 1).mutable_spec()->mutable_time_limit()->set_seconds(20 * 60);
  Queue("long", 1).mutable_spec()->mutable_time_limit()->set_seconds(40 * 60);
  EXPECT_EQ(Starts(), Ids{"small"});
}

// The jobs that hold its room have only just started: it would fit if they did not run.
TEST_F(ScheduleTest, LargeJob_BehindOneThatStartsInTheSamePass_IsNotOvertaken) {
  AddNode("a", 8);
  v1::JobSpec* const first = Queue("first", 4).mutable_spec();
  Queue("large", 8);
  Queue("small", 4);
  EXPECT_EQ(Starts(), Ids{"first"});
  EXPECT_EQ(WhyWaits("small").substr(0, 6), "large,");
  first->mutable_time_limit()->set_seconds(30 * 60);
  Queue("short", 4).mutable_spec()->mutable_time_limit()->set_seconds(20 * 60);
  EXPECT_EQ(Starts(), (Ids{"first", "short"}));
}

TEST_F(ScheduleTest, LargeJob_BehindOneThatStartsWithASpare_IsNotOvertaken) {
  for (const char* const name : {"a", "b", "c"}) AddNode(name, 2);
  Queue("first", 2).mutable_spec()->set_spare_nodes(1);
  Queue("large", 6);
  Queue("small", 2);
  EXPECT_EQ(Starts(), Ids{"first"});
  EXPECT_EQ(decision_.starts[0].placement.spares.size(), 1u);
}

TEST_F(ScheduleTest, JobThatStarts_GetsItsSparesOnce) {
  for (const char* const name : {"a", "b", "c", "d"}) AddNode(name, 2);
  Queue("first", 2).mutable_spec()->set_spare_nodes(2);
  EXPECT_EQ(Starts(), Ids{"first"});
  EXPECT_EQ(decision_.starts[0].placement.spares.size(), 2u);
  EXPECT_TRUE(decision_.spares.empty());
}

// Otherwise every job with a limit, however long, would start on the room for which the first one
// waits.
TEST_F(ScheduleTest, JobWithALimit_BehindOneWhoseStartIsNotKnown_Waits) {
  AddNode("a", 2);
  AddNode("b", 2);
  Running("endless", "a", 2);
  Queue("large", 4);
  Queue("year", 1).mutable_spec()->mutable_time_limit()->set_seconds(365 * 86'400);
  EXPECT_EQ(Starts(), Ids{});
  EXPECT_EQ(WhyWaits("year").substr(0, 6), "large,");
}

TEST_F(ScheduleTest, SmallJob_OnRoomThatTheFirstDoesNotNeed_IsBackfilled) {
  AddNode("a", 4);
  AddNode("b", 2);
  Running("old", "a", 2);
  Queue("large", 4).mutable_spec()->set_processes_per_node(4);
  Queue("small", 2);
  Queue("more", 1);
  EXPECT_EQ(Starts(), Ids{"small"});
  EXPECT_EQ(decision_.starts[0].placement.placements[0].node(), "b");
}

TEST_F(ScheduleTest, JobLargerThanAllNodes_BlocksNobody) {
  AddNode("a", 4);
  Queue("huge", 100);
  Queue("small", 4);
  EXPECT_EQ(Starts(), Ids{"small"});
}

// An older agent takes no files; jobs of the same size without files have another shape.
TEST_F(ScheduleTest, JobWithFilesThatNoNodeTakes_BlocksNobody) {
  AddNode("a", 4);
  Queue("files", 1).mutable_spec()->add_files()->set_path("config.yaml");
  Queue("plain", 1);
  EXPECT_EQ(Starts(), Ids{"plain"});
  EXPECT_NE(WhyWaits("files"), "");
}

TEST_F(ScheduleTest, PreemptibleJobOfLowerPriority_MakesRoom) {
  AddNode("a", 4);
  Running("keep", "a", 1, 0).mutable_spec()->set_preemptible(false);
  Running("older", "a", 1, 0).mutable_spec()->set_preemptible(true);
  Running("latest", "a", 1, 0).mutable_spec()->set_preemptible(true);
  Running("equal", "a", 1, 5).mutable_spec()->set_preemptible(true);
  Queue("urgent", 1, 5);
  EXPECT_EQ(Starts(), Ids{});
  ASSERT_EQ(decision_.preempts.size(), 1u);
  EXPECT_EQ(decision_.preempts[0].job_id, "latest");
  EXPECT_EQ(decision_.preempts[0].why,
            "job urgent of priority 5 needs the room; this one has priority 0 and is preemptible");
}

TEST_F(ScheduleTest, Preemption_StopsNobodyWhoDoesNotHelp) {
  AddNode("a", 1);
  AddNode("b", 4);
  Running("large", "b", 4, 0).mutable_spec()->set_preemptible(true);
  // The first one to be examined.
  Running("small", "a", 1, 0).mutable_spec()->set_preemptible(true);
  Queue("urgent", 4, 5);
  Starts();
  ASSERT_EQ(decision_.preempts.size(), 1u);
  EXPECT_EQ(decision_.preempts[0].job_id, "large");
}

// Few searches find them: as many jobs are stopped as without these.
TEST_F(ScheduleTest, Preemption_OfMany_StopsAsFewAsNeeded) {
  AddNode("z", 8);
  for (int i = 0; i < 20; ++i) {
    const std::string node = absl::StrCat("node-", i);
    AddNode(node, 2);
    // Every second one does not help.
    Running(absl::StrCat("job-", i), node, 1 + i % 2).mutable_spec()->set_preemptible(true);
    if (i % 2 == 0) Running(absl::StrCat("keeps-", i), node, 1);
  }
  v1::JobSpec* const urgent = Queue("urgent", 12, 5).mutable_spec();
  urgent->set_processes_per_node(2);
  Running("last", "z", 6);
  Starts();
  Ids stopped;
  for (const auto& [job, why] : decision_.preempts) stopped.push_back(job);
  EXPECT_EQ(stopped, (Ids{"job-19", "job-17", "job-15", "job-13", "job-11"}));
}

TEST_F(ScheduleTest, Preemption_ThatIsUnderWay_IsNotRepeated) {
  AddNode("a", 2);
  v1::JobRecord& going = Running("going", "a", 1);
  going.mutable_history(0)->set_stop(true);
  Running("other", "a", 1).mutable_spec()->set_preemptible(true);
  Queue("urgent", 1, 5);
  EXPECT_EQ(Starts(), Ids{});
  EXPECT_TRUE(decision_.preempts.empty());
}

TEST_F(ScheduleTest, NothingIsPreempted_BeforeNodesHadTimeToCome) {
  AddNode("a", 1);
  Running("old", "a", 1).mutable_spec()->set_preemptible(true);
  Queue("urgent", 1, 5);
  question_.settled = false;
  Starts();
  EXPECT_TRUE(decision_.preempts.empty());
}

TEST_F(ScheduleTest, WhileNodesAreAwaited_NothingStartsBehindTheFirstThatDoesNotFit) {
  AddNode("a", 2);
  Queue("fits", 1);
  Queue("large", 4);
  Queue("small", 1);
  question_.settled = false;
  question_.awaits_nodes = true;
  EXPECT_EQ(Starts(), Ids{"fits"});
  EXPECT_EQ(WhyWaits("small"), "nodes that may come back after the start of the coordinator");
  question_.awaits_nodes = false;
  EXPECT_EQ(Starts(), (Ids{"fits", "small"}));
}

TEST_F(ScheduleTest, WhileNodesAreAwaited_AnElasticJobStartsWithAllItsProcesses) {
  AddNode("a", 2);
  Queue("elastic", 1).mutable_spec()->set_max_processes(4);
  question_.awaits_nodes = true;
  EXPECT_EQ(Starts(), Ids{});
  EXPECT_EQ(WhyWaits("elastic"), "nodes that may come back after the start of the coordinator");
  AddNode("b", 2);
  EXPECT_EQ(Starts(), Ids{"elastic"});
  EXPECT_EQ(decision_.starts[0].placement.processes, 4);
  question_.nodes.erase("b");
  question_.awaits_nodes = false;
  EXPECT_EQ(Starts(), Ids{"elastic"});
}

// Otherwise a job behind it would start on the room for which the first one waits, for days.
TEST_F(ScheduleTest, DelayedRestart_AReservationCountsOnTheEndOfItsTimeLimit) {
  AddNode("a", 2);
  Queue("delayed", 1).mutable_spec()->mutable_time_limit()->set_seconds(60);
  question_.queued[0].not_before = kNow + absl::Seconds(7);
  Queue("large", 2);
  Queue("long", 1).mutable_spec()->mutable_time_limit()->set_seconds(864'000);
  Queue("short", 1).mutable_spec()->mutable_time_limit()->set_seconds(30);
  EXPECT_EQ(Starts(), Ids{"short"});
}

TEST_F(ScheduleTest, DelayedRestart_AReservationCountsOnTheEndOfItsStopGrace) {
  AddNode("a", 2);
  v1::JobSpec* const delayed = Queue("delayed", 1).mutable_spec();
  delayed->mutable_time_limit()->set_seconds(60);
  delayed->mutable_stop_grace()->set_seconds(10);
  question_.queued[0].not_before = kNow + absl::Seconds(7);
  Queue("large", 2);
  Queue("long", 1).mutable_spec()->mutable_time_limit()->set_seconds(80);
  Queue("short", 1).mutable_spec()->mutable_time_limit()->set_seconds(72);
  EXPECT_EQ(Starts(), Ids{"short"});
}

// A job that fails repeatedly hardly uses the room that it would keep.
TEST_F(ScheduleTest, DelayOfMoreThanAMinute_KeepsNoRoom) {
  AddNode("a", 2);
  Queue("delayed", 2);
  question_.queued[0].not_before = kNow + absl::Seconds(61);
  Queue("small", 1);
  EXPECT_EQ(Starts(), Ids{"small"});
}

// Otherwise a job of a thousand processes that restarts after a failure loses its nodes to small
// ones.
TEST_F(ScheduleTest, DelayedRestart_KeepsTheRoomFromJobsBehindIt) {
  AddNode("a", 2);
  AddNode("b", 1);
  Queue("delayed", 2);
  question_.queued[0].not_before = kNow + absl::Seconds(7);
  Queue("two", 2);
  Queue("one", 1);
  EXPECT_EQ(Starts(), Ids{"one"});
  EXPECT_EQ(decision_.next, kNow + absl::Seconds(7));
  EXPECT_EQ(WhyWaits("two"), "delayed, which is about to start again, and keeps the room for that");
  // A job before it takes what it needs.
  Queue("urgent", 2, /*priority=*/1);
  EXPECT_EQ(Starts(), (Ids{"urgent", "one"}));
}

TEST_F(ScheduleTest, DelayedRestart_ThatDoesNotFitNow_BlocksNobody) {
  AddNode("a", 1);
  Queue("delayed", 2);
  question_.queued[0].not_before = kNow + absl::Seconds(7);
  Queue("next", 1);
  EXPECT_EQ(Starts(), Ids{"next"});
  EXPECT_EQ(decision_.next, kNow + absl::Seconds(7));
}

// The room that becomes free is reserved for the first job that waits, not given to later ones.
TEST_F(ScheduleTest, DelayedRestart_LeavesAReservationToTheFirstThatWaits) {
  AddNode("a", 2);
  Queue("delayed", 1);
  question_.queued[0].not_before = kNow + absl::Seconds(7);
  Queue("large", 2);
  Queue("small", 1);
  EXPECT_EQ(Starts(), Ids{});
}

TEST_F(ScheduleTest, DelayedRestart_KeepsRoomWithinTheOwnersLimit) {
  question_.max_processes_of_owner = 3;
  AddNode("a", 8);
  Queue("delayed", 2).set_owner("ann");
  question_.queued[0].not_before = kNow + absl::Seconds(7);
  Queue("two", 2).set_owner("ann");
  Queue("one", 1).set_owner("ann");
  EXPECT_EQ(Starts(), Ids{"one"});
}

TEST_F(ScheduleTest, JobThatMayGrow_GrowsOnlyIfMoreFits_OneAtATime) {
  AddNode("a", 4);
  AddNode("b", 2);
  const auto elastic = [&](const std::string& id, const std::string& node, int priority) {
    Running(id, node, 1, priority).mutable_spec()->set_max_processes(4);
    question_.active.back().grows_from = kNow;
  };
  elastic("first", "a", 0);
  elastic("urgent", "b", 1);
  Starts();
  ASSERT_EQ(decision_.grows.size(), 1u);
  EXPECT_EQ(decision_.grows[0].job_id, "urgent");
  EXPECT_EQ(decision_.grows[0].why, "there is room for 4 processes instead of 1");
  question_.active[1].grows_from = kNow + absl::Seconds(9);
  Starts();
  ASSERT_EQ(decision_.grows.size(), 1u);
  EXPECT_EQ(decision_.grows[0].job_id, "first");
  EXPECT_EQ(decision_.next, kNow + absl::Seconds(9));
  Running("rest", "a", 3);
  Running("rest of b", "b", 1);
  Starts();
  EXPECT_TRUE(decision_.grows.empty());
}

TEST_F(ScheduleTest, Growth_TakesNoRoomThatAnotherJobWaitsFor) {
  AddNode("a", 4);
  Running("elastic", "a", 1).mutable_spec()->set_max_processes(4);
  question_.active.back().grows_from = kNow;
  Queue("large", 4);
  Starts();
  EXPECT_TRUE(decision_.grows.empty());
  question_.queued.clear();
  Queue("huge", 100);  // blocks no other job
  Starts();
  EXPECT_EQ(decision_.grows.size(), 1u);
  Queue("delayed", 1);
  question_.queued.back().not_before = kNow + absl::Seconds(7);
  Starts();
  EXPECT_TRUE(decision_.grows.empty());
  // It keeps no room for such a long delay.
  question_.queued.back().not_before = kNow + absl::Minutes(5);
  Starts();
  EXPECT_EQ(decision_.grows.size(), 1u);
  EXPECT_EQ(decision_.next, kNow + absl::Minutes(5));
  question_.queued.pop_back();
  question_.settled = false;
  Starts();
  EXPECT_TRUE(decision_.grows.empty());
}

TEST_F(ScheduleTest, Growth_StaysWithinTheOwnersLimit) {
  question_.max_processes_of_owner = 5;
  AddNode("a", 8);
  v1::JobRecord& record = Running("elastic", "a", 1);
  record.set_owner("ann");
  record.mutable_spec()->set_max_processes(4);
  question_.active.back().grows_from = kNow;
  Running("other", "a", 2).set_owner("ann");
  Starts();
  EXPECT_TRUE(decision_.grows.empty());
  question_.max_processes_of_owner = 6;
  Starts();
  EXPECT_EQ(decision_.grows.size(), 1u);
}

TEST_F(ScheduleTest, JobThatStopsToGrow_ReservesItsRoom_InItsOrder) {
  AddNode("a", 4);
  v1::JobRecord& record = StopsToGrow("elastic", "a", 1, 3);
  Queue("late", 2);
  Queue("fits beside", 1);
  EXPECT_EQ(Starts(), Ids{"fits beside"});
  Queue("urgent", 2, 5);
  EXPECT_EQ(Starts(), (Ids{"urgent"}));
  // The job does not come back.
  question_.queued.pop_back();
  record.set_wanted(v1::JOB_ACTION_CANCEL);
  EXPECT_EQ(Starts(), (Ids{"late", "fits beside"}));
}

TEST_F(ScheduleTest, JobThatStopsToGrow_KeepsItsPartOfTheOwnersLimit) {
  question_.max_processes_of_owner = 8;
  AddNode("a", 16);
  StopsToGrow("elastic", "a", 2, 8).set_owner("ann");
  Queue("late", 4).set_owner("ann");
  Queue("other", 4).set_owner("bob");
  EXPECT_EQ(Starts(), Ids{"other"});
}

TEST_F(ScheduleTest, OwnerAtTheLimitOfProcesses_WaitsAndBlocksNobody) {
  question_.max_processes_of_owner = 4;
  AddNode("a", 16);
  Running("r", "a", 3).set_owner("ann");
  Queue("fits", 1).set_owner("ann");
  Queue("too many", 1).set_owner("ann");
  Queue("other", 4).set_owner("bob");
  Queue("nobody's", 8);
  EXPECT_EQ(Starts(), (Ids{"fits", "other", "nobody's"}));
  EXPECT_EQ(
      WhyWaits("too many"),
      "other jobs of user \"ann\" to end: they run 4 processes of the 4 that each user may run");
}

TEST_F(ScheduleTest, LargeJob_ThatWaitsForTheOwnersLimit_IsNotOvertakenByTheOwnersSmallOnes) {
  question_.max_processes_of_owner = 8;
  AddNode("a", 32);
  Running("old", "a", 2, 0, kNow + absl::Minutes(10)).set_owner("ann");
  Running("older", "a", 2, 0, kNow + absl::Minutes(30)).set_owner("ann");
  Queue("large", 7, 10).set_owner("ann");
  Queue("small", 3).set_owner("ann");
  v1::JobRecord& brief = Queue("brief", 1);
  brief.set_owner("ann");
  brief.mutable_spec()->mutable_time_limit()->set_seconds(20 * 60);
  Queue("beside", 1).set_owner("ann");
  Queue("too many", 1).set_owner("ann");
  Queue("other", 8).set_owner("bob");
  EXPECT_EQ(Starts(), (Ids{"brief", "beside", "other"}));
  EXPECT_EQ(
      WhyWaits("large"),
      "other jobs of user \"ann\" to end: they run 4 processes of the 8 that each user may run");
  EXPECT_EQ(WhyWaits("too many"),
            "large, which came first or has a higher priority, to start: it needs what is left of "
            "the 8 processes that each user may run");
}

// The limit was lowered after the job was submitted.
TEST_F(ScheduleTest, JobLargerThanTheOwnersLimit_StopsNoOtherJobOfItsOwner) {
  question_.max_processes_of_owner = 4;
  AddNode("a", 32);
  Queue("too large", 8).set_owner("ann");
  Queue("small", 1).set_owner("ann");
  EXPECT_EQ(Starts(), Ids{"small"});
  EXPECT_EQ(WhyWaits("too large"),
            "a higher limit, or a smaller size (muster resize): it needs 8 processes, and each "
            "user may run 4");
}

TEST_F(ScheduleTest, JobThatNoNodesCanHold_ReservesNothingOfTheOwnersLimit) {
  for (const int least : {8, 1}) {
    question_ = ScheduleQuestion();
    question_.now = kNow;
    question_.max_processes_of_owner = 8;
    AddNode("a", 32);
    Running("old", "a", 1).set_owner("ann");
    v1::JobRecord& large = Queue("large", 8);
    large.set_owner("ann");
    large.mutable_spec()->set_min_processes(least);
    large.mutable_spec()->mutable_per_process()->set_cpus(100);
    Queue("small", 1).set_owner("ann");
    EXPECT_EQ(Starts(), Ids{"small"}) << least;
  }
}

// Otherwise one after the other of them would make it wait for the limit whenever there is room.
TEST_F(ScheduleTest, LargeJob_ThatWaitsForRoom_KeepsWhatTheOwnersLimitAllowsIt) {
  question_.max_processes_of_owner = 8;
  AddNode("a", 16);
  Running("old", "a", 12);
  Queue("large", 8).set_owner("ann");
  Queue("small", 2).set_owner("ann");
  Queue("other", 2).set_owner("bob");
  EXPECT_EQ(Starts(), Ids{"other"});
}

TEST_F(ScheduleTest, ElasticJob_TakesWhatTheOwnersLimitLeaves) {
  question_.max_processes_of_owner = 8;
  AddNode("a", 32);
  Running("old", "a", 3).set_owner("ann");
  v1::JobRecord& elastic = Queue("elastic", 2);
  elastic.set_owner("ann");
  elastic.mutable_spec()->set_max_processes(8);
  EXPECT_EQ(Starts(), Ids{"elastic"});
  EXPECT_EQ(decision_.starts[0].placement.processes, 5);
  elastic.mutable_spec()->set_processes_per_node(2);
  AddNode("b", 2);
  EXPECT_EQ(Starts(), Ids{"elastic"});
  EXPECT_EQ(decision_.starts[0].placement.processes, 4);
  // Not fewer than it needs: the owner's next job must not take them.
  elastic.mutable_spec()->set_processes_per_node(6);
  Queue("small", 3).set_owner("ann");
  Queue("beside", 2).set_owner("ann");
  EXPECT_EQ(Starts(), Ids{"beside"});
}

// The limit leaves it 5 processes, and no nodes have room for 5 evenly.
TEST_F(ScheduleTest, ElasticJob_ThatDoesNotFitWithWhatTheOwnersLimitLeaves_IsNotOvertaken) {
  question_.max_processes_of_owner = 8;
  AddNode("a", 4);
  AddNode("b", 4);
  Running("old", "a", 3).set_owner("ann");
  v1::JobRecord& elastic = Queue("elastic", 5);
  elastic.set_owner("ann");
  elastic.mutable_spec()->set_max_processes(8);
  Queue("small", 1).set_owner("ann");
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Starts(), Ids{});
    question_.too_large = decision_.too_large;
  }
}

TEST_F(ScheduleTest, JobWhoseLabelLooksLikeTwo_StopsNoOther) {
  AddNode("a", 4);
  const auto add = [](v1::NameValue* label, const char* name, const char* value) {
    label->set_name(name);
    label->set_value(value);
  };
  v1::JobSpec* const strange = Queue("strange", 1).mutable_spec();
  add(strange->add_node_labels(), "a", "b\nc=d");
  v1::JobSpec* const plain = Queue("plain", 1).mutable_spec();
  for (const auto& [name, value] : {std::pair{"a", "b"}, {"c", "d"}}) {
    add(infos_.back().add_labels(), name, value);
    add(plain->add_node_labels(), name, value);
  }
  EXPECT_EQ(Starts(), Ids{"plain"});
}

TEST_F(ScheduleTest, SmallJob_BehindALongQueueOfOneShape_IsBackfilled) {
  AddNode("a", 4);
  Running("old", "a", 3);
  for (int i = 0; i < 2 * kMaxExamined; ++i) Queue(absl::StrCat("large-", i), 4);
  question_.active[0].ends_by = kNow + absl::Minutes(30);
  Queue("endless", 1);
  Queue("short", 1).mutable_spec()->mutable_time_limit()->set_seconds(20 * 60);
  EXPECT_EQ(Starts(), Ids{"short"});
  EXPECT_EQ(WhyWaits("endless").substr(0, 8), "large-0,");
}

TEST_F(ScheduleTest, ManyJobsThatWaitForTheirOwnersLimit_DelayNobody) {
  question_.max_processes_of_owner = 4;
  AddNode("a", 8);
  Running("old", "a", 4).set_owner("ann");
  for (int i = 0; i < 5000; ++i) Queue(absl::StrCat("ann-", i), 1 + i % 4).set_owner("ann");
  Queue("other", 4).set_owner("bob");
  EXPECT_EQ(Starts(), Ids{"other"});
}

// Each schedule ends after limited work, and leaves less to the next one.
TEST_F(ScheduleTest, ManyJobsThatAreTooLargeForAllNodes_DelayNobodyForLong) {
  AddNode("a", 8);
  for (int i = 0; i < 2 * kMaxExamined + 10; ++i) Queue(absl::StrCat("large-", i), 9 + i);
  Queue("small", 4);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Starts(), Ids{}) << i;
    EXPECT_TRUE(decision_.unfinished) << i;
    EXPECT_EQ(WhyWaits("small"), "the jobs before it");
    question_.too_large = decision_.too_large;
  }
  EXPECT_EQ(Starts(), Ids{"small"});
  EXPECT_FALSE(decision_.unfinished);
  EXPECT_EQ(WhyWaits("large-0"), "room for 9 processes with 1 CPU each: 8 fit");
}

// Jobs that wait for others to end need no search.
TEST_F(ScheduleTest, ManyJobsOfDifferentSizesThatWaitForRoom_AreNotExaminedAgainAndAgain) {
  AddNode("a", 1000);
  Running("old", "a", 999);
  for (int i = 0; i < 2 * kMaxExamined; ++i) Queue(absl::StrCat("large-", i), 1000 - i);
  EXPECT_EQ(Starts(), Ids{});
  EXPECT_EQ(WhyWaits(absl::StrCat("large-", 2 * kMaxExamined - 1)), "the jobs before it");
  EXPECT_FALSE(decision_.unfinished);
}

TEST_F(ScheduleTest, Spares_AreOnOtherNodes_AndOnlyWhereThereIsRoom) {
  for (const char* const name : {"a", "b", "c"}) AddNode(name, 2);
  Queue("first", 2).mutable_spec()->set_spare_nodes(1);
  Queue("second", 2).mutable_spec()->set_spare_nodes(1);
  EXPECT_EQ(Starts(), (Ids{"first", "second"}));
  ASSERT_EQ(decision_.starts[0].placement.spares.size(), 1u);
  EXPECT_EQ(decision_.starts[0].placement.placements[0].node(), "a");
  EXPECT_EQ(decision_.starts[0].placement.spares[0].node(), "b");
  EXPECT_EQ(decision_.starts[0].placement.spares[0].processes(), 2);
  EXPECT_EQ(decision_.starts[1].placement.placements[0].node(), "c");
  EXPECT_TRUE(decision_.starts[1].placement.spares.empty());
}

TEST_F(ScheduleTest, RoomOfASpare_IsForItsJob_AndForThoseBeforeIt) {
  AddNode("a", 2);
  AddNode("b", 2);
  Running("old", "a", 2);
  Keep(&Queue("restarts", 2), "b", 2);
  Queue("late", 1);
  EXPECT_EQ(Starts(), Ids{"restarts"});
  EXPECT_EQ(decision_.starts[0].placement.placements[0].node(), "b");
  EXPECT_TRUE(decision_.yields.empty());
  // A job before it takes the room.
  Queue("urgent", 1, 5);
  EXPECT_EQ(Starts()[0], "urgent");
  EXPECT_EQ(decision_.yields, Ids{"restarts"});
  EXPECT_NE(WhyWaits("restarts"), "");
}

TEST_F(ScheduleTest, SparesOfAJobThatIsTooLargeForTheNodes_AreLeftAlone) {
  for (const char* const name : {"a", "b"}) AddNode(name, 2);
  Queue("wide", 5);
  Keep(&Running("old", "a", 2), "b", 2);
  EXPECT_EQ(Starts(), Ids{});
  EXPECT_TRUE(decision_.yields.empty()) << "it blocks nobody";
}

TEST_F(ScheduleTest, SparesBehindAJobThatWaits_Yield_AndItIsOvertakenByNobody) {
  for (const char* const name : {"a", "b", "c"}) AddNode(name, 2);
  Queue("wide", 6);
  v1::JobRecord& runs = Running("runs", "a", 2);
  Keep(&runs, "c", 2);
  Queue("small", 1);
  EXPECT_EQ(Starts(), Ids{}) << "b and c are kept for the first";
  EXPECT_EQ(decision_.yields, Ids{"runs"});
}

TEST_F(ScheduleTest, SparesBehind_AreTakenBeforeAnythingIsStopped) {
  for (const char* const name : {"a", "b", "c"}) AddNode(name, 2);
  Queue("first", 4);
  Keep(&Running("keeps", "a", 2), "b", 2);
  EXPECT_EQ(Starts(), Ids{"first"});
  EXPECT_EQ(decision_.yields, Ids{"keeps"});
  EXPECT_TRUE(decision_.preempts.empty());
}

TEST_F(ScheduleTest, OnlyAsManySparesYieldAsAreNeeded_TheLastJobsFirst) {
  for (const char* const name : {"a", "b", "c", "d"}) AddNode(name, 2);
  Queue("first", 2);
  Keep(&Running("second", "a", 2), "b", 2);
  Keep(&Running("third", "c", 2), "d", 2);
  EXPECT_EQ(Starts(), Ids{"first"});
  EXPECT_EQ(decision_.starts[0].placement.placements[0].node(), "d");
  EXPECT_EQ(decision_.yields, Ids{"third"});
}

TEST_F(ScheduleTest, SparesThatDoNotHelp_AreKept) {
  for (const char* const name : {"a", "b", "c"}) AddNode(name, 2);
  AddNode("d", 1);
  Queue("first", 2);
  Keep(&Running("second", "a", 2), "b", 2);
  // comes last, so its spare is tried first: the job does not fit there
  Keep(&Running("third", "c", 2), "d", 1);
  EXPECT_EQ(Starts(), Ids{"first"});
  EXPECT_EQ(decision_.starts[0].placement.placements[0].node(), "b");
  EXPECT_EQ(decision_.yields, Ids{"second"});
}

TEST_F(ScheduleTest, ManyJobsThatNoNodeHasSparesFor_DoNotKeepOthersFromTheirs) {
  AddNode("a", 1000);
  AddNode("b", 1);
  for (int i = 0; i < 2 * kMaxExamined; ++i) {
    Running(absl::StrCat("large-", i), "a", 2).mutable_spec()->set_spare_nodes(1);
  }
  question_.nodes.at("a").space.cpus = 0;
  Running("small", "a", 1).mutable_spec()->set_spare_nodes(1);
  question_.nodes.at("a").space.cpus = 0;
  EXPECT_EQ(Starts(), Ids{});
  ASSERT_EQ(decision_.spares.size(), 1u);
  EXPECT_EQ(decision_.spares[0].first, "small");
}

TEST_F(ScheduleTest, RunningJobThatLacksSpares_GetsThem_WhenNobodyWaitsForTheRoom) {
  AddNode("a", 2);
  AddNode("b", 2);
  Running("runs", "a", 1).mutable_spec()->set_spare_nodes(3);
  EXPECT_EQ(Starts(), Ids{});
  ASSERT_EQ(decision_.spares.size(), 1u);
  EXPECT_EQ(decision_.spares[0].first, "runs");
  ASSERT_EQ(decision_.spares[0].second.size(), 1u);
  EXPECT_EQ(decision_.spares[0].second[0].node(), "b");
  Queue("large", 4);
  EXPECT_EQ(Starts(), Ids{});
  EXPECT_TRUE(decision_.spares.empty());
}

TEST_F(ScheduleTest, Spares_CountAgainstTheOwnersLimit) {
  question_.max_processes_of_owner = 4;
  for (const char* const name : {"a", "b", "c", "d"}) AddNode(name, 2);
  v1::JobRecord& job = Queue("job", 2);
  job.set_owner("ann");
  job.mutable_spec()->set_spare_nodes(3);
  Queue("too many", 1).set_owner("ann");
  EXPECT_EQ(Starts(), Ids{"job"});
  EXPECT_EQ(decision_.starts[0].placement.spares.size(), 1u);
  // With its spares, it may start again although it is at the limit.
  Keep(&job, "d", 2);
  EXPECT_EQ(Starts(), Ids{"job"});
}

TEST_F(ScheduleTest, PreemptedJob_GivesUpItsSparesToo) {
  AddNode("a", 2);
  AddNode("b", 2);
  v1::JobRecord& old = Running("old", "a", 2);
  old.mutable_spec()->set_preemptible(true);
  Keep(&old, "b", 2);
  Queue("urgent", 4, 5);
  EXPECT_EQ(Starts(), Ids{});
  ASSERT_EQ(decision_.preempts.size(), 1u);
  EXPECT_EQ(decision_.preempts[0].job_id, "old");
}

// More jobs of all sizes arrive than there is room for; each runs for ten minutes at most.
TEST_F(ScheduleTest, AnyJobs_NoneStarves_AndNoNodeIsGivenOutTwice) {
  constexpr int kMinutes = 150, kLongest = 10;
  for (int seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937 random(seed);
    const auto draw = [&](int least, int most) {
      return std::uniform_int_distribution<int>(least, most)(random);
    };
    const int limit = seed % 2 == 0 ? 0 : 8;
    const std::map<std::string, int> cpus = {
        {"a", draw(3, 6)}, {"b", draw(3, 6)}, {"c", draw(3, 6)}};
    records_.clear();
    // By index: the minutes at which the job starts to wait, and at which it ends.
    std::map<int, int> queued, runs;
    for (int minute = 0; minute < kMinutes || !queued.empty(); ++minute) {
      ASSERT_LT(minute, 20 * kMinutes) << queued.size() << " jobs never start";
      std::erase_if(runs, [&](const auto& job) { return job.second <= minute; });
      for (int more = minute < kMinutes ? draw(0, 3) : 0; more > 0; --more) {
        // The large jobs come before all others, but not often enough to fill the nodes. Each job
        // fits: the same number of processes on each node.
        const bool large = minute % 50 == 20 && more == 1;
        queued[records_.size()] = minute;
        v1::JobRecord& record =
            Record(absl::StrCat("job-", records_.size()), large ? 6 : draw(1, 4), large ? 1 : 0);
        record.set_owner(draw(0, 1) == 0 ? "ann" : "bob");
        if (draw(0, 1) == 0) {
          record.mutable_spec()->mutable_time_limit()->set_seconds(60 * draw(1, kLongest));
        }
      }
      question_ = ScheduleQuestion();
      question_.now = kNow + absl::Minutes(minute);
      question_.max_processes_of_owner = limit;
      infos_.clear();
      for (const auto& [name, count] : cpus) AddNode(name, count);
      std::map<std::string, int> processes;  // by owner
      const auto take = [&](const v1::JobRecord& job) {
        processes[job.owner()] += CountProcesses(job.history(0));
        for (const v1::Placement& placement : job.history(0).placements()) {
          NodeSpace& space = question_.nodes.at(placement.node()).space;
          space.Take(placement, job.spec().per_process());
          EXPECT_GE(space.cpus, 0) << placement.node() << " is given out twice";
        }
      };
      for (const auto& [index, until] : runs) {
        const v1::JobRecord& job = records_[index];
        take(job);
        ActiveJob& active = question_.active.emplace_back();
        active.record = &job;
        active.attempt = &job.history(0);
        if (job.spec().has_time_limit()) {
          active.ends_by = absl::FromUnixMillis(job.history(0).started_unix_ms()) +
                           absl::Seconds(job.spec().time_limit().seconds());
        }
      }
      for (const auto& [index, since] : queued) question_.queued.push_back({&records_[index]});
      Starts();
      for (const auto& start : decision_.starts) {
        const int index = std::stoi(start.job_id.substr(4));
        ASSERT_EQ(queued.erase(index), 1u) << start.job_id << " does not wait";
        v1::JobRecord& job = records_[index];
        v1::JobAttempt* const attempt = job.add_history();
        attempt->set_started_unix_ms(absl::ToUnixMillis(question_.now));
        for (const v1::Placement& one : start.placement.placements) {
          *attempt->add_placements() = one;
        }
        take(job);
        ASSERT_EQ(CountProcesses(*attempt), job.spec().max_processes());
        const int longest =
            job.spec().has_time_limit() ? job.spec().time_limit().seconds() / 60 : kLongest;
        runs[index] = minute + draw(1, longest);
        for (const auto& [other, since] : queued) {
          ASSERT_FALSE(other < index && records_[other].owner() == job.owner() &&
                       records_[other].spec().SerializeAsString() == job.spec().SerializeAsString())
              << job.job_id() << " overtakes one that is alike";
        }
      }
      for (const auto& [owner, count] : processes) ASSERT_LE(count, limit > 0 ? limit : count);
      for (const auto& [index, since] : queued) {
        if (records_[index].spec().priority() == 0) continue;
        // The jobs that run end within kLongest, and then it is this one's turn.
        ASSERT_LE(minute - since, 3 * kLongest) << records_[index].job_id() << " starves";
      }
    }
  }
}

}  // namespace
}  // namespace muster::coordinator
