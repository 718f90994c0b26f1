#include "client/cli/launch_command.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/bool_word.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/home_path.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/variable_list.h"
#include "client/cli/output.h"
#include "client/cli/planned_checkpoint.h"
#include "client/config/accelerate_flags.h"
#include "client/config/accelerate_launch.h"
#include "client/config/cluster_launch.h"
#include "client/config/engine_flags.h"
#include "client/config/torchrun_flags.h"
#include "client/jobs/job_types.h"
#include "proto/job_limits.h"

namespace muster::client {
namespace {

constexpr char kExitCodes[] =
    "Exit codes: 0 the job succeeded; 1 a process failed (the message names it and has its last "
    "lines); 2 wrong\n"
    "options, config or layout; 4 the port is taken; 5 the other machines did not join in time; 7 "
    "the coordinator cannot\n"
    "be reached; 8 denied: a token, or a folder that is not yours; 126 the program cannot be run; "
    "127 "
    "it does not exist;\n"
    "130 Ctrl-C; 143 SIGTERM.\n"
    "All are in docs/cli.md.";

// A flag of `accelerate launch`; the help shows those that people use.
OptionSpec EngineOption(const AccelerateFlag& flag) {
  static const auto& helps = *new std::map<std::string, std::string>{
      {"use_fsdp", "Shard by these settings; Muster's own words: --sharding"},
      {"fsdp_version", "1 or 2 (default 1)"},
      {"fsdp_sharding_strategy",
       "Version 1: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2"},
      {"fsdp_reshard_after_forward", "Version 2: whether parameters are freed after it"},
      {"fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"},
      {"fsdp_transformer_layer_cls_to_wrap", "Classes of modules that are units, with commas"},
      {"use_deepspeed", "Shard by these settings"},
      {"zero_stage",
       "0 to 3 (default 2). The other --fsdp_..., --deepspeed_..., --zero3_... and --offload_... "
       "flags of accelerate launch are read, too"},
      {"deepspeed_config_file", "DeepSpeed's own JSON"}};
  const auto help = helps.find(flag.name);
  const bool shown = help != helps.end();
  return {.name = flag.name,
          .value_name = flag.takes_value ? "VALUE" : "",
          .help = shown ? help->second : "",
          .group = shown ? "Accelerate's flags for FSDP and DeepSpeed" : "",
          .values = flag.choices};
}

std::vector<OptionSpec> LaunchOptions() {
  std::vector<OptionSpec> options;
  for (const SettingSpec& spec : LaunchSettings()) {
    options.push_back({.name = spec.name,
                       .value_name = spec.type == SettingSpec::Type::kBool ? "" : spec.value_name,
                       .help = spec.fallback.empty()
                                   ? spec.help
                                   : absl::StrCat(spec.help, " (default ", spec.fallback, ")"),
                       .alias = spec.alias,
                       .group = "Settings (also in the config file, and as MUSTER_... variables)",
                       .negative = spec.type == SettingSpec::Type::kBool,
                       .values = spec.choices});
  }
  options.push_back({.name = "coordinator",
                     .value_name = "IP:PORT",
                     .help = "Address of machine 0: main_process_ip and main_process_port in one"});
  options.push_back({.name = "config_file",
                     .value_name = "FILE",
                     .help = "YAML or JSON. Default: $MUSTER_CONFIG, else "
                             "muster/config.yaml in $XDG_CONFIG_HOME or ~/.config, if it exists"});
  options.push_back({.name = "env",
                     .value_name = "NAME=VALUE",
                     .help = "An environment variable for all processes; may be repeated. "
                             "Variables of settings, such as MUSTER_MIXED_PRECISION, are refused",
                     .repeated = true});
  options.push_back({.name = "env_file",
                     .value_name = "FILE",
                     .help = "Such variables as `env -0` prints them, each with a null byte at its "
                             "end; --env wins over the file"});
  options.push_back(
      {.name = "dry_run", .help = "Print what would run and the source of each setting, and exit"});
  options.push_back(OutputOption({"text", "json", "yaml"}));
  options.back().help = "With --dry_run: " + options.back().help;
  for (const AccelerateFlag& flag : AccelerateEngineFlags()) {
    options.push_back(EngineOption(flag));
  }
  for (const TorchrunFlag& flag : TorchrunFlags()) {
    options.push_back(
        {.name = flag.name,
         .value_name = flag.value_name,
         .help = flag.help,
         .group = flag.refusal.empty() ? "torchrun's flags, and what they become" : "",
         .letter = flag.letter,
         .values = flag.choices});
  }
  for (const AccelerateOnlyFlag& flag : AccelerateOnlyFlags()) {
    options.push_back({.name = flag.name,
                       .value_name = flag.value_name,
                       .help = flag.help,
                       .group = flag.refusal.empty() ? "Other flags of accelerate launch" : "",
                       .letter = flag.letter});
  }
  return options;
}

int Report(const LaunchOutcome& outcome, const LaunchConfig& config, const CommandContext& context,
           const CommandSpec& spec) {
  switch (outcome.kind) {
    case LaunchOutcome::Kind::kSucceeded:
      return kExitOk;
    case LaunchOutcome::Kind::kStopped:
      return kExitSignal + outcome.signal;
    case LaunchOutcome::Kind::kRefused: {
      const absl::StatusCode code = outcome.status.code();
      return Fail(spec, context, outcome.status,
                  code == absl::StatusCode::kInternal ? kExitInternal : ExitCodeOf(outcome.status));
    }
    case LaunchOutcome::Kind::kFailed:
      break;
  }
  context.err << spec.name << ": " << outcome.why << "; the job has failed";
  if (outcome.restarts > 0)
    context.err << " after " << outcome.restarts
                << (outcome.restarts == 1 ? " restart" : " restarts");
  context.err << "\n";
  // The output of a single process is directly above, unless it went to a file.
  const bool shown = config.num_processes == 1 && (config.log_dir.empty() || config.tee);
  if (outcome.last_lines.empty()) {
    context.err << "  it wrote nothing\n";
  } else if (!shown) {
    context.err << "  its last lines:\n";
    for (const std::string& line : outcome.last_lines) context.err << "  | " << line << "\n";
  }
  if (!config.log_dir.empty()) context.err << "  all of it: " << config.log_dir << "\n";
  return kExitJobFailed;
}

// A listener and how its port is chosen: (what, address or "", in words).
struct LaunchPort {
  std::string name;
  std::string address;
  std::string why;
};
std::vector<LaunchPort> PortsOf(const LaunchConfig& config) {
  std::vector<LaunchPort> ports;
  if (config.coordinator_ip.empty() && config.coordinator_port == 0) {
    ports.push_back({"coordinator", "", "a private socket of this user: no port"});
  } else {
    ports.push_back(
        {"coordinator",
         absl::StrCat(config.coordinator_ip.empty() ? "127.0.0.1" : config.coordinator_ip, ":",
                      config.coordinator_port),
         config.coordinator_port == 0 ? "machine 0 listens, on a port that its kernel has free"
                                      : "machine 0 listens"});
  }
  if (!config.hub_listen.empty()) {
    ports.push_back({"hub", config.hub_listen, "the agent of this machine listens"});
  }
  ports.push_back({"master_port", "",
                   "MASTER_PORT of programs that meet by themselves, at rank 0: machine 0 takes a "
                   "free port at each start"});
  ports.push_back(
      {"processes", "", "each process takes free ports of its machine for its process groups"});
  return ports;
}

// Returns the checkpoint from which a program continues that calls load_state_if_present().
PlannedCheckpoint CheckpointOf(const LaunchPlan& plan) {
  PlannedCheckpoint checkpoint = {.decided_by = "program"};
  std::string project = Variable(plan.variables, "MUSTER_PROJECT_DIR");
  if (const auto own = plan.config.env.find("MUSTER_PROJECT_DIR"); own != plan.config.env.end()) {
    project = own->second;
  }
  project = project.empty() ? kDefaultProjectFolder : muster::WithHome(project);
  checkpoint.folder = JoinPath(project, kCheckpointsFolder);
  FindCheckpoint(checkpoint.folder, &checkpoint);
  return checkpoint;
}

void PrintDryRun(const LaunchPlan& plan, const std::string& program, const std::string& format,
                 const CommandContext& context) {
  const LaunchConfig& config = plan.config;
  const int first = config.machine_rank * config.processes_here;
  const bool numbered = config.machine_rank >= 0 && config.min_machines == config.num_machines;
  const PlannedCheckpoint checkpoint = CheckpointOf(plan);
  if (format == "text") {
    std::vector<std::string> words;
    for (const std::string& word : plan.argv) words.push_back(ShellWord(word));
    context.out << DescribeLaunch(config) << "\nprogram  " << program << "\nruns     "
                << absl::StrJoin(words, " ") << "\nranks    ";
    if (numbered) {
      context.out << first << " to " << first + config.processes_here - 1 << " of "
                  << config.num_processes << " on this machine\n";
    } else {
      context.out << config.processes_here << " on this machine, of at most "
                  << config.num_processes << ", numbered when the machines meet\n";
    }
    for (const LaunchPort& port : PortsOf(config)) {
      context.out << "port     " << port.name << (port.address.empty() ? "" : " " + port.address)
                  << ": " << port.why << "\n";
    }
    context.out << "resumes  " << ResumesFrom(checkpoint) << " in " << checkpoint.folder << ": "
                << checkpoint.why << "\n";
    return;
  }
  using nlohmann::ordered_json;
  ordered_json settings = ordered_json::object(), ports = ordered_json::array();
  for (const auto& [name, given] : config.provenance) {
    if (absl::StartsWith(name, "env.")) continue;
    settings[name] = {{"value", given.text}, {"source", given.source}};
  }
  for (const LaunchPort& port : PortsOf(config)) {
    ports.push_back(
        {{"name", port.name},
         {"address", port.address.empty() ? ordered_json() : ordered_json(port.address)},
         {"why", port.why}});
  }
  const ordered_json step =
      checkpoint.path.empty() ? ordered_json() : ordered_json(checkpoint.step);
  const ordered_json document = {{"program", program},
                                 {"command", plan.argv},
                                 {"settings", std::move(settings)},
                                 {"env", config.env},
                                 {"placements",
                                  {{{"machine_rank", config.machine_rank},
                                    {"processes", config.processes_here},
                                    {"first_rank", numbered ? ordered_json(first) : ordered_json()},
                                    {"num_processes", config.num_processes}}}},
                                 {"ports", std::move(ports)},
                                 {"checkpoint",
                                  {{"decided_by", checkpoint.decided_by},
                                   {"resume_from", ResumesFrom(checkpoint)},
                                   {"step", step},
                                   {"folder", checkpoint.folder},
                                   {"why", checkpoint.why}}}};
  context.out << (format == "yaml" ? YamlText(document) : Dump(document));
}

int Launch(const CommandLine& line, const std::vector<std::string>& argv,
           const CommandContext& context, const LaunchBackend& backend, const CommandSpec& spec) {
  LaunchPlan plan;
  plan.variables = context.variables;
  absl::StatusOr<LaunchConfig> config = ReadLaunchConfig(line, context.variables, nullptr);
  if (!config.ok()) {
    return Fail(spec, context, config.status(), kExitUsage);
  }
  plan.config = *std::move(config);
  for (const std::string& note : plan.config.notes) {
    context.err << spec.name << ": " << note << "\n";
  }
  plan.argv = argv;
  plan.cores = ReadMachine(context.variables).cores;

  // The PATH of the processes.
  const auto path = plan.config.env.find("PATH");
  const absl::StatusOr<std::string> program = backend.find_program(
      argv[0], path != plan.config.env.end() ? path->second : Variable(context.variables, "PATH"));
  if (!program.ok()) {
    return Fail(spec, context, program.status(),
                absl::IsNotFound(program.status()) ? kExitProgramMissing : kExitNotExecutable);
  }
  if (ParseBool(line.Has("dry_run") ? line.Get("dry_run") : "false").value_or(true)) {
    PrintDryRun(plan, *program, line.Has("output") ? line.Get("output") : "text", context);
    return kExitOk;
  }
  if (line.Has("output")) {
    return Fail(spec, context,
                absl::InvalidArgumentError(
                    "--output works only with --dry_run: add --dry_run, or leave --output out"),
                kExitUsage);
  }
  const LaunchOutcome outcome = backend.run(plan);
  // The program vanished between the look-up and the start, or is not a binary.
  if (outcome.kind == LaunchOutcome::Kind::kRefused && absl::IsNotFound(outcome.status)) {
    return Fail(spec, context, outcome.status, kExitProgramMissing);
  }
  if (outcome.kind == LaunchOutcome::Kind::kRefused && absl::IsFailedPrecondition(outcome.status)) {
    return Fail(spec, context, outcome.status, kExitNotExecutable);
  }
  return Report(outcome, plan.config, context, spec);
}

// Refuses "--tee true ./train", which would run the program `true`, successfully.
absl::Status CheckProgramIsNoValue(const std::vector<std::string>& args,
                                   const std::vector<std::string>& words) {
  if (args.size() <= words.size()) return absl::OkStatus();
  const std::string& before = args[args.size() - words.size() - 1];
  // That of torchrun and `accelerate launch` has a value: "3", or "0:3,1:1".
  if (before == "--tee" && words[0].find_first_not_of("0123456789:,") == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tee ", words[0],
                     ": it takes no value, because both streams are shown together: write "
                     "--log_dir FOLDER --tee; to run ",
                     words[0], " as a program, write -- ", words[0]));
  }
  if (!ParseBoolWord(words[0]).has_value()) return absl::OkStatus();
  if (!absl::StartsWith(before, "--") || before == "--" || absl::StrContains(before, '=')) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      before, " ", words[0], ": a yes or no follows after =, as in --cpu=false; to run ", words[0],
      " as a program, write -- ", words[0]));
}

