#ifndef MUSTER_CLIENT_CONFIG_LAUNCH_CONFIG_H_
#define MUSTER_CLIENT_CONFIG_LAUNCH_CONFIG_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "rpc/tls_files.h"

namespace muster::client {

// One setting of a launch. The table of all settings generates the flags, the variables, the keys
// of the config file and their documentation, so these cannot drift apart.
struct SettingSpec {
  enum class Type { kInt, kBool, kText, kChoice, kDuration, kMachines, kPolicy, kExitCodes };
  std::string name = {};      // the key in a file; the flag is "--" and the name
  std::string alias = {};     // another accepted key and flag; may be empty
  std::string variable = {};  // environment variable; empty: none
  Type type = Type::kText;
  int min = 0;                            // kInt
  int max = 0;                            // kInt
  std::vector<std::string> choices = {};  // kChoice
  std::string fallback = {};              // text of the default; empty: computed or none
  std::string value_name = {};            // "N" in the help
  std::string help = {};
  // If given, it is a variable of the workers (LaunchConfig::env), and has no other effect.
  bool for_workers = false;
  // It is about sharding, and is refused if nothing requests sharding.
  bool of_sharding = false;
};
const std::vector<SettingSpec>& LaunchSettings();

// Splits a value of the setting gpu_ids, other than "all", into its GPUs. A comma at its end is
// ignored, as in CUDA_VISIBLE_DEVICES.
std::vector<absl::string_view> SplitGpuIds(absl::string_view text);

// Returns the setting that has this name or alias; null if none.
const SettingSpec* FindSetting(absl::string_view name);

// Returns what a value must be: "a whole number of at least 1", "one of no, bf16, fp16". Empty:
// anything.
std::string ValueRule(const SettingSpec& spec);
// Returns whether `text` fits that rule.
bool FitsRule(const SettingSpec& spec, absl::string_view text);

// A value as text, and its source.
struct Given {
  std::string text;
  // "--num_processes", "MUSTER_NUM_PROCESSES", "config.yaml:3", "default", or a rule.
  std::string source;
};

// A section of an Accelerate file that requests something, although the distributed_type of the
// file does not call for it. Accelerate's launcher ignores it, unless a flag requests its engine:
// then it uses the section.
struct UnusedSection {
  std::string name;   // "fsdp_config"
  std::string flag;   // "use_fsdp"
  std::string type;   // the type or types that call for it
  std::string given;  // the type in the file
  std::string place;  // "config.yaml:3"
};
// Returns a sentence about it, for the log.
std::string DescribeUnused(const UnusedSection& section);

// One source of settings, by name.
struct Layer {
  std::map<std::string, Given> settings;
  // Variables for all workers (`env` in a file, --env on the command line).
  std::map<std::string, Given> env;
  std::vector<UnusedSection> unused_sections = {};
  // Other entries of a file that have no effect, a sentence each.
  std::vector<std::string> notes = {};
};

// Reads a config file's text: YAML, or JSON if `source` ends in ".json". `source` is the file's
// name for messages. Errors: INVALID_ARGUMENT "SOURCE:LINE: ..." for bad syntax, an unknown key
// (with the nearest one), a value of the wrong type.
absl::StatusOr<Layer> ParseConfig(absl::string_view text, absl::string_view source);

// The layer of environment variables. Pure.
Layer LayerFromVariables(const std::map<std::string, std::string>& variables);

// Returns `path` with $HOME in place of a leading "~", if HOME is set.
std::string WithHome(absl::string_view path, const std::map<std::string, std::string>& variables);
// Does the same for all settings that are paths. No shell has replaced the "~" of a config file, of
// --log_dir=~/logs and of disk:~/states. Error: INVALID_ARGUMENT if HOME is not set.
absl::Status ReplaceHome(const std::map<std::string, std::string>& variables, Layer* layer);

// The path of the config file: `flag` if not empty, else $MUSTER_CONFIG, else
// $XDG_CONFIG_HOME/muster/config.yaml or ~/.config/muster/config.yaml if that exists. Empty: there
// is none.
struct ConfigPath {
  std::string path;
  std::string source;     // "--config_file", "MUSTER_CONFIG", "default place"
  bool required = false;  // explicitly named
};
ConfigPath FindConfig(absl::string_view flag, const std::map<std::string, std::string>& variables);
// Returns the path to which `muster config` writes: as above, whether the file exists or not.
std::string DefaultConfigPath(const std::map<std::string, std::string>& variables);

// Reads the file. A missing file that was not explicitly named is an empty layer. Errors:
// NOT_FOUND, and those of ParseConfig.
absl::StatusOr<Layer> LoadConfig(const ConfigPath& path);

// The facts about this machine.
struct MachineFacts {
  int gpus = 0;  // usable by programs here
  int cores = 1;
};

// A whole launch, checked: every field is valid, and the counts fit each other.
struct LaunchConfig {
  int num_processes = 1;  // on all machines, as many as there may be
  int num_machines = 1;
  int min_machines = 1;  // if below num_machines, their number varies
  // -1: the machine that has the coordinator's address is machine 0, the others are numbered as
  // they come.
  int machine_rank = 0;
  absl::Duration last_call;
  absl::Duration grow_after;
  int processes_here = 1;
  bool cpu = false;
  std::string gpu_ids;  // empty: inherited
  std::string mixed_precision;
  std::string sharding;  // empty: the program decides
  std::optional<bool> activation_checkpointing;
  std::string activation_blocks, offload_activations;  // empty: the program decides
  int gradient_accumulation_steps = 0;                 // 0: the program decides
  int threads_per_process = 0;                         // 0: computed
  std::string coordinator_ip;                          // empty: any free loopback port
  int coordinator_port = 0;
  bool debug = false;
  int max_restarts = 0;
  std::map<std::string, int> class_limits;  // part of the failure policy, by name
  std::vector<int> user_error_codes;
  std::string job_name;  // empty: generated
  std::string log_dir;
  int log_max_mib = 0;  // 0: no limit
  int log_files = 1;
  bool tee = false;
  std::optional<bool> prefix;  // nullopt: only on a terminal
  absl::Duration stop_grace;
  absl::Duration join_timeout;
  absl::Duration outage_tolerance;
  absl::Duration hang_timeout;  // 0: none
  std::string hub_listen;       // empty: the agent is no hub
  absl::Duration lease;
  rpc::TlsFiles tls;
  std::string token_file;
  std::string checkpoint_key;
  // Variables of the workers: those that were given, and settings that have no other effect.
  std::map<std::string, std::string> env;
  // Entries of the file that have no effect, a sentence each, to be shown.
  std::vector<std::string> notes;

