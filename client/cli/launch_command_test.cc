#include "client/cli/launch_command.h"

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/variable_list.h"
#include "client/config/accelerate_launch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

class LaunchCommandTest : public ::testing::Test {
 protected:
  int Run(const std::vector<std::string>& args) {
    out_.str("");
    err_.str("");
    ran_ = false;
    const LaunchBackend backend = {
        .find_program = [this](absl::string_view program,
                               absl::string_view path) -> absl::StatusOr<std::string> {
          path_ = std::string(path);
          if (program == "missing") return absl::NotFoundError("program missing not found in PATH");
          if (program == "plain") return absl::PermissionDeniedError("plain is not executable");
          return std::string(program);
        },
        .run =
            [this](const LaunchPlan& plan) {
              ran_ = true;
              plan_ = plan;
              return outcome_;
            }};
    return RunLaunchCommand(args, {variables_, out_, err_}, backend);
  }
  // Expects one line, and that nothing is run.
  std::string Refused(const std::vector<std::string>& args, int code) {
    EXPECT_EQ(Run(args), code) << err_.str();
    EXPECT_FALSE(ran_);
    const std::string text = err_.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_TRUE(absl::StartsWith(text, "muster launch: ")) << text;
    return text;
  }

  std::map<std::string, std::string> variables_ = {{"PATH", "/bin"}, {"CUDA_VISIBLE_DEVICES", ""}};
  LaunchOutcome outcome_;
  bool ran_ = false;
  LaunchPlan plan_;
  std::string path_;  // the PATH in which the program was looked up
  std::ostringstream out_, err_;
};

TEST_F(LaunchCommandTest, ProgramAndSettings_ReachTheBackend) {
  EXPECT_EQ(
      Run({"--num-processes", "2", "--cpu", "--env", "A=b=c", "./train", "--num_processes", "9"}),
      kExitOk);
  EXPECT_EQ(plan_.config.num_processes, 2);
  EXPECT_TRUE(plan_.config.cpu);
  EXPECT_EQ(plan_.config.env.at("A"), "b=c");
  EXPECT_THAT(plan_.argv, ElementsAre("./train", "--num_processes", "9"));
}

TEST_F(LaunchCommandTest, Mistakes_AreOneLineWithTheWayOut) {
  EXPECT_THAT(Refused({}, kExitUsage), HasSubstr("no program to launch"));
  EXPECT_THAT(Refused({"--num_processes", "2"}, kExitUsage), HasSubstr("no program to launch"));
  EXPECT_THAT(Refused({"--numprocesses", "2", "x"}, kExitUsage),
              HasSubstr("did you mean --num_processes?"));
  EXPECT_THAT(Refused({"--num_processes", "0", "x"}, kExitUsage), HasSubstr("at least 1"));
  EXPECT_THAT(Refused({"--config_file", "/nowhere.yaml", "x"}, kExitUsage),
              HasSubstr("/nowhere.yaml"));
  EXPECT_THAT(Refused({"--env", "A", "x"}, kExitUsage), HasSubstr("NAME=VALUE"));
  EXPECT_THAT(Refused({"--coordinator", "here", "x"}, kExitUsage), HasSubstr("here"));
  EXPECT_THAT(Refused({"missing"}, kExitProgramMissing), HasSubstr("not found in PATH"));
  EXPECT_THAT(Refused({"plain"}, kExitNotExecutable), HasSubstr("not executable"));
}

TEST_F(LaunchCommandTest, EveryFlagOfAccelerateLaunch_IsTakenOrAnsweredByName) {
  const std::set<std::string> without_effect = {"same_network", "quiet"};
  for (const AccelerateFlag& flag : AccelerateFlags()) {
    const std::string name = "--" + flag.name;
    std::vector<std::string> args = {name};
    if (flag.takes_value && flag.name != "tee") {
      args.push_back(flag.choices.empty() ? "1" : flag.choices[0]);
    }
    args.push_back("./train");
    const int code = Run(args);
    EXPECT_THAT(err_.str(), Not(HasSubstr("unknown option"))) << name;
    EXPECT_THAT(err_.str(), Not(HasSubstr("did you mean"))) << name;
    if (code != kExitOk && flag.name != "config_file") {
      EXPECT_THAT(err_.str(), HasSubstr(flag.name)) << name;
    }
    if (without_effect.count(flag.name) > 0) {
      EXPECT_EQ(code, kExitOk) << err_.str();
    }
  }
  EXPECT_THAT(Refused({"--multi_gpu", "--num_processes", "8", "./train"}, kExitUsage),
              HasSubstr("--multi_gpu: this machine has no usable GPU: leave it out"));
  EXPECT_EQ(Run({"-q", "--num_machines", "1", "--dynamo_backend", "no", "--cpu", "./train"}),
            kExitOk)
      << err_.str();
}