// The file that `accelerate launch` would read without --config_file.
std::string AcceleratesDefaultConfig(const std::map<std::string, std::string>& variables) {
  std::string cache = Variable(variables, "HF_HOME");
  if (cache.empty()) {
    cache = Variable(variables, "XDG_CACHE_HOME");
    if (cache.empty()) cache = JoinPath(Variable(variables, "HOME"), ".cache");
    cache = JoinPath(cache, "huggingface");
  }
  return JoinPath(cache, "accelerate/default_config.yaml");
}

}  // namespace

CommandSpec LaunchCommandSpec() {
  return {
      .name = "muster launch",
      .summary = "Runs a program in several processes, with a coordinator, and supervises them.",
      .usage = "[OPTIONS] [--] PROGRAM [ARGS...]",
      .details = absl::StrCat("What follows PROGRAM belongs to the program. --num-processes and "
                              "--num_processes are the "
                              "same.\n\n",
                              kExitCodes),
      .options = LaunchOptions(),
      .takes_program = true};
}

absl::StatusOr<LaunchConfig> ReadLaunchConfig(const CommandLine& line,
                                              const std::map<std::string, std::string>& variables,
                                              ConfigPath* config_path) {
  Layer flags;
  for (const SettingSpec& spec : LaunchSettings()) {
    if (line.Has(spec.name)) flags.settings[spec.name] = {line.Get(spec.name), "--" + spec.name};
  }
  if (line.Has("coordinator")) {
    MUSTER_RETURN_IF_ERROR(AddCoordinator(line.Get("coordinator"), "--coordinator", &flags));
  }
  if (line.Has("env_file")) {
    const std::string file = line.Get("env_file");
    if (file.empty()) {
      return absl::InvalidArgumentError(
          "--env_file is empty: give it the file's name, or leave it out");
    }
    MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
    MUSTER_ASSIGN_OR_RETURN(const auto listed, ParseVariableList(text, file));
    for (const auto& [name, value] : listed) flags.env[name] = {value, "--env_file"};
  }
  if (line.Has("env")) {
    for (const std::string& entry : line.options.at("env")) {
      const size_t equals = entry.find('=');
      if (equals == std::string::npos || equals == 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("--env ", entry, ": write --env NAME=VALUE"));
      }
      flags.env[entry.substr(0, equals)] = {entry.substr(equals + 1), "--env"};
    }
  }
  const ConfigPath path = FindConfig(line.Get("config_file"), variables);
  if (config_path != nullptr) *config_path = path;
  MUSTER_ASSIGN_OR_RETURN(Layer file, LoadConfig(path));
  const Machine machine = ReadMachine(variables);
  MachineFacts facts = {.gpus = machine.usable_gpus, .cores = machine.cores};
  std::vector<Layer> layers = {std::move(flags), LayerFromVariables(variables)};
  const bool machines_given =
      line.Has("nnodes") || line.Has("node_rank") ||
      ParseBool(line.Has("standalone") ? line.Get("standalone") : "false").value_or(true) ||
      std::any_of(layers.begin(), layers.end(), [](const Layer& layer) {
        return layer.settings.count("num_machines") + layer.settings.count("machine_rank") > 0;
      });
  // Before the file, because the cluster's variables are about this run.
  if (!machines_given) {
    MUSTER_ASSIGN_OR_RETURN(Layer cluster, LayerFromCluster(variables));
    const bool address_given = std::any_of(layers.begin(), layers.end(), [](const Layer& layer) {
      return layer.settings.count("main_process_ip") > 0;
    });
    if (const auto host = cluster.settings.find("main_process_ip");
        host != cluster.settings.end() && !address_given) {
      MUSTER_ASSIGN_OR_RETURN(host->second.text, AddressOfHost(host->second.text));
    }
    layers.push_back(std::move(cluster));
  }
  layers.push_back(std::move(file));
  // --gpu_ids replaces CUDA_VISIBLE_DEVICES, so it counts all GPUs.
  if (NamesGpus(layers)) facts.gpus = static_cast<int>(machine.gpus.size());
  std::map<std::string, std::string> given;
  for (const auto& [name, values] : line.options) given[name] = values.back();
  MUSTER_RETURN_IF_ERROR(ApplyTorchrunFlags(given, facts, &layers));
  MUSTER_RETURN_IF_ERROR(ApplyAccelerateOnlyFlags(given, facts, &layers));
  MUSTER_RETURN_IF_ERROR(ApplyEngineFlags(given, &layers));
  for (Layer& layer : layers) MUSTER_RETURN_IF_ERROR(ReplaceHome(variables, &layer));
  MUSTER_ASSIGN_OR_RETURN(LaunchConfig config, ResolveLaunch(layers, facts));
  // With --cpu its own launcher does not read it either.
  if (const std::string skipped = AcceleratesDefaultConfig(variables);
      path.path.empty() && !line.Has("cpu") && PathExists(skipped)) {
    config.notes.push_back(absl::StrCat("Accelerate's ", skipped, " has no effect: --config_file ",
                                        ShellWord(skipped), " or MUSTER_CONFIG reads it"));
  }
  return config;
}

