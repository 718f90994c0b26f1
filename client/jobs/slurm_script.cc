#include "client/jobs/slurm_script.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "proto/job_limits.h"

namespace muster::client {
namespace {

constexpr char kBody[] =
#include "deploy/slurm/train_sbatch.inc"
    ;

constexpr absl::Duration kDefaultGrace = absl::Seconds(30);
// Time to save, and to put the job back into the queue; SLURM may signal up to a minute early.
constexpr absl::Duration kLead = absl::Seconds(30);

// Options of sbatch that the script relies on, or that would change the kind of submission.
constexpr const char* kOwned[] = {
    "array",     "chdir",    "clusters", "comment", "error",      "export", "export-file",
    "help",      "job-name", "no-kill",  "nodes",   "no-requeue", "ntasks", "ntasks-per-node",
    "open-mode", "output",   "parsable", "quiet",   "requeue",    "signal", "test-only",
    "usage",     "verbose",  "version",  "wait",    "wrap"};

int Cpus(const JobSpec& spec) { return std::max(1, spec.cpus_per_process); }

absl::Duration Grace(const JobSpec& spec) {
  return spec.stop_grace > absl::ZeroDuration() ? spec.stop_grace : kDefaultGrace;
}

int64_t MiB(int64_t bytes) { return (bytes + (1 << 20) - 1) >> 20; }

int Fits(const JobSpec& spec, const SlurmNode& node) {
  int64_t fits = node.cpus / Cpus(spec);
  if (spec.gpus_per_process > 0) fits = std::min<int64_t>(fits, node.gpus / spec.gpus_per_process);
  if (spec.memory_per_process > 0) {
    fits = std::min(fits, node.memory_bytes / spec.memory_per_process);
  }
  return static_cast<int>(std::min<int64_t>(fits, spec.max_processes));
}

// Returns the number of GPUs in "gpu:a100:4(S:0-1),shard:8"; "(null)": none.
int GpusOf(absl::string_view gres) {
  int gpus = 0;
  for (absl::string_view one : absl::StrSplit(gres, ',')) {
    if (!absl::ConsumePrefix(&one, "gpu:")) continue;
    one = one.substr(0, one.find('('));
    const size_t colon = one.rfind(':');
    int count = 0;
    if (absl::SimpleAtoi(colon == one.npos ? one : one.substr(colon + 1), &count)) gpus += count;
  }
  return gpus;
}

// Formats D-HH:MM:SS.
std::string TimeText(absl::Duration time) {
  const int64_t seconds = absl::ToInt64Seconds(absl::Ceil(time, absl::Seconds(1)));
  return absl::StrFormat("%d-%02d:%02d:%02d", seconds / 86400, seconds / 3600 % 24,
                         seconds / 60 % 60, seconds % 60);
}

std::string Seconds(absl::Duration time) {
  return absl::StrCat(absl::ToInt64Seconds(absl::Ceil(time, absl::Seconds(1))));
}

std::vector<std::string> LaunchFlags(const JobSpec& spec, const SlurmLayout& layout) {
  std::vector<std::string> flags = {
      "--num_processes", absl::StrCat("$((", layout.processes_per_node, " * SLURM_NNODES))"),
      "--log_dir",       "\"$MUSTER_LOGS\"",
      "--log_max_mib",   "0",
      "--max_restarts",  absl::StrCat(spec.max_restarts),
      "--stop_grace",    absl::StrCat(Seconds(Grace(spec)), "s")};
  if (!spec.mixed_precision.empty()) {
    flags.insert(flags.end(), {"--mixed_precision", spec.mixed_precision});
  }
  if (spec.gradient_accumulation_steps > 0) {
    flags.insert(flags.end(),
                 {"--gradient_accumulation_steps", absl::StrCat(spec.gradient_accumulation_steps)});
  }
  if (spec.cpu || spec.gpus_per_process == 0) flags.emplace_back("--cpu");
  if (spec.debug) flags.emplace_back("--debug");
  if (!spec.class_limits.empty()) {
    // Includes the total, which the flag before it does not complete.
    std::string policy = absl::StrCat("max_restarts=", spec.max_restarts);
    for (const auto& [name, limit] : spec.class_limits) {
      absl::StrAppend(&policy, ",", name, "=", limit);
    }
    flags.insert(flags.end(), {"--failure_policy", policy});
  }
  if (!spec.user_error_codes.empty()) {
    flags.insert(flags.end(), {"--user_error_codes", absl::StrJoin(spec.user_error_codes, ",")});
  }
  // The launch itself does not get the variables of the processes.
  if (const auto config = spec.env.find("MUSTER_CONFIG");
      config != spec.env.end() && !config->second.empty()) {
    flags.insert(flags.end(), {"--config_file", ShellWord(config->second)});
  }
  if (spec.hang_timeout > absl::ZeroDuration()) {
    flags.push_back(absl::StrCat("--hang_timeout=", absl::FormatDuration(spec.hang_timeout)));
  }
  return flags;
}

}  // namespace

absl::Status CheckSlurmJob(const JobSpec& spec) {
  // The name is a word of the script, too.
  if (!IsJobName(spec.name) || spec.name[0] == '-') {
    return absl::InvalidArgumentError(
        absl::StrCat("name: ", Printable(spec.name),
                     " does not name a job: use 1 to 64 letters, digits, '-' and '_', and no '-' "
                     "at the beginning"));
  }
  const std::pair<bool, const char*> refused[] = {
      {!spec.labels.empty(), "labels: SLURM's nodes have features: use --sbatch --constraint=..."},
      {spec.priority != 0,
       "priority: SLURM orders its queue: use --sbatch --qos=... or --nice=..."},
      {spec.preemptible, "preemptible: SLURM's partitions and QOS decide: use --sbatch --qos=..."},
      {spec.grow_after > absl::ZeroDuration(),
       "grow_after: SLURM does not change the size of a job that runs; a range of processes gets "
       "what is free at each start"},
      {spec.spare_nodes > 0,
       "spare_nodes: SLURM gives a lost node's job another one from its queue; --sbatch "
       "--nodes=... "
       "cannot keep one free"},
      {spec.wait_for_nodes, "wait_for_nodes: SLURM refuses a job that is larger than its nodes"},
      {spec.restart_delay > absl::ZeroDuration(),
       "restart_delay: programs restart at once within the allocation"},
      {spec.class_limits.contains("node_lost") || spec.class_limits.contains("preempted"),
       "failure_policy: SLURM puts a job back into its queue after a lost node and a preemption, "
       "as "
       "its own settings say: limit failed, oom and hang, and leave node_lost and preempted out"},
      {!spec.files.empty(), "files: put them into a folder that the nodes share, and use workdir"},
      {spec.retention > absl::ZeroDuration(),
       "retention: its records are kept until muster remove, and those of SLURM as slurm.conf "
       "says"},
      {spec.gpu_memory > 0,
       "gpu_memory: SLURM's nodes have features for it: use --sbatch --constraint=..."},
      {spec.gpus_per_process > 0 && spec.env.contains("CUDA_VISIBLE_DEVICES"),
       "env: CUDA_VISIBLE_DEVICES cannot be set: SLURM sets it to the GPUs that the job has"},
      {spec.gpus_per_process > 1, "gpus_per_process: a launch gives each process one GPU, or none"},
  };
  for (const auto& [given, why] : refused) {
    if (!given) continue;
    return absl::InvalidArgumentError(absl::StrCat(why, " (submitting to SLURM)"));
  }
  if (spec.time_limit > absl::ZeroDuration() && spec.time_limit < 2 * (Grace(spec) + kLead)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "time_limit: ", absl::FormatDuration(spec.time_limit), " is short for a job that is asked ",
        absl::FormatDuration(Grace(spec) + kLead),
        " before it to save and go back into the queue: give twice that or more"));
  }
  return absl::OkStatus();
}

