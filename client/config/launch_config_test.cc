#include "client/config/launch_config.h"

#include <stdlib.h>

#include <string>

#include "base/defaults.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/worker_variables.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Layer Flags(const std::map<std::string, std::string>& values) {
  Layer layer;
  for (const auto& [name, value] : values) layer.settings[name] = {value, "--" + name};
  return layer;
}

std::string SourceOf(const LaunchConfig& config, const std::string& name) {
  for (const auto& [key, given] : config.provenance) {
    if (key == name) return given.text + " from " + given.source;
  }
  return "absent";
}

std::string ErrorOf(const std::map<std::string, std::string>& flags, MachineFacts machine = {}) {
  const auto config = ResolveLaunch({Flags(flags)}, machine);
  return config.ok() ? "accepted" : std::string(config.status().message());
}

std::string FileError(absl::string_view text) {
  const auto layer = ParseConfig(text, "c.yaml");
  return layer.ok() ? "accepted" : std::string(layer.status().message());
}

TEST(ResolveLaunch, Nothing_OneCpuProcess) {
  const auto config = ResolveLaunch({}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_processes, 1);
  EXPECT_TRUE(config->cpu);
  EXPECT_EQ(SourceOf(*config, "cpu"), "true from this machine has no GPU");
  EXPECT_EQ(config->mixed_precision, "no");
  EXPECT_EQ(config->stop_grace, absl::Seconds(10));
}

TEST(ResolveLaunch, FailurePolicy_IsTheSameFromAFileAndFlags) {
  const auto file = ParseConfig(
      "failure_policy: {max_restarts: 5, oom: 1}\nuser_error_codes: [3, 4]\n", "c.yaml");
  ASSERT_TRUE(file.ok()) << file.status();
  for (const Layer& layer :
       {*file, Flags({{"failure_policy", "max_restarts=5,oom=1"}, {"user_error_codes", "3,4"}}),
        Flags({{"failure_policy", "oom=1"}, {"max_restarts", "5"}, {"user_error_codes", "3,4"}})}) {
    const auto config = ResolveLaunch({layer}, {});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->max_restarts, 5);
    EXPECT_EQ(config->class_limits, (std::map<std::string, int>{{"oom", 1}}));
    EXPECT_EQ(config->user_error_codes, (std::vector<int>{3, 4}));
  }
  // A file of `muster config` has max_restarts: 0 even if the user has not asked for it.
  const auto zero = ParseConfig("max_restarts: 0\n", "c.yaml");
  ASSERT_TRUE(zero.ok()) << zero.status();
  auto config = ResolveLaunch({Flags({{"failure_policy", "failed=3,oom=1"}}), *zero}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->max_restarts, 4);
  // A setting with precedence over the policy also has precedence over the policy's content.
  config = ResolveLaunch({Flags({{"max_restarts", "0"}}), *file}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->max_restarts, 0);
  EXPECT_THAT(FileError("failure_policy: [3]"), HasSubstr("must be one value"));
  EXPECT_THAT(FileError("failure_policy: {oom: soon}"), HasSubstr("restarts by class"));
}

TEST(ResolveLaunch, Gpus_OneProcessEach) {
  const auto config = ResolveLaunch({}, {.gpus = 4});
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->num_processes, 4);
  EXPECT_FALSE(config->cpu);
  const auto two = ResolveLaunch({Flags({{"gpu_ids", "1,3"}})}, {.gpus = 4});
  EXPECT_EQ(two->num_processes, 2);
  // CUDA takes it, too.
  const auto comma = ResolveLaunch({Flags({{"gpu_ids", "1,3,"}})}, {.gpus = 4});
  EXPECT_EQ(comma->num_processes, 2);
  EXPECT_EQ(comma->gpu_ids, "1,3");
}

TEST(ResolveLaunch, FirstLayerWins_AndSaysSo) {
  const auto file = ParseConfig("num_processes: 8\nmixed_precision: bf16\ncpu: yes\n", "c.yaml");
  ASSERT_TRUE(file.ok()) << file.status();
  const Layer variables =
      LayerFromVariables({{"MUSTER_NUM_PROCESSES", "4"}, {"MUSTER_MIXED_PRECISION", "fp16"}});
  const auto config = ResolveLaunch({Flags({{"num_processes", "2"}}), variables, *file}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_processes, 2);
  EXPECT_EQ(SourceOf(*config, "num_processes"), "2 from --num_processes");
  EXPECT_EQ(SourceOf(*config, "mixed_precision"), "fp16 from MUSTER_MIXED_PRECISION");
  EXPECT_EQ(SourceOf(*config, "cpu"), "true from c.yaml:3");
  EXPECT_EQ(SourceOf(*config, "max_restarts"), "0 from default");
}

// Agents and workers that are started without a launcher use the constant.
TEST(ResolveLaunch, OutageTolerance_DefaultIsTheOneOfAgentsAndWorkers) {
  const auto config = ResolveLaunch({}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->outage_tolerance, kDefaultOutageTolerance);
  EXPECT_EQ(config->lease, kDefaultLease);
}

