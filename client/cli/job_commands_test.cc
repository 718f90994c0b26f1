#include "client/cli/job_commands.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "base/test_folder.h"
#include "client/cli/info_commands.h"
#include "client/cli/node_commands.h"
#include "client/cli/running_launch.h"
#include "client/jobs/fake_job_service.h"
#include "client/jobs/job_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/error.pb.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class JobCommandsTest : public ::testing::Test {
 protected:
  FakeJobService fake_;
  std::ostringstream out_, err_;
  const CommandContext context_ = {
      .variables = {{"MUSTER_COORDINATOR", fake_.address()}, {"USER", "ann"}},
      .out = out_,
      .err = err_};
};

TEST_F(JobCommandsTest, Submit_Program_PrintsTheJob) {
  EXPECT_EQ(RunSubmitCommand({"--processes", "1:4", "--", "/opt/train", "--lr", "1"}, context_),
            kExitOk)
      << err_.str();
  EXPECT_EQ(out_.str(), "train-1\n");
  const auto calls = fake_.submitted();
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].owner(), "ann");
  EXPECT_EQ(calls[0].spec().max_processes(), 4);
  EXPECT_THAT(calls[0].spec().argv(), ElementsAre("/opt/train", "--lr", "1"));
}

// Nothing would ever run the job, and it would be gone with the launch.
TEST_F(JobCommandsTest, Submit_ToTheCoordinatorOfALaunch_IsRefused) {
  const TestFolder folder = TestFolder::ForSockets();
  const std::map<std::string, std::string> none = {{"MUSTER_RUNTIME_DIR", folder.path()}};
  auto named = none;
  named["MUSTER_COORDINATOR"] = fake_.address();
  const auto launch = LaunchRecord::Create(none);
  ASSERT_TRUE(launch.ok()) << launch.status();
  ASSERT_TRUE((*launch)->Publish({.job = "mine", .pid = 7, .address = fake_.address()}).ok());
  for (const auto& variables : {none, named}) {
    err_.str("");
    const CommandContext context = {.variables = variables, .out = out_, .err = err_};
    EXPECT_EQ(RunSubmitCommand({"--", "train"}, context), kExitUsage);
    EXPECT_THAT(err_.str(),
                HasSubstr("is that of your launch mine: no agent waits for jobs there"));
    EXPECT_EQ(RunListCommand({}, context), kExitOk) << err_.str();
  }
  EXPECT_TRUE(fake_.submitted().empty());
}

TEST_F(JobCommandsTest, Submit_RelativeProgramWithoutItsFolder_IsRefusedWithTheRemedy) {
  for (const std::string program : {"./train", "build/train"}) {
    err_.str("");
    EXPECT_EQ(RunSubmitCommand({"--", program}, context_), kExitUsage);
    EXPECT_THAT(err_.str(), HasSubstr("program " + program + " is relative"));
    EXPECT_THAT(err_.str(), HasSubstr("--workdir \"$PWD\""));
  }
  EXPECT_TRUE(fake_.submitted().empty());
  EXPECT_EQ(RunSubmitCommand({"--workdir", "/data", "--", "./train"}, context_), kExitOk);
  EXPECT_EQ(RunSubmitCommand({"--", "train"}, context_), kExitOk) << "it is found in PATH";
}

TEST_F(JobCommandsTest, Submit_DryRun_PrintsSettingsAndPlan) {
  EXPECT_EQ(RunSubmitCommand({"--dry_run", "--processes", "2", "--", "train"}, context_), kExitOk);
  EXPECT_EQ(
      out_.str(),
      "command: train  (the command line)\nprocesses: 2  (--processes)\n"
      "starts now: fits now\n  a: 2 processes\n"
      "  a: master_port, a free port from 32768 to 60999\n"
      "  checkpoint: /w/muster-run/checkpoints/checkpoint_3 of step 300; the program decides: "
      "the newest there\n");
  EXPECT_TRUE(fake_.submitted()[0].dry_run());
}