  // Every setting with its text and source, in the order of the table, then "env.NAME". For
  // --dry_run.
  std::vector<std::pair<std::string, Given>> provenance;
};

// A number of machines, "4", or a range of them, "1:4". nullopt: neither.
struct MachineCount {
  int least = 1;
  int most = 1;
};
std::optional<MachineCount> ParseMachines(absl::string_view text);

// The first layer that has a setting wins: pass flags, variables, file. Errors: INVALID_ARGUMENT,
// one line that names the setting, the source of its value and the way out: a bad value, counts
// that do not fit each other (processes that cannot be divided evenly among the machines, more
// processes than GPUs, several machines without a coordinator, a coordinator that would not know
// its callers).
absl::StatusOr<LaunchConfig> ResolveLaunch(const std::vector<Layer>& layers,
                                           const MachineFacts& machine);

// Returns whether the setting gpu_ids names GPUs, in place of CUDA_VISIBLE_DEVICES. "all" names
// none.
bool NamesGpus(const std::vector<Layer>& layers);

// Returns how many GPUs programs may use here: those of the setting gpu_ids, else all. Errors:
// INVALID_ARGUMENT: gpu_ids names more than there are, without the setting cpu.
absl::StatusOr<int> CountGpus(const std::vector<Layer>& layers, const MachineFacts& machine);

// Splits "host:port" (or "[::1]:port") into the two settings. Errors: INVALID_ARGUMENT.
absl::Status AddCoordinator(absl::string_view text, const std::string& source, Layer* layer);

// Returns a config file with every setting at its default (or its value in `given`), with comments,
// and the variables `env` for all processes. ParseConfig reads it.
std::string DefaultConfigText(const std::map<std::string, std::string>& given,
                              const std::map<std::string, std::string>& env = {});

// Reads a word for yes or no: 1 y yes t true on, 0 n no f false off. Errors: INVALID_ARGUMENT.
absl::StatusOr<bool> ParseBool(absl::string_view text);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_LAUNCH_CONFIG_H_
