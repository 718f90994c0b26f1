#include "client/jobs/job_file.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bool_word.h"
#include "base/size_option.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "base/text.h"
#include "base/worker_variables.h"
#include "base/yaml.h"
#include "proto/failure_policy.h"
#include "proto/job_limits.h"

namespace muster::client {
namespace {

using nlohmann::json;

enum class Kind { kText, kInteger, kBool, kMap, kNumbers, kIntegers, kWords, kCommand };

// Reads a value into the specification. Returns what to write instead; empty if the value is valid.
using Reader = std::string (*)(const json& value, JobSpec* spec);

struct Setting {
  JobSettingSpec spec;
  Kind kind;
  Reader read;
};

constexpr int kAny = std::numeric_limits<int32_t>::max();

template <int JobSpec::*kField, int kLeast = 0, int kMost = kAny>
std::string ReadInteger(const json& value, JobSpec* spec) {
  if (!value.is_number_integer() || value > kMost || value < kLeast) {
    return kLeast < 0 ? "a whole number"
                      : absl::StrCat("a whole number from ", kLeast,
                                     kMost == kAny ? "" : absl::StrCat(" to ", kMost));
  }
  spec->*kField = value.get<int>();
  return "";
}

template <bool JobSpec::*kField>
std::string ReadBool(const json& value, JobSpec* spec) {
  if (!value.is_boolean()) return "true or false";
  spec->*kField = value.get<bool>();
  return "";
}

template <std::string JobSpec::*kField>
std::string ReadText(const json& value, JobSpec* spec) {
  if (!value.is_string()) return "text, in quotes if it looks like a number";
  spec->*kField = value.get<std::string>();
  return "";
}

template <absl::Duration JobSpec::*kField>
std::string ReadTime(const json& value, JobSpec* spec) {
  absl::Duration time;
  if (!value.is_string() || !absl::ParseDuration(value.get<std::string>(), &time) ||
      time <= absl::ZeroDuration() || time > absl::Hours(24 * 365)) {
    return "a time such as 30s, 5m or 12h";
  }
  spec->*kField = time;
  return "";
}

template <std::map<std::string, std::string> JobSpec::*kField>
std::string ReadMap(const json& value, JobSpec* spec) {
  if (!value.is_object()) return "a map of names to texts";
  for (auto item = value.begin(); item != value.end(); ++item) {
    const std::string& name = item.key();
    const json& text = *item;
    // A float or a truth value would lose its spelling.
    if (text.is_string()) {
      (spec->*kField)[name] = text.get<std::string>();
    } else if (text.is_number_integer()) {
      (spec->*kField)[name] = text.dump();
    } else {
      return absl::StrCat("text for ", Printable(name), ", in quotes");
    }
  }
  return "";
}

std::string ReadCommand(const json& value, JobSpec* spec) {
  static constexpr char kHelp[] = "a program and its arguments: [./train, --lr, \"0.1\"]";
  spec->command.clear();
  if (value.is_string()) {
    const auto text = value.get<std::string>();
    if (text.find_first_of("'\"\\$`|&;<>*?(){}[]~#") != std::string::npos)
      return absl::StrCat("a list, because no shell reads it; ", kHelp);
    for (absl::string_view word :
         absl::StrSplit(text, absl::ByAnyChar(" \t\n"), absl::SkipEmpty())) {
      spec->command.emplace_back(word);
    }
  } else if (value.is_array()) {
    for (const json& word : value) {
      if (!word.is_string() && !word.is_number_integer())
        return absl::StrCat(kHelp, ", each word a text");
      spec->command.push_back(word.is_string() ? word.get<std::string>() : word.dump());
    }
  }
  return spec->command.empty() || spec->command[0].empty() ? kHelp : "";
}

std::string ReadProcesses(const json& value, JobSpec* spec) {
  // In the form of a flag; a plain number as a file may have it.
  const absl::StatusOr<std::pair<int, int>> processes =
      ParseProcesses(value.is_string()           ? value.get<std::string>()
                     : value.is_number_integer() ? value.dump()
                                                 : "");
  if (!processes.ok()) return std::string(processes.status().message());
  std::tie(spec->min_processes, spec->max_processes) = *processes;
  return "";
}

template <int64_t JobSpec::*kField>
std::string ReadMemory(const json& value, JobSpec* spec) {
  int64_t bytes = -1;  // refused
  if (value.is_number_integer() && value >= 0 && value <= std::numeric_limits<int64_t>::max()) {
    bytes = value.get<int64_t>();
  } else if (value.is_string()) {
    bytes = ParseSizeOption(value.get<std::string>()).value_or(-1);
  }
  if (bytes < 0 && value.is_string() && absl::EndsWith(value.get<std::string>(), "b")) {
    return "a size with B for bytes, such as 16GiB (b may mean bits)";
  }
  if (bytes < 0) return "a size with its unit, such as 16GiB";
  spec->*kField = bytes;
  return "";
}

// Returns what to write instead of a memory size that is too small for any process or GPU; "" if
// the size is plausible. A user who writes 16 does not mean bytes.
std::string TooSmall(absl::string_view name, const JobSpec& spec) {
  constexpr int64_t kLeast = 1 << 20;
  const int64_t bytes = name == "memory_per_process" ? spec.memory_per_process
                        : name == "gpu_memory"       ? spec.gpu_memory
                                                     : 0;
  return bytes == 0 || bytes >= kLeast ? "" : "a size of 1MiB or more with its unit, such as 16GiB";
}

std::string ReadExitCodes(const json& value, JobSpec* spec) {
  static constexpr char kHelp[] = "a list of exit codes from 1 to 255: [3, 4]";
  if (!value.is_array()) return kHelp;
  spec->user_error_codes.clear();
  for (const json& code : value) {
    if (!code.is_number_integer() || code < 1 || code > 255) return kHelp;
    spec->user_error_codes.push_back(code.get<int>());
  }
  return "";
}

// Reads the policy as written; nullopt if it is invalid.
std::optional<FailurePolicy> PolicyOf(const json& value) {
  if (!value.is_object() || value.empty()) return std::nullopt;
  FailurePolicy policy;
  for (auto item = value.begin(); item != value.end(); ++item) {
    if (!item->is_number_integer() || !AddToPolicy(item.key(), item->get<int64_t>(), &policy)) {
      return std::nullopt;
    }
  }
  return policy;
}

// The total counts only once all given settings are known: see SetRestarts.
std::string ReadFailurePolicy(const json& value, JobSpec* spec) {
  std::optional<FailurePolicy> policy = PolicyOf(value);
  if (!policy.has_value()) {
    return "a map of max_restarts, failed, oom, hang, node_lost and preempted to whole numbers "
           "from 0: {max_restarts: 3, oom: 1}";
  }
  spec->class_limits = std::move(policy->class_limits);
  return "";
}

// A path that has yet to be read has no name.
std::string ReadFiles(const json& value, JobSpec* spec) {
  static constexpr char kHelp[] =
      "a list of files and folders, [config.yaml, scripts], or a map of paths to what the files "
      "have: {config.yaml: \"lr: 1\"}";
  spec->files.clear();
  if (value.is_object()) {
    for (auto item = value.begin(); item != value.end(); ++item) {
      if (!item->is_string() || !IsJobFilePath(item.key())) return kHelp;
      spec->files.push_back({.path = item.key(), .content = item->get<std::string>()});
    }
    return spec->files.empty() ? kHelp : "";
  }
  if (!value.is_array() || value.empty()) return kHelp;
  for (const json& path : value) {
    if (!path.is_string() || path.get<std::string>().empty()) return kHelp;
    spec->files.push_back({.content = path.get<std::string>()});
  }
  return "";
}

// Moves the paths that have yet to be read out of the specification. `folder`: of relative paths.
void TakePaths(const std::string& folder, ResolvedJob* job) {
  std::vector<JobFile> read;
  job->paths.clear();
  for (JobFile& file : job->spec.files) {
    if (!file.path.empty()) {
      read.push_back(std::move(file));
    } else {
      job->paths.push_back(folder.empty() || file.content[0] == '/'
                               ? file.content
                               : absl::StrCat(folder, "/", file.content));
    }
  }
  job->spec.files = std::move(read);
}

std::string ReadPrecision(const json& value, JobSpec* spec) {
  // YAML reads a plain no as false.
  if (value.is_boolean() && !value.get<bool>()) {
    spec->mixed_precision = "no";
    return "";
  }
  if (value != "no" && value != "bf16" && value != "fp16") return "no, bf16 or fp16";
  spec->mixed_precision = value.get<std::string>();
  return "";
}

// The one definition of keys, flags, help and docs.
const std::vector<Setting>& Table() {
  static const auto* const table = new std::vector<Setting>{
      {{"name", "NAME",
        "Letters, digits, - and _; the job is NAME-NUMBER (default: the program's)"},
       Kind::kText,
       ReadText<&JobSpec::name>},
      {{.name = "command",
        .value_name = "",
        .help = "The program and its arguments",
        .has_flag = false},
       Kind::kCommand,
       ReadCommand},
      {{"env", "NAME=VALUE",
        "An environment variable for all processes. Variables of settings are refused",
        /*repeated=*/true},
       Kind::kMap,
       ReadMap<&JobSpec::env>},
      {{"workdir", "FOLDER", "Working directory on every node (default: a private one)"},
       Kind::kText,
       ReadText<&JobSpec::workdir>},
      {{"processes", "N|MIN:MAX", "Processes of the job (default 1)"}, Kind::kText, ReadProcesses},
      {{"processes_per_node", "N", "Default: the same number on each, on as few nodes as possible"},
       Kind::kInteger,
       ReadInteger<&JobSpec::processes_per_node>},
      {{"gpus_per_process", "N", "Default 0"},
       Kind::kInteger,
       ReadInteger<&JobSpec::gpus_per_process>},
      {{"gpu_memory", "SIZE", "Least memory of each GPU, for example 80GiB"},
       Kind::kText,
       ReadMemory<&JobSpec::gpu_memory>},
      {{"cpus_per_process", "N", "Default 1"},
       Kind::kInteger,
       ReadInteger<&JobSpec::cpus_per_process>},
      {{"memory_per_process", "SIZE", "16GiB, for example (default: not counted)"},
       Kind::kText,
       ReadMemory<&JobSpec::memory_per_process>},
      {{"labels", "NAME=VALUE", "A label that the nodes must have", /*repeated=*/true},
       Kind::kMap,
       ReadMap<&JobSpec::labels>},
      {{"priority", "N", "Larger ones start first (default 0)"},
       Kind::kInteger,
       ReadInteger<&JobSpec::priority, std::numeric_limits<int32_t>::min()>},
      {{"preemptible", "", "Jobs of a higher priority may stop it; it is queued again"},
       Kind::kBool,
       ReadBool<&JobSpec::preemptible>},
      {{"max_restarts", "N", "Restarts after failures of the program (default 0)"},
       Kind::kInteger,
       ReadInteger<&JobSpec::max_restarts, 0, kMaxRestarts>},
      {{"failure_policy", "CLASS=N",
        "Restarts after a class of end: failed, oom, hang, node_lost, preempted",
        /*repeated=*/true},
       Kind::kNumbers,
       ReadFailurePolicy},
      {{"restart_delay", "TIME",
        "Delay before a restart, at most 5m; doubles with each consecutive failure, up to that"},
       Kind::kText,
       ReadTime<&JobSpec::restart_delay>},
      {{"time_limit", "TIME", "Limit for each attempt (default: none)"},
       Kind::kText,
       ReadTime<&JobSpec::time_limit>},
      {{"hang_timeout", "TIME",
        "After the first finished step: fails an attempt in which no rank shows progress for this "
        "long"},
       Kind::kText,
       ReadTime<&JobSpec::hang_timeout>},
      {{"stop_grace", "TIME", "Time between SIGTERM and SIGKILL (default 30s)"},
       Kind::kText,
       ReadTime<&JobSpec::stop_grace>},
      {{"grow_after", "TIME",
        "With MIN:MAX processes: restarts the job with more processes when they fit and it has run "
        "this long"},
       Kind::kText,
       ReadTime<&JobSpec::grow_after>},
      {{"spare_nodes", "N",
        "Keeps room on N more nodes, if available, so that a lost node delays no restart (default "
        "0)"},
       Kind::kInteger,
       ReadInteger<&JobSpec::spare_nodes>},
      {{"user_error_codes", "CODE,...", "Exit codes that are never retried, besides 2, 126, 127"},
       Kind::kIntegers,
       ReadExitCodes},
      {{"files", "PATH",
        "A small file or folder to copy into the private folder of each attempt; 96 KiB in total",
        /*repeated=*/true},
       Kind::kWords,
       ReadFiles},
      {{"retention", "TIME", "How long the job's record is kept after its end"},
       Kind::kText,
       ReadTime<&JobSpec::retention>},
      {{"wait_for_nodes", "", "Queues the job even if it is larger than all nodes together"},
       Kind::kBool,
       ReadBool<&JobSpec::wait_for_nodes>},
      {{"mixed_precision", "KIND", "no, bf16 or fp16"}, Kind::kText, ReadPrecision},
      {{"gradient_accumulation_steps", "N", "Backward passes for each optimizer step"},
       Kind::kInteger,
       ReadInteger<&JobSpec::gradient_accumulation_steps>},
      {{"cpu", "", "Trains on CPUs"}, Kind::kBool, ReadBool<&JobSpec::cpu>},
      {{"debug", "", "Checks every collective across processes first"},
       Kind::kBool,
       ReadBool<&JobSpec::debug>},
  };
  return *table;
}

const Setting* Find(absl::string_view name) {
  for (const Setting& setting : Table()) {
    if (setting.spec.name == name) return &setting;
  }
  return nullptr;
}

// Refuses variables that are set for each process whatever `env` says, because they would be lost.
// `where` names the setting.
absl::Status CheckVariables(const json& env, absl::string_view where) {
  for (const auto& [name, value] : env.items()) {
    const WorkerVariable* const set = FindWorkerVariable(name);
    if (set == nullptr) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": ", name, " cannot be set: ",
        set->setting.empty() ? "Muster sets it for each process according to its place in the job"
        : Find(set->setting) != nullptr
            ? absl::StrCat("write the setting ", set->setting, ", which sets it for all processes")
            : "the agent of each node sets it, and a job has no setting for it"));
  }
  return absl::OkStatus();
}

