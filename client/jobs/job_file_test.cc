#include "client/jobs/job_file.h"

#include <random>

#include "base/mutate.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

constexpr char kFile[] = R"(name: mnist
command: [./train, --lr, "0.1"]
env: {OMP_NUM_THREADS: 4, HTTP_PROXY: ""}
workdir: /data
processes: 1:4
gpus_per_process: 1
memory_per_process: 16GiB
labels: {pool: a100}
priority: -2
preemptible: yes
restart_delay: 5s
time_limit: 12h
user_error_codes: [3, 4]
mixed_precision: no
)";

std::string Error(absl::string_view text,
                  const std::map<std::string, std::vector<std::string>>& flags = {}) {
  return std::string(ResolveJob(text, "job.yaml", flags, {}).status().message());
}

TEST(JobFile, ResolveJob_AllKinds_AreRead) {
  const auto job = ResolveJob(kFile, "job.yaml", {}, {});
  ASSERT_TRUE(job.ok()) << job.status();
  const JobSpec& spec = job->spec;
  EXPECT_EQ(spec.name, "mnist");
  EXPECT_EQ(spec.command, (std::vector<std::string>{"./train", "--lr", "0.1"}));
  EXPECT_EQ(spec.env.at("OMP_NUM_THREADS"), "4");
  EXPECT_EQ(spec.env.at("HTTP_PROXY"), "");
  EXPECT_EQ(spec.min_processes, 1);
  EXPECT_EQ(spec.max_processes, 4);
  EXPECT_EQ(spec.gpus_per_process, 1);
  EXPECT_EQ(spec.memory_per_process, int64_t{16} << 30);
  EXPECT_EQ(spec.labels.at("pool"), "a100");
  EXPECT_EQ(spec.priority, -2);
  EXPECT_TRUE(spec.preemptible);
  EXPECT_EQ(spec.restart_delay, absl::Seconds(5));
  EXPECT_EQ(spec.time_limit, absl::Hours(12));
  EXPECT_EQ(spec.user_error_codes, (std::vector<int>{3, 4}));
  EXPECT_EQ(spec.mixed_precision, "no");
  EXPECT_EQ(job->provenance.at("processes").source, "job.yaml:5");
}

// A job on SLURM is recorded as a job file.
TEST(JobFile, JobFileText_FailurePolicy_IsReadAsItWas) {
  for (const char* const policy : {"max_restarts=0,oom=1", "max_restarts=3,oom=1", "oom=2",
                                   "failed=0", "max_restarts=2", "max_restarts=0"}) {
    const auto job = ResolveJob("", "", {{"failure_policy", {policy}}}, {"./train"});
    ASSERT_TRUE(job.ok()) << job.status();
    const auto read = ResolveJob(JobFileText(job->spec), "job.json", {}, {});
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->spec.max_restarts, job->spec.max_restarts) << policy;
    EXPECT_EQ(read->spec.class_limits, job->spec.class_limits) << policy;
    EXPECT_EQ(JobFileText(read->spec), JobFileText(job->spec)) << policy;
  }
}

TEST(JobFile, ResolveJob_FlagAndFile_FlagWinsAndEnvIsJoined) {
  const auto job = ResolveJob(
      kFile, "job.yaml",
      {{"processes", {"2"}}, {"env", {"A=1", "OMP_NUM_THREADS=8"}}, {"preemptible", {"false"}}},
      {"./other", "x"});
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->spec.min_processes, 2);
  EXPECT_EQ(job->spec.max_processes, 2);
  EXPECT_EQ(job->spec.env.at("A"), "1");
  EXPECT_EQ(job->spec.env.at("OMP_NUM_THREADS"), "8");
  EXPECT_EQ(job->spec.env.count("HTTP_PROXY"), 1u);
  EXPECT_FALSE(job->spec.preemptible);
  EXPECT_EQ(job->spec.command, (std::vector<std::string>{"./other", "x"}));
  EXPECT_EQ(job->provenance.at("processes").source, "--processes");
  EXPECT_EQ(job->provenance.at("workdir").source, "job.yaml:4");
}

// A value that the agent would silently replace.
TEST(JobFile, EnvThatTheAgentSets_IsRefusedByName) {
  EXPECT_EQ(Error("command: [a]\nenv: {A: b, MUSTER_MIXED_PRECISION: bf16}\n"),
            "job.yaml:2: env: MUSTER_MIXED_PRECISION cannot be set: write the setting "
            "mixed_precision, which sets it for all processes");
  EXPECT_EQ(Error("command: [a]\n", {{"env", {"A=b", "RANK=7"}}}),
            "--env: RANK cannot be set: Muster sets it for each process according to its place in "
            "the job");
  EXPECT_EQ(Error("command: [a]\n", {{"env", {"MUSTER_LEASE=10s"}}}),
            "--env: MUSTER_LEASE cannot be set: the agent of each node sets it, and a "
            "job has no setting for it");
  EXPECT_EQ(Error("command: [a]\n", {{"env", {"MUSTER_SHARDING=zero2"}}}), "");
}

