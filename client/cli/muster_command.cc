#include "client/cli/muster_command.h"

#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "base/exit_code.h"
#include "client/checkpoints/checkpoint_commands.h"
#include "client/cli/info_commands.h"
#include "client/cli/job_commands.h"
#include "client/cli/node_commands.h"
#include "client/cli/token_command.h"
#include "client/config/suggest.h"

namespace muster::client {
namespace {

struct Command {
  std::string name;
  std::string summary;
  std::function<int(const std::vector<std::string>&)> run;
};

void PrintHelp(const std::vector<Command>& commands, std::ostream& out) {
  out << "Muster trains and serves LibTorch models on one machine or many.\n"
         "Usage: muster COMMAND [OPTIONS]\n\nCommands:\n";
  for (const Command& command : commands)
    out << absl::StrFormat("  %-13s %s\n", command.name, command.summary);
  out << "\nmuster COMMAND --help has details. Exit codes are in docs/cli.md.\n";
}

}  // namespace

int RunMuster(const std::vector<std::string>& args, const CommandContext& context,
              const LaunchBackend& backend, const std::string& self) {
  using Args = std::vector<std::string>;
  const std::vector<Command> commands = {
      {"launch", "Run a program in several processes, with a coordinator",
       [&](const Args& rest) { return RunLaunchCommand(rest, context, backend); }},
      {"test", "Run Muster's own checks as launch would run a program",
       [&](const Args& rest) { return RunTestCommand(rest, context, backend, self); }},
      {"config", "Write, show or check the config file",
       [&](const Args& rest) { return RunConfigCommand(rest, context); }},
      {"env", "Print versions, devices and libraries",
       [&](const Args& rest) { return RunEnvCommand(rest, context); }},
      {"status", "Show the jobs and workers of a coordinator",
       [&](const Args& rest) { return RunStatusCommand(rest, context); }},
      {"trigger", "Make all processes of a job act at the same step",
       [&](const Args& rest) { return RunTriggerCommand(rest, context); }},
      {"barrier", "Show a job's barriers and their late ranks, or cancel a barrier",
       [&](const Args& rest) { return RunBarrierCommand(rest, context); }},
      {"quarantine", "Exclude a host from a job, or readmit it",
       [&](const Args& rest) { return RunQuarantineCommand(rest, context); }},
      {"remove", "Remove a job that has ended, with its keys and its history",
       [&](const Args& rest) { return RunRemoveCommand(rest, context); }},
      {"submit", "Submit a job to a cluster",
       [&](const Args& rest) { return RunSubmitCommand(rest, context); }},
      {"list", "List submitted jobs",
       [&](const Args& rest) { return RunListCommand(rest, context); }},
      {"describe", "Show all that is known of a submitted job",
       [&](const Args& rest) { return RunDescribeCommand(rest, context); }},
      {"watch", "Print each change of a submitted job until it ends",
       [&](const Args& rest) { return RunWatchCommand(rest, context); }},
      {"logs", "Print the output of a submitted job",
       [&](const Args& rest) { return RunLogsCommand(rest, context); }},
      {"cancel", "Stop a submitted job for good",
       [&](const Args& rest) { return RunControlCommand("cancel", rest, context); }},
      {"suspend", "Stop a submitted job and keep it until resume",
       [&](const Args& rest) { return RunControlCommand("suspend", rest, context); }},
      {"resume", "Queue a suspended job again",
       [&](const Args& rest) { return RunControlCommand("resume", rest, context); }},
      {"retry", "Queue a job again that failed or was cancelled",
       [&](const Args& rest) { return RunControlCommand("retry", rest, context); }},
      {"nodes", "List the machines whose agents wait for jobs",
       [&](const Args& rest) { return RunNodesCommand(rest, context); }},
      {"cordon", "Start nothing new on a node",
       [&](const Args& rest) { return RunNodeControlCommand("cordon", rest, context); }},
      {"drain", "Stop the jobs on a node and start nothing new there",
       [&](const Args& rest) { return RunNodeControlCommand("drain", rest, context); }},
      {"uncordon", "Let jobs start on a node again",
       [&](const Args& rest) { return RunNodeControlCommand("uncordon", rest, context); }},
      {"token", "Make a user's token, and its line for the coordinator's users file",
       [&](const Args& rest) { return RunTokenCommand(rest, context); }},
      {"checkpoints", "List, inspect, verify, compare, export, prune, pin or promote checkpoints",
       [&](const Args& rest) {
         if (rest.empty() || !IsRegistryVerb(rest[0])) return RunCheckpointsCommand(rest, context);
         return RunRegistryCommand(rest[0], {rest.begin() + 1, rest.end()}, context);
       }},
      {"merge-weights", "Write weights of any format as safetensors, in one file or in shards",
       [&](const Args& rest) { return RunMergeWeightsCommand(rest, context); }},
      {"version", "Print the version",
       [&](const Args& rest) { return RunVersionCommand(rest, context); }},
  };
  if (args.empty()) {
    PrintHelp(commands, context.err);
    return kExitUsage;
  }
  const std::string& name = args[0];
  if (name == "--help" || name == "-h" || name == "help") {
    PrintHelp(commands, context.out);
    return kExitOk;
  }
  if (name == "--version") return RunVersionCommand({}, context);
  std::vector<std::string> names;
  for (const Command& command : commands) {
    if (command.name == name) return command.run({args.begin() + 1, args.end()});
    names.push_back(command.name);
  }
  context.err << "muster: unknown " << (absl::StartsWith(name, "-") ? "option " : "command ")
              << name << DidYouMean(name, names, "muster ") << "; see muster --help\n";
  return kExitUsage;
}

}  // namespace muster::client