// Converts NAME=VALUE words to a map of texts, or of numbers; then a word may have several, with
// commas.
json MapOf(const std::vector<std::string>& words, bool numbers) {
  json map = json::object();
  for (const std::string& word : words) {
    const std::vector<std::string> entries =
        numbers ? std::vector<std::string>(absl::StrSplit(word, ',')) : std::vector{word};
    for (const std::string& entry : entries) {
      const size_t equals = entry.find('=');
      if (equals == std::string::npos || equals == 0) return json(word);
      const std::string value = entry.substr(equals + 1);
      int64_t number = 0;
      if (numbers && !absl::SimpleAtoi(value, &number)) return json(word);
      map[entry.substr(0, equals)] = numbers ? json(number) : json(value);
    }
  }
  return map;
}

// Converts a flag's words to the form of a file; what a reader refuses stays text.
json FlagValue(Kind kind, const std::vector<std::string>& words) {
  const std::string& last = words.back();
  int64_t number = 0;
  switch (kind) {
    case Kind::kInteger:
      return absl::SimpleAtoi(last, &number) ? json(number) : json(last);
    case Kind::kBool: {
      const auto truth = ParseBoolWord(last);
      return truth.has_value() ? json(*truth) : json(last);
    }
    case Kind::kMap:
      return MapOf(words, /*numbers=*/false);
    case Kind::kNumbers:
      return MapOf(words, /*numbers=*/true);
    case Kind::kWords:
      return json(words);
    case Kind::kIntegers: {
      json list = json::array();
      for (absl::string_view word : absl::StrSplit(last, ',')) {
        if (!absl::SimpleAtoi(word, &number)) return json(last);
        list.push_back(number);
      }
      return list;
    }
    default:
      return json(last);
  }
}