TEST(JobFile, ResolveJob_NoFile_NamesTheJobAfterTheProgram) {
  const auto job = ResolveJob("", "", {}, {"/opt/my train.sh"});
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->spec.name, "my-train-sh");
}

TEST(JobFile, ResolveJob_ProgramThatBeginsLikeAnOption_GetsANameThatIsNone) {
  for (const auto& [program, name] : {std::pair{"./.train", "train"}, {"./--", "job"}}) {
    const auto job = ResolveJob("", "", {}, {program});
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->spec.name, name);
  }
}

TEST(JobFile, ResolveJob_BadInput_NamesPlaceAndWhatToWrite) {
  EXPECT_EQ(Error("command: [a]\nprocceses: 2\n"),
            "job.yaml:2: unknown key procceses; did you mean processes?");
  EXPECT_EQ(Error("command: [a, 8, 010]\n"),
            "job.yaml:1: command: 010: YAML reads this as a different number: write it in quotes");
  EXPECT_EQ(Error("command: [a]\nenv: {A: 8, B: 1_000}\n"),
            "job.yaml:2: env: 1_000: YAML reads this as a different number: write it in quotes");
  EXPECT_EQ(Error("command: [a]\nprocesses: many\n"),
            "job.yaml:2: processes: many: write how many, 4, or a range, 1:4");
  EXPECT_EQ(Error("command: [a]\nprocesses: 4:1\n"),
            "job.yaml:2: processes: 4:1: write how many, 4, or a range, 1:4");
  EXPECT_EQ(Error("command: [a]\ntime_limit: 5\n"),
            "job.yaml:2: time_limit: 5: write a time such as 30s, 5m or 12h");
  EXPECT_EQ(Error("command: [a]", {{"max_restarts", {"x"}}}),
            "--max_restarts x: write a whole number from 0 to 1000000");
  // Some write this value for "any number"; no node could start the job.
  EXPECT_EQ(Error("command: [a]\nmax_restarts: 2147483647\n"),
            "job.yaml:2: max_restarts: 2147483647: write a whole number from 0 to 1000000");
  EXPECT_EQ(Error("command: [a]", {{"env", {"A"}}}), "--env A: write NAME=VALUE");
  EXPECT_NE(Error("command: a | b").find("no shell reads it"), std::string::npos);
  EXPECT_NE(Error("command: [a]\nworkdir: here\n").find("job.yaml:2: workdir: here"),
            std::string::npos);
  EXPECT_NE(Error("[a]").find("a job file is a map"), std::string::npos);
  EXPECT_NE(Error("name: a").find("no program"), std::string::npos);
}

TEST(JobFile, MemoryWithoutAUnit_IsRefusedAsByTheFlag) {
  for (const char* const key : {"memory_per_process", "gpu_memory"}) {
    const std::string name(key);
    EXPECT_EQ(
        Error("command: [a]\n" + name + ": 16\n"),
        "job.yaml:2: " + name + ": 16: write a size of 1MiB or more with its unit, such as 16GiB");
    EXPECT_EQ(Error("command: [a]\n", {{name, {"16"}}}),
              "--" + name + " 16: write a size with its unit, such as 16GiB");
    EXPECT_NE(Error("command: [a]\n" + name + ": 65536\n"), "");
    EXPECT_NE(Error("command: [a]\n" + name + ": 16KB\n"), "");
    // As in `muster describe -o json`, and in the record of a job on SLURM.
    EXPECT_EQ(Error("command: [a]\n" + name + ": 17179869184\n"), "");
    EXPECT_EQ(Error("command: [a]\n" + name + ": 0\n"), "");
  }
}

TEST(JobFile, ResolveJob_EverySettingWithAMapOfLists_IsRefused) {
  for (const JobSettingSpec& setting : JobSettings()) {
    const std::string error = Error(setting.name + ": {a: [1]}\n");
    EXPECT_EQ(error.rfind("job.yaml:1: " + setting.name + ": ", 0), 0u)
        << setting.name << ": " << error;
  }
}

// Every key with every type: read, or one line with the place and what to write.
TEST(JobFile, ResolveJob_EveryKeyWithEveryType_IsReadOrNamed) {
  const char* const values[] = {"[]", "[1, a]", "[[1]]", "{}",   "{a: [1]}",
                                "-1", "1.5",    "yes",   "\"\"", "word"};
  for (const JobSettingSpec& setting : JobSettings()) {
    int refused = 0;
    for (const char* const value : values) {
      const std::string program = setting.name == "command" ? "" : "command: [a], ";
      const std::string error = Error("{" + program + setting.name + ": " + value + "}\n");
      if (error.empty()) continue;
      ++refused;
      EXPECT_EQ(error.rfind("job.yaml:1: " + setting.name + ": ", 0), 0u) << error;
      EXPECT_NE(error.find(": write "), std::string::npos) << error;
      EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    }
    EXPECT_GE(refused, 4) << setting.name;
  }
}

