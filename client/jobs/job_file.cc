#include "client/jobs/job_file.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/bool_word.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/units.h"
#include "base/yaml.h"
#include "client/config/suggest.h"
#include "rpc/session/duration.h"

namespace muster::client {
namespace {

using nlohmann::json;

absl::Status Write(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("write ", what));
}

// How one key takes its words. The status says what to write.
struct Setter {
  JobKey key;
  std::function<absl::Status(const std::vector<std::string>& words, v1::JobSpec* spec)> set;
};

using Words = std::vector<std::string>;

Setter Number(JobKey key, int least, void (*set)(v1::JobSpec*, int)) {
  key.value_name = "N";
  return {key, [least, set](const Words& words, v1::JobSpec* spec) {
            int value = 0;
            if (words.size() != 1 || !absl::SimpleAtoi(words[0], &value) || value < least) {
              return Write(absl::StrCat("a whole number of at least ", least));
            }
            set(spec, value);
            return absl::OkStatus();
          }};
}

Setter Flag(JobKey key, void (*set)(v1::JobSpec*, bool)) {
  return {key, [set](const Words& words, v1::JobSpec* spec) {
            const std::optional<bool> value =
                words.size() == 1 ? ParseBoolWord(words[0]) : std::nullopt;
            if (!value.has_value()) return Write("true or false");
            set(spec, *value);
            return absl::OkStatus();
          }};
}

Setter Time(JobKey key, google::protobuf::Duration* (*field)(v1::JobSpec*)) {
  key.value_name = "TIME";
  return {key, [field](const Words& words, v1::JobSpec* spec) {
            absl::Duration value;
            if (words.size() != 1 || !absl::ParseDuration(words[0], &value) ||
                value < absl::ZeroDuration() || value == absl::InfiniteDuration()) {
              return Write("a duration with a unit, such as 30s, 10m or 12h");
            }
            *field(spec) = rpc::ToProto(value);
            return absl::OkStatus();
          }};
}

Setter Text(JobKey key, void (*set)(v1::JobSpec*, const std::string&)) {
  return {key, [set](const Words& words, v1::JobSpec* spec) {
            if (words.size() != 1) return Write("one word");
            set(spec, words[0]);
            return absl::OkStatus();
          }};
}

Setter Pairs(JobKey key, google::protobuf::Map<std::string, std::string>* (*field)(v1::JobSpec*)) {
  key.value_name = "NAME=VALUE";
  key.repeated = true;
  return {key, [field](const Words& words, v1::JobSpec* spec) {
            for (const std::string& word : words) {
              const size_t equals = word.find('=');
              if (equals == std::string::npos || equals == 0) return Write("NAME=VALUE");
              (*field(spec))[word.substr(0, equals)] = word.substr(equals + 1);
            }
            return absl::OkStatus();
          }};
}

Setter Processes() {
  return {{"processes", "N", "Processes in all; MIN:MAX for a job that takes what is there"},
          [](const Words& words, v1::JobSpec* spec) {
            const std::vector<std::string> bounds =
                words.size() == 1 ? absl::StrSplit(words[0], ':') : Words();
            int min = 0, max = 0;
            if (bounds.empty() || bounds.size() > 2 || !absl::SimpleAtoi(bounds[0], &min) ||
                !absl::SimpleAtoi(bounds.back(), &max) || min < 1 || max < min) {
              return Write("a number such as 8, or MIN:MAX such as 2:8");
            }
            spec->set_min_processes(min);
            spec->set_max_processes(max);
            return absl::OkStatus();
          }};
}

Setter Memory() {
  return {{"memory", "SIZE", "Memory for each process, such as 16GiB"},
          [](const Words& words, v1::JobSpec* spec) {
            const absl::StatusOr<int64_t> bytes =
                words.size() == 1 ? ParseMemorySize(words[0]) : absl::InvalidArgumentError("");
            if (!bytes.ok() || *bytes < 0) return Write("a size with a unit, such as 16GiB");
            spec->mutable_per_process()->set_memory_bytes(*bytes);
            return absl::OkStatus();
          }};
}

Setter UserErrorCodes() {
  return {{"user_error_codes", "CODE", "Exit code that is never retried, besides 2, 126 and 127",
           /*repeated=*/true},
          [](const Words& words, v1::JobSpec* spec) {
            for (const std::string& word : words) {
              int code = 0;
              if (!absl::SimpleAtoi(word, &code) || code < 1 || code > 255) {
                return Write("exit codes from 1 to 255");
              }
              spec->add_user_error_codes(code);
            }
            return absl::OkStatus();
          }};
}

const std::vector<Setter>& Setters() {
  static const auto* const setters = new std::vector<Setter>{
      Text({"name", "NAME", "Name; the job's id is NAME-NUMBER (default: the program's)"},
           [](v1::JobSpec* spec, const std::string& value) { spec->set_name(value); }),
      Processes(),
      Number({"processes_per_node", "", "Processes on each node (default: as few nodes as "
                                        "possible)"},
             0, [](v1::JobSpec* spec, int value) { spec->set_processes_per_node(value); }),
      Number({"gpus", "", "GPUs for each process"}, 0,
             [](v1::JobSpec* spec, int value) { spec->mutable_per_process()->set_gpus(value); }),
      Number({"cpus", "", "CPUs for each process (default 1)"}, 1,
             [](v1::JobSpec* spec, int value) { spec->mutable_per_process()->set_cpus(value); }),
      Memory(),
      Pairs({"labels", "", "Label that nodes must have"},
            [](v1::JobSpec* spec) { return spec->mutable_node_labels(); }),
      Pairs({"env", "", "Variable for the program"},
            [](v1::JobSpec* spec) { return spec->mutable_env(); }),
      Text({"workdir", "FOLDER", "Folder in which it runs, on every node (default: a private one)"},
           [](v1::JobSpec* spec, const std::string& value) { spec->set_working_directory(value); }),
      Number({"priority", "", "Larger first (default 0)"}, INT32_MIN,
             [](v1::JobSpec* spec, int value) { spec->set_priority(value); }),
      Flag({"preemptible", "", "A job of higher priority may stop it; it is queued again"},
           [](v1::JobSpec* spec, bool value) { spec->set_preemptible(value); }),
      Number({"max_restarts", "", "Restarts after failures of the program (default 0)"}, 0,
             [](v1::JobSpec* spec, int value) { spec->set_max_restarts(value); }),
      Time({"restart_delay", "", "Delay before the first restart, doubled with each"},
           [](v1::JobSpec* spec) { return spec->mutable_restart_delay(); }),
      Time({"time_limit", "", "Of each attempt"},
           [](v1::JobSpec* spec) { return spec->mutable_time_limit(); }),
      Time({"stop_grace", "", "Between SIGTERM and SIGKILL (default 30s)"},
           [](v1::JobSpec* spec) { return spec->mutable_stop_grace(); }),
      UserErrorCodes(),
      Flag({"wait_for_nodes", "", "Queue it also if it is larger than all nodes together"},
           [](v1::JobSpec* spec, bool value) { spec->set_wait_for_nodes(value); }),
      Text({"mixed_precision", "TYPE", "no, bf16 or fp16"},
           [](v1::JobSpec* spec, const std::string& value) { spec->set_mixed_precision(value); }),
      Number({"gradient_accumulation_steps", "", "Backward passes for each optimizer step"}, 1,
             [](v1::JobSpec* spec, int value) { spec->set_gradient_accumulation_steps(value); }),
      Flag({"cpu", "", "Train on the CPU"},
           [](v1::JobSpec* spec, bool value) { spec->set_cpu(value); }),
      Flag({"debug", "", "Check every collective across processes"},
           [](v1::JobSpec* spec, bool value) { spec->set_debug(value); }),
  };
  return *setters;
}

const Setter* FindSetter(absl::string_view name) {
  for (const Setter& setter : Setters()) {
    if (setter.key.name == name) return &setter;
  }
  return nullptr;
}

// One value of the file as a word; nullopt: a list or a map.
std::optional<std::string> WordOf(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number()) return value.dump();
  return std::nullopt;
}