std::string ValueText(const json& value) {
  return Printable(value.is_string() ? value.get<std::string>()
                                     : value.dump(-1, ' ', false, json::error_handler_t::replace));
}

// The settings about restarts in the file, or of the flags.
struct Restarts {
  bool max_restarts = false;  // whether it is given
  std::optional<FailurePolicy> policy = std::nullopt;

  // Returns false if both settings have the total.
  bool Add(absl::string_view name, const json& value) {
    if (name == "max_restarts") max_restarts = true;
    if (name == "failure_policy") policy = PolicyOf(value);
    return !max_restarts || !policy.has_value() || !policy->max_restarts.has_value();
  }
};

// Sets the total of a failure policy and the restarts of classes that it does not name, as launches
// do: a max_restarts that is given in the same place, or in one with precedence, is the total.
void SetRestarts(const Restarts& file, const Restarts& flags, ResolvedJob* job) {
  const std::optional<FailurePolicy>& given = flags.policy.has_value() ? flags.policy : file.policy;
  if (!given.has_value()) return;
  FailurePolicy policy = *given;
  const int max_restarts = job->spec.max_restarts;
  const bool above = flags.max_restarts && !flags.policy.has_value();
  if (above || (max_restarts > 0 && !policy.max_restarts.has_value())) {
    policy.max_restarts = max_restarts;
  }
  CompletePolicy(&policy);
  job->spec.max_restarts = policy.max_restarts.value_or(0);
  job->spec.class_limits = std::move(policy.class_limits);
  // The policy determines it.
  if (job->spec.max_restarts != max_restarts) job->provenance.erase("max_restarts");
}