TEST(JobFile, ResolveJob_MutatedFiles_AreReadOrRefusedInOneLine) {
  std::mt19937_64 random(17);
  for (int i = 0; i < 3000; ++i) {
    const std::string text = Mutate(kFile, random);
    const auto job = ResolveJob(text, "job.yaml", {}, {});
    if (job.ok()) {
      EXPECT_FALSE(job->spec.command.empty()) << text;
      EXPECT_LE(job->spec.min_processes, job->spec.max_processes) << text;
    } else {
      EXPECT_EQ(job.status().message().find('\n'), absl::string_view::npos) << job.status();
    }
  }
}

TEST(JobFile, FailurePolicy_HasItsOwnTotalOrTheSum) {
  const auto total =
      ResolveJob("command: [a]\nfailure_policy: {max_restarts: 3, oom: 1}\n", "j", {}, {});
  ASSERT_TRUE(total.ok()) << total.status();
  EXPECT_EQ(total->spec.max_restarts, 3);
  EXPECT_EQ(total->spec.class_limits, (std::map<std::string, int>{{"oom", 1}}));
  const auto sum = ResolveJob("", "", {{"failure_policy", {"oom=1,hang=2", "preempted=5"}}}, {"a"});
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_EQ(sum->spec.max_restarts, 3);
  EXPECT_EQ(sum->spec.class_limits,
            (std::map<std::string, int>{{"failed", 0}, {"hang", 2}, {"oom", 1}, {"preempted", 5}}));
  EXPECT_EQ(Error("command: [a]\nfailure_policy: {max_restarts: 3}\nmax_restarts: 3\n"),
            "job.yaml:3: max_restarts: failure_policy also has it: set it once");
  EXPECT_NE(Error("command: [a]\nfailure_policy: {user_error: 3}\n").find("write a map of"),
            std::string::npos);
}

TEST(JobFile, FailurePolicy_BesideMaxRestarts_TakesItAsItsTotal) {
  struct Case {
    const char* text;
    std::map<std::string, std::vector<std::string>> flags;
    int total;
    const char* source;  // of max_restarts; empty: from the policy
    std::map<std::string, int> limits;
  };
  const Case cases[] = {
      {"max_restarts: 3\nfailure_policy: {oom: 1}\n", {}, 3, "job.yaml:1", {{"oom", 1}}},
      {"",
       {{"max_restarts", {"3"}}, {"failure_policy", {"oom=1"}}},
       3,
       "--max_restarts",
       {{"oom", 1}}},
      {"max_restarts: 5\n", {{"failure_policy", {"oom=1"}}}, 5, "job.yaml:1", {{"oom", 1}}},
      {"failure_policy: {oom: 1}\n", {{"max_restarts", {"5"}}}, 5, "--max_restarts", {{"oom", 1}}},
      {"failure_policy: {max_restarts: 4, oom: 1}\n",
       {{"max_restarts", {"0"}}},
       0,
       "--max_restarts",
       {{"oom", 1}}},
      {"max_restarts: 5\n", {{"failure_policy", {"max_restarts=2,oom=1"}}}, 2, "", {{"oom", 1}}},
      {"max_restarts: 5\nfailure_policy: {oom: 1}\n",
       {{"failure_policy", {"hang=2"}}},
       5,
       "job.yaml:1",
       {{"hang", 2}}},
      {"max_restarts: 0\nfailure_policy: {oom: 1}\n",
       {},
       1,
       "",
       {{"failed", 0}, {"hang", 0}, {"oom", 1}}},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.text);
    const auto job = ResolveJob(one.text, "job.yaml", one.flags, {"./train"});
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->spec.max_restarts, one.total);
    EXPECT_EQ(job->spec.class_limits, one.limits);
    const auto given = job->provenance.find("max_restarts");
    EXPECT_EQ(given == job->provenance.end() ? "" : given->second.source, one.source);
    // The record of a job on SLURM.
    const auto read = ResolveJob(JobFileText(job->spec), "job.json", {}, {});
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(JobFileText(read->spec), JobFileText(job->spec));
  }
  EXPECT_EQ(Error("command: [a]\n",
                  {{"max_restarts", {"3"}}, {"failure_policy", {"max_restarts=3,oom=1"}}}),
            "--max_restarts: --failure_policy also has it: set it once");
}

