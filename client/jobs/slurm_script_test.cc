#include "client/jobs/slurm_script.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/mutate.h"
#include "base/test_folder.h"
#include "base/variable_list.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

JobSpec Spec(int processes) {
  JobSpec spec;
  spec.name = "train";
  spec.command = {"./train", "--lr", "0.1"};
  spec.min_processes = spec.max_processes = processes;
  return spec;
}

std::vector<SlurmNode> Nodes(int count, int cpus, int gpus = 0, int64_t gib = 64) {
  std::vector<SlurmNode> nodes;
  for (int i = 0; i < count; ++i) {
    nodes.push_back({absl::StrCat("n", i), cpus, gib << 30, gpus});
  }
  return nodes;
}

std::string LayoutText(const JobSpec& spec, const std::vector<SlurmNode>& nodes) {
  const absl::StatusOr<SlurmLayout> layout = ChooseSlurmLayout(spec, nodes);
  if (!layout.ok()) return std::string(layout.status().message());
  return absl::StrCat(layout->processes_per_node, " on each of ", layout->min_nodes, " to ",
                      layout->max_nodes);
}

std::string Script(const JobSpec& spec, const std::string& folder = "/home/ann/.muster") {
  const absl::StatusOr<std::string> script =
      RenderSlurmScript(spec, {.processes_per_node = 2, .min_nodes = 2, .max_nodes = 2},
                        {.muster = "/opt/muster", .folder = folder, .key = "k1"});
  return script.ok() ? *script : std::string(script.status().message());
}

TEST(SlurmLayoutTest, FixedJob_TakesAsFewNodesAsHaveTheSameNumberEach) {
  EXPECT_EQ(LayoutText(Spec(4), Nodes(4, 8)), "4 on each of 1 to 1");
  EXPECT_EQ(LayoutText(Spec(12), Nodes(4, 8)), "6 on each of 2 to 2");
  EXPECT_EQ(LayoutText(Spec(7), Nodes(7, 4)), "1 on each of 7 to 7");
  JobSpec spec = Spec(8);
  spec.processes_per_node = 2;
  EXPECT_EQ(LayoutText(spec, Nodes(4, 8)), "2 on each of 4 to 4");
}

TEST(SlurmLayoutTest, ElasticJob_HasARangeOfNodes) {
  JobSpec spec = Spec(16);
  spec.min_processes = 3;
  EXPECT_EQ(LayoutText(spec, Nodes(3, 4)), "4 on each of 1 to 3");
  spec.processes_per_node = 2;
  EXPECT_EQ(LayoutText(spec, Nodes(16, 4)), "2 on each of 2 to 8");
}

TEST(SlurmLayoutTest, GpusMemoryAndCpus_Count) {
  JobSpec spec = Spec(8);
  spec.gpus_per_process = 1;
  EXPECT_EQ(LayoutText(spec, Nodes(4, 64, 4)), "4 on each of 2 to 2");
  spec.memory_per_process = int64_t{32} << 30;
  EXPECT_EQ(LayoutText(spec, Nodes(4, 64, 4)), "2 on each of 4 to 4");
  spec.cpus_per_process = 40;
  EXPECT_THAT(LayoutText(spec, Nodes(4, 64, 4)), HasSubstr("4 fit: ask for less"));
  EXPECT_THAT(LayoutText(Spec(1), {}), HasSubstr("each of 0 nodes, 0 fit"));
}

TEST(SlurmNodesTest, OutputOfSinfo_IsRead) {
  const auto nodes = ParseSlurmNodes(
      "n0|64|515000|gpu:a100:4(S:0-1),shard:8|a|idle\nn0|64|515000|gpu:a100:4(S:0-1)|b*|idle\n"
      "n1|8+|1000+|(null)|a|drain*\nn2|8|1000|gpu:2|b*|alloc\n");
  ASSERT_TRUE(nodes.ok()) << nodes.status();
  ASSERT_EQ(nodes->size(), 3u);
  EXPECT_EQ((*nodes)[0].gpus, 4);
  EXPECT_EQ((*nodes)[0].memory_bytes, int64_t{515000} << 20);
  EXPECT_EQ((*nodes)[1].cpus, 8);
  EXPECT_EQ((*nodes)[1].gpus, 0);
  EXPECT_EQ((*nodes)[2].gpus, 2);
  EXPECT_TRUE((*nodes)[0].in_default_partition);
  EXPECT_FALSE((*nodes)[1].in_default_partition);
  EXPECT_TRUE((*nodes)[0].takes_jobs);
  EXPECT_FALSE((*nodes)[1].takes_jobs);
  EXPECT_THAT(ParseSlurmNodes("n0|x|1|(null)|a|idle").status().message(),
              HasSubstr("n0|x|1|(null)|a|idle"));
}