// `by_people`: also checks the rules that apply only to files written by people.
absl::Status ReadFile(absl::string_view text, absl::string_view source, bool by_people,
                      ResolvedJob* job, Restarts* restarts) {
  MUSTER_ASSIGN_OR_RETURN(const YamlDocument file, ParseYaml(text, source));
  if (file.value.is_null()) return absl::OkStatus();
  if (!file.value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": a job file is a map, for example \"command: [/opt/train]\""));
  }
  std::vector<std::string> known;
  for (const Setting& setting : Table()) known.push_back(setting.spec.name);
  for (const auto& [key, value] : file.value.items()) {
    const auto line = file.lines.find(absl::StrCat("/", key));
    const std::string where =
        line == file.lines.end() ? std::string(source) : absl::StrCat(source, ":", line->second);
    const Setting* const setting = Find(key);
    if (setting == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": unknown key ", Printable(key), DidYouMean(key, known)));
    }
    if (value.is_null()) continue;
    if (setting->kind == Kind::kCommand || setting->kind == Kind::kMap) {
      const std::string entries = absl::StrCat("/", key, "/");
      const auto rewritten = file.rewritten.lower_bound(entries);
      if (rewritten != file.rewritten.end() && absl::StartsWith(rewritten->first, entries)) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, ": ", key, ": ", rewritten->second,
                         ": YAML reads this as a different number: write it in quotes"));
      }
    }
    std::string write = setting->read(value, &job->spec);
    if (write.empty() && by_people) write = TooSmall(key, job->spec);
    if (!write.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": ", key, ": ", ValueText(value), ": write ", write));
    }
    if (key == "env" && by_people) {
      MUSTER_RETURN_IF_ERROR(CheckVariables(value, absl::StrCat(where, ": env")));
    }
    job->provenance[key] = {ValueText(value), where};
    // The keys come in alphabetical order.
    if (!restarts->Add(key, value)) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": max_restarts: failure_policy also has it: set it once"));
    }
  }
  TakePaths(absl::StrContains(source, '/') ? std::string(source.substr(0, source.rfind('/'))) : "",
            job);
  return absl::OkStatus();
}

