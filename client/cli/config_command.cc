#include "client/cli/config_command.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/machine.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "base/text.h"
#include "base/yaml.h"
#include "client/cli/launch_command.h"
#include "client/cli/output.h"
#include "client/cli/prompt.h"
#include "client/cli/terminal.h"
#include "client/config/accelerate_launch.h"
#include "client/config/config_dialog.h"
#include "client/config/launch_config.h"
#include "client/config/muster_programs.h"
#include "client/config/torchrun_flags.h"
#include "rpc/certificates.h"
#include "rpc/token.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kLargestPem = 1 << 20;
constexpr size_t kLongestAnswer = 64 << 10;

ordered_json ConfigJson(const LaunchConfig& config) {
  ordered_json settings = ordered_json::object();
  for (const auto& [name, given] : config.provenance) {
    settings[name] = {{"value", given.text}, {"source", given.source}};
  }
  return settings;
}

CommandSpec ConfigSpec() {
  CommandSpec spec = LaunchCommandSpec();
  spec.name = "muster config";
  spec.summary =
      "Asks for the settings of muster launch and writes its config file; shows or checks it.";
  spec.usage = "[default|show|validate [FILE]] [OPTIONS]";
  spec.details =
      "(nothing) asks for the settings one by one and writes the file; it suggests the options "
      "given here.\n          Without a terminal it reads one answer per line; < goes "
      "back\ndefault   writes a file with every setting and its meaning; the options given here go "
      "into "
      "it\n"
      "show      prints every setting that a launch with these options would use, with its source\n"
      "validate  reads a file and reports whether a launch would accept it, and what programs "
      "written with Muster do not\n"
      "Exit codes: 0 done; 2 wrong options or answers, or a file that would be refused; 4 the file "
      "exists already\n"
      "(--force); 6 the disk is full; 8 the folder is not yours; 130 Ctrl-C.";
  spec.takes_program = false;
  spec.max_words = 2;
  spec.verbs = {"default", "show", "validate"};
  // These are flags of a launch, not keys of the file.
  std::erase_if(spec.options, [](const OptionSpec& option) {
    return option.name == "dry_run" || option.name == "output";
  });
  for (const TorchrunFlag& flag : TorchrunFlags()) {
    std::erase_if(spec.options, [&](const OptionSpec& option) { return option.name == flag.name; });
  }
  spec.options.push_back({.name = "force", .help = "Replace an existing file without asking"});
  spec.options.push_back(OutputOption({"text", "json", "yaml"}));
  spec.options.back().help = "show: " + spec.options.back().help;
  spec.options.push_back({.name = "json", .help = "show: as -o json"});
  return spec;
}

// Whether the nearest existing folder on the way to `path` lets this user create files there.
absl::Status CheckPlace(const std::string& path) {
  if (IsFolder(path)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is a folder: name a file in it"));
  }
  std::string folder = ParentPath(path);
  while (!PathExists(folder) && folder != ParentPath(folder)) folder = ParentPath(folder);
  struct stat info;
  if (stat(folder.c_str(), &info) == 0 && !S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " cannot be written: ", folder,
                     " is not a folder; give another name with --config_file"));
  }
  if (access(folder.c_str(), W_OK | X_OK) == 0) return absl::OkStatus();
  const absl::Status failed = absl::ErrnoToStatus(errno, folder);
  return absl::Status(failed.code(), absl::StrCat(path, " cannot be written: ", failed.message(),
                                                  "; give another name with --config_file"));
}

// Returns the path to which `default` and the dialog write.
absl::StatusOr<std::string> ConfigPathToWrite(const CommandLine& line,
                                              const CommandContext& context) {
  std::string path = WithHome(line.Get("config_file"), context.variables);
  if (path.empty()) path = FindConfig("", context.variables).path;
  if (path.empty()) path = DefaultConfigPath(context.variables);
  if (path.empty()) return absl::InvalidArgumentError("no file name: give --config_file FILE");
  if (absl::EndsWith(path, ".json")) {
    return absl::InvalidArgumentError(absl::StrCat(
        path,
        ": the file is YAML: give it a name that does not end in .json, such as config.yaml"));
  }
  MUSTER_RETURN_IF_ERROR(CheckPlace(path));
  return path;
}