TEST(SlurmNodesTest, AnyOutput_IsReadOrRefused) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {
    std::string text =
        "n0|64|515000|gpu:a100:4(S:0-1),shard:8|a*|idle\nn1|8+|1000+|(null)|b|down\n";
    text = Mutate(text, random);
    const auto nodes = ParseSlurmNodes(text);
    if (nodes.ok()) (void)ChooseSlurmLayout(Spec(4), *nodes);
  }
}

TEST(SlurmScriptTest, Settings_AreOptionsOfSbatchAndFlagsOfLaunch) {
  JobSpec spec = Spec(4);
  spec.gpus_per_process = 1;
  spec.cpus_per_process = 8;
  spec.memory_per_process = int64_t{16} << 30;
  spec.time_limit = absl::Hours(36) + absl::Seconds(5);
  spec.max_restarts = 3;
  spec.mixed_precision = "bf16";
  spec.workdir = "/data/my runs";
  spec.env = {{"WORDS", "it's $HOME"}};
  const std::string script = Script(spec);
  for (const char* const line :
       {"#SBATCH --job-name=train\n", "#SBATCH --comment=muster:k1\n", "#SBATCH --nodes=2\n",
        "#SBATCH --cpus-per-task=16\n", "#SBATCH --gpus-per-node=2\n", "#SBATCH --mem=32768M\n",
        "#SBATCH --time=1-12:00:05\n", "#SBATCH --signal=B:TERM@60\n",
        "#SBATCH --output=\"/home/ann/.muster/%j.log\"\n", "#SBATCH --chdir=\"/data/my runs\"\n",
        "job_variables() {\n  printf '%s\\0' \\\n    'WORDS=it'\\''s $HOME'\n}\n",
        "MUSTER=/opt/muster\n", "--num_processes $((2 * SLURM_NNODES)) ", "--max_restarts 3 ",
        "--mixed_precision bf16", "set -- ./train --lr 0.1\n",
        "--ntasks-per-node=1 --wait=\"${MUSTER_STEP_WAIT:-300}\" --export=ALL"}) {
    EXPECT_THAT(script, HasSubstr(line));
  }
  EXPECT_THAT(script, Not(HasSubstr("--cpu)")));
  EXPECT_THAT(Script(Spec(4)), AllOf(HasSubstr("--cpu)"), Not(HasSubstr("job_variables()"))));
}

TEST(SlurmScriptTest, FailurePolicy_IsThatOfTheLaunch) {
  JobSpec spec = Spec(4);
  spec.max_restarts = 3;
  spec.class_limits = {{"failed", 0}, {"oom", 1}, {"hang", 2}};
  spec.user_error_codes = {3, 4};
  ASSERT_TRUE(CheckSlurmJob(spec).ok());
  EXPECT_THAT(Script(spec), HasSubstr("--failure_policy max_restarts=3,failed=0,hang=2,oom=1 "
                                      "--user_error_codes 3,4)"));
}

std::string Shell(const std::string& command) {
  FILE* const pipe = popen((command + " 2>&1").c_str(), "r");
  std::string output;
  char part[4096];
  for (size_t count; (count = fread(part, 1, sizeof(part), pipe)) > 0;) output.append(part, count);
  pclose(pipe);
  return output;
}

TEST(SlurmScriptTest, Script_IsOneThatBashReads) {
  JobSpec spec = Spec(4);
  spec.command = {"./it's", "a b", "$(touch /tmp/never)", "", "x\ny"};
  spec.env = {{"A", "`id`"}, {"B", ""}, {"C;id", "x\ny"}, {"UID", "7"}};
  const TestFolder folder;
  const std::string script = folder.Path("job.sh");
  std::ofstream(script) << Script(spec);
  EXPECT_EQ(Shell("bash -n " + script), "");
  // The part before the body: the words of the program survive unchanged.
  EXPECT_EQ(Shell(absl::StrCat(
                "SLURM_JOB_ID=1 SLURM_NNODES=2 bash -c 'source <(sed \"/^# "
                "train.sbatch$/Q\" ",
                script, "); printf \"<%s>\" \"$@\"; echo \"${muster_flags[1]}\"; job_variables'")),
            absl::StrCat("<./it's><a b><$(touch /tmp/never)><><x\ny>4\n", VariableList(spec.env)));
}