TEST_F(JobCommandsTest, Submit_DryRunAsJson_IsTheWholePlanAndTheSameEachTime) {
  const std::vector<std::string> args = {"--dry_run", "--env", "A=b", "-o", "json", "--", "train"};
  EXPECT_EQ(RunSubmitCommand(args, context_), kExitOk) << err_.str();
  const std::string first = out_.str();
  const auto document = nlohmann::json::parse(first);
  EXPECT_EQ(document["job"]["spec"]["env"]["A"], "b");
  const auto& plan = document["plan"];
  EXPECT_EQ(plan["placements"][0]["node"], "a");
  EXPECT_EQ(plan["ports"][0]["name"], "master_port");
  EXPECT_EQ(plan["ports"][0]["from"], 32768);
  EXPECT_EQ(plan["checkpoint"]["decided_by"], "program");
  EXPECT_EQ(plan["checkpoint"]["resume_from"], "/w/muster-run/checkpoints/checkpoint_3");
  EXPECT_EQ(plan["checkpoint"]["step"], 300);
  EXPECT_EQ(plan["checkpoint"]["saved_by"], "old-1.2");
  out_.str("");
  EXPECT_EQ(RunSubmitCommand(args, context_), kExitOk);
  EXPECT_EQ(out_.str(), first);
}

// Each flag with an invalid value: one line that names it and what to write, before any call.
TEST_F(JobCommandsTest, Submit_EveryFlagWithAWrongValue_IsOneLineThatNamesIt) {
  const std::map<std::string, std::string> wrong = {
      {"name", ""},  // any text: the coordinator knows its rule
      {"workdir", "relative"},
      {"env", "A"},
      {"labels", "=b"},
      {"processes", "1:x"},
      {"user_error_codes", "3,x"},
      {"mixed_precision", "fp8"},
      {"memory_per_process", "much"},
      {"gpu_memory", "-1"},
  };
  const std::vector<std::string> times = {"restart_delay", "time_limit", "stop_grace", "grow_after",
                                          "hang_timeout"};
  for (const JobSettingSpec& setting : JobSettings()) {
    const auto given = wrong.find(setting.name);
    const bool is_time = std::find(times.begin(), times.end(), setting.name) != times.end();
    const std::string value = given != wrong.end()         ? given->second
                              : is_time                    ? "5"
                              : setting.value_name.empty() ? "maybe"
                                                           : "1.5";
    if (!setting.has_flag || value.empty()) continue;
    err_.str("");
    EXPECT_EQ(RunSubmitCommand({"--" + setting.name + "=" + value, "--", "train"}, context_),
              kExitUsage)
        << setting.name << "=" << value;
    const std::string text = err_.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_THAT(text, ::testing::StartsWith("muster submit: --" + setting.name));
    EXPECT_THAT(text, HasSubstr(value));
    EXPECT_THAT(text, ContainsRegex("write |true or false")) << "the way out";
    // And without a value if one is required.
    if (setting.value_name.empty()) continue;
    err_.str("");
    EXPECT_EQ(RunSubmitCommand({"--" + setting.name}, context_), kExitUsage);
    EXPECT_THAT(err_.str(), HasSubstr("--" + setting.name)) << err_.str();
  }
  EXPECT_TRUE(fake_.submitted().empty());
}

TEST_F(JobCommandsTest, Submit_BadFlag_IsAUsageErrorBeforeAnyCall) {
  EXPECT_EQ(RunSubmitCommand({"--processes", "x", "--", "train"}, context_), kExitUsage);
  EXPECT_EQ(err_.str(), "muster submit: --processes x: write how many, 4, or a range, 1:4\n");
  EXPECT_TRUE(fake_.submitted().empty());
}

TEST_F(JobCommandsTest, List_Table_HasARowForEachJob) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1);
  job.set_why("waits for 2 GPUs");
  fake_.Add(job);
  fake_.Add(FakeJob("gpt-2", v1::JOB_STATE_RUNNING, 2));
  EXPECT_EQ(RunListCommand({}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(),
            "JOB      STATE    PROCESSES  RESTARTS  WHY\n"
            "mnist-1  QUEUED   2          0         waits for 2 GPUs\n"
            "gpt-2    RUNNING  2          0         -\n");
}

TEST_F(JobCommandsTest, List_StateAndName_PrintsOnlyThose) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1));
  fake_.Add(FakeJob("gpt-2", v1::JOB_STATE_RUNNING, 2));
  EXPECT_EQ(RunListCommand({"--state", "running", "-o", "name"}, context_), kExitOk);
  EXPECT_EQ(out_.str(), "gpt-2\n");
  EXPECT_EQ(RunListCommand({"--state", "runing"}, context_), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("did you mean RUNNING?"));
}

TEST_F(JobCommandsTest, Logs_WrongFlags_AreNamedBeforeAnyCall) {
  for (const auto& [flag, value] :
       std::vector<std::pair<std::string, std::string>>{{"rank", "-1"},
                                                        {"rank", "x"},
                                                        {"attempt", "0"},
                                                        {"tail", "1.5"},
                                                        {"since", "lately"},
                                                        {"grep", "("}}) {
    err_.str("");
    EXPECT_EQ(RunLogsCommand({"mnist-1", absl::StrCat("--", flag, "=", value), "--coordinator",
                              "unix:/nonexistent", "--timeout", "100ms"},
                             context_),
              kExitUsage);
    EXPECT_THAT(err_.str(), HasSubstr(absl::StrCat("--", flag, " ", value)));
  }
}

