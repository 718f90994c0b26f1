#include "client/config/torchrun_flags.h"

#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;

class TorchrunFlagsTest : public ::testing::Test {
 protected:
  // Returns the setting and its source, "TEXT from SOURCE", for a launch with these flags.
  std::string Setting(const std::map<std::string, std::string>& given, const std::string& name) {
    std::vector<Layer> layers = {flags_, {}, file_};
    const absl::Status status = ApplyTorchrunFlags(given, machine_, &layers);
    if (!status.ok()) return std::string(status.message());
    for (const Layer& layer : layers) {
      const auto it = layer.settings.find(name);
      if (it != layer.settings.end()) return it->second.text + " from " + it->second.source;
    }
    return "none";
  }
  // Returns the refusal, one line; INVALID_ARGUMENT.
  std::string Refusal(const std::map<std::string, std::string>& given) {
    std::vector<Layer> layers = {flags_, {}, file_};
    const absl::Status status = ApplyTorchrunFlags(given, machine_, &layers);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    const std::string text(status.message());
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 0) << text;
    return text;
  }

  MachineFacts machine_ = {.gpus = 4, .cores = 16};
  Layer flags_, file_;
};

TEST_F(TorchrunFlagsTest, ProcessesPerNode_AreMultipliedByTheMachines) {
  EXPECT_EQ(Setting({{"nproc_per_node", "2"}}, "num_processes"), "2 from --nproc_per_node 2");
  EXPECT_EQ(Setting({{"nproc_per_node", "2"}, {"nnodes", "3"}}, "num_processes"),
            "6 from --nproc_per_node 2");
  file_.settings["num_machines"] = {"4", "c.yaml:1"};
  EXPECT_EQ(Setting({{"nproc_per_node", "2"}}, "num_processes"), "8 from --nproc_per_node 2");
  EXPECT_EQ(Setting({{"nproc_per_node", "2"}, {"standalone", "true"}}, "num_processes"),
            "2 from --nproc_per_node 2");
}

TEST_F(TorchrunFlagsTest, ProcessesPerNodeByDevice_CountsGpusOrCores) {
  EXPECT_EQ(Setting({{"nproc_per_node", "gpu"}}, "num_processes"), "4 from --nproc_per_node gpu");
  EXPECT_EQ(Setting({{"nproc_per_node", "auto"}}, "num_processes"), "4 from --nproc_per_node auto");
  EXPECT_EQ(Setting({{"nproc_per_node", "cpu"}}, "num_processes"), "16 from --nproc_per_node cpu");
  EXPECT_EQ(Setting({{"nproc_per_node", "cpu"}}, "cpu"), "true from --nproc_per_node cpu");
  file_.settings["gpu_ids"] = {"0,2", "c.yaml:1"};
  EXPECT_EQ(Setting({{"nproc_per_node", "gpu"}}, "num_processes"), "2 from --nproc_per_node gpu");
  file_.settings["cpu"] = {"true", "c.yaml:2"};
  EXPECT_EQ(Setting({{"nproc_per_node", "auto"}}, "num_processes"),
            "16 from --nproc_per_node auto");
}

TEST_F(TorchrunFlagsTest, ProcessesPerNodeByDevice_WithoutGpu_IsRefusedOrCountsCores) {
  machine_.gpus = 0;
  EXPECT_EQ(Setting({{"nproc_per_node", "auto"}}, "num_processes"),
            "16 from --nproc_per_node auto");
  EXPECT_THAT(Refusal({{"nproc_per_node", "gpu"}}),
              HasSubstr("--nproc_per_node gpu: this machine has no usable GPU"));
}

TEST_F(TorchrunFlagsTest, Machines_BecomeTheirSettings) {
  EXPECT_EQ(Setting({{"nnodes", "2"}}, "num_machines"), "2 from --nnodes 2");
  EXPECT_EQ(Setting({{"nnodes", "2:2"}}, "num_machines"), "2 from --nnodes 2:2");
  EXPECT_EQ(Setting({{"nnodes", "1:4"}}, "num_machines"), "1:4 from --nnodes 1:4");
  EXPECT_EQ(Setting({{"node_rank", "1"}}, "machine_rank"), "1 from --node_rank");
  EXPECT_EQ(Setting({{"rdzv_id", "night"}}, "job_name"), "night from --rdzv_id");
}