absl::Status CheckSbatchOptions(const std::vector<std::string>& options) {
  for (const std::string& option : options) {
    if (option.size() < 2 || option[0] != '-' || option == "--") {
      return absl::InvalidArgumentError(
          absl::StrCat("--sbatch ", Printable(option),
                       ": write one option of sbatch with its value, as in --sbatch "
                       "--partition=gpu"));
    }
    if (option[1] != '-') {
      // "-Hn4" is "-H -n 4".
      if (absl::StrContains("ApqCxwLdt", option[1])) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--sbatch ", Printable(option), ": write the long name of the option"));
    }
    // sbatch accepts the beginning of an option's name.
    const std::string name = option.substr(2, option.find('=') - 2);
    const auto owned = std::find_if(std::begin(kOwned), std::end(kOwned),
                                    [&](const char* one) { return absl::StartsWith(one, name); });
    if (owned == std::end(kOwned)) continue;
    return absl::InvalidArgumentError(absl::StrCat("--sbatch ", Printable(option),
                                                   ": muster sets --", *owned,
                                                   " itself, from the job's settings"));
  }
  return absl::OkStatus();
}

std::vector<std::string> SbatchVariablesOfScript(const JobSpec& spec) {
  std::vector<std::string> names = {"SBATCH_ARRAY_INX", "SBATCH_DEBUG", "SBATCH_CPUS_PER_TASK",
                                    "SBATCH_CPUS_PER_GPU"};
  for (const char* const option : kOwned) {
    std::string name = absl::AsciiStrToUpper(option);
    std::replace(name.begin(), name.end(), '-', '_');
    names.push_back(absl::StrCat("SBATCH_", name));
  }
  if (spec.gpus_per_process > 0) {
    names.insert(names.end(), {"SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK"});
  }
  if (spec.memory_per_process > 0) {
    names.insert(names.end(), {"SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU", "SBATCH_MEM_PER_NODE"});
  }
  if (spec.time_limit > absl::ZeroDuration()) names.emplace_back("SBATCH_TIMELIMIT");
  return names;
}