TEST(SlurmScriptTest, Launch_ReadsNoConfigFileOfTheUser) {
  const TestFolder folder;
  const std::string script = folder.Path("job.sh");
  std::ofstream(script) << Script(Spec(4));
  EXPECT_EQ(Shell(absl::StrCat("SLURM_JOB_ID=1 SLURM_NNODES=2 MUSTER_CONFIG=mine bash -c 'source "
                               "<(sed \"/^# train.sbatch$/Q\" ",
                               script, "); exec env' | grep ^MUSTER_CONFIG")),
            "MUSTER_CONFIG=/dev/null\n");
  JobSpec spec = Spec(4);
  spec.env = {{"MUSTER_CONFIG", "/shared/my launch.yaml"}};
  EXPECT_THAT(Script(spec), HasSubstr(" --config_file '/shared/my launch.yaml')"));
  spec.env = {{"MUSTER_CONFIG", ""}};
  EXPECT_THAT(Script(spec), Not(HasSubstr("--config_file")));
}

// The address would be that of the machine from which the job was submitted.
TEST(SlurmScriptTest, Launch_TakesItsPlaceFromSlurmOnly) {
  const TestFolder folder;
  const std::string script = folder.Path("job.sh");
  std::ofstream(script) << Script(Spec(4));
  EXPECT_EQ(Shell(absl::StrCat("SLURM_JOB_ID=1 SLURM_NNODES=2 MUSTER_NUM_MACHINES=1 "
                               "MUSTER_MACHINE_RANK=0 MUSTER_MAIN_PROCESS_IP=192.0.2.9 bash -c "
                               "'source <(sed \"/^# train.sbatch$/Q\" ",
                               script, "); exec env' | grep -e ^MUSTER_NUM -e ^MUSTER_MA; true")),
            "");
}

// Runs `script`, with `arguments`, for a job whose program ends with `code`, under an imitation of
// SLURM whose scontrol runs the shell commands `scontrol`.
std::string RunIn(const TestFolder& folder, const std::string& script, int code,
                  const std::string& scontrol, int starts, const std::string& arguments = "") {
  const auto program = [&](const std::string& name, const std::string& text) {
    const std::string path = folder.Path(name);
    std::ofstream(path) << "#!/bin/sh\n" << text << "\n";
    EXPECT_EQ(chmod(path.c_str(), 0700), 0);
  };
  program("srun", absl::StrCat("echo \"$*\" > \"$0.calls\"; env > \"$0.env\"\n"
                               "for w; do case $w in */token) stat -c %a \"${w%/token}\" > "
                               "\"$0.mode\";; */env) stat -c %a \"$w\" > \"$0.file\"; cat \"$w\" "
                               ">> \"$0.file\";; esac; done\nexit ",
                               code));
  program("hostname", "echo 127.0.0.1");
  program("openssl", "echo x");
  program("squeue", "exit 1");
  program("sleep", "echo >> \"$0.calls\"");
  program("scontrol", absl::StrCat("echo \"$*\" >> \"$0.calls\"\n", scontrol));
  std::ofstream(folder.Path("job.sh")) << script;
  return Shell(absl::StrCat("SLURM_JOB_ID=7 SLURM_NNODES=2 SLURM_RESTART_COUNT=", starts,
                            " MUSTER_MAIN_PROCESS_IP=127.0.0.1 PATH=", folder.Path(""),
                            ":$PATH bash ", folder.Path("job.sh"), " ", arguments,
                            " 2>&1; echo ended with $?"));
}

std::string RunScript(const TestFolder& folder, int code, const std::string& scontrol,
                      int starts = 0) {
  return RunIn(folder, Script(Spec(4), folder.Path("records")), code, scontrol, starts);
}

// Runs train.sbatch alone. SLURM itself ends a program that ends with 143.
std::string RunBody(const TestFolder& folder, int code, int starts, const std::string& run_folder) {
  const std::string script = Script(Spec(4));
  return RunIn(folder,
               absl::StrCat("unset MUSTER_EVENTS\nMUSTER_RUN_FOLDER=", run_folder,
                            script.substr(script.find("\n# train.sbatch\n"))),
               code, code == 143 ? "echo JobState=COMPLETING" : "true", starts, "./train");
}