TEST_F(LaunchCommandTest, TeeWithItsValueOfTorchrun_SaysWhatToWrite) {
  for (const char* value : {"3", "0:3,1:1"}) {
    EXPECT_THAT(Refused({"--log_dir", "logs", "--tee", value, "./train"}, kExitUsage),
                HasSubstr(std::string("--tee ") + value + ": it takes no value"));
  }
  EXPECT_EQ(Run({"--log_dir", "logs", "--tee", "--", "3"}), kExitOk);
  EXPECT_THAT(plan_.argv, ElementsAre("3"));
}

TEST_F(LaunchCommandTest, DefaultConfigOfAccelerates_IsNotPassedOverInSilence) {
  const std::string home = TestPath("home");
  const std::string folder = JoinPath(home, ".cache/huggingface/accelerate");
  const std::string file = JoinPath(folder, "default_config.yaml");
  ASSERT_TRUE(MakeDirectories(folder).ok());
  variables_["HOME"] = home;
  EXPECT_EQ(Run({"./train"}), kExitOk);
  EXPECT_EQ(err_.str(), "");
  ASSERT_TRUE(WriteFileAtomically(file, "distributed_type: 'NO'\nnum_processes: 1\n").ok());
  EXPECT_EQ(Run({"./train"}), kExitOk);
  EXPECT_THAT(err_.str(), HasSubstr("Accelerate's " + file + " has no effect: --config_file "));
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"--cpu", "./train"}, {"--config_file", file, "./train"}}) {
    EXPECT_EQ(Run(args), kExitOk) << err_.str();
    EXPECT_EQ(err_.str(), "");
  }
  variables_["HF_HOME"] = TestPath("elsewhere");
  EXPECT_EQ(Run({"./train"}), kExitOk);
  EXPECT_EQ(err_.str(), "");
}

// It would run the program `true`, and succeed.
TEST_F(LaunchCommandTest, YesOrNoAfterAFlag_IsNotTakenForTheProgram) {
  for (const char* flag : {"--cpu", "--sharding-overlap", "--use_fsdp", "--no_prefix"}) {
    EXPECT_THAT(Refused({flag, "true", "./train"}, kExitUsage),
                HasSubstr(std::string(flag) + " true: a yes or no follows after =, as in "));
  }
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{"true"},
                                             {"--cpu", "--", "true"},
                                             {"--num_processes=1", "true"},
                                             {"--num_processes", "1", "true"}}) {
    EXPECT_EQ(Run(args), kExitOk) << err_.str();
    EXPECT_THAT(plan_.argv, ElementsAre("true"));
  }
}

TEST_F(LaunchCommandTest, HomeInAPath_IsReplacedWhereverItComesFrom) {
  variables_["HOME"] = "/h";
  EXPECT_EQ(Run({"--log_dir=~/flag", "--offload_optimizer", "disk:~/states", "x"}), kExitOk);
  EXPECT_EQ(plan_.config.log_dir, "/h/flag");
  EXPECT_EQ(plan_.config.env.at("MUSTER_OFFLOAD_OPTIMIZER"), "disk:/h/states");
  variables_["MUSTER_LOG_DIR"] = "~/variable";
  EXPECT_EQ(Run({"x"}), kExitOk);
  EXPECT_EQ(plan_.config.log_dir, "/h/variable");
  variables_.erase("MUSTER_LOG_DIR");
  const std::string path = TestPath("home.yaml");
  ASSERT_TRUE(WriteFileAtomically(path, "log_dir: ~/file\n").ok());
  EXPECT_EQ(Run({"--config_file", path, "x"}), kExitOk);
  EXPECT_EQ(plan_.config.log_dir, "/h/file");
  variables_.erase("HOME");
  EXPECT_THAT(Refused({"--log_dir=~/flag", "x"}, kExitUsage),
              HasSubstr("log_dir: ~/flag (from --log_dir) needs HOME"));
}

