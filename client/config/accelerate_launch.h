#ifndef MUSTER_CLIENT_CONFIG_ACCELERATE_LAUNCH_H_
#define MUSTER_CLIENT_CONFIG_ACCELERATE_LAUNCH_H_

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/yaml.h"

namespace muster::client {

// Hugging Face Accelerate's config files and the flags of `accelerate launch` (release 1.15), and
// the settings that they give the processes of a job. For existing files, and for Python programs
// that read these variables. If the real launcher ignores its own file or crashes on it, the file
// counts here; docs/accelerate.md lists the differences. Pure.

// A config file. Its keys are those of the release, each checked; old names are converted.
struct AccelerateConfig {
  // In the order of the file, on which some variables depend. Sections are objects.
  nlohmann::ordered_json values = nlohmann::ordered_json::object();
  std::string source;
};

// A key in a section of a file that neither the release nor Muster reads.
struct UnreadKey {
  std::string section;
  std::string key;
  std::string nearest;  // the key that it was probably meant to be; empty if none is near
};
// Returns all of them. The release ignores them silently, so files of older releases have some.
std::vector<UnreadKey> UnreadKeys(const AccelerateConfig& config);

// Returns whether a parsed config file is one of Accelerate's: it has a key that only those have.
bool IsAccelerateConfig(const nlohmann::json& document);

// Reads a file's text: JSON if `source` ends in ".json", else YAML 1.1. Errors: INVALID_ARGUMENT
// that names the file and the key: bad syntax, unknown keys, a missing or unknown
// distributed_type, a value of the wrong type; UNIMPLEMENTED for SageMaker.
absl::StatusOr<AccelerateConfig> ParseAccelerateConfig(absl::string_view text,
                                                       absl::string_view source);
// Does the same for YAML that is already parsed.
absl::StatusOr<AccelerateConfig> ReadAccelerateConfig(const YamlDocument& document,
                                                      absl::string_view source);

struct AccelerateMachine {
  int physical_cores = 1;
  bool fp8 = false;  // a backend for 8-bit floats is installed
};

// A flag of `accelerate launch`.
struct AccelerateFlag {
  std::string name = {};  // without "--", words joined by "_"
  bool takes_value = true;
  std::vector<std::string> choices = {};
};
// Returns all flags.
const std::vector<AccelerateFlag>& AccelerateFlags();
// Returns those for FSDP and DeepSpeed: use_fsdp and fsdp_..., use_deepspeed, zero_stage,
// offload_..., and others.
const std::vector<AccelerateFlag>& AccelerateEngineFlags();

// The actions of `accelerate launch`.
struct AccelerateLaunch {
  // One process directly, torchrun's elastic agent, or DeepSpeed's own runner.
  enum class Launcher { kSimple, kTorchrun, kDeepspeed };
  Launcher launcher = Launcher::kSimple;
  // Set for every process, besides the launcher's own environment.
  std::map<std::string, std::string> env;
  // Settings, from a flag or the file, that the release's plugin reads from variables, although the
  // release's launcher sets these for no process: the paths for offloading.
  std::map<std::string, std::string> left_out;
  int num_processes = 1;  // on all machines together
  int num_machines = 1;
  int machine_rank = 0;
  // kTorchrun: its parameters by name; parameters that are not set are absent.
  std::map<std::string, std::string> agent;
  // kDeepspeed: the command, with "<script>" for the program.
  std::vector<std::string> command;
  std::string role = "default";
};

// `config`: null if there is no file. `args`: the launcher's flags without the program; words may
// be joined with - or _. `variables`: the launcher's environment. Errors: INVALID_ARGUMENT for what
// the release refuses, FAILED_PRECONDITION for something that this machine lacks, UNIMPLEMENTED for
// launchers that do not exist here (TPU, mpirun); each names the flag or key.
absl::StatusOr<AccelerateLaunch> PlanAccelerateLaunch(
    const AccelerateConfig* config, const std::vector<std::string>& args,
    const std::map<std::string, std::string>& variables, const AccelerateMachine& machine);

// Returns the variables of each process that the launcher starts on machine `machine_rank`, by
// local rank: those of `launch.env` and, under torchrun, the rank, world and address. "<any>" means
// an address or port that is chosen at run time.
std::vector<std::map<std::string, std::string>> ProcessVariables(const AccelerateLaunch& launch,
                                                                 int machine_rank);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_ACCELERATE_LAUNCH_H_
