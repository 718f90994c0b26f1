#include "client/config/accelerate_flags.h"

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "client/config/accelerate_launch.h"

namespace muster::client {
namespace {

constexpr char kMultiGpu[] = "multi_gpu", kDynamoBackend[] = "dynamo_backend";
constexpr char kNoCompiler[] =
    "a program written with Muster has no Python code to compile: leave it out; for a Python "
    "program write dynamo_config in a config file of Accelerate's";

struct Taken {
  const char* name;
  const char* letter;
  const char* help;
};
constexpr Taken kTaken[] = {
    {kMultiGpu, "", "Not needed: GPUs are used if there are any. Refused where there are none"},
    {"same_network", "", "Accepted without effect: the machines meet at the coordinator"},
    {"quiet", "q", "Accepted without effect: errors of the launcher are one line"},
    {kDynamoBackend, "", "Only no: there is nothing to compile"},
};

// Refuses the flags named `name`, or all that begin with `name` if it ends in "_".
struct Refused {
  const char* name;
  const char* refusal;
};
constexpr char kNoTpus[] = "there are no TPUs here: leave it out";
constexpr char kNoMegatron[] =
    "Muster has no Megatron-LM: leave it out, and shard the model with --sharding zero3";
constexpr char kNoParallelism[] =
    "Muster has no tensor, context or sequence parallelism: leave it out, and shard the model with "
    "--sharding zero3 or hybrid";
constexpr char kNoRunner[] =
    "DeepSpeed's runner is not used: leave it out, and start muster launch on each machine, with "
    "--num_machines, --machine_rank and --main_process_ip, or below srun";
constexpr Refused kRefused[] = {
    {"dynamo_", kNoCompiler},
    {"use_megatron_lm", kNoMegatron},
    {"megatron_lm_", kNoMegatron},
    {"use_parallelism_config", kNoParallelism},
    {"parallelism_config_", kNoParallelism},
    {"fp8_", "8-bit floats are not supported: leave it out, and write --mixed_precision bf16"},
    {"enable_cpu_affinity",
     "a launch binds no process to a NUMA node: leave it out, or start PROGRAM through numactl"},
    {"deepspeed_hostfile", kNoRunner},
    {"deepspeed_exclusion_filter", kNoRunner},
    {"deepspeed_inclusion_filter", kNoRunner},
    {"deepspeed_multinode_launcher", kNoRunner},
    {"mpirun_hostfile",
     "a launch does not start mpirun: write mpirun --hostfile FILE PROGRAM without muster launch, "
     "or --cpu --num_processes N for this machine"},
    {"tpu", kNoTpus},
    {"tpu_", kNoTpus},
    {"no_tpu_cluster", kNoTpus},
    {"vm", kNoTpus},
    {"downcast_bf16", kNoTpus},
    {"main_training_function", kNoTpus},
    {"aws_", "a launch does not start jobs of SageMaker: leave it out"},
};

bool IsAbout(const Refused& row, const std::string& flag) {
  return absl::EndsWith(row.name, "_") ? absl::StartsWith(flag, row.name) : flag == row.name;
}

absl::Status Wrong(absl::string_view name, absl::string_view remedy) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", remedy));
}

// Without this check, training would silently use the CPU.
absl::Status CheckGpus(const MachineFacts& machine, const std::vector<Layer>& layers) {
  for (const Layer& layer : layers) {
    const auto cpu = layer.settings.find("cpu");
    if (cpu == layer.settings.end()) continue;
    if (!ParseBool(cpu->second.text).value_or(false)) break;
    return Wrong(kMultiGpu, absl::StrCat("it trains on GPUs, but cpu is true (from ",
                                         cpu->second.source, "): leave one of them out"));
  }
  MUSTER_ASSIGN_OR_RETURN(const int gpus, CountGpus(layers, machine));
  if (gpus > 0) return absl::OkStatus();
  return Wrong(kMultiGpu,
               "this machine has no usable GPU: leave it out to train on the CPU (muster env shows "
               "what was found)");
}

}  // namespace

const std::vector<AccelerateOnlyFlag>& AccelerateOnlyFlags() {
  static const auto& flags = *[] {
    auto* const all = new std::vector<AccelerateOnlyFlag>;
    for (const AccelerateFlag& flag : AccelerateFlags()) {
      AccelerateOnlyFlag answer = {.name = flag.name,
                                   .value_name = flag.takes_value ? "VALUE" : ""};
      for (const Taken& row : kTaken) {
        if (flag.name != row.name) continue;
        answer.letter = row.letter;
        answer.help = row.help;
      }
      for (const Refused& row : kRefused) {
        if (answer.help.empty() && answer.refusal.empty() && IsAbout(row, flag.name)) {
          answer.refusal = row.refusal;
        }
      }
      if (!answer.help.empty() || !answer.refusal.empty()) all->push_back(std::move(answer));
    }
    return all;
  }();
  return flags;
}

absl::Status ApplyAccelerateOnlyFlags(const std::map<std::string, std::string>& given,
                                      const MachineFacts& machine, std::vector<Layer>* layers) {
  for (const AccelerateOnlyFlag& flag : AccelerateOnlyFlags()) {
    const auto found = given.find(flag.name);
    if (found == given.end()) continue;
    if (flag.value_name.empty()) {
      const absl::StatusOr<bool> on = ParseBool(found->second);
      if (!on.ok()) return Wrong(flag.name, "it must be true or false");
      if (!*on) continue;
    }
    // The message omits the value, because it may be an AWS key.
    if (!flag.refusal.empty()) return Wrong(flag.name, flag.refusal);
    if (flag.name == kMultiGpu) MUSTER_RETURN_IF_ERROR(CheckGpus(machine, *layers));
    if (flag.name == kDynamoBackend && !absl::EqualsIgnoreCase(found->second, "no")) {
      return Wrong(absl::StrCat(flag.name, " ", found->second), kNoCompiler);
    }
  }
  return absl::OkStatus();
}

}  // namespace muster::client