TEST_F(LaunchCommandTest, TorchrunFlags_InBothSpellings_ReachTheBackend) {
  for (const char* processes : {"--nproc_per_node=2", "--nproc-per-node=2"}) {
    EXPECT_EQ(Run({"--standalone", "--nnodes=1", processes, "--rdzv-id", "night", "--max-restarts",
                   "3", "--no-python", "./train", "--nnodes", "9"}),
              kExitOk)
        << err_.str();
    EXPECT_EQ(plan_.config.num_processes, 2);
    EXPECT_EQ(plan_.config.max_restarts, 3);
    EXPECT_EQ(plan_.config.job_name, "night");
    EXPECT_THAT(plan_.argv, ElementsAre("./train", "--nnodes", "9"));
  }
}

TEST_F(LaunchCommandTest, StandaloneOfFalse_LeavesTheMachinesToTheCluster) {
  variables_["SLURM_JOB_ID"] = "7";
  variables_["SLURM_NNODES"] = "2";
  EXPECT_EQ(Run({"--standalone", "x"}), kExitOk) << err_.str();
  EXPECT_THAT(Refused({"--standalone=false", "x"}, kExitUsage),
              HasSubstr("the SLURM job has 2 nodes"));
}

TEST_F(LaunchCommandTest, TorchrunFlags_ThatCannotBeHonoured_AreOneLine) {
  EXPECT_THAT(Refused({"--nproc_per_node", "2", "--num-processes", "2", "x"}, kExitUsage),
              HasSubstr("--nproc_per_node and --num_processes mean the same"));
  EXPECT_THAT(Refused({"-m", "pkg.train", "--lr", "1"}, kExitUsage),
              HasSubstr("--module: a launch runs programs: write -- python3 -m MODULE"));
  EXPECT_THAT(Refused({"--rdzv-backend", "etcd", "x"}, kExitUsage),
              HasSubstr("--rdzv_backend etcd: "));
  EXPECT_EQ(Run({"--help"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("--nproc_per_node N|auto|gpu|cpu"));
  EXPECT_THAT(out_.str(), ::testing::Not(HasSubstr("--monitor_interval")));
}

TEST_F(LaunchCommandTest, ConfigFile_UnknownKey_NamesFileLineAndKey) {
  const std::string path = TestPath("c.yaml");
  ASSERT_TRUE(WriteFileAtomically(path, "cpu: true\nnum_process: 2\n").ok());
  variables_["MUSTER_CONFIG"] = path;
  EXPECT_THAT(Refused({"x"}, kExitUsage),
              HasSubstr("c.yaml:2: unknown key num_process; did you mean num_processes?"));
  ASSERT_TRUE(WriteFileAtomically(path, "num_processes: 3\n").ok());
  EXPECT_EQ(Run({"x"}), kExitOk);
  EXPECT_EQ(plan_.config.num_processes, 3);
}

TEST_F(LaunchCommandTest, SectionOfAccelerates_WithoutEffect_IsSaidAndTheLaunchGoesOn) {
  const std::string path = TestPath("c.yaml");
  ASSERT_TRUE(WriteFileAtomically(path,
                                  "distributed_type: 'NO'\nuse_cpu: true\n"
                                  "fsdp_config: {fsdp_version: 2}\n")
                  .ok());
  EXPECT_EQ(Run({"--config_file", path, "x"}), kExitOk) << err_.str();
  EXPECT_TRUE(ran_);
  EXPECT_EQ(err_.str(), "muster launch: " + path +
                            ":3: fsdp_config has no effect with distributed_type: NO: to use it, "
                            "write distributed_type: FSDP\n");
  EXPECT_THAT(Refused({"--config_file", path, "--use_fsdp", "x"}, kExitUsage),
              HasSubstr("fsdp_config would be lost"));
}

TEST_F(LaunchCommandTest, FailedJob_NamesTheWorkerAndItsLastLines) {
  outcome_.kind = LaunchOutcome::Kind::kFailed;
  outcome_.why = "rank 1 (pid 12 on box) was killed by signal 9 (SIGKILL)";
  outcome_.last_lines = {"step 7", "step 8"};
  EXPECT_EQ(Run({"--num_processes=2", "x"}), kExitJobFailed);
  EXPECT_EQ(
      err_.str(),
      "muster launch: rank 1 (pid 12 on box) was killed by signal 9 (SIGKILL); the job has failed\n"
      "  its last lines:\n  | step 7\n  | step 8\n");
}

// Its last lines are printed just above; in a file they are not.
TEST_F(LaunchCommandTest, FailedJobOfOneProcess_IsToldOnce) {
  outcome_.kind = LaunchOutcome::Kind::kFailed;
  outcome_.why = "rank 0 (pid 12 on box) exited with code 3";
  outcome_.last_lines = {"step 7"};
  EXPECT_EQ(Run({"--num_processes=1", "x"}), kExitJobFailed);
  EXPECT_EQ(err_.str(),
            "muster launch: rank 0 (pid 12 on box) exited with code 3; the job has failed\n");
  err_.str("");
  EXPECT_EQ(Run({"--num_processes=1", "--log_dir=logs", "x"}), kExitJobFailed);
  EXPECT_THAT(err_.str(), HasSubstr("  | step 7\n"));
}

TEST_F(LaunchCommandTest, Outcomes_HaveTheirExitCodes) {
  outcome_.kind = LaunchOutcome::Kind::kStopped;
  outcome_.signal = 2;
  EXPECT_EQ(Run({"x"}), 130);
  outcome_.signal = 15;
  EXPECT_EQ(Run({"x"}), 143);
  outcome_.kind = LaunchOutcome::Kind::kRefused;
  outcome_.status = absl::AlreadyExistsError("127.0.0.1:29400 is taken");
  EXPECT_EQ(Run({"x"}), kExitConflict);
  EXPECT_EQ(err_.str(), "muster launch: 127.0.0.1:29400 is taken\n");
  outcome_.status = absl::UnavailableError("no coordinator");
  EXPECT_EQ(Run({"x"}), kExitUnreachable);
  outcome_.status = absl::DeadlineExceededError("machine 1 did not come");
  EXPECT_EQ(Run({"x"}), kExitTimeout);
  outcome_.status = absl::NotFoundError("gone");
  EXPECT_EQ(Run({"x"}), kExitProgramMissing);
}

TEST_F(LaunchCommandTest, DryRun_PrintsEverySettingWithItsSourceAndRunsNothing) {
  variables_["MUSTER_MIXED_PRECISION"] = "bf16";
  EXPECT_EQ(Run({"--dry-run", "--num_processes=4", "./train", "a b"}), kExitOk);
  EXPECT_FALSE(ran_);
  EXPECT_THAT(out_.str(),
              AllOf(::testing::ContainsRegex("num_processes +4 +--num_processes"),
                    ::testing::ContainsRegex("mixed_precision +bf16 +MUSTER_MIXED_PRECISION"),
                    ::testing::ContainsRegex("max_restarts +0 +default"),
                    HasSubstr("./train 'a b'"), HasSubstr("ranks    0 to 3 of 4 on this machine")));
}

TEST_F(LaunchCommandTest, EnvFile_GivesVariablesToTheProcessesAlone) {
  const TestFolder folder;
  const std::string path = folder.Path("env");
  std::ofstream(path) << VariableList(
      {{"A", "1\n2"}, {"B", "file"}, {"LD_LIBRARY_PATH", "/none"}, {"MUSTER_MAX_RESTARTS", "7"}});
  EXPECT_EQ(Run({"--dry_run", "-o", "json", "--env_file", path, "--env=B=flag", "--", "./train"}),
            kExitOk)
      << err_.str();
  const auto plan = nlohmann::json::parse(out_.str());
  EXPECT_EQ(plan["env"], (std::map<std::string, std::string>{{"A", "1\n2"},
                                                             {"B", "flag"},
                                                             {"LD_LIBRARY_PATH", "/none"},
                                                             {"MUSTER_MAX_RESTARTS", "7"}}));
  EXPECT_EQ(plan["settings"]["max_restarts"]["value"], "0");

  std::ofstream(path) << VariableList({{"RANK", "0"}});
  EXPECT_EQ(Run({"--env_file", path, "--", "./train"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("env: RANK (from --env_file) cannot be set"));
  std::ofstream(path) << "A\n";
  EXPECT_EQ(Run({"--env_file", path, "--", "./train"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("env has no null byte at its end"));
  EXPECT_EQ(Run({"--env_file", "", "--", "./train"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("--env_file is empty"));
  EXPECT_EQ(Run({"--env_file", folder.Path("none"), "--", "./train"}), kExitUsage);
}

TEST_F(LaunchCommandTest, DryRun_ShowsValuesOnOneLine) {
  EXPECT_EQ(Run({"--dry_run", "--env=A=1\n\x1b[2J", "--", "./train"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("1\\x0a\\x1b[2J"));
}

TEST_F(LaunchCommandTest, DryRunAsJson_IsTheWholePlanAndTheSameEachTime) {
  const TestFolder folder;
  variables_["MUSTER_PROJECT_DIR"] = folder.path();
  const std::vector<std::string> args = {"--dry-run", "-o", "json",    "--num_processes=4",
                                         "--env=A=b", "--", "./train", "a b"};
  EXPECT_EQ(Run(args), kExitOk) << err_.str();
  const std::string first = out_.str();
  auto plan = nlohmann::json::parse(first);
  EXPECT_EQ(plan["command"], (std::vector<std::string>{"./train", "a b"}));
  EXPECT_EQ(plan["settings"]["num_processes"]["value"], "4");
  EXPECT_EQ(plan["settings"]["num_processes"]["source"], "--num_processes");
  EXPECT_EQ(plan["env"]["A"], "b");
  EXPECT_EQ(plan["placements"][0]["processes"], 4);
  EXPECT_EQ(plan["ports"][0]["name"], "coordinator");
  EXPECT_TRUE(plan["ports"][0]["address"].is_null());
  EXPECT_EQ(plan["ports"][1]["name"], "master_port");
  EXPECT_EQ(plan["checkpoint"]["decided_by"], "program");
  EXPECT_EQ(plan["checkpoint"]["resume_from"], "none");
  EXPECT_TRUE(plan["checkpoint"]["step"].is_null());
  EXPECT_EQ(plan["checkpoint"]["folder"], folder.Path("checkpoints"));
  EXPECT_EQ(Run(args), kExitOk);
  EXPECT_EQ(out_.str(), first);
  EXPECT_FALSE(ran_);

  EXPECT_EQ(Run({"--dry-run", "--coordinator=127.0.0.1:29400", "x"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("port     coordinator 127.0.0.1:29400: machine 0 listens\n"));
  EXPECT_THAT(out_.str(), HasSubstr("resumes  none in " + folder.Path("checkpoints") + ": "));
  EXPECT_THAT(Refused({"-o", "json", "x"}, kExitUsage),
              HasSubstr("--output works only with --dry_run"));

  // The content of a folder that cannot be listed is unknown.
  ASSERT_TRUE(WriteFileAtomically(folder.Path("checkpoints"), "").ok());
  EXPECT_EQ(Run(args), kExitOk);
  plan = nlohmann::json::parse(out_.str());
  EXPECT_EQ(plan["checkpoint"]["resume_from"], "unknown");
  EXPECT_THAT(std::string(plan["checkpoint"]["why"]), HasSubstr("checkpoints: Not a directory; "));
}

TEST_F(LaunchCommandTest, Help_HasEverySettingAndTheExitCodes) {
  EXPECT_EQ(Run({"--help"}), kExitOk);
  for (const SettingSpec& spec : LaunchSettings())
    EXPECT_THAT(out_.str(), HasSubstr("--" + spec.name));
  EXPECT_THAT(out_.str(), HasSubstr("Exit codes: 0 the job succeeded"));
}

TEST_F(LaunchCommandTest, Program_IsLookedUpWhereTheProcessesWouldFindIt) {
  variables_["PATH"] = "/usr/bin";
  EXPECT_EQ(Run({"--", "train"}), kExitOk) << err_.str();
  EXPECT_EQ(path_, "/usr/bin");
  EXPECT_EQ(Run({"--env", "PATH=/opt/job:/bin", "--", "train"}), kExitOk) << err_.str();
  EXPECT_EQ(path_, "/opt/job:/bin");
}

TEST_F(LaunchCommandTest, Test_RunsTheChecksBesideTheBinary) {
  const std::string folder = TestPath("bin");
  ASSERT_TRUE(MakeDirectories(folder).ok());
  std::vector<std::string> argv;
  const LaunchBackend backend = {
      .find_program = [](absl::string_view program,
                         absl::string_view) { return std::string(program); },
      .run =
          [&](const LaunchPlan& plan) {
            argv = plan.argv;
            return LaunchOutcome();
          }};
  const CommandContext context = {variables_, out_, err_};
  EXPECT_EQ(RunTestCommand({}, context, backend, folder + "/muster"), kExitProgramMissing);
  EXPECT_THAT(err_.str(), HasSubstr("the checks program is not installed"));
  ASSERT_TRUE(WriteFileAtomically(folder + "/muster-checks", "").ok());
  EXPECT_EQ(RunTestCommand({"--num_processes", "2"}, context, backend, folder + "/muster"),
            kExitOk);
  EXPECT_THAT(argv, ElementsAre(EndsWith("/bin/muster-checks")));
  EXPECT_EQ(RunTestCommand({"word"}, context, backend, folder + "/muster"), kExitUsage);
}

}  // namespace
}  // namespace muster::client