TEST(ResolveLaunch, BadValues_NameTheSettingItsSourceAndTheWayOut) {
  EXPECT_THAT(ErrorOf({{"lease", "3s"}}),
              HasSubstr("lease: 3s (from --lease) is too short: give at least 4s"));
  EXPECT_EQ(ErrorOf({{"num_processes", "0"}}),
            "num_processes: 0 (from --num_processes) is not allowed: it must be a whole number of "
            "at least 1");
  EXPECT_THAT(ErrorOf({{"max_restarts", "2147483647"}}),
              HasSubstr("it must be a whole number from 0 to 1000000"));
  EXPECT_THAT(ErrorOf({{"num_machines", "2000000"}}),
              HasSubstr("a number of machines from 1 to 1000000, or a range"));
  EXPECT_THAT(ErrorOf({{"num_processes", "two"}}), HasSubstr("whole number"));
  EXPECT_THAT(ErrorOf({{"num_processes", "2.5"}}), HasSubstr("whole number"));
  EXPECT_THAT(ErrorOf({{"mixed_precision", "fp8"}}), HasSubstr("one of no, bf16, fp16"));
  EXPECT_THAT(ErrorOf({{"main_process_port", "70000"}}), HasSubstr("from 0 to 65535"));
  EXPECT_THAT(ErrorOf({{"stop_grace", "5"}}), HasSubstr("a duration with a unit"));
  EXPECT_THAT(ErrorOf({{"cpu", "maybe"}}), HasSubstr("true or false"));
  EXPECT_THAT(ErrorOf({{"tee", "true"}}), HasSubstr("--log_dir"));
  EXPECT_THAT(ErrorOf({{"hang_timeout", "5s"}}),
              HasSubstr("hang_timeout: 5s (from --hang_timeout) is too short: give at least 10s"));
  EXPECT_EQ(ErrorOf({{"hang_timeout", "0"}}), "accepted");
  EXPECT_THAT(ErrorOf({{"failure_policy", "oom=x"}}),
              HasSubstr("failure_policy: oom=x (from --failure_policy) is not allowed: it must be "
                        "restarts by class"));
  EXPECT_THAT(ErrorOf({{"failure_policy", "preempted=1"}}), HasSubstr("is not allowed"));
  EXPECT_THAT(ErrorOf({{"user_error_codes", "3,256"}}), HasSubstr("exit codes from 1 to 255"));
  EXPECT_THAT(ErrorOf({{"tls_cert", "x"}}), HasSubstr("tls_key"));
}

TEST(ResolveLaunch, D27_ProcessesNotDivisibleByMachines_AreRefused) {
  EXPECT_THAT(ErrorOf({{"num_processes", "7"},
                       {"num_machines", "2"},
                       {"main_process_ip", "10.0.0.1"},
                       {"main_process_port", "29400"}}),
              AllOf(HasSubstr("7"), HasSubstr("2 machines"), HasSubstr("use 6 or 8")));
  EXPECT_THAT(ErrorOf({{"num_processes", "1"}, {"num_machines", "2"}}), HasSubstr("use 2"));
}

TEST(ResolveLaunch, RangeOfMachines_ProcessesAreThoseOfTheMost) {
  std::vector<Layer> layers(1);
  for (const auto& [name, text] :
       std::map<std::string, std::string>{{"num_machines", "1:3"},
                                          {"num_processes", "6"},
                                          {"cpu", "true"},
                                          {"main_process_ip", "127.0.0.1"},
                                          {"main_process_port", "29400"},
                                          {"token_file", "t"}}) {
    layers[0].settings[name] = {text, "--" + name};
  }
  const absl::StatusOr<LaunchConfig> config = ResolveLaunch(layers, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->min_machines, 1);
  EXPECT_EQ(config->num_machines, 3);
  EXPECT_EQ(config->processes_here, 2);
  EXPECT_EQ(config->machine_rank, -1) << "they are numbered as they come";
  EXPECT_EQ(config->last_call, absl::Seconds(30));
  layers[0].settings["machine_rank"] = {"2", "--machine_rank"};
  EXPECT_EQ(ResolveLaunch(layers, {})->machine_rank, 2);
  for (const char* wrong : {"3:1", "0:2", "1:", "1:2:3", "many"}) {
    EXPECT_THAT(ErrorOf({{"num_machines", wrong}}), HasSubstr("a range such as 1:4"));
  }
}

TEST(ResolveLaunch, OneMachineOverAFileForSeveral_LeavesOutItsPlaceAndAddress) {
  for (const char* text :
       {"num_machines: 2\nmachine_rank: 1\ncoordinator: 10.0.0.5:29400\ncpu: true\n",
        "distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 2\nmachine_rank: 1\n"
        "main_process_ip: 10.0.0.5\nmain_process_port: 29400\n"}) {
    const auto file = ParseConfig(text, "c.yaml");
    ASSERT_TRUE(file.ok()) << file.status();
    auto config = ResolveLaunch({Flags({{"num_machines", "1"}}), {}, *file}, {});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->num_machines, 1);
    EXPECT_EQ(config->machine_rank, 0);
    EXPECT_EQ(config->coordinator_ip, "");
    EXPECT_EQ(config->coordinator_port, 0);
    EXPECT_EQ(SourceOf(*config, "machine_rank"), "0 from default");
    // The command line takes precedence.
    config = ResolveLaunch(
        {Flags({{"num_machines", "1"}, {"main_process_ip", "127.0.0.1"}}), {}, *file}, {});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->coordinator_ip, "127.0.0.1");
    EXPECT_THAT(std::string(ResolveLaunch({{}, {}, *file}, {}).status().message()),
                HasSubstr("authenticates its callers"));
  }
}

TEST(ResolveLaunch, MachinesThatCannotMeet_AreRefused) {
  EXPECT_THAT(ErrorOf({{"num_machines", "2"}}), HasSubstr("--coordinator IP:PORT"));
  EXPECT_THAT(ErrorOf({{"num_machines", "2"}, {"machine_rank", "2"}}),
              HasSubstr("numbered from 0"));
}

