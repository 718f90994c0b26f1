#include "client/cli/muster_command.h"

#include <algorithm>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/suggest.h"
#include "client/checkpoints/checkpoint_commands.h"
#include "client/checkpoints/estimate_command.h"
#include "client/checkpoints/plan_command.h"
#include "client/cli/backup_command.h"
#include "client/cli/config_command.h"
#include "client/cli/info_commands.h"
#include "client/cli/job_commands.h"
#include "client/cli/log_level_command.h"
#include "client/cli/node_commands.h"
#include "client/cli/reference_commands.h"
#include "client/cli/stacks_command.h"
#include "client/cli/token_command.h"
#include "client/cli/top_command.h"

namespace muster::client {
namespace {

const std::string kBarrier = "barrier";

struct Command {
  std::string name;
  std::string summary;
  std::function<int(const std::vector<std::string>&, const CommandContext&)> run;
};

void PrintHelp(const std::vector<Command>& commands, std::ostream& out) {
  out << "Muster trains and runs LibTorch models on one machine or many.\n"
         "Usage: muster COMMAND [OPTIONS]\n\nCommands:\n";
  for (const Command& command : commands)
    out << absl::StrFormat("  %-13s %s\n", command.name, command.summary);
  out << "\nmuster COMMAND --help has details. Exit codes are in docs/cli.md.\n";
}

// Runs the commands on folders, and those on the coordinator's records.
int RunCheckpoints(const std::vector<std::string>& args, const CommandContext& context) {
  const std::vector<std::string> verbs = RegistryVerbs();
  if (!args.empty() && std::count(verbs.begin(), verbs.end(), args[0]) != 0) {
    return RunRegistryCommand(args[0], {args.begin() + 1, args.end()}, context);
  }
  const int code = RunCheckpointsCommand(args, context);
  if (context.describe != nullptr) {
    for (const std::string& verb : verbs) RunRegistryCommand(verb, {}, context);
  }
  return code;
}

// A program that is installed with muster and has its own options.
struct Program {
  const char* command;
  const char* program;
  const char* summary;
};
constexpr Program kCoordinator = {
    "muster coordinator", "muster-coordinator",
    "Runs a coordinator, which serves until it is stopped: the program muster-coordinator."};
constexpr Program kAgent = {
    "muster agent", "muster-agent",
    "Runs the agent of one machine, for a job or for submitted jobs: the program muster-agent."};
constexpr Program kGenerate = {
    "muster generate", "muster-generate",
    "Continues a prompt with a language model and streams the text: the program muster-generate."};

// Returns only if the program could not be started.
int RunProgram(const Program& what, const std::vector<std::string>& args,
               const CommandContext& context, const LaunchBackend& backend,
               const std::string& self) {
  const CommandSpec spec = {.name = what.command,
                            .summary = what.summary,
                            .usage = "[OPTIONS]",
                            .details = absl::StrCat("The options are those of ", what.program,
                                                    ", which is beside "
                                                    "muster or in PATH: ",
                                                    what.command, " --help lists them."),
                            .external = true};
  if (context.describe != nullptr) {
    context.describe(spec);
    return kExitOk;
  }
  const std::string beside = self.empty() ? "" : JoinPath(ParentPath(self), what.program);
  absl::StatusOr<std::string> path = beside;
  if (beside.empty() || !PathExists(beside)) {
    path = backend.find_program(what.program, Variable(context.variables, "PATH"));
  }
  if (absl::IsNotFound(path.status())) {
    return Fail(
        spec, context,
        absl::NotFoundError(absl::StrCat(what.program, " is not installed: it is neither ",
                                         beside.empty() ? "beside muster" : beside,
                                         " nor in PATH; tools/install puts both into one folder")),
        kExitProgramMissing);
  }
  absl::Status status = path.status();
  if (status.ok()) {
    std::vector<std::string> argv = {*path};
    argv.insert(argv.end(), args.begin(), args.end());
    status = backend.replace_process(argv);
  }
  return Fail(spec, context, status, kExitNotExecutable);
}

using Args = std::vector<std::string>;

// Returns a command that passes its name to its function.
auto Named(int (*run)(const std::string&, const Args&, const CommandContext&), const char* name) {
  return [=](const Args& rest, const CommandContext& in) { return run(name, rest, in); };
}

// Returns the commands in the order of --help. Borrows all of its arguments.
std::vector<Command> Commands(const LaunchBackend& backend, const std::string& self,
                              const DescribeCommands& describe) {
  return {
      {"launch", "Run a program in several processes, with a coordinator",
       [&](const Args& rest, const CommandContext& in) {
         return RunLaunchCommand(rest, in, backend);
       }},
      {"test", "Run Muster's own checks as launch would run a program",
       [&](const Args& rest, const CommandContext& in) {
         return RunTestCommand(rest, in, backend, self);
       }},
      {"config", "Ask for settings and write the config file; show or check it", RunConfigCommand},
      {"env", "Print versions, devices and libraries", RunEnvCommand},
      {"status", "Show the jobs and workers of a coordinator", RunStatusCommand},
      {"top", "Show jobs, ranks and steps per second, again and again", RunTopCommand},
      {"trigger", "Make all processes of a job act at the same step", RunTriggerCommand},
      {"barrier", "Show a job's barriers and their late ranks, or cancel a barrier",
       RunBarrierCommand},
      {"stacks", "Show where the processes of a running job are", RunStacksCommand},
      {"quarantine", "Exclude a host from a job, or readmit it", RunQuarantineCommand},
      {"remove", "Remove a job that has ended, with its keys and its history", RunRemoveCommand},
      {"submit", "Submit a job to a cluster", RunSubmitCommand},
      {"list", "List submitted jobs", RunListCommand},
      {"describe", "Show all that is known of a submitted job", RunDescribeCommand},
      {"incidents", "Show what ended the attempts of a submitted job", RunIncidentsCommand},
      {"watch", "Print each change of a submitted job until it ends", RunWatchCommand},
      {"logs", "Print the output of a submitted job", RunLogsCommand},
      {"cancel", "Stop a submitted job for good", Named(RunControlCommand, "cancel")},
      {"suspend", "Stop a submitted job and keep it until resume",
       Named(RunControlCommand, "suspend")},
      {"resume", "Queue a suspended job again", Named(RunControlCommand, "resume")},
      {"retry", "Queue a job again that failed or was cancelled",
       Named(RunControlCommand, "retry")},
      {"resize", "Change how many processes a submitted job has", RunResizeCommand},
      {"nodes", "List the machines whose agents wait for jobs", RunNodesCommand},
      {"cordon", "Start nothing new on a node", Named(RunNodeControlCommand, "cordon")},
      {"drain", "Stop the jobs on a node and start nothing new there",
       Named(RunNodeControlCommand, "drain")},
      {"uncordon", "Let jobs start on a node again", Named(RunNodeControlCommand, "uncordon")},
      {"backup", "Write the state of a running coordinator to a file", RunBackupCommand},
      {"log-level", "Show or set how much a running coordinator logs", RunLogLevelCommand},
      {"token", "Make a user's token, and its line for the coordinator's users file",
       RunTokenCommand},
      {"checkpoints", "List, inspect, verify, compare, export, prune, pin or promote checkpoints",
       RunCheckpoints},
      {"merge-weights", "Write weights of any format as safetensors, in one file or in shards",
       RunMergeWeightsCommand},
      {"estimate-memory", "Print what a model takes to load and to train",
       RunEstimateMemoryCommand},
      {"plan", "Print which device each part of a model goes to, before it is loaded",
       RunPlanCommand},
      {"generate", "Continue a text with a language model (muster-generate)",
       [&](const Args& rest, const CommandContext& in) {
         return RunProgram(kGenerate, rest, in, backend, self);
       }},
      {"coordinator", "Run a coordinator (muster-coordinator)",
       [&](const Args& rest, const CommandContext& in) {
         return RunProgram(kCoordinator, rest, in, backend, self);
       }},
      {"agent", "Run the agent of a machine (muster-agent)",
       [&](const Args& rest, const CommandContext& in) {
         return RunProgram(kAgent, rest, in, backend, self);
       }},
      {"completion", "Print the script with which a shell completes commands",
       [&](const Args& rest, const CommandContext& in) {
         return RunCompletionCommand(rest, in, describe);
       }},
      {"man", "Print the manual page of a command",
       [&](const Args& rest, const CommandContext& in) {
         return RunManCommand(rest, in, describe);
       }},
      {"version", "Print the version", RunVersionCommand},
  };
}

}  // namespace

int RunMuster(const std::vector<std::string>& args, const CommandContext& given,
              const LaunchBackend& backend, const std::string& self) {
  CommandContext context = given;
  context.run_program = backend.run_program;
  DescribeCommands describe;
  const std::vector<Command> commands = Commands(backend, self, describe);
  describe = [&] {
    std::vector<CommandSpec> all;
    const CommandContext describing = {context.variables, context.out, context.err,
                                       [&](const CommandSpec& spec) { all.push_back(spec); }};
    for (const Command& command : commands) command.run({}, describing);
    return all;
  };
  if (args.empty()) {
    PrintHelp(commands, context.err);
    return kExitUsage;
  }
  // The plural is accepted as well, because the command lists several.
  const std::string& name = args[0] == "barriers" ? kBarrier : args[0];
  if (name == "help" && args.size() > 1) {
    Args help = {args.begin() + 1, args.end()};
    help.push_back("--help");
    return RunMuster(help, given, backend, self);
  }
  if (name == "--help" || name == "-h" || name == "help") {
    PrintHelp(commands, context.out);
    return kExitOk;
  }
  if (name == "--version") return RunVersionCommand({}, context);
  std::vector<std::string> names;
  for (const Command& command : commands) {
    if (command.name == name) return command.run({args.begin() + 1, args.end()}, context);
    names.push_back(command.name);
  }
  context.err << "muster: unknown " << (absl::StartsWith(name, "-") ? "option " : "command ")
              << name << DidYouMean(name, names, "muster ") << "; see muster --help\n";
  return kExitUsage;
}

}  // namespace muster::client