TEST_F(JobCommandsTest, NumbersBeyond32Bits_SayWhatIsAllowed) {
  for (const std::string flag : {"rank", "attempt"}) {
    err_.str("");
    EXPECT_EQ(RunLogsCommand({"mnist-1", absl::StrCat("--", flag), "99999999999"}, context_),
              kExitUsage);
    EXPECT_THAT(err_.str(), HasSubstr(absl::StrCat("--", flag, " 99999999999: write a number from ",
                                                   flag == "rank" ? 0 : 1, " to 2147483647")));
  }
  err_.str("");
  EXPECT_EQ(RunSubmitCommand({"--processes", "99999999999", "--", "train"}, context_), kExitUsage);
  EXPECT_EQ(
      err_.str(),
      "muster submit: --processes 99999999999: write how many, 4, or a range, 1:4, of at most "
      "2147483647\n");
}

TEST_F(JobCommandsTest, NoCoordinator_EveryCommandSaysWhereHowOftenWhyAndWhatToDo) {
  const std::string flag = "unix:/nonexistent/flag";
  for (const auto& run : {RunListCommand, RunNodesCommand, RunStatusCommand}) {
    err_.str("");
    EXPECT_EQ(run({"--coordinator", flag, "--timeout", "100ms"}, context_), kExitUnreachable);
    const std::string text = err_.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_THAT(
        text,
        ContainsRegex(
            "muster [a-z]+: no coordinator answers at unix:/nonexistent/flag \\([0-9]+ tr.* in "
            "100ms, .+\\): is it running\\? Start it with muster coordinator --listen "
            "unix:/nonexistent/flag, or correct the address, which --coordinator sets\n"));
  }
  err_.str("");
  const CommandContext variable = {{{"MUSTER_COORDINATOR", "unix:/nonexistent/v"}}, out_, err_};
  EXPECT_EQ(RunSubmitCommand({"--timeout", "50ms", "--", "train"}, variable), kExitUnreachable);
  EXPECT_THAT(err_.str(), HasSubstr("--listen unix:/nonexistent/v, or correct the address, which "
                                    "MUSTER_COORDINATOR sets\n"));
}

TEST_F(JobCommandsTest, Describe_UnknownJob_NamesASimilarOne) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1));
  EXPECT_EQ(RunDescribeCommand({"mnits-1"}, context_), kExitNotFound);
  EXPECT_THAT(err_.str(), HasSubstr("did you mean mnist-1?"));
  EXPECT_EQ(RunDescribeCommand({"mnist-1"}, context_), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("\"state\": \"QUEUED\""));
}

// Three attempts: rank 3 failed, a node was lost, and one runs.
v1::JobRecord JobWithIncidents() {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1);
  job.set_attempts(5);
  for (int i = 0; i < 3; ++i) {
    v1::JobAttempt* const attempt = job.add_history();
    attempt->set_number(3 + i);
    attempt->set_started_unix_ms(1000000 + 100000 * i);
    if (i == 2) break;
    attempt->set_ended_unix_ms(1000000 + 100000 * i + 90000);
    v1::AttemptEnd* const end = attempt->mutable_end();
    end->set_end_class(i == 0 ? v1::END_CLASS_PROCESS_FAILED : v1::END_CLASS_NODE_LOST);
    end->set_why(i == 0 ? "rank 3 exited with code 7" : "node b is lost");
    end->set_node("b");
    end->set_rank(i == 0 ? 3 : -1);
    end->set_exit_code(i == 0 ? 7 : 0);
    if (i == 0) end->add_last_lines("no \x1b[31mluck");
  }
  return job;
}

TEST_F(JobCommandsTest, Incidents_EachFailedAttempt_WithCauseTimesAndLastLines) {
  fake_.Add(JobWithIncidents());
  EXPECT_EQ(RunIncidentsCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  const std::string text = out_.str();
  EXPECT_THAT(text, HasSubstr("attempts 1 to 2 are no longer kept"));
  EXPECT_THAT(text, ContainsRegex("\n3 .* 1m30s +10 s +PROCESS_FAILED +b +3 +rank 3 exited with "
                                  "code 7\n"));
  EXPECT_THAT(text, ContainsRegex("\n4 .* 1m30s +10 s +NODE_LOST +b +- +node b is lost\n"));
  EXPECT_THAT(text, HasSubstr("attempt 3, the last lines of rank 3:\n  no "));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("\x1b")));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("\n5 ")));
}