TEST(ResolveLaunch, CoordinatorThatWouldNotKnowItsCallers_IsRefusedWithTheWays) {
  using Settings = std::map<std::string, std::string>;
  const Settings kFar = {{"main_process_ip", "10.0.0.5"}, {"main_process_port", "29400"}};
  const Settings kNear = {{"main_process_ip", "127.0.0.1"}, {"main_process_port", "29400"}};
  const Settings kCertificates = {{"tls_ca", "a"}, {"tls_cert", "c"}, {"tls_key", "k"}};
  const Settings kToken = {{"token_file", "t"}};
  const Settings kTwo = {{"num_machines", "2"}}, kSecond = {{"machine_rank", "1"}};
  const Settings kCa = {{"tls_ca", "a"}};
  const auto of = [](const std::vector<Settings>& parts) {
    Settings all;
    for (const Settings& part : parts) all.insert(part.begin(), part.end());
    return ErrorOf(all);
  };
  // One machine, whose launcher provides the authentication.
  EXPECT_EQ(of({}), "accepted");
  EXPECT_EQ(of({kNear}), "accepted");
  EXPECT_EQ(of({{{"main_process_ip", "localhost"}}}), "accepted");
  EXPECT_EQ(of({{{"main_process_ip", "::1"}}}), "accepted");
  // An address that others can reach.
  for (const Settings& machines : {Settings(), kTwo}) {
    EXPECT_THAT(of({kFar, machines}),
                AllOf(HasSubstr("authenticates its callers"),
                      HasSubstr("--tls_ca, --tls_cert and --tls_key"), HasSubstr("--token_file")));
    EXPECT_THAT(of({kFar, machines, kToken}), HasSubstr("travel in clear"));
    EXPECT_THAT(of({kFar, machines, kToken, kCa}), HasSubstr("a certificate of machine 0"));
    EXPECT_THAT(of({kFar, machines, kCa}), HasSubstr("authenticates its callers"));
    EXPECT_EQ(of({kFar, machines, kCertificates}), "accepted");
    EXPECT_EQ(of({kFar, machines, kCertificates, kToken}), "accepted");
  }
  EXPECT_EQ(of({kFar, kTwo, kSecond, kToken, kCa}), "accepted");
  EXPECT_THAT(of({kFar, kTwo, kSecond, kCa}), HasSubstr("authenticates its callers"));
  EXPECT_THAT(of({{{"main_process_ip", "0.0.0.0"}}}), HasSubstr("authenticates its callers"));
  EXPECT_THAT(of({{{"main_process_ip", "here"}}}), HasSubstr("not numeric"));
  // Several machines on one host: no secret travels, but each must know it.
  EXPECT_THAT(of({kNear, kTwo}), AllOf(HasSubstr("--token_file"), HasSubstr("--tls_ca")));
  EXPECT_EQ(of({kNear, kTwo, kToken}), "accepted");
  EXPECT_EQ(of({kNear, kTwo, kSecond, kToken}), "accepted");
  EXPECT_EQ(of({kNear, kTwo, kCertificates}), "accepted");
}

TEST(ResolveLaunch, MoreProcessesThanGpus_AreRefusedUnlessOnTheCpu) {
  EXPECT_THAT(ErrorOf({{"num_processes", "4"}}, {.gpus = 2}), HasSubstr("use 2 or --cpu"));
  EXPECT_THAT(ErrorOf({{"gpu_ids", "0,1,2"}}, {.gpus = 2}), HasSubstr("names 3 GPUs"));
  EXPECT_THAT(ErrorOf({{"gpu_ids", "-1"}}, {.gpus = 2}), HasSubstr("--cpu"));
  EXPECT_EQ(ErrorOf({{"num_processes", "4"}, {"cpu", "true"}}, {.gpus = 2}), "accepted");
}

TEST(ResolveLaunch, GpusOfAFileTriedOnTheCpu_AreNotCounted) {
  const auto file =
      ParseConfig("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: '0,1'\n", "c.yaml");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(std::string(ResolveLaunch({{}, *file}, {}).status().message()),
              HasSubstr("this machine has 0"));
  const auto config = ResolveLaunch({Flags({{"cpu", "true"}}), *file}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->processes_here, 2);
}

TEST(NamesGpus, AllAndNothing_LeaveTheGpusToCudaVisibleDevices) {
  EXPECT_FALSE(NamesGpus({}));
  EXPECT_FALSE(NamesGpus({Flags({{"gpu_ids", ""}})}));
  EXPECT_FALSE(NamesGpus({Flags({{"gpu_ids", "all"}}), Flags({{"gpu_ids", "0,1"}})}));
  EXPECT_TRUE(NamesGpus({{}, Flags({{"gpu_ids", "0,1"}})}));
}

TEST(ResolveLaunch, GpuAskedForWhereNoneIs_IsRefusedOnTheCommandLineOnly) {
  EXPECT_TRUE(ResolveLaunch({*ParseConfig("cpu: no\n", "c.yaml")}, {})->cpu);
  EXPECT_THAT(ErrorOf({{"cpu", "false"}}), HasSubstr("no usable GPU"));
  EXPECT_EQ(ErrorOf({{"cpu", "false"}}, {.gpus = 1}), "accepted");
}

TEST(ResolveLaunch, D26_ProcessesOnTheCpu_AreAllCounted) {
  const auto config = ResolveLaunch({Flags({{"num_processes", "3"}, {"cpu", "true"}})}, {});
  EXPECT_EQ(config->processes_here, 3);
}

