#include "client/jobs/job_file.h"

#include <gtest/gtest.h>

#include <random>

#include "base/mutate.h"

namespace muster::client {
namespace {

constexpr char kGood[] = R"(# of examples/mnist
name: mnist
command: [./train, --epochs, 3]
processes: 2:8
processes_per_node: 2
gpus: 1
memory: 16GiB
labels: {gpu: h200}
env:
  OMP_NUM_THREADS: 4
max_restarts: 3
restart_delay: 10s
time_limit: 12h
preemptible: yes
user_error_codes: [3, 4]
mixed_precision: bf16
)";

std::string ErrorOf(const std::string& text) {
  return std::string(ParseJobFile(text, "job.yaml").status().message());
}

TEST(JobFileTest, GoodFile_IsRead) {
  const absl::StatusOr<v1::JobSpec> spec = ParseJobFile(kGood, "job.yaml");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name(), "mnist");
  EXPECT_EQ(spec->argv(2), "3");
  EXPECT_EQ(spec->min_processes(), 2);
  EXPECT_EQ(spec->max_processes(), 8);
  EXPECT_EQ(spec->per_process().memory_bytes(), int64_t{16} << 30);
  EXPECT_EQ(spec->node_labels().at("gpu"), "h200");
  EXPECT_EQ(spec->env().at("OMP_NUM_THREADS"), "4");
  EXPECT_EQ(spec->time_limit().seconds(), 12 * 3600);
  EXPECT_TRUE(spec->preemptible());
  EXPECT_EQ(spec->user_error_codes(1), 4);
}

TEST(JobFileTest, CommandOnOneLine_IsSplitAtBlanks) {
  EXPECT_EQ(ParseJobFile("command: ./train  --x 1", "f")->argv_size(), 3);
}

TEST(JobFileTest, BadKey_IsNamedWithItsLine) {
  EXPECT_EQ(ErrorOf("name: a\nmax_restart: 3\n"),
            "job.yaml:2: no key \"max_restart\" in a job file; did you mean max_restarts?");
  EXPECT_EQ(ErrorOf("processes: many\n"),
            "job.yaml:1: processes: write a number such as 8, or MIN:MAX such as 2:8, not "
            "\"many\"");
  EXPECT_EQ(ErrorOf("time_limit: 12\n"),
            "job.yaml:1: time_limit: write a duration with a unit, such as 30s, 10m or 12h, not "
            "12");
  EXPECT_EQ(ErrorOf("gpus: -1\n"),
            "job.yaml:1: gpus: write a whole number of at least 0, not -1");
  EXPECT_EQ(ErrorOf("env: [[1]]\n"),
            "job.yaml:1: env: write a value, not a list of lists, not [[1]]");
  EXPECT_EQ(ErrorOf("- a\n"),
            "job.yaml: a job file has keys such as \"command: ./train\", one a line");
}

TEST(JobFileTest, Flag_SetsTheSameAndNamesItself) {
  v1::JobSpec spec;
  ASSERT_TRUE(SetJobKey("env", {"A=1", "B=2"}, &spec).ok());
  EXPECT_EQ(spec.env_size(), 2);
  EXPECT_EQ(SetJobKey("gpus", {"x"}, &spec).message(),
            "--gpus x: write a whole number of at least 0");
}

TEST(JobFileTest, Name_IsThatOfTheProgram) {
  EXPECT_EQ(JobNameOf("./build/train_mnist"), "train_mnist");
  EXPECT_EQ(JobNameOf("train.py"), "train");
  EXPECT_EQ(JobNameOf("...."), "job");
}

TEST(JobFileTest, MutatedFiles_DoNoHarm) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 3000; ++i) {
    (void)ParseJobFile(Mutate(kGood, random), "job.yaml");
  }
}

}  // namespace
}  // namespace muster::client