absl::StatusOr<std::vector<SlurmNode>> ParseSlurmNodes(absl::string_view sinfo) {
  std::vector<SlurmNode> nodes;
  std::map<std::string, size_t> seen;
  for (absl::string_view line : absl::StrSplit(sinfo, '\n', absl::SkipWhitespace())) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, '|');
    SlurmNode node;
    // "16+": nodes that are printed together have at least this much.
    int64_t mib = 0;
    if (fields.size() != 6 || !absl::SimpleAtoi(absl::StripSuffix(fields[1], "+"), &node.cpus) ||
        !absl::SimpleAtoi(absl::StripSuffix(fields[2], "+"), &mib)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sinfo printed ", Printable(line), " instead of NODE|CPUS|MIB|GRES|PARTITION|STATE"));
    }
    node.name = std::string(fields[0]);
    node.memory_bytes = mib << 20;
    node.gpus = GpusOf(fields[3]);
    node.in_default_partition = absl::EndsWith(fields[4], "*");
    for (const char* const state : {"down", "drain", "drng", "fail", "inval", "maint", "unk"}) {
      if (absl::StartsWith(fields[5], state)) node.takes_jobs = false;
    }
    const auto [known, is_new] = seen.emplace(node.name, nodes.size());
    if (is_new) {
      nodes.push_back(std::move(node));
    } else {
      nodes[known->second].in_default_partition |= node.in_default_partition;
    }
  }
  return nodes;
}

absl::StatusOr<SlurmLayout> ChooseSlurmLayout(const JobSpec& spec,
                                              const std::vector<SlurmNode>& nodes) {
  std::vector<int> fits;
  for (const SlurmNode& node : nodes) fits.push_back(Fits(spec, node));
  const int largest = fits.empty() ? 0 : *std::max_element(fits.begin(), fits.end());
  const int fixed = spec.processes_per_node;
  int best = 0, most = 0;
  SlurmLayout layout;
  for (int each = fixed > 0 ? fixed : largest; each >= std::max(1, fixed); --each) {
    const auto with_room =
        std::count_if(fits.begin(), fits.end(), [each](int count) { return count >= each; });
    const int count = std::min(static_cast<int>(with_room), spec.max_processes / each);
    most = std::max(most, each * count);
    if (each * count <= best || each * count < spec.min_processes) continue;
    best = each * count;
    layout = {each, (spec.min_processes + each - 1) / each, count};
  }
  if (best > 0) return layout;
  return absl::FailedPreconditionError(absl::StrCat(
      "the job is larger than SLURM's nodes: of ", spec.max_processes, " processes with ",
      Cpus(spec), " CPUs",
      spec.gpus_per_process > 0 ? absl::StrCat(", ", spec.gpus_per_process, " GPU") : "",
      spec.memory_per_process > 0 ? absl::StrCat(", ", MiB(spec.memory_per_process), " MiB") : "",
      " each, the same number on each of ", nodes.size(), " nodes, ", most,
      " fit: ask for less, or for other nodes with --sbatch --partition=..."));
}

