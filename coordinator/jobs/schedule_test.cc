#include "coordinator/jobs/schedule.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
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
  // Runs on `node`, whose space it takes.
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
  // Runs, and is being stopped to come back with up to `most` processes.
  v1::JobRecord& StopsToGrow(const std::string& id, const std::string& node, int processes,
                             int most) {
    v1::JobRecord& record = Running(id, node, processes);
    record.mutable_spec()->set_max_processes(most);
    record.mutable_history(0)->set_stop(true);
    record.mutable_history(0)->mutable_end()->set_end_class(v1::END_CLASS_RESIZED);
    return record;
  }
  // Room on `node` is kept for the next attempt of the job.
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

// An older agent takes none; jobs of the same size without files are no such jobs.
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
  Running("small", "a", 1, 0).mutable_spec()->set_preemptible(true);  // the first to be examined
  Queue("urgent", 4, 5);
  Starts();
  ASSERT_EQ(decision_.preempts.size(), 1u);
  EXPECT_EQ(decision_.preempts[0].job_id, "large");
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

// Else a job behind it would start on what the first one waits for, for days.
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

// One that fails again and again hardly uses what it would keep.
TEST_F(ScheduleTest, DelayOfMoreThanAMinute_KeepsNoRoom) {
  AddNode("a", 2);
  Queue("delayed", 2);
  question_.queued[0].not_before = kNow + absl::Seconds(61);
  Queue("small", 1);
  EXPECT_EQ(Starts(), Ids{"small"});
}

// Else a job of a thousand processes that restarts after a failure loses its nodes to small ones.
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

// What comes after it is reserved for the first that waits, not given to later ones.
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
  Queue("huge", 100);  // blocks nobody
  Starts();
  EXPECT_EQ(decision_.grows.size(), 1u);
  Queue("delayed", 1);
  question_.queued.back().not_before = kNow + absl::Seconds(7);
  Starts();
  EXPECT_TRUE(decision_.grows.empty());
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
  // It does not come back.
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
  EXPECT_EQ(WhyWaits("too many"),
            "other jobs of user \"ann\" to end: they run 4 processes of the 4 that each user may");
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
  // One that comes before it takes the room.
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
  // Comes last, so its spare is tried first: the job does not fit there.
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
  // With room that is kept for it, it may start again although it is at the limit.
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

}  // namespace
}  // namespace muster::coordinator