// A variable that the launch would silently replace.
TEST(ResolveLaunch, EnvThatIsASetting_IsRefusedOrCounts) {
  const auto error = [](const std::vector<Layer>& layers) {
    const auto config = ResolveLaunch(layers, {});
    return config.ok() ? "accepted" : std::string(config.status().message());
  };
  const auto with_env = [](const char* name, const char* value, const char* source) {
    Layer layer;
    layer.env[name] = {value, source};
    return layer;
  };
  EXPECT_EQ(error({with_env("MUSTER_MIXED_PRECISION", "bf16", "--env")}),
            "env: MUSTER_MIXED_PRECISION (from --env) cannot be set: write --mixed_precision, or "
            "mixed_precision: in the file, which sets it for all processes");
  EXPECT_THAT(error({with_env("ACCELERATE_DEBUG_MODE", "1", "c.yaml:2")}),
              HasSubstr("(from c.yaml:2) cannot be set: write --debug, or debug: in the file"));
  EXPECT_EQ(error({with_env("RANK", "3", "--env")}),
            "env: RANK (from --env) cannot be set: muster launch sets it for each process "
            "according to its place in the job");
  // Each variable that names a setting names an existing one.
  for (const SettingSpec& spec : LaunchSettings()) {
    const WorkerVariable* const set = FindWorkerVariable(spec.variable);
    if (set != nullptr) {
      EXPECT_EQ(set->setting, spec.name);
    }
  }

  // Other variables count, unless a setting of the same or higher precedence has another value.
  const Layer zero3 = with_env("MUSTER_SHARDING", "zero3", "--env");
  EXPECT_EQ(error({zero3}), "accepted");
  Layer file;
  file.settings["sharding"] = {"zero2", "c.yaml:4"};
  EXPECT_EQ(
      error({zero3, file}),
      "env: MUSTER_SHARDING: zero3 (from --env) differs from sharding: zero2 (from c.yaml:4): "
      "leave the variable out, and write --sharding VALUE");
  EXPECT_EQ(error({Flags({{"sharding", "zero3"}}), zero3}), "accepted");
  EXPECT_EQ(error({Flags({{"sharding", "zero2"}}), zero3}), "accepted");
}

TEST(ResolveLaunch, Threads_AreWhatTheFirstSourceSays) {
  const auto layer = [](const char* env, const char* setting, const std::string& source) {
    Layer layer;
    if (env != nullptr) layer.env["OMP_NUM_THREADS"] = {env, source};
    if (setting != nullptr) layer.settings["num_cpu_threads_per_process"] = {setting, source};
    return layer;
  };
  // The setting and the variable, or the error.
  const auto threads = [](const std::vector<Layer>& layers) {
    const auto config = ResolveLaunch(layers, {});
    if (!config.ok()) return std::string(config.status().message());
    const auto variable = config->env.find("OMP_NUM_THREADS");
    return absl::StrCat(config->threads_per_process, " ",
                        variable != config->env.end() ? variable->second : "-");
  };
  const Layer env = layer("4", nullptr, "--env"), file = layer(nullptr, "8", "c.yaml:1");
  EXPECT_EQ(threads({env}), "0 4");
  EXPECT_EQ(threads({env, file}), "0 4") << "the command line comes before the file";
  EXPECT_EQ(threads({layer("", nullptr, "--env"), file}), "8 -");
  EXPECT_EQ(threads({layer("", nullptr, "--env"), layer("2", nullptr, "c.yaml:2")}), "0 2")
      << "an empty one says nothing";
  EXPECT_EQ(threads({file, layer("2", nullptr, "c.yaml:2")}), "8 -");
  EXPECT_EQ(threads({layer("4", "4", "--env"), file}), "4 4");
  EXPECT_EQ(threads({layer("4", "8", "--x")}),
            "env: OMP_NUM_THREADS: 4 (from --x) differs from num_cpu_threads_per_process: 8 (from "
            "--x): leave one out");
  EXPECT_EQ(threads({layer("4", "8", "c.yaml:1")}), "8 -") << "such files ran";
  EXPECT_THAT(ResolveLaunch({layer("4", "8", "c.yaml:1")}, {})->notes,
              ElementsAre(HasSubstr("8 (from c.yaml:1), which counts: leave one out")));
}

TEST(ResolveLaunch, D31_BooleanWords_MeanWhatTheySay) {
  EXPECT_FALSE(ResolveLaunch({Flags({{"debug", "False"}})}, {})->debug);
  EXPECT_TRUE(ResolveLaunch({Flags({{"debug", "on"}})}, {})->debug);
}

TEST(ParseConfig, AllTypes_AndEnv) {
  const auto layer = ParseConfig(
      "num_processes: 2\nuse_cpu: true\nmixed_precision: no\nenv:\n  A: 1\n  B: text\ncoordinator: "
      "10.0.0.1:29400\n",
      "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->settings.at("num_processes").text, "2");
  EXPECT_EQ(layer->settings.at("cpu").text, "true");
  EXPECT_EQ(layer->settings.at("mixed_precision").text, "no");
  EXPECT_EQ(layer->settings.at("main_process_ip").text, "10.0.0.1");
  EXPECT_EQ(layer->settings.at("main_process_port").text, "29400");
  EXPECT_EQ(layer->env.at("A").text, "1");
  EXPECT_EQ(layer->env.at("B").source, "c.yaml:6");
}

TEST(ParseConfig, Json_IsReadToo) {
  const auto layer = ParseConfig("{\"num_processes\": 3, \"env\": {\"A\": \"b\"}}", "c.json");
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->settings.at("num_processes").text, "3");
}

// What Muster cannot do is refused by name, never silently left out.
TEST(ParseConfig, D25_D34_SectionsOfOtherEngines_AreRefused) {
  EXPECT_THAT(FileError("fp8_config:\n  amax_history_length: 16\n"), HasSubstr("fp8_config"));
  EXPECT_THAT(FileError("fsdp_config:\n  fsdp_version: 2\n"), HasSubstr("fsdp_config"));
  EXPECT_THAT(FileError("mixed_precision: fp8\n"), HasSubstr("one of no, bf16, fp16"));
}