TEST_F(TorchrunFlagsTest, RangeOfMachines_ProcessesAreThoseOfTheMost) {
  EXPECT_EQ(Setting({{"nnodes", "1:4"}, {"nproc_per_node", "2"}}, "num_processes"),
            "8 from --nproc_per_node 2");
}

TEST_F(TorchrunFlagsTest, RendezvousConf_BecomesTimesAndTheHost) {
  const std::map<std::string, std::string> given = {
      {"rdzv_conf", "join_timeout=60,last_call_timeout=1.5,is_host=1"}};
  EXPECT_EQ(Setting(given, "join_timeout"), "1m from --rdzv_conf join_timeout");
  EXPECT_EQ(Setting(given, "last_call"), "1.5s from --rdzv_conf last_call_timeout");
  EXPECT_EQ(Setting(given, "machine_rank"), "0 from --rdzv_conf is_host");
  EXPECT_EQ(Setting({{"rdzv_conf", "timeout=9"}}, "join_timeout"), "9s from --rdzv_conf timeout");
  EXPECT_EQ(Setting({{"rdzv_conf", "is_host=0"}}, "machine_rank"), "none");
  EXPECT_THAT(Refusal({{"rdzv_conf", "timeout=9,close_timeout=3"}}),
              HasSubstr("--rdzv_conf close_timeout=3: of its keys a launch has timeout, "));
  for (const char* wrong :
       {"timeout", "timeout=x", "timeout=-1", "timeout=0", "timeout=nan", "timeout=0x10"}) {
    EXPECT_THAT(Refusal({{"rdzv_conf", wrong}}), HasSubstr("timeout must be a number of seconds"));
  }
  EXPECT_THAT(Refusal({{"rdzv_conf", "is_host=perhaps"}}), HasSubstr("true or false"));
  EXPECT_THAT(Refusal({{"rdzv_conf", ""}}), HasSubstr("of its keys"));
}

TEST_F(TorchrunFlagsTest, Addresses_BecomeTheCoordinators) {
  const std::map<std::string, std::string> endpoint = {{"rdzv_endpoint", "10.0.0.5:1234"}};
  EXPECT_EQ(Setting(endpoint, "main_process_ip"), "10.0.0.5 from --rdzv_endpoint");
  EXPECT_EQ(Setting(endpoint, "main_process_port"), "1234 from --rdzv_endpoint");
  EXPECT_EQ(Setting({{"rdzv_endpoint", "localhost:0"}}, "main_process_ip"),
            "127.0.0.1 from --rdzv_endpoint");
  for (const char* bare : {"10.0.0.5", "[::1]"}) {
    EXPECT_EQ(Setting({{"rdzv_endpoint", bare}}, "main_process_port"),
              "29400 from --rdzv_endpoint");
  }
  EXPECT_EQ(Setting({{"master_addr", "::1"}}, "main_process_ip"), "::1 from --master_addr");
  EXPECT_EQ(Setting({{"master_addr", "10.0.0.5"}}, "main_process_port"),
            "29500 from --master_addr");
  EXPECT_EQ(Setting({{"master_addr", "10.0.0.5"}, {"master_port", "7"}}, "main_process_port"),
            "7 from --master_port");
  EXPECT_THAT(
      Refusal({{"rdzv_endpoint", "node0:29400"}}),
      HasSubstr(
          "'node0' is not numeric: write its IP address, 10.0.0.5:29400 or [fd00::5]:29400 (from "
          "--rdzv_endpoint)"));
}

TEST_F(TorchrunFlagsTest, Backend_OtherThanC10dAndStatic_IsRefusedByName) {
  EXPECT_EQ(Setting({{"rdzv_backend", "c10d"}}, "num_machines"), "none");
  EXPECT_EQ(Setting({{"rdzv_backend", "static"}, {"nnodes", "2"}}, "num_machines"),
            "2 from --nnodes 2");
  EXPECT_EQ(Refusal({{"rdzv_backend", "etcd-v2"}}),
            "--rdzv_backend etcd-v2: the machines of a launch meet at Muster's coordinator: write "
            "c10d or static, or leave it out");
}

