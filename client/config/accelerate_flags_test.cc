#include "client/config/accelerate_flags.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string ErrorOf(const std::map<std::string, std::string>& given, int gpus = 2,
                    std::vector<Layer> layers = {{}, {}, {}}) {
  return std::string(ApplyAccelerateOnlyFlags(given, {.gpus = gpus}, &layers).message());
}

TEST(AccelerateOnlyFlags, EachIsTakenOrRefused) {
  EXPECT_GT(AccelerateOnlyFlags().size(), 60u);
  for (const AccelerateOnlyFlag& flag : AccelerateOnlyFlags()) {
    EXPECT_NE(flag.help.empty(), flag.refusal.empty()) << flag.name;
  }
}

TEST(AccelerateOnlyFlags, ThoseWithoutEffect_AreTaken) {
  EXPECT_EQ(ErrorOf({{"multi_gpu", "true"},
                     {"same_network", "true"},
                     {"quiet", "true"},
                     {"dynamo_backend", "no"}}),
            "");
  EXPECT_EQ(ErrorOf({{"dynamo_backend", "NO"}, {"num_processes", "2"}}), "");
  // Switched off.
  EXPECT_EQ(ErrorOf({{"tpu", "false"}, {"multi_gpu", "no"}}, /*gpus=*/0), "");
}

TEST(AccelerateOnlyFlags, MultiGpu_NeedsGpus) {
  EXPECT_THAT(ErrorOf({{"multi_gpu", "true"}}, /*gpus=*/0),
              HasSubstr("--multi_gpu: this machine has no usable GPU"));
  Layer file;
  file.settings["cpu"] = {"true", "a.yaml:3"};
  EXPECT_THAT(ErrorOf({{"multi_gpu", "true"}}, 2, {{}, file}),
              HasSubstr("--multi_gpu: it trains on GPUs, but cpu is true (from a.yaml:3)"));
  Layer flags;
  flags.settings["cpu"] = {"false", "--cpu"};
  EXPECT_EQ(ErrorOf({{"multi_gpu", "true"}}, 2, {flags, file}), "");
}

TEST(AccelerateOnlyFlags, WhatCannotBeHonoured_SaysWhatToDo) {
  EXPECT_THAT(ErrorOf({{"dynamo_backend", "inductor"}}),
              HasSubstr("--dynamo_backend inductor: a program written with Muster has no Python"));
  EXPECT_THAT(ErrorOf({{"dynamo_mode", "default"}}), HasSubstr("leave it out"));
  EXPECT_THAT(ErrorOf({{"tpu", "true"}}), HasSubstr("--tpu: there are no TPUs"));
  EXPECT_THAT(ErrorOf({{"enable_cpu_affinity", "true"}}), HasSubstr("numactl"));
  EXPECT_THAT(ErrorOf({{"fp8_backend", "te"}}), HasSubstr("--mixed_precision bf16"));
  EXPECT_THAT(ErrorOf({{"megatron_lm_tp_degree", "2"}}), HasSubstr("--sharding zero3"));
  EXPECT_THAT(ErrorOf({{"mpirun_hostfile", "hosts"}}), HasSubstr("mpirun"));
  const std::string secret = ErrorOf({{"aws_secret_access_key", "s3cret"}});
  EXPECT_THAT(secret, HasSubstr("--aws_secret_access_key: "));
  EXPECT_THAT(secret, Not(HasSubstr("s3cret")));
  EXPECT_THAT(ErrorOf({{"tpu", "perhaps"}}), HasSubstr("--tpu: it must be true or false"));
}

}  // namespace
}  // namespace muster::client