// Returns the options that are settings of the file, checked.
absl::StatusOr<std::map<std::string, std::string>> GivenSettings(const CommandLine& line,
                                                                 const std::string& path) {
  std::map<std::string, std::string> given;
  // Settings that the file cannot hold would be missing in launches that read it.
  for (const AccelerateFlag& flag : AccelerateEngineFlags()) {
    if (!line.Has(flag.name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag.name,
                     " is a flag of muster launch and not a key of the config file: pass it to "
                     "muster launch, or set sharding in the file (--sharding)"));
  }
  if (line.Has("env")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--env ", line.options.at("env").front(),
        " is not copied into the file: write it there, under env, or pass it to muster launch"));
  }
  if (line.Has("env_file")) {
    return absl::InvalidArgumentError(
        "--env_file is a flag of muster launch and not a key of the config file: pass it to muster "
        "launch, or write its variables into the file, under env");
  }
  for (const SettingSpec& setting : LaunchSettings()) {
    if (line.Has(setting.name)) given[setting.name] = line.Get(setting.name);
  }
  if (line.Has("coordinator")) {
    Layer layer;
    MUSTER_RETURN_IF_ERROR(AddCoordinator(line.Get("coordinator"), "--coordinator", &layer));
    for (const auto& [name, value] : layer.settings) given[name] = value.text;
  }
  MUSTER_RETURN_IF_ERROR(ParseConfig(DefaultConfigText(given), path).status());
  return given;
}

absl::Status WriteConfig(const std::string& path, const std::string& text) {
  MUSTER_RETURN_IF_ERROR(MakeDirectories(ParentPath(path)));
  return WriteFileAtomically(path, text);
}

absl::Status Exists(const std::string& path) {
  return absl::AlreadyExistsError(absl::StrCat(path, " exists; --force replaces it"));
}

int WriteDefaultConfig(const CommandSpec& spec, const CommandLine& line,
                       const CommandContext& context) {
  const auto path = ConfigPathToWrite(line, context);
  if (!path.ok()) return FailCall(spec, context, path.status());
  if (PathExists(*path) && line.Get("force") != "true") {
    return Fail(spec, context, Exists(*path), kExitConflict);
  }
  const auto given = GivenSettings(line, *path);
  if (!given.ok()) return Fail(spec, context, given.status(), kExitUsage);
  const absl::Status status = WriteConfig(*path, DefaultConfigText(*given));
  if (!status.ok()) return FailCall(spec, context, status);
  context.out << *path << "\n";
  return kExitOk;
}

// Returns "~/a" and "a" as an absolute path.
std::string AbsolutePath(const std::string& answer,
                         const std::map<std::string, std::string>& variables) {
  const std::string path = WithHome(answer, variables);
  std::error_code error;
  const std::filesystem::path here = std::filesystem::current_path(error);
  return error ? path : JoinPath(here.string(), path);
}

// Implements DialogFacts::find_file.
absl::StatusOr<std::string> FindFile(const std::string& name, const std::string& answer,
                                     const std::map<std::string, std::string>& answers,
                                     const std::map<std::string, std::string>& variables) {
  std::string path = AbsolutePath(answer, variables);
  if (name == "token_file") {
    MUSTER_RETURN_IF_ERROR(rpc::ReadToken(path, name).status());
  } else if (name == "tls_ca") {
    MUSTER_RETURN_IF_ERROR(rpc::CheckTlsFiles({.ca = path}));
  } else if (name == "tls_cert") {
    MUSTER_ASSIGN_OR_RETURN(const std::string pem, ReadFile(path, kLargestPem));
    if (!absl::StrContains(pem, "-----BEGIN CERTIFICATE-----")) {
      return absl::InvalidArgumentError(
          absl::StrCat("tls_cert: '", path, "' holds no certificate in PEM format"));
    }
  } else if (name == "tls_key") {
    const auto cert = answers.find("tls_cert");
    MUSTER_RETURN_IF_ERROR(
        rpc::CheckTlsFiles({.cert = cert == answers.end() ? "" : cert->second, .key = path}));
  } else if (name == "checkpoint_key") {
    MUSTER_ASSIGN_OR_RETURN(const std::string pem,
                            ReadSecretFile(path, name, "private key", kLargestPem));
    MUSTER_RETURN_IF_ERROR(
        SigningKey::Parse(pem, absl::StrCat("checkpoint_key: '", path, "'")).status());
  }
  return path;
}