// Words as a flag would have them.
std::optional<Words> WordsOf(const json& value) {
  if (const std::optional<std::string> word = WordOf(value)) return Words{*word};
  Words words;
  if (value.is_array()) {
    for (const json& item : value) {
      const std::optional<std::string> word = WordOf(item);
      if (!word.has_value()) return std::nullopt;
      words.push_back(*word);
    }
    return words;
  }
  if (!value.is_object()) return std::nullopt;
  for (const auto& [name, item] : value.items()) {
    const std::optional<std::string> word = WordOf(item);
    if (!word.has_value()) return std::nullopt;
    words.push_back(absl::StrCat(name, "=", *word));
  }
  return words;
}

absl::Status SetCommand(const json& value, v1::JobSpec* spec) {
  std::optional<Words> words = WordsOf(value);
  if (value.is_object() || !words.has_value() || words->empty()) {
    return Write("the program and its arguments, as a list or on one line");
  }
  if (value.is_string()) *words = absl::StrSplit((*words)[0], ' ', absl::SkipEmpty());
  for (std::string& word : *words) spec->add_argv(std::move(word));
  return absl::OkStatus();
}

}  // namespace

const std::vector<JobKey>& JobKeys() {
  static const auto* const keys = [] {
    auto* const all = new std::vector<JobKey>;
    for (const Setter& setter : Setters()) all->push_back(setter.key);
    return all;
  }();
  return *keys;
}

