#include "coordinator/jobs/job_spec.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/signature.h"
#include "proto/job_limits.h"
#include "proto/name_value.h"

namespace muster::coordinator {
namespace {

v1::JobSpec Good() {
  v1::JobSpec spec;
  spec.set_name("mnist");
  spec.add_argv("./train");
  spec.set_max_processes(4);
  return spec;
}

std::string FieldOf(v1::JobSpec spec) {
  const auto error = CompleteJobSpec(&spec);
  return error.has_value() ? error->detail().field() : "";
}

TEST(JobSpecTest, GoodSpec_IsCompleted) {
  v1::JobSpec spec = Good();
  ASSERT_FALSE(CompleteJobSpec(&spec).has_value());
  EXPECT_EQ(spec.min_processes(), 4);
  EXPECT_EQ(spec.per_process().cpus(), 1);
  EXPECT_EQ(spec.stop_grace().seconds(), 30);
  // A complete specification stays unchanged.
  const std::string before = spec.SerializeAsString();
  ASSERT_FALSE(CompleteJobSpec(&spec).has_value());
  EXPECT_EQ(spec.SerializeAsString(), before);
}

TEST(JobSpecTest, VariableThatAgentsSet_IsRefusedWithTheFieldThatSaysTheSame) {
  const auto error_of = [](const char* name) -> std::string {
    v1::JobSpec spec = Good();
    AddNameValue(name, "1", spec.mutable_env());
    const auto error = CompleteJobSpec(&spec);
    return error.has_value() ? error->message() : "none";
  };
  EXPECT_EQ(error_of("MUSTER_MIXED_PRECISION"),
            "env MUSTER_MIXED_PRECISION cannot be set: set the field mixed_precision instead");
  EXPECT_EQ(error_of("RANK"),
            "env RANK cannot be set: the agent of each node sets it for each process");
  EXPECT_EQ(error_of("MUSTER_LEASE"),
            "env MUSTER_LEASE cannot be set: the agent of each node sets it for each process");
  EXPECT_EQ(error_of("MUSTER_SHARDING"), "none");
  // Only if the node has GPUs to assign.
  EXPECT_EQ(error_of("CUDA_VISIBLE_DEVICES"), "none");
  v1::JobSpec spec = Good();
  spec.mutable_per_process()->set_gpus(1);
  AddNameValue("CUDA_VISIBLE_DEVICES", "2", spec.mutable_env());
  const auto error = CompleteJobSpec(&spec);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->message(),
            "env CUDA_VISIBLE_DEVICES cannot be set: the agent of each node sets it to the GPUs "
            "that the job has there");
}

TEST(JobSpecTest, BadField_IsNamed) {
  v1::JobSpec spec = Good();
  spec.set_name("a b");
  EXPECT_EQ(FieldOf(spec), "spec.name");
  spec = Good();
  spec.set_name("-x");  // commands would take it for an option
  EXPECT_EQ(FieldOf(spec), "spec.name");
  spec.set_name("dots.are.for.attempts");
  EXPECT_EQ(FieldOf(spec), "spec.name");
  spec = Good();
  spec.clear_argv();
  EXPECT_EQ(FieldOf(spec), "spec.argv");
  spec = Good();
  spec.add_argv(std::string("a\0b", 3));
  EXPECT_EQ(FieldOf(spec), "spec.argv");
  spec = Good();
  AddNameValue("A=B", "c", spec.mutable_env());
  EXPECT_EQ(FieldOf(spec), "spec.env");
  spec = Good();
  for (const char* value : {"1", "2"}) AddNameValue("A", value, spec.mutable_node_labels());
  EXPECT_EQ(FieldOf(spec), "spec.node_labels");
  spec = Good();
  for (const char* name : {"A", "B", "A"}) AddNameValue(name, "1", spec.mutable_env());
  EXPECT_EQ(FieldOf(spec), "spec.env");
  spec = Good();
  spec.set_working_directory("relative");
  EXPECT_EQ(FieldOf(spec), "spec.working_directory");
  spec = Good();
  spec.clear_max_processes();
  EXPECT_EQ(FieldOf(spec), "spec.max_processes");
  spec = Good();
  spec.set_min_processes(5);
  EXPECT_EQ(FieldOf(spec), "spec.min_processes");
  spec = Good();
  spec.set_processes_per_node(3);
  EXPECT_EQ(FieldOf(spec), "spec.processes_per_node");
  spec = Good();
  spec.mutable_per_process()->set_gpus(-1);
  EXPECT_EQ(FieldOf(spec), "spec.per_process.gpus");
  spec = Good();
  spec.mutable_per_process()->set_gpu_memory_bytes(1);  // without any GPU
  EXPECT_EQ(FieldOf(spec), "spec.per_process.gpu_memory_bytes");
  spec.mutable_per_process()->set_gpus(1);
  EXPECT_EQ(FieldOf(spec), "");
  spec.mutable_per_process()->set_gpu_memory_bytes(INT64_MAX);
  EXPECT_EQ(FieldOf(spec), "spec.per_process.gpu_memory_bytes");
  spec.mutable_per_process()->set_gpu_memory_bytes(-1);
  EXPECT_EQ(FieldOf(spec), "spec.per_process.gpu_memory_bytes");
  spec = Good();
  spec.mutable_restart_delay()->set_seconds(301);
  EXPECT_EQ(FieldOf(spec), "spec.restart_delay");
  spec.mutable_restart_delay()->set_seconds(300);
  EXPECT_EQ(FieldOf(spec), "");
  spec.mutable_hang_timeout()->set_seconds(9);
  EXPECT_EQ(FieldOf(spec), "spec.hang_timeout");
  spec.mutable_hang_timeout()->set_seconds(10);
  EXPECT_EQ(FieldOf(spec), "");
  spec = Good();
  spec.set_max_restarts(-1);
  EXPECT_EQ(FieldOf(spec), "spec.max_restarts");
  spec.set_max_restarts(INT32_MAX);  // no node could start a runner with it
  EXPECT_EQ(FieldOf(spec), "spec.max_restarts");
  spec = Good();
  spec.mutable_time_limit()->set_seconds(0);
  EXPECT_EQ(FieldOf(spec), "spec.time_limit");
  spec = Good();
  spec.mutable_stop_grace()->set_seconds(-1);
  EXPECT_EQ(FieldOf(spec), "spec.stop_grace");
  spec = Good();
  spec.mutable_stop_grace()->set_seconds(3601);
  EXPECT_EQ(FieldOf(spec), "spec.stop_grace");
  spec = Good();
  spec.set_gradient_accumulation_steps(2'000'000);
  EXPECT_EQ(FieldOf(spec), "spec.gradient_accumulation_steps");
  spec = Good();
  spec.mutable_per_process()->set_memory_bytes(INT64_MAX);
  EXPECT_EQ(FieldOf(spec), "spec.per_process.memory_bytes");
  spec = Good();
  spec.set_mixed_precision("fp8");
  EXPECT_EQ(FieldOf(spec), "spec.mixed_precision");
  spec = Good();
  AddNameValue("A", std::string(kMaxSpecBytes, 'x'), spec.mutable_env());
  EXPECT_EQ(FieldOf(spec), "spec");
}

v1::JobSpec WithFiles(const std::vector<std::pair<std::string, std::string>>& files) {
  v1::JobSpec spec = Good();
  for (const auto& [path, content] : files) {
    v1::JobFile* const file = spec.add_files();
    file->set_path(path);
    file->set_content(content);
  }
  return spec;
}

TEST(JobSpecTest, Files_AreSortedAndGetDigests) {
  v1::JobSpec spec = WithFiles({{"b/c.txt", "two"}, {"a", ""}});
  EXPECT_FALSE(CompleteJobSpec(&spec).has_value());
  EXPECT_EQ(spec.files(0).path(), "a");
  EXPECT_EQ(spec.files(1).sha256(), Sha256("two"));
  EXPECT_EQ(spec.files(1).size(), 3);
}

// The hash is in journals, which every later version reads.
TEST(JobSpecTest, Hash_StaysTheSameForEver) {
  v1::JobSpec spec = WithFiles({{"b", "two"}, {"a", "x"}});
  AddNameValue("B", "2", spec.mutable_env());
  AddNameValue("A", "1", spec.mutable_env());
  spec.add_class_limits()->set_end_class(v1::END_CLASS_HANG);
  FillJobSpec(&spec);
  EXPECT_EQ(HashJobSpec(spec), 13630646142085219878u);
}

// Only what the caller has written counts, because digests of files are added to it.
TEST(JobSpecTest, SizeIsThatOfTheCallersSpecification) {
  v1::JobSpec spec = Good();
  for (int i = 0; i < kMaxFiles; ++i) spec.add_files()->set_path(absl::StrCat("f", i));
  AddNameValue("A", "", spec.mutable_env());
  spec.mutable_env(0)->set_value(std::string(kMaxSpecBytes - spec.ByteSizeLong() - 8, 'x'));
  ASSERT_LE(spec.ByteSizeLong(), kMaxSpecBytes);
  EXPECT_FALSE(CompleteJobSpec(&spec).has_value());
  EXPECT_GT(spec.ByteSizeLong(), kMaxSpecBytes);
}

TEST(JobSpecTest, FilesThatLeadElsewhereOrAreTooLarge_AreRefused) {
  for (const char* path : {"", "/etc/passwd", "..", "a/../b", "./a", "a//b", "a/", "a/.."}) {
    EXPECT_EQ(FieldOf(WithFiles({{path, "x"}})), "spec.files") << path;
  }
  EXPECT_EQ(FieldOf(WithFiles({{std::string("a\0b", 3), "x"}})), "spec.files");
  EXPECT_EQ(FieldOf(WithFiles({{std::string(kMaxFilePath + 1, 'a'), "x"}})), "spec.files");
  EXPECT_EQ(FieldOf(WithFiles({{"a", "x"}, {"a", "x"}})), "spec.files");
  EXPECT_EQ(FieldOf(WithFiles({{"a/b/c", "x"}, {"a/b", "x"}})), "spec.files");
  EXPECT_EQ(FieldOf(WithFiles({{"a-b", "x"}, {"a", "x"}, {"a/b", "x"}})), "spec.files");
  EXPECT_EQ(FieldOf(WithFiles({{"a", std::string(kMaxFileBytes, 'x')}, {"b", "x"}})), "spec.files");
  v1::JobSpec spec = WithFiles({{"a", "x"}});
  spec.mutable_files(0)->set_sha256(Sha256("y"));
  EXPECT_EQ(FieldOf(spec), "spec.files");
  EXPECT_EQ(FieldOf(WithFiles(
                std::vector<std::pair<std::string, std::string>>(kMaxFiles + 1, {"a", ""}))),
            "spec.files");
}

TEST(JobSpecTest, LimitsOfClassesThatHaveNone_AreRefused) {
  const auto with = [](std::vector<std::pair<v1::EndClass, int>> limits) {
    v1::JobSpec spec = Good();
    for (const auto& [end_class, count] : limits) {
      spec.add_class_limits()->set_end_class(end_class);
      spec.mutable_class_limits()->rbegin()->set_count(count);
    }
    return spec;
  };
  v1::JobSpec good = with({{v1::END_CLASS_HANG, 2}, {v1::END_CLASS_OUT_OF_MEMORY, 0}});
  EXPECT_FALSE(CompleteJobSpec(&good).has_value());
  EXPECT_EQ(good.class_limits(0).end_class(), v1::END_CLASS_OUT_OF_MEMORY);
  for (const v1::EndClass none :
       {v1::END_CLASS_UNSPECIFIED, v1::END_CLASS_USER_ERROR, v1::END_CLASS_PEER_FAILED,
        v1::END_CLASS_RESIZED, static_cast<v1::EndClass>(99)}) {
    EXPECT_EQ(FieldOf(with({{none, 1}})), "spec.class_limits") << none;
  }
  EXPECT_EQ(FieldOf(with({{v1::END_CLASS_HANG, -1}})), "spec.class_limits");
  EXPECT_EQ(FieldOf(with({{v1::END_CLASS_HANG, 1}, {v1::END_CLASS_HANG, 1}})), "spec.class_limits");
}

}  // namespace
}  // namespace muster::coordinator