// Reads the existing file, if the dialog can continue from it.
absl::StatusOr<Layer> ReadFormer(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, /*max_bytes=*/1 << 20));
  MUSTER_ASSIGN_OR_RETURN(const YamlDocument document, ParseYaml(text, path));
  if (IsAccelerateConfig(document.value)) {
    return absl::InvalidArgumentError(
        "it is an Accelerate config file, which muster launch reads unchanged");
  }
  return ParseConfig(text, path);
}

absl::StatusOr<DialogFacts> ReadDialogFacts(const CommandLine& line,
                                            const CommandContext& context) {
  const Machine machine = ReadMachine(context.variables);
  DialogFacts facts = {.gpus = static_cast<int>(machine.gpus.size()),
                       .usable_gpus = machine.usable_gpus,
                       .cores = machine.cores,
                       .memory_bytes = machine.memory_bytes};
  MUSTER_ASSIGN_OR_RETURN(facts.path, ConfigPathToWrite(line, context));
  facts.exists = PathExists(facts.path) && line.Get("force") != "true";
  if (facts.exists) {
    absl::StatusOr<Layer> former = ReadFormer(facts.path);
    if (former.ok()) {
      facts.former = *std::move(former);
    } else {
      facts.why_no_former = Printable(former.status().message(), 300);
    }
  }
  MUSTER_ASSIGN_OR_RETURN(facts.given, GivenSettings(line, facts.path));
  facts.find_file = [variables = context.variables](const auto& name, const auto& answer,
                                                    const auto& answers) {
    return FindFile(name, answer, answers, variables);
  };
  return facts;
}

std::string QuestionText(const DialogQuestion& question, int number) {
  std::string text = absl::StrCat(number, ". ", question.text, "\n");
  if (!question.note.empty()) {
    for (const absl::string_view line : absl::StrSplit(question.note, '\n')) {
      absl::StrAppend(&text, "   ", line, "\n");
    }
  }
  for (size_t i = 0; i < question.choices.size(); ++i) {
    absl::StrAppend(&text, "   ", i + 1, ") ", ChoiceText(question, i), "\n");
  }
  absl::StrAppend(&text, "   ", question.choices.empty() ? "answer" : "number or word");
  if (!question.suggestion.empty()) absl::StrAppend(&text, " [", question.suggestion, "]");
  if (question.optional) {
    absl::StrAppend(&text, question.suggestion.empty() ? " [nothing]" : " (-: nothing)");
  }
  return absl::StrCat(text, ": ");
}

enum class LineKind { kLine, kEnd, kTooLong };

LineKind ReadLine(std::istream& in, std::string* line) {
  line->clear();
  for (int byte = in.get(); byte != std::istream::traits_type::eof(); byte = in.get()) {
    if (byte == '\n') return LineKind::kLine;
    if (line->size() == kLongestAnswer) return LineKind::kTooLong;
    line->push_back(static_cast<char>(byte));
  }
  return line->empty() ? LineKind::kEnd : LineKind::kLine;
}