// Its own launcher silently ignores them.
TEST(ParseConfig, SectionThatTheTypeOfAFileDoesNotCallFor_IsNoted) {
  const auto notes = [](const std::string& type, const std::string& section) {
    const auto layer = ParseConfig(
        "distributed_type: " + type + "\nnum_processes: 2\n" + section + "\n", "c.yaml");
    EXPECT_TRUE(layer.ok()) << layer.status();
    const auto config = ResolveLaunch({*layer}, {.gpus = 2});
    EXPECT_TRUE(config.ok()) << config.status();
    return config.ok() ? config->notes : std::vector<std::string>();
  };
  for (const auto& [section, type] :
       {std::pair("fsdp_config: {fsdp_version: 2}", "FSDP"),
        {"deepspeed_config: {zero_stage: 3}", "DEEPSPEED"},
        {"megatron_lm_config: {megatron_lm_tp_degree: 2}", "MEGATRON_LM"},
        {"parallelism_config: {parallelism_config_tp_size: 2}", "MULTI_GPU, FSDP or DEEPSPEED"}}) {
    const std::string name = std::string(section).substr(0, std::string(section).find(':'));
    EXPECT_THAT(notes("MULTI_CPU", section),
                ElementsAre("c.yaml:3: " + name +
                            " has no effect with distributed_type: MULTI_CPU: to use it, write "
                            "distributed_type: " +
                            type));
  }
  // The section stays in the file for a try on one GPU.
  EXPECT_THAT(notes("'NO'", "fsdp_config: {fsdp_version: 2}"),
              ElementsAre(HasSubstr("distributed_type: NO: ")));
  // Sections that wizards write into every file, and those that request nothing.
  for (const char* const section :
       {"fsdp_config: {}", "deepspeed_config: {gradient_accumulation_steps: null}",
        "megatron_lm_config: {}", "parallelism_config: {parallelism_config_tp_size: 1}"}) {
    EXPECT_THAT(notes("MULTI_CPU", section), IsEmpty()) << section;
  }
  EXPECT_THAT(notes("FSDP", "fsdp_config: {fsdp_version: 2}"), IsEmpty());
  for (const char* const type : {"MULTI_GPU", "FSDP", "DEEPSPEED"}) {
    EXPECT_THAT(notes(type, "parallelism_config: {parallelism_config_tp_size: 2}"), IsEmpty());
  }
}

// A file that `accelerate config` wrote: its settings are ours, and its sections become the
// variables that Accelerate's own programs read.
TEST(ParseConfig, FileOfAccelerates_IsReadAsItIs) {
  const auto layer = ParseConfig(
      "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
      "num_processes: 8\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
      "main_process_port: 29501\ndebug: true\nuse_cpu: false\ngpu_ids: all\nsame_network: true\n"
      "rdzv_backend: static\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n",
      "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  const std::map<std::string, std::string> expected = {{"num_processes", "8"},
                                                       {"num_machines", "2"},
                                                       {"machine_rank", "1"},
                                                       {"main_process_ip", "10.0.0.1"},
                                                       {"main_process_port", "29501"},
                                                       {"mixed_precision", "bf16"},
                                                       {"debug", "true"},
                                                       {"cpu", "false"}};
  for (const auto& [name, text] : expected) {
    ASSERT_TRUE(layer->settings.contains(name)) << name;
    EXPECT_EQ(layer->settings.at(name).text, text) << name;
  }
  EXPECT_EQ(layer->settings.size(), expected.size());
  EXPECT_EQ(layer->settings.at("num_processes").source, "c.yaml:4");
  EXPECT_EQ(layer->env.at("FSDP_VERSION").text, "2");
  EXPECT_EQ(layer->env.at("FSDP_OFFLOAD_PARAMS").text, "true");
  EXPECT_EQ(layer->env.at("ACCELERATE_USE_FSDP").text, "true");
  EXPECT_FALSE(layer->env.contains("ACCELERATE_MIXED_PRECISION")) << "the launcher sets it";
  EXPECT_FALSE(layer->env.contains("ACCELERATE_DYNAMO_BACKEND"));
}