TEST(SlurmScriptTest, ControllerIsAway_TheJobGoesBackIntoTheQueueWhenItAnswers) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records")).ok());
  EXPECT_THAT(RunScript(folder, 137, "test $(grep -c requeue \"$0.calls\") -ge 4"),
              HasSubstr("ended with 0"));
  const std::string events = Shell(absl::StrCat("cut -f 4 ", folder.Path("records/7.events")));
  EXPECT_THAT(events, HasSubstr("137 failed with exit code 137\n"));
  EXPECT_THAT(events, Not(HasSubstr("not put it back")));
}

TEST(SlurmScriptTest, ControllerRefuses_TheJobEndsAndItsRecordSaysSo) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records")).ok());
  EXPECT_THAT(RunScript(folder, 137, "test \"$1\" != requeue"), HasSubstr("ended with 137"));
  EXPECT_THAT(Shell(absl::StrCat("tail -n 1 ", folder.Path("records/7.events"))),
              HasSubstr("137 SLURM has not put it back into the queue: failed with exit code 137"));
  EXPECT_EQ(Shell(absl::StrCat("grep -c requeue ", folder.Path("scontrol.calls"))), "2\n");
}

// These would decide which libraries srun and muster load, and what their settings are.
TEST(SlurmScriptTest, VariablesOfTheJob_ReachItsProcessesAlone) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records")).ok());
  JobSpec spec = Spec(4);
  spec.env = {{"LD_LIBRARY_PATH", "/none"}, {"MUSTER_LOG_LEVEL", "debug"}, {"PATH", "/none"}};
  EXPECT_THAT(RunIn(folder, Script(spec, folder.Path("records")), 0, "true", 0),
              HasSubstr("ended with 0"));
  EXPECT_EQ(Shell(absl::StrCat("grep -e /none -e ^MUSTER_LOG_LEVEL ", folder.Path("srun.env"))),
            "");
  EXPECT_EQ(*ReadFile(folder.Path("srun.file")), absl::StrCat("600\n", VariableList(spec.env)));
  EXPECT_FALSE(PathExists(folder.Path("records/run/7"))) << "nothing of them stays";
  RunIn(folder, Script(Spec(4), folder.Path("records")), 0, "true", 0);
  EXPECT_THAT(*ReadFile(folder.Path("srun.calls")), Not(HasSubstr("--env_file")));
}

TEST(SlurmScriptTest, JobEnvOfAnEarlierVersion_StillExports_WithAWarning) {
  const TestFolder folder;
  const std::string script = Script(Spec(4));
  EXPECT_THAT(RunIn(folder,
                    absl::StrCat("unset MUSTER_EVENTS\nMUSTER_RUN_FOLDER=", folder.Path("run"),
                                 "\njob_env() { export FOO=exported; }",
                                 script.substr(script.find("\n# train.sbatch\n"))),
                    0, "true", 0, "./train"),
              AllOf(HasSubstr("print them in job_variables"), HasSubstr("ended with 0")));
  EXPECT_EQ(Shell(absl::StrCat("grep ^FOO= ", folder.Path("srun.env"))), "FOO=exported\n");
}

// Or the queue has the request, and only the answer was lost: the job has ended either way, and
// failed once.
TEST(SlurmScriptTest, CancelledWhileTheControllerIsAway_TheJobHasEnded) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records")).ok());
  EXPECT_THAT(RunScript(folder, 137,
                        "case $1 in requeue) exit 1;; show) grep -q requeue \"$0.calls\" && "
                        "echo JobState=COMPLETING;; esac"),
              HasSubstr("ended with 137"));
  const std::string events = folder.Path("records/7.events");
  EXPECT_THAT(Shell(absl::StrCat("tail -n 1 ", events)), HasSubstr("137 ended"));
  EXPECT_EQ(Shell(absl::StrCat("grep -c 'failed with' ", events)), "1\n");
}

// srun must wait as long after the first node's end as a save may take.
TEST(SlurmScriptTest, OneNodeEndsBeforeTheOthers_TheyHaveTheTimeOfTheGrace) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records")).ok());
  JobSpec spec = Spec(4);
  spec.stop_grace = absl::Seconds(200);
  RunIn(folder, Script(spec, folder.Path("records")), 0, "true", 0);
  EXPECT_THAT(Shell(absl::StrCat("cat ", folder.Path("srun.calls"))), HasSubstr(" --wait=230 "));
  RunBody(folder, 0, 0, folder.Path("run"));
  EXPECT_THAT(Shell(absl::StrCat("cat ", folder.Path("srun.calls"))), HasSubstr(" --wait=300 "));
}