// Asks until the dialog has ended. Returns -1, or the exit code if it was not completed.
int AskByLines(const CommandSpec& spec, const CommandContext& context, ConfigDialog* dialog) {
  while (dialog->state() == ConfigDialog::State::kAsking) {
    const std::string asked =
        absl::StrCat("question ", dialog->number(), " (", dialog->question().text, ")");
    context.out << QuestionText(dialog->question(), dialog->number()) << std::flush;
    std::string answer;
    const LineKind kind = ReadLine(*context.in, &answer);
    if (!context.in_is_terminal) context.out << answer << "\n";
    absl::Status status;
    if (kind == LineKind::kEnd) {
      status = absl::InvalidArgumentError("the input ended before this answer");
    } else if (kind == LineKind::kTooLong) {
      status = absl::InvalidArgumentError("the answer is too long for one line");
    } else if (absl::StripAsciiWhitespace(answer) == "<") {
      if (!dialog->Back()) status = absl::InvalidArgumentError("this is the first question");
    } else {
      status = dialog->Answer(answer);
    }
    if (status.ok()) continue;
    // After a wrong line, a script's next lines are answers to other questions.
    if (kind != LineKind::kLine || !context.in_is_terminal) {
      return Fail(spec, context,
                  absl::InvalidArgumentError(
                      absl::StrCat(asked, ": ", status.message(), "; nothing is written")),
                  kExitUsage);
    }
    context.out << "   " << status.message() << "\n";
  }
  return -1;
}

// Does the same as AskByLines, with keys. `why`: why it was not completed.
int AskByKeys(const CommandContext& context, Terminal& terminal, ConfigDialog* dialog,
              std::string* why) {
  context.out.flush();
  while (dialog->state() == ConfigDialog::State::kAsking) {
    DialogQuestion question = dialog->question();
    const size_t lines = WrapText(question.note, terminal.columns()).size();
    // A picture higher than the screen cannot be drawn over.
    if (lines + question.choices.size() + 6 > terminal.rows()) {
      terminal.Settle(question.note);
      question.note.clear();
    }
    Prompt prompt(std::move(question), dialog->number());
    for (bool asking = true; asking;) {
      terminal.Draw(prompt.Lines(terminal.columns()), prompt.Cursor(terminal.columns()));
      const Terminal::Input input = terminal.Read();
      if (!input.key.has_value()) {
        terminal.Settle("");
        *why = input.signal == 0 ? "the terminal is gone" : "a signal has ended the questions";
        return kExitSignal + (input.signal == 0 ? SIGHUP : input.signal);
      }
      if (input.key->kind == Key::Kind::kSuspend) {
        terminal.Suspend();
        continue;
      }
      switch (prompt.Press(*input.key)) {
        case Prompt::Event::kNone:
          break;
        case Prompt::Event::kCancel:
          terminal.Settle("");
          *why = "ended before the last question";
          return kExitSignal + SIGINT;
        case Prompt::Event::kBack:
          asking = !dialog->Back();
          if (asking) {
            prompt.Refuse("There is no question before.");
          } else {
            terminal.Settle("");
          }
          break;
        case Prompt::Event::kAnswer: {
          const absl::Status status = dialog->Answer(prompt.answer());
          asking = !status.ok();
          if (asking) {
            prompt.Refuse(status.message());
          } else {
            terminal.Settle(prompt.Settled());
          }
          break;
        }
      }
    }
  }
  return -1;
}

int Ask(const CommandSpec& spec, const CommandContext& context, ConfigDialog* dialog) {
  const std::string kind = Variable(context.variables, "TERM");
  if (!context.in_is_terminal || isatty(STDOUT_FILENO) == 0 || kind.empty() || kind == "dumb") {
    return AskByLines(spec, context, dialog);
  }
  std::string why;
  int code = -1;
  {
    const auto terminal = Terminal::Open(STDIN_FILENO, STDOUT_FILENO);
    if (!terminal.ok()) return AskByLines(spec, context, dialog);
    code = AskByKeys(context, **terminal, dialog, &why);
  }
  if (code < 0) return code;
  // Print only after the terminal is restored.
  return Fail(spec, context, absl::CancelledError(absl::StrCat(why, "; nothing is written")), code);
}