TEST_F(TorchrunFlagsTest, C10dWithSeveralMachines_NumbersThemAsTheyCome) {
  EXPECT_EQ(Setting({{"rdzv_backend", "c10d"}, {"nnodes", "2"}}, "machine_rank"),
            "-1 from --rdzv_backend c10d");
  EXPECT_EQ(Setting({{"rdzv_backend", "c10d"}}, "machine_rank"), "none");
  EXPECT_EQ(
      Setting({{"rdzv_backend", "c10d"}, {"nnodes", "2"}, {"node_rank", "0"}}, "machine_rank"),
      "0 from --node_rank");
  file_.settings["machine_rank"] = {"1", "c.yaml:1"};
  EXPECT_EQ(Setting({{"rdzv_backend", "c10d"}, {"nnodes", "2"}}, "machine_rank"),
            "1 from c.yaml:1");
}

TEST_F(TorchrunFlagsTest, Standalone_WinsOverTheFile) {
  file_.settings = {{"num_machines", {"2", "c.yaml:1"}},
                    {"machine_rank", {"1", "c.yaml:2"}},
                    {"main_process_ip", {"10.0.0.5", "c.yaml:3"}}};
  const std::map<std::string, std::string> given = {
      {"standalone", "true"}, {"nnodes", "1"}, {"node_rank", "0"}, {"rdzv_backend", "c10d"}};
  EXPECT_EQ(Setting(given, "num_machines"), "1 from --nnodes 1");
  EXPECT_EQ(Setting(given, "machine_rank"), "0 from --node_rank");
  EXPECT_EQ(Setting(given, "main_process_ip"), " from --standalone");
  EXPECT_EQ(Setting({{"standalone", "false"}}, "num_machines"), "2 from c.yaml:1");
}

TEST_F(TorchrunFlagsTest, StandaloneWithMachinesOrAnAddress_NamesBoth) {
  EXPECT_EQ(Refusal({{"standalone", "true"}, {"nnodes", "2"}}),
            "--standalone runs one machine without an address, but --nnodes 2 was given too: leave "
            "one of them out");
  EXPECT_THAT(Refusal({{"standalone", "true"}, {"rdzv_endpoint", "localhost:0"}}),
              HasSubstr("--rdzv_endpoint was given too"));
  flags_.settings["main_process_port"] = {"1", "--main_process_port"};
  EXPECT_THAT(Refusal({{"standalone", "true"}}), HasSubstr("--main_process_port was given too"));
}

TEST_F(TorchrunFlagsTest, FlagsOfOneMeaning_AreRefusedByBothNames) {
  for (const TorchrunFlag& flag : TorchrunFlags()) {
    for (const std::string& rival : flag.rivals) {
      EXPECT_EQ(Refusal({{flag.name, "1"}, {rival, "1"}}),
                "--" + flag.name + " and --" + rival + " mean the same: give only one of them");
    }
  }
  EXPECT_EQ(Refusal({{"nproc_per_node", "2"}, {"num_processes", "2"}}),
            "--nproc_per_node and --num_processes mean the same: give only one of them");
  flags_.settings["cpu"] = {"false", "--cpu"};
  EXPECT_THAT(Refusal({{"nproc_per_node", "cpu"}}), HasSubstr("but --cpu is false"));
}

TEST_F(TorchrunFlagsTest, WrongValues_AreRefusedWithWhatToWrite) {
  for (const char* wrong : {"0", "-1", "many", ""}) {
    EXPECT_THAT(Refusal({{"nproc_per_node", wrong}}), HasSubstr("or auto, gpu or cpu"));
  }
  for (const char* wrong : {"0", "x", "2:1", "0:2", "1:", ":2", "1:2:3", ""}) {
    EXPECT_THAT(Refusal({{"nnodes", wrong}}), HasSubstr("write the number of machines, 1 or more"));
  }
  EXPECT_EQ(Refusal({{"standalone", "perhaps"}}), "--standalone perhaps: it must be true or false");
}

TEST_F(TorchrunFlagsTest, WhatCannotBeHonoured_IsRefusedByNameWithTheWayOut) {
  for (const TorchrunFlag& flag : TorchrunFlags()) {
    EXPECT_NE(flag.refusal.empty(), flag.help.empty()) << flag.name;
    if (flag.refusal.empty()) continue;
    EXPECT_THAT(Refusal({{flag.name, flag.value_name.empty() ? "true" : "1"}}),
                HasSubstr(flag.refusal));
  }
  EXPECT_EQ(Refusal({{"module", "true"}}),
            "--module: a launch runs programs: write -- python3 -m MODULE");
  EXPECT_EQ(Refusal({{"t", "3"}}),
            "-t 3: both streams are shown together: write --log_dir FOLDER --tee");
}

}  // namespace
}  // namespace muster::client