// Returns "train" for "/opt/bin/train": a valid name for a job.
std::string NameOf(absl::string_view program) {
  std::string name(program.substr(program.rfind('/') + 1));
  for (char& c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '_') c = '-';
  }
  // Without the leading dashes of ".train" or "--", which a command would take for an option.
  name.erase(0, name.find_first_not_of('-'));
  if (name.size() > 64) name.resize(64);
  return name.empty() ? "job" : name;
}

}  // namespace

absl::StatusOr<std::pair<int, int>> ParseProcesses(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  int64_t least = 0, most = 0;
  if (parts.size() > 2 || !absl::SimpleAtoi(parts.front(), &least) ||
      !absl::SimpleAtoi(parts.back(), &most) || least < 1 || most < least) {
    return absl::InvalidArgumentError("how many, 4, or a range, 1:4");
  }
  constexpr int kMost = std::numeric_limits<int>::max();
  if (most > kMost) {
    return absl::InvalidArgumentError(
        absl::StrCat("how many, 4, or a range, 1:4, of at most ", kMost));
  }
  return std::make_pair(static_cast<int>(least), static_cast<int>(most));
}

std::string ProcessesText(const JobSpec& spec) {
  return spec.min_processes == spec.max_processes
             ? absl::StrCat(spec.max_processes)
             : absl::StrCat(spec.min_processes, ":", spec.max_processes);
}