int RunDialog(const CommandSpec& spec, const CommandLine& line, const CommandContext& context) {
  absl::StatusOr<DialogFacts> facts = ReadDialogFacts(line, context);
  if (!facts.ok()) return FailCall(spec, context, facts.status());
  if (context.in == nullptr) {
    return Fail(spec, context,
                absl::InvalidArgumentError(
                    "the input is not available: use muster config default, which asks nothing"),
                kExitUsage);
  }
  const std::string path = facts->path;
  const bool existed = facts->exists || PathExists(path);
  ConfigDialog dialog(*std::move(facts));
  if (const int code = Ask(spec, context, &dialog); code >= 0) return code;
  if (dialog.state() == ConfigDialog::State::kLeave) {
    context.out << "nothing is written\n";
    return kExitOk;
  }
  // Another process has created the file while the questions were asked.
  if (!existed && PathExists(path)) return Fail(spec, context, Exists(path), kExitConflict);
  const absl::Status status = WriteConfig(path, dialog.FileText());
  if (!status.ok()) return FailCall(spec, context, status);
  bool several = false;
  context.out << "\n";
  for (const auto& [name, value] : dialog.Summary()) {
    context.out << "  " << name << ": " << value << "\n";
    several = several || name == "num_machines";
  }
  const bool found = FindConfig("", context.variables).path == path;
  context.out
      << (several ? "The other machines need files of their own: run muster config there, too.\n"
                  : "")
      << "A launch with these settings: muster launch "
      << (found ? "" : absl::StrCat("--config_file ", ShellWord(path), " ")) << "-- PROGRAM\n"
      << "written: " << path << "\n";
  return kExitOk;
}

}  // namespace

int RunConfigCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = ConfigSpec();
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::string verb = line.words.empty() ? "" : line.words[0];
  const std::string format = line.Has("output")           ? line.Get("output")
                             : line.Get("json") == "true" ? "json"
                                                          : "text";
  if (verb != "show" && format != "text") {
    return Fail(
        spec, context,
        absl::InvalidArgumentError(absl::StrCat("only muster config show has a format: leave out ",
                                                line.Has("output") ? "--output" : "--json")),
        kExitUsage);
  }
  if (verb.empty()) return RunDialog(spec, line, context);
  if (std::count(spec.verbs.begin(), spec.verbs.end(), verb) == 0) {
    return Fail(spec, context,
                absl::InvalidArgumentError(
                    absl::StrCat("unknown word ", verb, DidYouMean(verb, spec.verbs))),
                kExitUsage);
  }
  if (line.words.size() == 2) line.options["config_file"] = {line.words[1]};

  if (verb == "default") return WriteDefaultConfig(spec, line, context);
  ConfigPath path;
  const absl::StatusOr<LaunchConfig> config = ReadLaunchConfig(line, context.variables, &path);
  if (verb == "validate") {
    if (path.path.empty()) {
      return Fail(spec, context,
                  absl::InvalidArgumentError(
                      "no config file found: name one, or write one with muster config"),
                  kExitUsage);
    }
    if (!config.ok()) return Fail(spec, context, config.status(), kExitUsage);
    context.out << path.path << ": ok\n";
    for (const std::string& note : config->notes) context.out << note << "\n";
    const MusterProgramNotes notes = NotesForMusterPrograms(*config);
    for (const std::string& why : notes.refused) {
      context.out << "for Python programs; those written with Muster refuse it: " << why << "\n";
    }
    for (const std::string& what : notes.no_effect) {
      context.out << "without effect on programs written with Muster: " << what << "\n";
    }
    return kExitOk;
  }
  if (!config.ok()) return Fail(spec, context, config.status(), kExitUsage);
  if (format != "text") {
    const ordered_json shown = {{"config_file", path.path}, {"settings", ConfigJson(*config)}};
    context.out << (format == "yaml" ? YamlText(shown) : Dump(shown));
    return kExitOk;
  }
  context.out << "config file: "
              << (path.path.empty() ? "none" : absl::StrCat(path.path, " (", path.source, ")"))
              << "\n"
              << DescribeLaunch(*config);
  return kExitOk;
}

}  // namespace muster::client