absl::StatusOr<std::string> RenderSlurmScript(const JobSpec& spec, const SlurmLayout& layout,
                                              const SlurmScriptOptions& options) {
  // sbatch reads a quoted value up to the next quote, and % as a pattern.
  for (const std::string& path : {options.folder, spec.workdir}) {
    if (path.find_first_of("\"\\%\n\r") == std::string::npos) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(Printable(path),
                     ": SLURM cannot use a folder with \", \\, % or a line break "
                     "in its name"));
  }
  for (const auto& [name, value] : spec.env) {
    const std::string entry = absl::StrCat(name, "=", value);
    if (entry.find('=') == name.size() && !name.empty() && entry.find('\0') == entry.npos) continue;
    return absl::InvalidArgumentError(
        // Not the value, which may be secret.
        absl::StrCat("env: ", Printable(name), " is no variable that a process can have"));
  }
  const int each = layout.processes_per_node;
  std::string script = "#!/usr/bin/env bash\n";
  const auto option = [&](const std::string& text) {
    absl::StrAppend(&script, "#SBATCH ", text, "\n");
  };
  option(absl::StrCat("--job-name=", spec.name));
  option(absl::StrCat("--comment=muster:", options.key));
  option(layout.min_nodes == layout.max_nodes
             ? absl::StrCat("--nodes=", layout.max_nodes)
             : absl::StrCat("--nodes=", layout.min_nodes, "-", layout.max_nodes));
  option("--ntasks-per-node=1");
  option(absl::StrCat("--cpus-per-task=", each * Cpus(spec)));
  if (spec.gpus_per_process > 0) {
    option(absl::StrCat("--gpus-per-node=", each * spec.gpus_per_process));
  }
  if (spec.memory_per_process > 0) {
    option(absl::StrCat("--mem=", each * MiB(spec.memory_per_process), "M"));
  }
  if (spec.time_limit > absl::ZeroDuration()) {
    option(absl::StrCat("--time=", TimeText(spec.time_limit)));
  }
  option(absl::StrCat("--signal=B:TERM@", Seconds(Grace(spec) + kLead)));
  option("--requeue");
  option("--open-mode=append");
  option(absl::StrCat("--output=\"", options.folder, "/%j.log\""));
  if (!spec.workdir.empty()) option(absl::StrCat("--chdir=\"", spec.workdir, "\""));
  absl::StrAppend(&script,
                  "# Written by muster submit --on slurm; from the line with the name of "
                  "train.sbatch on it is deploy/slurm/train.sbatch.\n"
                  // These belong to the terminal from which the job was submitted.
                  "unset MUSTER_COORDINATOR MUSTER_TOKEN_FILE MUSTER_TLS_CA MUSTER_TLS_CERT "
                  "MUSTER_TLS_KEY MUSTER_ON MUSTER_MAIN_PROCESS_IP\n"
                  // With these, a launch would not ask SLURM for its place among the nodes.
                  "unset MUSTER_NUM_MACHINES MUSTER_MACHINE_RANK\n"
                  // The job's launches read no file of the user, like agents, unless the job's env
                  // names one: it may say that the processes compute on CPUs.
                  "export MUSTER_CONFIG=/dev/null\n");
  if (!spec.env.empty()) {
    script += "job_variables() {\n  printf '%s\\0'";
    for (const auto& [name, value] : spec.env) {
      absl::StrAppend(&script, " \\\n    ", ShellWord(absl::StrCat(name, "=", value)));
    }
    script += "\n}\n";
  }
  const std::string folder = ShellWord(options.folder);
  absl::StrAppend(&script, "MUSTER=", ShellWord(options.muster), "\nMUSTER_RUN_FOLDER=", folder,
                  "/run\nMUSTER_EVENTS=", folder, "/$SLURM_JOB_ID.events\nMUSTER_LOGS=", folder,
                  "/$SLURM_JOB_ID.logs/${SLURM_RESTART_COUNT:-0}\n"
                  // Programs restart within the allocation.
                  "MUSTER_MAX_FAILURES=0\nMUSTER_MAX_REQUEUES=16\nMUSTER_STEP_WAIT=",
                  Seconds(Grace(spec) + kLead), "\nmuster_flags=(");
  for (const std::string& flag : LaunchFlags(spec, layout)) absl::StrAppend(&script, flag, " ");
  script.back() = ')';
  script += "\nset --";
  for (const std::string& word : spec.command) absl::StrAppend(&script, " ", ShellWord(word));
  script += "\n\n# train.sbatch\n";
  // Skip its first line and its own options, which sbatch no longer reads here.
  absl::string_view body = kBody;
  body = body.substr(body.find("#\n# usage:"));
  return absl::StrCat(script, body);
}

}  // namespace muster::client