const std::vector<JobSettingSpec>& JobSettings() {
  static const auto* const settings = [] {
    auto* const all = new std::vector<JobSettingSpec>;
    for (const Setting& setting : Table()) all->push_back(setting.spec);
    return all;
  }();
  return *settings;
}

nlohmann::ordered_json SettingsJson(const JobSpec& spec) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const JobFile& file : spec.files) {
    files.push_back({{"path", file.path},
                     {"size", file.content.empty() ? file.size : int64_t(file.content.size())},
                     {"sha256", file.sha256},
                     {"executable", file.executable}});
  }
  return {{"name", spec.name},
          {"command", spec.command},
          {"env", spec.env},
          {"workdir", spec.workdir},
          {"processes", ProcessesText(spec)},
          {"processes_per_node", spec.processes_per_node},
          {"gpus_per_process", spec.gpus_per_process},
          {"gpu_memory", spec.gpu_memory},
          {"cpus_per_process", spec.cpus_per_process},
          {"memory_per_process", spec.memory_per_process},
          {"labels", spec.labels},
          {"priority", spec.priority},
          {"preemptible", spec.preemptible},
          {"max_restarts", spec.max_restarts},
          {"failure_policy", spec.class_limits},
          {"restart_delay", absl::FormatDuration(spec.restart_delay)},
          {"time_limit", absl::FormatDuration(spec.time_limit)},
          {"hang_timeout", absl::FormatDuration(spec.hang_timeout)},
          {"stop_grace", absl::FormatDuration(spec.stop_grace)},
          {"grow_after", absl::FormatDuration(spec.grow_after)},
          {"spare_nodes", spec.spare_nodes},
          {"user_error_codes", spec.user_error_codes},
          {"files", std::move(files)},
          {"retention", absl::FormatDuration(spec.retention)},
          {"wait_for_nodes", spec.wait_for_nodes},
          {"mixed_precision", spec.mixed_precision},
          {"gradient_accumulation_steps", spec.gradient_accumulation_steps},
          {"cpu", spec.cpu},
          {"debug", spec.debug}};
}