TEST(ParseConfig, FileOfAccelerates_CountsLeftToFlagsAndDevices) {
  auto layer = ParseConfig("distributed_type: MULTI_CPU\nnum_processes: -1\n", "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_FALSE(layer->settings.contains("num_processes"));
  EXPECT_EQ(layer->settings.at("cpu").text, "true");
  layer = ParseConfig("distributed_type: MULTI_GPU\nnum_processes: 2\nmain_process_port: 29500\n",
                      "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_FALSE(layer->settings.contains("main_process_port")) << "one machine needs none";
  layer = ParseConfig(
      "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
      "  gradient_accumulation_steps: 4\n  zero_stage: 2\n",
      "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->settings.at("gradient_accumulation_steps").text, "4");
  EXPECT_EQ(layer->env.at("ACCELERATE_DEEPSPEED_ZERO_STAGE").text, "2");
}

TEST(ParseConfig, FileOfAccelerates_PathsToOffloadTo_Count) {
  const auto layer = ParseConfig(
      "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n"
      "  offload_param_device: nvme\n  offload_param_nvme_path: /a\n"
      "  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /b\n",
      "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->env.at("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH").text, "/a");
  EXPECT_EQ(layer->env.at("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH").text, "/b");
}

TEST(ParseConfig, FileOfAccelerates_AccumulationInQuotes_Counts) {
  const auto with = [](const std::string& steps) {
    return "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
           "  gradient_accumulation_steps: " +
           steps + "\n";
  };
  const auto layer = ParseConfig(with("'4'"), "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_TRUE(layer->settings.contains("gradient_accumulation_steps"));
  EXPECT_EQ(layer->settings.at("gradient_accumulation_steps").text, "4");
  for (const char* open : {"auto", "null"}) {
    const auto left = ParseConfig(with(open), "c.yaml");
    ASSERT_TRUE(left.ok()) << left.status();
    EXPECT_FALSE(left->settings.contains("gradient_accumulation_steps"));
  }
  // Without DeepSpeed, Accelerate's launcher passes them to no process: its variable would win over
  // the setting of a Python program.
  const auto other = ParseConfig(
      "distributed_type: MULTI_GPU\nnum_processes: 2\ndeepspeed_config:\n"
      "  gradient_accumulation_steps: 4\n",
      "c.yaml");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_FALSE(other->settings.contains("gradient_accumulation_steps"));
  ASSERT_EQ(other->unused_sections.size(), 1u) << "and it is said";
  EXPECT_EQ(other->unused_sections[0].name, "deepspeed_config");
  EXPECT_THAT(FileError(with("four")), HasSubstr("four (from c.yaml:4)"));
  EXPECT_THAT(FileError(with("2.5")), HasSubstr("2.5 (from c.yaml:4)"));
}

// Accelerate's launcher ignores both; the first trains with a default that the user did not choose.
TEST(ParseConfig, FileOfAccelerates_MisspeltKeyOfASection_IsRefusedAndAStrangeOneNoted) {
  const auto with = [](const std::string& key) {
    return "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"
           "  " +
           key + "\n";
  };
  EXPECT_EQ(FileError(with("gradient_cliping: 1.0")),
            "c.yaml:5: unknown key gradient_cliping in deepspeed_config; did you mean "
            "gradient_clipping?");
  const auto layer = ParseConfig(with("round_robin_gradients: true"), "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  const auto config = ResolveLaunch({*layer}, {.gpus = 2});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->notes,
              ElementsAre("c.yaml:5: deepspeed_config.round_robin_gradients has no effect: this "
                          "section has no such key"));
}

TEST(ParseConfig, FileOfAccelerates_MistakesNameFileAndKey) {
  EXPECT_THAT(FileError("distributed_type: MULTI_GPU\nnum_proceses: 2\n"),
              HasSubstr("num_proceses for num_processes?"));
  EXPECT_THAT(FileError("distributed_type: MULTI_GPU\nnum_processes: 0\n"), HasSubstr("c.yaml:2"));
  EXPECT_THAT(FileError("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\n"),
              HasSubstr("one of no, bf16, fp16"));
  EXPECT_THAT(FileError("distributed_type: XLA\nnum_processes: 8\n"), HasSubstr("TPUs"));
}

TEST(ParseConfig, Mistakes_NameFileLineAndTheNearestKey) {
  EXPECT_EQ(FileError("cpu: true\nnum_proceses: 2\n"),
            "c.yaml:2: unknown key num_proceses; did you mean num_processes? (muster config "
            "default writes all keys)");
  EXPECT_THAT(FileError("rdzv_backend: c10d\n"), HasSubstr("has no distributed_type"));
  EXPECT_THAT(FileError("num_processes: [1]\n"),
              HasSubstr("c.yaml:1: num_processes must be one value"));
  EXPECT_THAT(FileError("num_processes: many\n"), HasSubstr("many (from c.yaml:1)"));
  EXPECT_THAT(FileError("env: 3\n"), HasSubstr("env must be a map"));
  for (const char* lost : {"1.10", "off", "True", "~", "[a]", "010", "0x10"}) {
    EXPECT_THAT(FileError("env: {A: " + std::string(lost) + "}\n"),
                HasSubstr("env.A must be text, in quotes"));
  }
  EXPECT_THAT(FileError("- a\n"), HasSubstr("KEY: VALUE"));
  EXPECT_THAT(FileError("coordinator: somewhere\n"), HasSubstr("c.yaml:1"));
  EXPECT_EQ(FileError(""), "accepted");
}

TEST(DefaultConfigText, IsReadBackAsTheDefaults) {
  const auto layer = ParseConfig(DefaultConfigText({{"mixed_precision", "bf16"}}), "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  const auto from_file = ResolveLaunch({*layer}, {});
  const auto without = ResolveLaunch({}, {});
  ASSERT_TRUE(from_file.ok()) << from_file.status();
  EXPECT_EQ(from_file->mixed_precision, "bf16");
  ASSERT_EQ(from_file->provenance.size(), without->provenance.size());
  for (size_t i = 0; i < without->provenance.size(); ++i) {
    const auto& [name, given] = without->provenance[i];
    if (name != "mixed_precision" && name != "cpu") {
      EXPECT_EQ(from_file->provenance[i].second.text, given.text) << name;
    }
  }
}

TEST(DefaultConfigText, Variables_AreReadBack) {
  const std::map<std::string, std::string> env = {{"A", ""}, {"MUSTER_SHARDING_UNITS", "A: \"b\""}};
  const auto layer = ParseConfig(DefaultConfigText({}, env), "c.yaml");
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_EQ(layer->env.size(), 2u);
  for (const auto& [name, value] : env) EXPECT_EQ(layer->env.at(name).text, value);
}

TEST(FindConfig, FlagThenVariableThenDefaultPlace) {
  const std::string home = TestPath("config_home");
  ASSERT_TRUE(MakeDirectories(home + "/muster").ok());
  EXPECT_EQ(FindConfig("a", {{"MUSTER_CONFIG", "b"}}).path, "a");
  EXPECT_EQ(FindConfig("", {{"MUSTER_CONFIG", "b"}}).path, "b");
  EXPECT_EQ(FindConfig("", {{"XDG_CONFIG_HOME", home}}).path, "");
  ASSERT_TRUE(WriteFileAtomically(home + "/muster/config.yaml", "cpu: true\n").ok());
  const ConfigPath found = FindConfig("", {{"XDG_CONFIG_HOME", home}, {"HOME", "/nowhere"}});
  EXPECT_EQ(found.path, home + "/muster/config.yaml");
  EXPECT_EQ(LoadConfig(found)->settings.at("cpu").text, "true");
  EXPECT_TRUE(LoadConfig({}).ok());
  EXPECT_THAT(std::string(LoadConfig(FindConfig("/nowhere/c.yaml", {})).status().message()),
              AllOf(HasSubstr("/nowhere/c.yaml"), HasSubstr("--config_file")));
}

// The script of a job on SLURM uses it.
TEST(FindConfig, DevNull_SaysNothing) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("muster")).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("muster/config.yaml"), "cpu: true\n").ok());
  const std::map<std::string, std::string> home = {{"XDG_CONFIG_HOME", folder.Path("")},
                                                   {"MUSTER_CONFIG", "/dev/null"}};
  for (const ConfigPath& path : {FindConfig("", home), FindConfig("/dev/null", {})}) {
    const auto layer = LoadConfig(path);
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_TRUE(layer->settings.empty());
  }
}

TEST(FindConfig, HomeOfANamedFile_IsReplaced) {
  EXPECT_EQ(FindConfig("~/a", {{"HOME", "/h"}}).path, "/h/a");
  EXPECT_EQ(FindConfig("", {{"MUSTER_CONFIG", "~/b"}, {"HOME", "/h"}}).path, "/h/b");
  EXPECT_EQ(FindConfig("~/a", {}).path, "~/a");
}

TEST(ReplaceHome, EverySettingThatIsAPath_BeginsAtHome) {
  // No other setting does.
  const std::map<std::string, std::string> kPaths = {{"log_dir", ""},
                                                     {"tls_ca", ""},
                                                     {"tls_cert", ""},
                                                     {"tls_key", ""},
                                                     {"token_file", ""},
                                                     {"checkpoint_key", ""},
                                                     {"offload_optimizer", "disk:"},
                                                     {"offload_parameters", "disk:"},
                                                     {"offload_activations", "disk:"}};
  for (const SettingSpec& spec : LaunchSettings()) {
    const auto path = kPaths.find(spec.name);
    const std::string before = path == kPaths.end() ? "" : path->second;
    Layer layer;
    layer.settings[spec.name] = {before + "~/a b", "c.yaml:3"};
    ASSERT_TRUE(ReplaceHome({{"HOME", "/h"}}, &layer).ok());
    EXPECT_EQ(layer.settings[spec.name].text, path == kPaths.end() ? "~/a b" : before + "/h/a b");
    EXPECT_EQ(layer.settings[spec.name].source, "c.yaml:3");
  }
}

TEST(ReplaceHome, OtherPaths_Stay) {
  for (const char* const text : {"~bob/logs", "logs/~", "./~/logs", "/logs", ""}) {
    Layer layer;
    layer.settings["log_dir"] = {text, "MUSTER_LOG_DIR"};
    ASSERT_TRUE(ReplaceHome({{"HOME", "/h"}}, &layer).ok());
    EXPECT_EQ(layer.settings["log_dir"].text, text);
  }
  Layer layer;
  layer.settings["log_dir"] = {"~", "MUSTER_LOG_DIR"};
  ASSERT_TRUE(ReplaceHome({{"HOME", "/h"}}, &layer).ok());
  EXPECT_EQ(layer.settings["log_dir"].text, "/h");
}

TEST(ReplaceHome, NoHome_IsSaid) {
  Layer layer;
  layer.settings["log_dir"] = {"~/logs", "c.yaml:3"};
  EXPECT_EQ(ReplaceHome({}, &layer).message(),
            "log_dir: ~/logs (from c.yaml:3) needs HOME, which is not set");
}

// Each key and flag with each type is read, or refused in one line with the place and the rule.
TEST(LaunchSettings, EveryOneWithEveryType_IsReadOrNamed) {
  const char* const values[] = {"[1]", "{a: 1}", "-1", "1.5", "maybe"};
  for (const SettingSpec& spec : LaunchSettings()) {
    int refused = 0;
    for (const char* const value : values) {
      const std::string error = FileError(spec.name + ": " + value + "\n");
      if (error == "accepted") continue;
      ++refused;
      EXPECT_THAT(error, AllOf(HasSubstr("c.yaml:1"), HasSubstr(spec.name)));
      EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    }
    EXPECT_GE(refused, 2) << spec.name;  // lists and maps
    if (FitsRule(spec, "maybe?")) continue;
    EXPECT_GE(refused, 4) << spec.name;
    EXPECT_THAT(ErrorOf({{spec.name, "maybe?"}}),
                AllOf(HasSubstr(spec.name + ": maybe? (from --" + spec.name + ")"),
                      HasSubstr(ValueRule(spec))));
    if (spec.variable.empty()) continue;
    const auto variable = ResolveLaunch({LayerFromVariables({{spec.variable, "maybe?"}})}, {});
    EXPECT_THAT(std::string(variable.status().message()),
                AllOf(HasSubstr(spec.name), HasSubstr(spec.variable)));
  }
}

TEST(LaunchSettings, TextsWithARule_AreReadByIt) {
  const std::map<std::string, std::pair<std::vector<std::string>, std::vector<std::string>>> texts =
      {{"gpu_ids",
        {{"all", "0", "0, 2", "0,1,", "GPU-8f3c,MIG-1"},
         {"-1", ",", "0,,", ",0", "0,,1", "x", "1.5"}}},
       {"offload_activations", {{"none", "cpu", "disk:/tmp"}, {"disk:", "gpu", "/tmp"}}},
       {"offload_optimizer", {{"none", "cpu", "disk:/tmp"}, {"disk:", "gpu", "/tmp"}}},
       {"offload_gradients", {{"none", "cpu", "disk:/tmp"}, {"disk:", "gpu", "/tmp"}}},
       {"offload_parameters", {{"none", "cpu", "disk:/tmp"}, {"disk:", "gpu", "/tmp"}}},
       {"sharding_ignored_modules", {{"head|blocks\\.0", ".*"}, {"head(", "[", "*"}}},
       {"sharding_ignored_parameters", {{".*\\.bias"}, {"(", "+a"}}},
       {"hub_listen", {{"127.0.0.1:0", "[::1]:29401"}, {"here", "unix:/x", "127.0.0.1"}}},
       {"job_name", {{"night", "a b"}, {"a\nb", "\x1b[2J", "caf\xe9", std::string(201, 'a')}}}};
  for (const auto& [name, values] : texts) {
    const SettingSpec& spec = *FindSetting(name);
    for (const std::string& good : values.first) EXPECT_TRUE(FitsRule(spec, good)) << name << good;
    for (const std::string& bad : values.second) EXPECT_FALSE(FitsRule(spec, bad)) << name << bad;
    EXPECT_TRUE(FitsRule(spec, "")) << name;
  }
  // No control characters for terminals.
  EXPECT_THAT(ErrorOf({{"job_name", "\x1b[2J"}}), testing::Not(HasSubstr("\x1b")));
}

// Everything for which options.sharding has a variable.
TEST(LaunchSettings, Sharding_ReachesTheWorkersAsVariables) {
  const std::map<std::string, std::pair<std::string, std::string>> kSettings = {
      {"sharding_units", {"MUSTER_SHARDING_UNITS", "Block,Head"}},
      {"sharding_unit_names", {"MUSTER_SHARDING_UNIT_NAMES", "blocks.0,head"}},
      {"sharding_min_unit_parameters", {"MUSTER_SHARDING_MIN_UNIT_PARAMETERS", "1000000"}},
      {"sharding_group_size", {"MUSTER_SHARDING_GROUP_SIZE", "4"}},
      {"sharding_reshard_after_forward", {"MUSTER_SHARDING_RESHARD_AFTER_FORWARD", "false"}},
      {"sharding_reshard_group_size", {"MUSTER_SHARDING_RESHARD_GROUP_SIZE", "2"}},
      {"sharding_parameter_dtype", {"MUSTER_SHARDING_PARAMETER_DTYPE", "bf16"}},
      {"sharding_reduce_dtype", {"MUSTER_SHARDING_REDUCE_DTYPE", "bf16"}},
      {"sharding_output_dtype", {"MUSTER_SHARDING_OUTPUT_DTYPE", "fp32"}},
      {"sharding_buffer_dtype", {"MUSTER_SHARDING_BUFFER_DTYPE", "bf16"}},
      {"sharding_no_split", {"MUSTER_SHARDING_NO_SPLIT", "Experts"}},
      {"sharding_ignored_modules", {"MUSTER_SHARDING_IGNORED_MODULES", "head"}},
      {"sharding_ignored_parameters", {"MUSTER_SHARDING_IGNORED_PARAMETERS", ".*\\.bias"}},
      {"sharding_overlap", {"MUSTER_SHARDING_OVERLAP", "true"}},
      {"optimizer_in_backward", {"MUSTER_OPTIMIZER_IN_BACKWARD", "true"}},
      {"offload_optimizer", {"MUSTER_OFFLOAD_OPTIMIZER", "disk:/scratch"}},
      {"offload_gradients", {"MUSTER_OFFLOAD_GRADIENTS", "disk:/more"}},
      {"offload_parameters", {"MUSTER_OFFLOAD_PARAMETERS", "disk:/scratch"}}};
  Layer flags, file;
  std::map<std::string, std::string> variables, want;
  flags.settings["sharding"] = {"zero3", "--sharding"};
  for (const auto& [name, setting] : kSettings) {
    flags.settings[name] = {setting.second, "--" + name};
    variables[setting.first] = "none";
    file.env[setting.first] = {"of the file", "c.yaml:1"};
    want[setting.first] = setting.second;
  }
  const auto config = ResolveLaunch({flags, LayerFromVariables(variables), file}, {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->env, want);
  // A file with the same settings, in its words for yes and no.
  const auto read = ParseConfig("sharding: zero2\nsharding_overlap: on\n", "c.yaml");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(ResolveLaunch({*read}, {})->env,
            (std::map<std::string, std::string>{{"MUSTER_SHARDING_OVERLAP", "true"}}));
  EXPECT_TRUE(ResolveLaunch({}, {})->env.empty());
}

TEST(LaunchSettings, ShardingOfNothing_IsRefusedByName) {
  for (const SettingSpec& spec : LaunchSettings()) {
    if (!spec.of_sharding) continue;
    const bool is_bool = spec.type == SettingSpec::Type::kBool;
    const bool is_place = spec.name == "offload_gradients" || spec.name == "offload_parameters";
    const std::string value = is_bool                                ? "yes"
                              : is_place                             ? "cpu"
                              : spec.type == SettingSpec::Type::kInt ? "8"
                              : !spec.choices.empty()                ? "bf16"
                                                                     : "head";
    EXPECT_THAT(ErrorOf({{spec.name, value}}),
                AllOf(HasSubstr(absl::StrCat(spec.name, ": ", value, " (from --", spec.name, ")")),
                      HasSubstr("--sharding NAME")));
    EXPECT_EQ(ErrorOf({{spec.name, value}, {"sharding", "zero3"}}), "accepted");
    Layer flags;
    flags.settings[spec.name] = {value, "--" + spec.name};
    // Other settings that request sharding.
    for (const char* name :
         {"MUSTER_SHARDING", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"}) {
      flags.env = {{name, {name == std::string("MUSTER_SHARDING") ? "zero3" : "true", "--env"}}};
      const absl::Status status = ResolveLaunch({flags}, {}).status();
      EXPECT_TRUE(status.ok()) << status;
    }
    flags.env = {{"ACCELERATE_USE_FSDP", {"false", "--env"}}};
    EXPECT_FALSE(ResolveLaunch({flags}, {}).ok());
  }
  EXPECT_EQ(ErrorOf({{"offload_optimizer", "cpu"}}), "accepted") << "whatever the strategy";
}

TEST(LaunchSettings, NamesAndVariables_AreUnique) {
  std::map<std::string, int> seen;
  for (const SettingSpec& spec : LaunchSettings()) {
    EXPECT_EQ(++seen[spec.name], 1) << spec.name;
    EXPECT_EQ(++seen[spec.variable], 1) << spec.variable;
    EXPECT_FALSE(spec.help.empty());
    EXPECT_EQ(FindSetting(spec.name), &spec);
  }
}

}  // namespace
}  // namespace muster::client