std::string DescribeLaunch(const LaunchConfig& config) {
  size_t name_width = 0, text_width = 0;
  std::vector<std::array<std::string, 3>> rows;
  for (const auto& [name, given] : config.provenance) {
    // Values may contain line breaks and control characters for terminals.
    rows.push_back({Printable(name), given.text.empty() ? "-" : Printable(given.text),
                    Printable(given.source)});
    name_width = std::max(name_width, rows.back()[0].size());
    text_width = std::max(text_width, std::min<size_t>(rows.back()[1].size(), 40));
  }
  std::string text;
  for (const auto& [name, shown, source] : rows) {
    absl::StrAppendFormat(&text, "%-*s  %-*s  %s\n", name_width, name, text_width, shown, source);
  }
  return text;
}

int RunLaunchCommand(const std::vector<std::string>& args, const CommandContext& context,
                     const LaunchBackend& backend) {
  const CommandSpec spec = LaunchCommandSpec();
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  if (line.words.empty()) {
    return Fail(spec, context,
                absl::InvalidArgumentError(
                    "no program to launch: write muster launch [OPTIONS] -- PROGRAM [ARGS...]"),
                kExitUsage);
  }
  if (const absl::Status status = CheckProgramIsNoValue(args, line.words); !status.ok()) {
    return Fail(spec, context, status, kExitUsage);
  }
  return Launch(line, line.words, context, backend, spec);
}

int RunTestCommand(const std::vector<std::string>& args, const CommandContext& context,
                   const LaunchBackend& backend, const std::string& self) {
  CommandSpec spec = LaunchCommandSpec();
  spec.name = "muster test";
  spec.summary =
      "Runs Muster's own checks the way `muster launch` would run a program, and prints a verdict.";
  spec.usage = "[OPTIONS]";
  spec.details = kExitCodes;
  spec.takes_program = false;
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  std::vector<std::string> places;
  if (const std::string named = Variable(context.variables, "MUSTER_CHECKS"); !named.empty()) {
    places = {named};
  } else {
    const std::string folder = ParentPath(self);
    places = {JoinPath(folder, "muster-checks"), JoinPath(folder, "../lib/muster/muster-checks")};
  }
  for (const std::string& place : places) {
    if (PathExists(place)) return Launch(line, {place}, context, backend, spec);
  }
  return Fail(spec, context,
              absl::NotFoundError(absl::StrCat("the checks program is not installed: no ",
                                               absl::StrJoin(places, ", no "),
                                               "; set MUSTER_CHECKS to its path")),
              kExitProgramMissing);
}

}  // namespace muster::client