absl::Status SetJobKey(const std::string& name, const std::vector<std::string>& words,
                       v1::JobSpec* spec) {
  const Setter* const setter = FindSetter(name);
  if (setter == nullptr) return absl::InvalidArgumentError(absl::StrCat("no option --", name));
  const absl::Status status = setter->set(words, spec);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat("--", name, " ", words.empty() ? "" : words.back(),
                                                 ": ", status.message()));
}

absl::StatusOr<v1::JobSpec> ParseJobFile(absl::string_view text, absl::string_view source) {
  MUSTER_ASSIGN_OR_RETURN(const YamlDocument document, ParseYaml(text, source));
  if (!document.value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": a job file has keys such as \"command: ./train\", one a line"));
  }
  std::vector<std::string> names = {"command"};
  for (const JobKey& key : JobKeys()) names.push_back(key.name);
  v1::JobSpec spec;
  for (const auto& [name, value] : document.value.items()) {
    const auto line = document.lines.find(absl::StrCat("/", name));
    const std::string place =
        line == document.lines.end() ? std::string(source) : absl::StrCat(source, ":", line->second);
    const Setter* const setter = FindSetter(name);
    if (setter == nullptr && name != "command") {
      return absl::InvalidArgumentError(absl::StrCat(place, ": no key \"", Printable(name, 80),
                                                     "\" in a job file",
                                                     DidYouMean(name, names)));
    }
    if (value.is_null()) continue;
    absl::Status status;
    if (setter == nullptr) {
      status = SetCommand(value, &spec);
    } else {
      const std::optional<Words> words = WordsOf(value);
      status = words.has_value() ? setter->set(*words, &spec) : Write("a value, not a list of lists");
    }
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(place, ": ", name, ": ", status.message(), ", not ",
                       Printable(value.dump(-1, ' ', false, json::error_handler_t::replace), 80)));
    }
  }
  return spec;
}

std::string JobNameOf(absl::string_view program) {
  std::string name;
  for (const char c : BaseName(std::string(program))) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-') {
      name += c;
    } else if (c == '.') {
      break;  // what follows is a suffix
    }
  }
  name.resize(std::min<size_t>(name.size(), 64));
  return name.empty() ? "job" : name;
}

}  // namespace muster::client