TEST_F(JobCommandsTest, Incidents_AfterWhichTheAttemptHasGoneOn_AreNumberedWithinIt) {
  v1::JobRecord job = JobWithIncidents();
  // Attempt 5 has lost two processes, one after the other.
  for (int restarts = 0; restarts < 2; ++restarts) {
    v1::JobAttempt* const last = job.mutable_history(job.history_size() - 1);
    last->mutable_end()->set_end_class(v1::END_CLASS_PROCESS_FAILED);
    last->mutable_end()->set_why("rank 1 was killed");
    v1::JobAttempt* const next = job.add_history();
    next->set_number(5);
    next->set_restarts(restarts + 1);
  }
  const int number = 5;
  fake_.Add(job);
  EXPECT_EQ(RunIncidentsCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr(absl::StrCat("\n", number, "+1 ")));
  out_.str("");
  EXPECT_EQ(RunIncidentsCommand({"mnist-1", "-o", "json"}, context_), kExitOk);
  const auto incidents = nlohmann::json::parse(out_.str())["incidents"];
  const auto last = incidents.back();
  EXPECT_EQ(last["attempt"], number);
  EXPECT_EQ(last["restarts_in_place"], 1);
  EXPECT_EQ(last["continued_in_place"], true);
  EXPECT_EQ(incidents[0]["continued_in_place"], false);
}

TEST_F(JobCommandsTest, Incidents_StretchesOfAnAttemptThatAreNotKept_AreSaid) {
  v1::JobRecord job = JobWithIncidents();
  job.mutable_history(0)->set_restarts(2);
  fake_.Add(job);
  EXPECT_EQ(RunIncidentsCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("attempts 1 to 3+1 are no longer kept"));
  out_.str("");
  EXPECT_EQ(RunIncidentsCommand({"mnist-1", "-o", "json"}, context_), kExitOk);
  const auto value = nlohmann::json::parse(out_.str());
  EXPECT_EQ(value["forgotten"], 2);
  EXPECT_EQ(value["forgotten_in_place"], 2);
}

TEST_F(JobCommandsTest, Incidents_FirstStretchOfTheOnlyAttemptIsNotKept_IsSaid) {
  v1::JobRecord job = JobWithIncidents();
  for (v1::JobAttempt& attempt : *job.mutable_history()) attempt.set_number(1);
  job.mutable_history(0)->set_restarts(1);
  fake_.Add(job);
  EXPECT_EQ(RunIncidentsCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("attempt 1 is no longer kept"));
}

TEST_F(JobCommandsTest, Incidents_OfAHang_ShowWhatEveryRankWasDoing) {
  v1::JobRecord job = JobWithIncidents();
  v1::AttemptEnd* const end = job.mutable_history(0)->mutable_end();
  end->set_end_class(v1::END_CLASS_HANG);
  v1::HungRanks* const hung = end->add_hung();
  for (const int rank : {0, 2}) hung->add_ranks(rank);
  hung->set_doing("step 12, backward, AllReduce #41 (1,024 Float)");
  hung->set_stack("thread 7:\n  #0 poll\n");
  fake_.Add(job);
  EXPECT_EQ(RunIncidentsCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(),
              HasSubstr("\nattempt 3, ranks 0,2 hung: step 12, backward, AllReduce #41 (1,024 "
                        "Float)\n  thread 7:\n    #0 poll\n"));
  EXPECT_THAT(out_.str(), HasSubstr("HANG"));
  out_.str("");
  EXPECT_EQ(RunIncidentsCommand({"mnist-1", "-o", "json"}, context_), kExitOk);
  EXPECT_EQ(nlohmann::json::parse(out_.str())["incidents"][0]["hung"][0]["ranks"][1], 2);
}

TEST_F(JobCommandsTest, Incidents_OnATerminal_NoLineIsWiderThanIt) {
  v1::JobRecord job = JobWithIncidents();
  job.mutable_history(0)->mutable_end()->set_why(
      "rank 3 (pid 4711 on node7) was killed by signal 9 (SIGKILL), by the kernel for memory, "
      "because it reached its limit of 16.0 GiB; it had 16.0 GiB at most: give it a larger "
      "memory_per_process");
  fake_.Add(job);
  CommandContext terminal = context_;
  terminal.columns = 80;
  EXPECT_EQ(RunIncidentsCommand({"mnist-1"}, terminal), kExitOk) << err_.str();
  std::string whole;
  for (const absl::string_view line : absl::StrSplit(out_.str(), '\n')) {
    EXPECT_LE(line.size(), 80u) << line;
    absl::StrAppend(&whole, absl::StripLeadingAsciiWhitespace(line), " ");
  }
  EXPECT_THAT(whole, HasSubstr(job.history(0).end().why()));
}