std::string JobFileText(const JobSpec& spec) {
  const nlohmann::ordered_json unset = SettingsJson(JobSpec()), settings = SettingsJson(spec);
  nlohmann::ordered_json file;
  for (const auto& [key, value] : settings.items()) {
    if (value != unset[key]) file[key] = value;
  }
  if (!spec.files.empty()) {
    file["files"] = nlohmann::ordered_json::object();
    for (const JobFile& one : spec.files) file["files"][one.path] = one.content;
  }
  // Even a 0: without one, the policy is completed from its classes when it is read.
  if (file.contains("failure_policy")) {
    file["failure_policy"]["max_restarts"] = spec.max_restarts;
    file.erase("max_restarts");
  }
  return file.dump(2, ' ', false, json::error_handler_t::replace);
}

namespace {

absl::StatusOr<ResolvedJob> Resolve(absl::string_view text, absl::string_view source,
                                    bool by_people,
                                    const std::map<std::string, std::vector<std::string>>& flags,
                                    const std::vector<std::string>& program) {
  ResolvedJob job;
  Restarts of_file, of_flags;
  if (!text.empty()) MUSTER_RETURN_IF_ERROR(ReadFile(text, source, by_people, &job, &of_file));
  for (const auto& [name, words] : flags) {
    const Setting* const setting = Find(name);
    if (setting == nullptr || words.empty()) continue;
    const json value = FlagValue(setting->kind, words);
    std::string write = setting->read(value, &job.spec);
    if (write.empty()) write = TooSmall(name, job.spec);
    if (!write.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " ", Printable(words.back()), ": write ",
                       setting->kind == Kind::kMap ? "NAME=VALUE" : write));
    }
    if (name == "env") MUSTER_RETURN_IF_ERROR(CheckVariables(value, "--env"));
    job.provenance[name] = {Printable(absl::StrJoin(words, " ")), absl::StrCat("--", name)};
    if (name == "files") TakePaths("", &job);
    if (!of_flags.Add(name, value)) {
      return absl::InvalidArgumentError(
          "--max_restarts: --failure_policy also has it: set it once");
    }
  }
  SetRestarts(of_file, of_flags, &job);
  if (!program.empty()) {
    job.spec.command = program;
    job.provenance["command"] = {Printable(absl::StrJoin(program, " ")), "the command line"};
  }
  if (job.spec.command.empty()) {
    return absl::InvalidArgumentError(
        "no program: write it after --, or as \"command\" in a job file");
  }
  if (!job.spec.workdir.empty() && job.spec.workdir[0] != '/') {
    return absl::InvalidArgumentError(
        absl::StrCat(job.provenance["workdir"].source, ": workdir: ", Printable(job.spec.workdir),
                     ": write an absolute path, which is the same on every node"));
  }
  // Otherwise both of its names would be set.
  for (const char* const name :
       {"MUSTER_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"}) {
    const auto found = job.spec.env.find(name);
    const int steps = job.spec.gradient_accumulation_steps;
    if (!by_people || steps == 0 || found == job.spec.env.end()) continue;
    if (found->second == absl::StrCat(steps)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("env: ", name, ": ", Printable(found->second),
                     " differs from gradient_accumulation_steps: ", steps, ": leave one out"));
  }
  if (job.spec.name.empty()) job.spec.name = NameOf(job.spec.command[0]);
  return job;
}

}  // namespace

absl::StatusOr<ResolvedJob> ResolveJob(absl::string_view text, absl::string_view source,
                                       const std::map<std::string, std::vector<std::string>>& flags,
                                       const std::vector<std::string>& program) {
  return Resolve(text, source, /*by_people=*/true, flags, program);
}

absl::StatusOr<ResolvedJob> ResolveRecord(absl::string_view text, absl::string_view source) {
  return Resolve(text, source, /*by_people=*/false, {}, {});
}

}  // namespace muster::client