// Otherwise a job on a full disk, which is why it fails, would be requeued forever.
TEST(SlurmScriptTest, RecordCannotBeWritten_StartsCountAsFailures) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records/7.events")).ok());
  EXPECT_THAT(RunScript(folder, 137, "true", /*starts=*/15), HasSubstr("ended with 0"));
  EXPECT_THAT(RunScript(folder, 137, "true", /*starts=*/16), HasSubstr("ended with 137"));
}

// The owner of the folder, or a user who may write there, would have the job's token.
TEST(SlurmScriptTest, FolderOfTheKeys_IsTheUsersOwn) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records")).ok());
  ASSERT_TRUE(MakeDirectories(folder.Path("of_another")).ok());
  ASSERT_TRUE(MakeDirectories(folder.Path("run")).ok());
  ASSERT_EQ(symlink(folder.Path("of_another").c_str(), folder.Path("run/7").c_str()), 0);
  EXPECT_THAT(RunBody(folder, 0, 0, folder.Path("run")),
              AllOf(HasSubstr("run/7 is not your own folder"), HasSubstr("ended with 2")));
  EXPECT_TRUE(ListDirectory(folder.Path("of_another"))->empty());
  // Made earlier, and writable for all.
  ASSERT_TRUE(MakeDirectories(folder.Path("open/7")).ok());
  ASSERT_EQ(chmod(folder.Path("open/7").c_str(), 0777), 0);
  EXPECT_THAT(RunBody(folder, 0, 0, folder.Path("open")), HasSubstr("ended with 0"));
  EXPECT_THAT(Shell(absl::StrCat("cat ", folder.Path("srun.mode"))), HasSubstr("700\n"));
}

TEST(SlurmScriptTest, JobOfSeveralParts_IsRefused) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records")).ok());
  EXPECT_THAT(
      RunIn(folder, absl::StrCat("SLURM_HET_SIZE=2\n", Script(Spec(4), folder.Path("records"))), 0,
            "true", 0),
      AllOf(HasSubstr("several parts"), HasSubstr("ended with 2")));
}

// For the last task of an array, SLURM_JOB_ID is the number of the array: all tasks would be
// requeued.
TEST(SlurmScriptTest, TaskOfAnArray_OnlyItsOwnTaskGoesBackIntoTheQueue) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("records")).ok());
  EXPECT_THAT(RunIn(folder,
                    absl::StrCat("SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=2\n",
                                 Script(Spec(4), folder.Path("records"))),
                    137, "true", 0),
              HasSubstr("job 7_2 goes back into the queue"));
  EXPECT_EQ(Shell(absl::StrCat("sort -u ", folder.Path("scontrol.calls"))),
            "requeue 7_2\nshow hostnames \nshow job 7_2\n");
}

// train.sbatch as people start it, without muster submit.
TEST(SlurmScriptTest, TimeLimitsBefore_LeaveTheRequeuesForFailures) {
  const TestFolder folder;
  const std::string record = folder.Path("run/7.events");
  const auto run = [&](int code, int starts, const std::string& folder_of_record = "run") {
    return RunBody(folder, code, starts, folder.Path(folder_of_record));
  };
  // A number that another job had before.
  ASSERT_TRUE(MakeDirectories(folder.Path("run")).ok());
  std::ofstream(record) << "end\t1\t0\t1 failed with exit code 1\n";
  // SLURM has ended it, for example by a preemption, or requeued it after its time limit.
  for (int starts = 0; starts < 5; ++starts) {
    EXPECT_THAT(run(143, starts), HasSubstr("ended with 143")) << starts;
  }
  // Three failures are put back into the queue, the fourth is the end.
  for (int starts = 5; starts < 8; ++starts) {
    EXPECT_THAT(run(1, starts), HasSubstr("ended with 0")) << starts;
  }
  EXPECT_THAT(run(1, 8), HasSubstr("ended with 1"));
  EXPECT_FALSE(PathExists(record));

  // Without the records of other nodes, every start counts.
  EXPECT_THAT(run(1, 2, "local"), HasSubstr("ended with 0"));
  EXPECT_THAT(run(1, 3, "other"), HasSubstr("ended with 1"));
  ASSERT_TRUE(MakeDirectories(folder.Path("full/7.events")).ok());
  EXPECT_THAT(run(1, 2, "full"), HasSubstr("ended with 0"));
  EXPECT_THAT(run(1, 3, "full"), HasSubstr("ended with 1"));

  // A finished job leaves no record.
  EXPECT_THAT(run(0, 0, "good"), HasSubstr("ended with 0"));
  EXPECT_FALSE(PathExists(folder.Path("good/7.events")));
}