TEST_F(JobCommandsTest, Submit_RefusedByALimit_HasACodeOfItsOwn) {
  fake_.RefuseSubmissions(rpc::ErrorWithReason(absl::StatusCode::kResourceExhausted,
                                               "user \"ann\" has 5 jobs that have not ended",
                                               v1::ERROR_REASON_LIMIT));
  EXPECT_EQ(RunSubmitCommand({"--", "/opt/train"}, context_), kExitLimit);
  EXPECT_EQ(err_.str(), "muster submit: user \"ann\" has 5 jobs that have not ended\n");
}

TEST_F(JobCommandsTest, Incidents_Json_HasNullWhereATimeIsNotKnown) {
  v1::JobRecord job = JobWithIncidents();
  job.mutable_history(1)->set_started_unix_ms(0);  // never started: its node was lost at once
  // The clock of the next node is behind.
  job.mutable_history(2)->set_started_unix_ms(1000);
  fake_.Add(job);
  EXPECT_EQ(RunIncidentsCommand({"mnist-1", "-o", "json"}, context_), kExitOk) << err_.str();
  const auto value = nlohmann::json::parse(out_.str());
  EXPECT_EQ(value["forgotten"], 2);
  ASSERT_EQ(value["incidents"].size(), 2u);
  EXPECT_EQ(value["incidents"][0]["ran_s"], 90.0);
  EXPECT_EQ(value["incidents"][0]["exit_code"], 7);
  EXPECT_TRUE(value["incidents"][0]["down_s"].is_null());
  EXPECT_TRUE(value["incidents"][1]["ran_s"].is_null());
  EXPECT_TRUE(value["incidents"][1]["down_s"].is_null());
}

TEST_F(JobCommandsTest, Incidents_StagesOfARecovery_AreShown_AndUnknownOnesAreNot) {
  v1::JobRecord job = JobWithIncidents();
  v1::AttemptTimes* const end = job.mutable_history(0)->mutable_times();
  end->set_failed_unix_ms(1'000'000);
  end->set_detected_unix_ms(1'000'012);
  end->set_decided_unix_ms(1'000'512);
  end->set_fenced_unix_ms(1'002'512);
  v1::AttemptTimes* const next = job.mutable_history(1)->mutable_times();
  next->set_placed_unix_ms(1'002'512);
  next->set_sealed_unix_ms(1'010'512);
  fake_.Add(job);
  EXPECT_EQ(RunIncidentsCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_THAT(
      out_.str(),
      ContainsRegex("ATTEMPT +DETECT +DECIDE +FENCE +PLACE +RENDEZVOUS +RESTORE "
                    "+FIRST_STEP +TOTAL\n3 +12 ms +500 ms +2 s +0 us +8 s +- +- +-\n4 +- +- "
                    "+- +- +- +- +- +-\n"));
  out_.str("");
  EXPECT_EQ(RunIncidentsCommand({"mnist-1", "-o", "json"}, context_), kExitOk) << err_.str();
  const auto recovery = nlohmann::json::parse(out_.str())["incidents"][0]["recovery"];
  EXPECT_EQ(recovery["detect_s"], 0.012);
  EXPECT_EQ(recovery["place_s"], 0.0);
  EXPECT_EQ(recovery["rendezvous_s"], 8.0);
  EXPECT_TRUE(recovery["restore_s"].is_null());
  EXPECT_TRUE(recovery["total_s"].is_null());
}

TEST_F(JobCommandsTest, Incidents_NoneYet_SaysSo) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_SUCCEEDED, 1);
  job.add_history()->set_number(1);
  job.mutable_history(0)->mutable_end()->set_end_class(v1::END_CLASS_SUCCEEDED);
  fake_.Add(job);
  EXPECT_EQ(RunIncidentsCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "mnist-1 SUCCEEDED: no attempt of 1 has failed\n");
}

TEST_F(JobCommandsTest, Watch_FailedJob_PrintsChangesAndFails) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 1));
  v1::JobRecord end = FakeJob("mnist-1", v1::JOB_STATE_FAILED, 1, 2);
  end.set_why("rank 1 exited with 3");
  fake_.Change(end);
  EXPECT_EQ(RunWatchCommand({"mnist-1"}, context_), kExitJobFailed);
  EXPECT_EQ(out_.str(), "mnist-1 RUNNING\nmnist-1 FAILED: rank 1 exited with 3\n");
}