TEST(JobFile, Files_OfAListAreRelativeToTheJobFile) {
  const auto job = ResolveJob("command: [a]\nfiles: [c.yaml, /abs/d]\n", "jobs/x.yaml", {}, {});
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->paths, (std::vector<std::string>{"jobs/c.yaml", "/abs/d"}));
  EXPECT_TRUE(job->spec.files.empty());
  // A flag replaces them, and is relative to the current folder.
  const auto flag =
      ResolveJob("command: [a]\nfiles: [c.yaml]\n", "jobs/x.yaml", {{"files", {"e", "f"}}}, {});
  ASSERT_TRUE(flag.ok()) << flag.status();
  EXPECT_EQ(flag->paths, (std::vector<std::string>{"e", "f"}));
  const auto inline_text = ResolveJob("command: [a]\nfiles: {c.yaml: \"x: 1\"}\n", "x", {}, {});
  ASSERT_TRUE(inline_text.ok()) << inline_text.status();
  EXPECT_TRUE(inline_text->paths.empty());
  EXPECT_EQ(inline_text->spec.files.at(0).content, "x: 1");
  EXPECT_NE(Error("command: [a]\nfiles: {../c: x}\n"), "");
}

TEST(JobFileTextTest, AnySpecification_IsReadBack) {
  JobSpec spec;
  spec.name = "a";
  spec.command = {"./train", "a b", "", "0", "true"};
  spec.env = {{"A", "1"}, {"B", "no\nline: \"x\""}};
  spec.workdir = "/data";
  spec.min_processes = 2;
  spec.max_processes = 8;
  spec.processes_per_node = 2;
  spec.gpus_per_process = 1;
  spec.cpus_per_process = 3;
  spec.memory_per_process = (int64_t{5} << 30) + 1;
  spec.labels = {{"pool", "a100"}};
  spec.priority = -3;
  spec.preemptible = true;
  spec.max_restarts = 4;
  spec.restart_delay = absl::Seconds(5);
  spec.time_limit = absl::Hours(12) + absl::Milliseconds(1500);
  spec.stop_grace = absl::Minutes(2);
  spec.grow_after = absl::Minutes(10);
  spec.hang_timeout = absl::Minutes(20);
  spec.gpu_memory = int64_t{80} << 30;
  spec.spare_nodes = 2;
  spec.class_limits = {{"oom", 1}, {"preempted", 2}};
  spec.files = {{.path = "a/b.yaml", .content = "lr: 1\n"}};
  spec.retention = absl::Hours(24);
  spec.user_error_codes = {3, 4};
  spec.wait_for_nodes = true;
  spec.mixed_precision = "no";
  spec.gradient_accumulation_steps = 7;
  spec.cpu = true;
  spec.debug = true;
  const std::string text = JobFileText(spec);
  const auto read = ResolveJob(text, "a.job", {}, {});
  ASSERT_TRUE(read.ok()) << read.status() << "\n" << text;
  EXPECT_EQ(JobFileText(read->spec), text);
  EXPECT_EQ(read->spec.env, spec.env);
  EXPECT_EQ(read->spec.command, spec.command);
  EXPECT_EQ(read->spec.time_limit, spec.time_limit);
  EXPECT_EQ(read->spec.memory_per_process, spec.memory_per_process);
  // A new setting needs a line there.
  EXPECT_EQ(read->provenance.size(), JobSettings().size() - 1);  // max_restarts is in the policy
  EXPECT_EQ(read->spec.max_restarts, 4);
  EXPECT_EQ(read->spec.class_limits, spec.class_limits);
  ASSERT_EQ(read->spec.files.size(), 1u);
  EXPECT_EQ(read->spec.files[0].content, "lr: 1\n");
}

}  // namespace
TEST(ResolveRecord, OfAnOlderVersion_IsTakenAsItIs) {
  const auto job = ResolveRecord(
      R"({"command": ["train"], "env": {"MUSTER_MIXED_PRECISION": "bf16"}, "gpu_memory": 16})",
      "1.job");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->spec.env.at("MUSTER_MIXED_PRECISION"), "bf16");
  EXPECT_EQ(job->spec.gpu_memory, 16);
}

TEST(ResolveJob, VariableThatDiffersFromItsSetting_IsRefused) {
  const auto resolve = [](const char* variable) {
    return ResolveJob("command: [train]\ngradient_accumulation_steps: 4", "job.yaml",
                      {{"env", {variable}}}, {});
  };
  EXPECT_TRUE(resolve("MUSTER_GRADIENT_ACCUMULATION_STEPS=4").ok());
  EXPECT_FALSE(resolve("MUSTER_GRADIENT_ACCUMULATION_STEPS=8").ok());
  EXPECT_FALSE(resolve("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=8").ok());
}

}  // namespace muster::client