TEST(SlurmScriptTest, WhatNoScriptCanHave_IsRefused) {
  EXPECT_THAT(Script(Spec(4), "/a%j"), HasSubstr("cannot use a folder"));
  EXPECT_THAT(Script(Spec(4), "/a\"b"), HasSubstr("cannot use a folder"));
  JobSpec spec = Spec(4);
  spec.workdir = "/a\n#SBATCH --uid=0";
  EXPECT_THAT(Script(spec), HasSubstr("cannot use a folder"));
  spec = Spec(4);
  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
           {"", "1"}, {"A=B", "1"}, {std::string("A\0", 2), "1"}, {"A", std::string(1, '\0')}}) {
    spec.env = {{name, value}};
    EXPECT_THAT(Script(spec), HasSubstr("is no variable that a process can have")) << name;
    EXPECT_THAT(Script(spec), Not(HasSubstr("a value"))) << "it may be secret";
  }
}

TEST(SlurmJobTest, SettingsThatSlurmDecides_AreRefusedByName) {
  EXPECT_TRUE(CheckSlurmJob(Spec(4)).ok());
  const auto refusal = [](auto change) {
    JobSpec spec = Spec(4);
    change(&spec);
    return std::string(CheckSlurmJob(spec).message());
  };
  EXPECT_THAT(refusal([](JobSpec* spec) { spec->priority = 1; }), HasSubstr("--nice"));
  for (const char* const name : {"", "x\ntouch y", "x --array=0-1", "a/../b", "-x", "a b"}) {
    EXPECT_THAT(refusal([name](JobSpec* spec) { spec->name = name; }), HasSubstr("name: ")) << name;
  }
  EXPECT_THAT(refusal([](JobSpec* spec) { spec->labels["a"] = "b"; }), HasSubstr("--constraint"));
  EXPECT_THAT(refusal([](JobSpec* spec) { spec->preemptible = true; }), HasSubstr("preemptible"));
  EXPECT_THAT(refusal([](JobSpec* spec) { spec->gpus_per_process = 2; }), HasSubstr("gpus_per"));
  EXPECT_THAT(refusal([](JobSpec* spec) {
                spec->gpus_per_process = 1;
                spec->env["CUDA_VISIBLE_DEVICES"] = "0";
              }),
              HasSubstr("env: CUDA_VISIBLE_DEVICES cannot be set"));
  EXPECT_THAT(refusal([](JobSpec* spec) { spec->grow_after = absl::Seconds(1); }),
              HasSubstr("grow_after"));
  EXPECT_THAT(refusal([](JobSpec* spec) { spec->spare_nodes = 1; }), HasSubstr("spare_nodes"));
  for (const char* const of_slurm : {"node_lost", "preempted"}) {
    EXPECT_THAT(
        refusal([&](JobSpec* spec) { spec->class_limits[of_slurm] = 1; }),
        HasSubstr("failure_policy: SLURM puts a job back into its queue after a lost node"));
  }
  EXPECT_THAT(refusal([](JobSpec* spec) { spec->time_limit = absl::Seconds(100); }),
              HasSubstr("time_limit: 1m40s is short"));
}

TEST(SbatchOptionsTest, OptionsOfTheScript_AreRefused) {
  EXPECT_TRUE(CheckSbatchOptions({"--partition=gpu", "-pgpu", "--account=a", "--qos=high"}).ok());
  for (const char* const bad :
       {"gpu", "-", "--", "", "--nodes=3", "-N3", "--output=x", "--array=1-9", "-o", "--wrap=id",
        "--export=NONE", "--arra=0-1", "--no-req", "--outp=x", "-Hn4", "-M"}) {
    EXPECT_FALSE(CheckSbatchOptions({bad}).ok()) << bad;
  }
}

}  // namespace
}  // namespace muster::client