TEST_F(JobCommandsTest, ListWatch_PrintsALineForEachChange_UntilItIsRefused) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 1));
  fake_.Add(FakeJob("gpt-2", v1::JOB_STATE_QUEUED, 2, 2));
  v1::JobRecord same = FakeJob("gpt-2", v1::JOB_STATE_QUEUED, 2, 3);  // a node has begun
  fake_.Change(same);
  fake_.Change(FakeJob("gpt-2", v1::JOB_STATE_FAILED, 2, 4));
  fake_.RefuseWatchesAfter(3);
  EXPECT_EQ(RunListCommand({"--watch"}, context_), kExitDenied);
  EXPECT_THAT(err_.str(), HasSubstr("the token has expired"));
  EXPECT_EQ(out_.str(), "mnist-1 RUNNING\ngpt-2 QUEUED\ngpt-2 FAILED\n");
  EXPECT_EQ(RunListCommand({"--watch", "-o", "yaml"}, context_), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("--watch with --output yaml: write table or json"));
}

TEST_F(JobCommandsTest, Logs_AllRanks_ArePrefixedAndFiltered) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1);
  job.set_attempts(1);
  fake_.Add(job);
  fake_.SetLog(1, 0, "epoch 0\nloss 1\n");
  fake_.SetLog(1, 1, "loss 2\nlast");
  EXPECT_EQ(RunLogsCommand({"mnist-1", "--rank", "all"}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "[0]: epoch 0\n[0]: loss 1\n[1]: loss 2\n[1]: last\n");
  out_.str("");
  EXPECT_EQ(RunLogsCommand({"mnist-1", "--grep", "^loss"}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "loss 1\n");
}

TEST_F(JobCommandsTest, Logs_MatchFarBehindTheBeginOfALine_IsFound) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_SUCCEEDED, 1);
  job.set_attempts(1);
  fake_.Add(job);
  const std::string line = std::string(4090, 'x') + "a needle" + std::string(5000, 'y') + "end";
  fake_.SetLog(1, 0, line + "\n");
  for (const char* const found : {"a needle", "end$", "^x"}) {
    out_.str("");
    EXPECT_EQ(RunLogsCommand({"mnist-1", "--grep", found}, context_), kExitOk) << err_.str();
    EXPECT_EQ(out_.str(), line + "\n") << found;
  }
  // A window of the search ends after the first 4096 bytes.
  for (const char* const missing : {"^a needle", "needle$", "^y", "y$"}) {
    out_.str("");
    EXPECT_EQ(RunLogsCommand({"mnist-1", "--grep", missing}, context_), kExitOk) << err_.str();
    EXPECT_EQ(out_.str(), "") << missing;
  }
}

TEST_F(JobCommandsTest, LogsAndWatch_OutputThatCannotBeWritten_EndThemBeforeTheJob) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1);
  job.set_attempts(1);
  fake_.Add(job);
  fake_.SetLog(1, 0, "epoch 0\nloss 1\n");
  // Like a full disk, after which the program ends as if a table could not be written.
  out_.setstate(std::ios::badbit);
  EXPECT_EQ(RunLogsCommand({"mnist-1", "--follow"}, context_), kExitOk) << err_.str();
  // The rank that prints nothing is no longer followed, either.
  fake_.SetLog(1, 1, "");
  EXPECT_EQ(RunLogsCommand({"mnist-1", "--follow", "--rank", "all"}, context_), kExitOk)
      << err_.str();
  EXPECT_EQ(err_.str(), "");
  EXPECT_EQ(RunWatchCommand({"mnist-1"}, context_), kExitOk) << err_.str();
}

TEST_F(JobCommandsTest, Logs_WhoseBeginIsGone_SaySo) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_SUCCEEDED, 1);
  job.set_attempts(1);
  fake_.Add(job);
  fake_.SetLog(1, 0, "epoch 0\nloss 1\n");
  fake_.SetLogBegin(8);
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"mnist-1"}, {"mnist-1", "--follow"}}) {
    err_.str("");
    out_.str("");
    EXPECT_EQ(RunLogsCommand(args, context_), kExitOk) << err_.str();
    EXPECT_EQ(out_.str(), "loss 1\n");
    EXPECT_THAT(err_.str(), HasSubstr("8 bytes of rank 0 are missing here"));
  }
  // A user who requests the end of the log is not told of a missing beginning.
  err_.str("");
  for (const char* lines : {"5", "99999999999"}) {
    EXPECT_EQ(RunLogsCommand({"mnist-1", "--tail", lines}, context_), kExitOk) << err_.str();
    EXPECT_EQ(err_.str(), "");
  }
}

