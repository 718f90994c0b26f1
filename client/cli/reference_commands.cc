#include "client/cli/reference_commands.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/suggest.h"
#include "client/cli/completion.h"
#include "client/cli/man_page.h"

namespace muster::client {
namespace {

// Begins with muster(1).
absl::Status WritePages(const std::string& folder, const std::vector<CommandSpec>& commands) {
  absl::Status status = MakeDirectories(folder);
  if (status.ok()) {
    status = WriteFileAtomically(JoinPath(folder, "muster.1"), MainManPage(commands));
  }
  for (const CommandSpec& command : commands) {
    if (!status.ok()) return status;
    status = WriteFileAtomically(JoinPath(folder, ManPageName(command) + ".1"), ManPage(command));
  }
  return status;
}

}  // namespace

int RunCompletionCommand(const std::vector<std::string>& args, const CommandContext& context,
                         const DescribeCommands& describe) {
  const CommandSpec spec = {
      .name = "muster completion",
      .summary = "Prints the script with which a shell completes commands, flags and values.",
      .usage = absl::StrJoin(CompletionShells(), "|"),
      .details =
          "bash  source <(muster completion bash), in ~/.bashrc\n"
          "zsh   source <(muster completion zsh), in ~/.zshrc after compinit\n"
          "fish  muster completion fish > ~/.config/fish/completions/muster.fish\n"
          "Exit codes: 0 printed; 2 no such shell.",
      .max_words = 1,
      .verbs = CompletionShells()};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::string shell = line.words.empty() ? "" : line.words[0];
  for (const std::string& known : CompletionShells()) {
    if (known != shell) continue;
    context.out << CompletionScript(shell, describe());
    return kExitOk;
  }
  return Fail(spec, context,
              absl::InvalidArgumentError(
                  shell.empty() ? absl::StrCat("name a shell: ", spec.usage)
                                : absl::StrCat("unknown shell ", shell, ": write one of ",
                                               absl::StrJoin(CompletionShells(), ", "))),
              kExitUsage);
}

int RunManCommand(const std::vector<std::string>& args, const CommandContext& context,
                  const DescribeCommands& describe) {
  const CommandSpec spec = {
      .name = "muster man",
      .summary = "Prints the manual page of a command, or of muster, for man.",
      .usage = "[COMMAND...] [OPTIONS]",
      .details =
          "The page is troff: muster man launch | man -l -\n"
          "Exit codes: 0 done; 2 wrong options; 3 no such command; 8 the folder is not "
          "yours.",
      .options = {{.name = "folder",
                   .value_name = "FOLDER",
                   .help = "Write the pages of all commands there, as muster.1, muster-launch.1, "
                           "... (share/man/man1 of a prefix)"}},
      .max_words = 2};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::vector<CommandSpec> commands = describe();
  if (line.Has("folder")) {
    if (!line.words.empty()) {
      return Fail(spec, context,
                  absl::InvalidArgumentError(absl::StrCat(
                      "--folder writes the pages of all commands: leave ", line.words[0], " out")),
                  kExitUsage);
    }
    const absl::Status status = WritePages(line.Get("folder"), commands);
    return status.ok() ? kExitOk : FailCall(spec, context, status);
  }
  if (line.words.empty()) {
    context.out << MainManPage(commands);
    return kExitOk;
  }
  const std::string wanted = absl::StrCat("muster ", absl::StrJoin(line.words, " "));
  std::vector<std::string> names;
  for (const CommandSpec& command : commands) {
    names.push_back(command.name);
    if (command.name != wanted) continue;
    context.out << ManPage(command);
    return kExitOk;
  }
  return Fail(spec, context,
              absl::NotFoundError(absl::StrCat("unknown command ", wanted,
                                               DidYouMean(wanted, names), "; see muster --help")),
              kExitNotFound);
}

}  // namespace muster::client