TEST_F(JobCommandsTest, Logs_OfAJobThatHasNotRun_SayWhyThereAreNone) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_CANCELLED, 1);
  job.set_why("it was cancelled: \x1b[2J");
  fake_.Add(job);
  fake_.SetLog(0, 0, "");
  EXPECT_EQ(RunLogsCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "");
  EXPECT_EQ(err_.str(),
            "muster logs: mnist-1 has not run, so there is no output: it was cancelled: "
            "\\x1b[2J\n");
}

TEST_F(JobCommandsTest, Logs_OfARankThatIsNotThere_SuggestNoOtherJob) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1));
  EXPECT_EQ(RunLogsCommand({"mnist-1", "--rank", "7"}, context_), kExitNotFound);
  EXPECT_EQ(err_.str(), "muster logs: no rank 7\n");
}

// A coordinator that was restored from a copy made before the first attempt has skipped thousands
// of numbers.
TEST_F(JobCommandsTest, CheckpointsOfAJobThatHasNone_AreAskedForOfAFewAttempts) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1);
  job.set_attempts(20002);
  job.add_history()->set_number(20001);
  job.add_history()->set_number(20002);
  fake_.Add(job);
  EXPECT_EQ(RunRegistryCommand("registered", {"mnist-1"}, context_), kExitNotFound) << err_.str();
  const std::vector<std::string> asked = fake_.checkpoints_of();
  ASSERT_EQ(asked.size(), 102u);
  EXPECT_EQ(asked[0], "mnist-1.20002");
  EXPECT_EQ(asked[1], "mnist-1.20001");
  EXPECT_EQ(asked[2], "mnist-1.20000");
}

TEST_F(JobCommandsTest, Cancel_Job_SendsTheReason) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_STOPPING, 1));
  EXPECT_EQ(RunControlCommand("cancel", {"mnist-1", "--why", "old"}, context_), kExitOk);
  EXPECT_EQ(out_.str(), "mnist-1 STOPPING\n");
  EXPECT_THAT(fake_.actions(), ElementsAre("CANCEL mnist-1 old0"));
}

TEST_F(JobCommandsTest, Resize_Job_SendsTheRange) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1));
  EXPECT_EQ(RunResizeCommand({"mnist-1", "--processes", "2:6", "--why", "more nodes"}, context_),
            kExitOk)
      << err_.str();
  EXPECT_EQ(out_.str(), "mnist-1 RUNNING\n");
  EXPECT_THAT(fake_.actions(), ElementsAre("RESIZE mnist-1 more nodes0"));
  out_.str("");
  EXPECT_EQ(RunListCommand({}, context_), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("2:6"));
}

TEST_F(JobCommandsTest, Resize_WithoutANumberOrWithABadOne_SaysWhatToWrite) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1));
  for (const char* const bad : {"", "0", "4:2", "x", "1:2:3", "99999999999"}) {
    err_.str("");
    EXPECT_EQ(RunResizeCommand({"mnist-1", "--processes", bad}, context_), kExitUsage) << bad;
    EXPECT_THAT(err_.str(), HasSubstr("write how many, 4, or a range, 1:4")) << bad;
  }
  err_.str("");
  EXPECT_EQ(RunResizeCommand({"mnist-1"}, context_), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("--processes: write how many, 4, or a range, 1:4"));
  EXPECT_EQ(RunResizeCommand({"mnits-1", "--processes", "2"}, context_), kExitNotFound);
  EXPECT_THAT(fake_.actions(), ElementsAre());
}

TEST_F(JobCommandsTest, OnSlurm_CommandsAreThoseOfSlurm) {
  const TestFolder home;
  std::vector<std::string> commands;
  CommandContext context = {
      .variables = {{"HOME", home.Path("")}, {"MUSTER_ON", "slurm"}}, .out = out_, .err = err_};
  context.run_program = [&](const std::vector<std::string>& argv, const auto& /*without*/) {
    commands.push_back(absl::StrJoin(argv, " "));
    return ProgramOutput{0,
                         argv[0] == "sinfo"    ? "n0|4|1000|(null)|all*|idle\n"
                         : argv[0] == "sbatch" ? "12\n"
                                               : "12|RUNNING|n0|None\n",
                         argv[0] == "sbatch" ? "sbatch: Job 12 to start now\n" : ""};
  };
  EXPECT_EQ(RunSubmitCommand({"--processes", "2", "--dry_run", "--", "/opt/train"}, context),
            kExitOk)
      << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("processes: 2  (--processes)\nsbatch: Job 12 to start now\n"));
  EXPECT_THAT(out_.str(), HasSubstr("#SBATCH --nodes=1\n"));
  out_.str("");
  EXPECT_EQ(RunSubmitCommand({"--processes", "2", "--sbatch=--partition=gpu", "--", "/opt/train"},
                             context),
            kExitOk)
      << err_.str();
  EXPECT_EQ(out_.str(), "train-12\n");
  EXPECT_THAT(commands, ::testing::Contains(HasSubstr("sbatch --parsable --partition=gpu ")));
  out_.str("");
  EXPECT_EQ(RunListCommand({}, context), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), ContainsRegex("train-12 +RUNNING +2 +0 +SLURM runs it on n0"));
  EXPECT_EQ(RunControlCommand("cancel", {"train-12"}, context), kExitOk) << err_.str();
  EXPECT_THAT(commands, ::testing::Contains("scancel 12"));
  EXPECT_EQ(RunDescribeCommand({"trian-12"}, context), kExitNotFound);
  EXPECT_THAT(err_.str(), HasSubstr("did you mean train-12?"));
  EXPECT_TRUE(fake_.submitted().empty());
}

TEST_F(JobCommandsTest, On_OfAnotherPlaceOrWithItsOptions_IsRefused) {
  EXPECT_EQ(RunListCommand({"--on", "mars"}, context_), kExitUsage);
  EXPECT_EQ(RunSubmitCommand({"--sbatch=--qos=a", "--", "train"}, context_), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("--sbatch is for jobs on SLURM: add --on slurm"));
  EXPECT_EQ(RunListCommand({"--on", "slurm", "--coordinator", "unix:/x"}, context_), kExitUsage);
  EXPECT_EQ(RunListCommand({"--on", "slurm"}, context_), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("MUSTER_SLURM_FOLDER"));
}

TEST_F(JobCommandsTest, Remove_SubmittedJob_IsRemovedThere) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_FAILED, 1));
  EXPECT_EQ(RunRemoveCommand({"mnist-1"}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "job mnist-1 is removed\n");
  EXPECT_THAT(fake_.actions(), ElementsAre("REMOVE mnist-1 0"));
}

TEST_F(JobCommandsTest, Nodes_Table_ShowsUse) {
  v1::NodeRecord node;
  node.set_node("a");
  node.mutable_info()->set_cpus(8);
  node.mutable_info()->set_memory_bytes(int64_t{4} << 30);
  node.set_used_cpus(2);
  node.add_jobs("mnist-1");
  fake_.AddNode(node);
  EXPECT_EQ(RunNodesCommand({}, context_), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(),
            "NODE  STATE  CPUS  GPUS  MEMORY          JOBS     WHY\n"
            "a     READY  2/8   0/0   0 B / 4.00 GiB  mnist-1  -\n");
  EXPECT_EQ(RunNodeControlCommand("drain", {"a", "--why", "disk"}, context_), kExitOk);
  EXPECT_THAT(fake_.actions(), ElementsAre("DRAIN a disk"));
}

TEST_F(JobCommandsTest, Nodes_WideAndJson_ShowTheMemoryOfGpusAndTheirDomain) {
  v1::NodeRecord node;
  node.set_node("a");
  for (int i = 0; i < 3; ++i) node.mutable_info()->add_gpus("H200");
  for (const int64_t gib : {141, 141}) node.mutable_info()->add_gpu_memory_bytes(gib << 30);
  node.mutable_info()->set_nvlink_domain("cafe.1");
  fake_.AddNode(node);
  EXPECT_EQ(RunNodesCommand({"-o", "wide"}, context_), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("cafe.1"));
  EXPECT_THAT(out_.str(), ContainsRegex("2 x 141.* GiB, 1 x \\?"));
  out_.str("");
  EXPECT_EQ(RunNodesCommand({"-o", "json"}, context_), kExitOk) << err_.str();
  const auto shown = nlohmann::json::parse(out_.str())[0];
  EXPECT_EQ(shown["nvlink_domain"], "cafe.1");
  EXPECT_EQ(shown["gpu_memory_bytes"].size(), 2u);
  EXPECT_EQ(shown["gpu_memory_bytes"][0], int64_t{141} << 30);
}

TEST_F(JobCommandsTest, Commands_NoJobNamed_SayWhatToWrite) {
  EXPECT_EQ(RunDescribeCommand({}, context_), kExitUsage);
  EXPECT_EQ(err_.str(), "muster describe: write muster describe JOB; muster list shows the jobs\n");
}

}  // namespace
}  // namespace muster::client
