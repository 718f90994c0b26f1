#include "base/flags/service_settings.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/bool_word.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "base/text.h"
#include "base/yaml.h"

namespace muster {
namespace {

using nlohmann::json;

constexpr int64_t kMostBytes = 1 << 20;

// A scalar as the text that a flag would have.
std::optional<std::string> ScalarText(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number()) return value.dump();
  return std::nullopt;
}

// Formats `text` for a config file. What YAML might read as something else is quoted.
std::string YamlScalar(const std::string& text) {
  if (text == "true" || text == "false" || text == "0") return text;
  const bool number = IsDigits(text) && text[0] != '0';
  return number ? text : JsonQuote(text);
}

// Removes the flag from "--lease: Value 0 not in range", because the message has it already.
std::string WithoutFlag(absl::string_view message, const std::string& name) {
  absl::ConsumePrefix(&message, absl::StrCat("--", name, ": "));
  return std::string(message);
}

}  // namespace

ServiceSettings::ServiceSettings(CLI::App* app, Options options)
    : app_(app), options_(std::move(options)) {
  for (CLI::Option* const option : app->get_options()) {
    if (option->get_lnames().empty()) continue;
    Setting setting = {.option = option, .name = option->get_lnames()[0], .variable = ""};
    if (setting.name == "help" || options_.actions.count(setting.name) > 0) continue;
    setting.variable = option->get_envname();
    if (setting.variable.empty() || options_.shared.count(setting.name) > 0) {
      setting.variable = absl::StrCat(options_.prefix, absl::AsciiStrToUpper(setting.name));
    }
    setting.required = option->get_required();
    setting.flag = option->get_expected_max() == 0;
    setting.repeated = option->get_expected_max() > 1;
    // The environment is read here, and required options may come from the file.
    option->envname("");
    option->required(false);
    settings_.push_back(std::move(setting));
  }
  app->add_option("--config", config_,
                  absl::StrCat("YAML file whose keys are the names of these flags; a flag and a "
                               "variable come before it (or ",
                               options_.prefix, "CONFIG)"));
  app->add_flag("--print_config", print_,
                "print every setting with where it comes from, as a config file, and exit");
}

ServiceSettings::Setting* ServiceSettings::Find(absl::string_view name) {
  for (Setting& setting : settings_) {
    if (setting.name == name) return &setting;
  }
  return nullptr;
}

std::string ServiceSettings::Help() {
  for (const Setting& setting : settings_) {
    setting.option->envname(setting.variable);
    setting.option->required(setting.required);
    const auto other = options_.shared.find(setting.name);
    if (other == options_.shared.end()) continue;
    setting.option->description(absl::StrCat(setting.option->get_description(), " (or ",
                                             other->second, ", where nothing else says it)"));
  }
  return app_->help();
}

absl::Status ServiceSettings::Apply(Setting* setting, const std::vector<std::string>& values,
                                    const std::string& where) {
  const auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", setting->name, ": ", why));
  };
  std::vector<std::string> texts = values;
  if (setting->flag) {
    const std::optional<bool> yes = ParseBoolWord(texts[0]);
    if (!yes.has_value()) return bad(absl::StrCat(texts[0], " is neither true nor false"));
    texts[0] = *yes ? "true" : "false";
  }
  try {
    setting->option->add_result(texts);
    setting->option->run_callback();
  } catch (const CLI::Error& error) {
    return bad(WithoutFlag(error.what(), setting->name));
  }
  setting->source = where;
  return absl::OkStatus();
}

absl::Status ServiceSettings::ReadVariables(bool shared) {
  for (Setting& setting : settings_) {
    const auto other = options_.shared.find(setting.name);
    if (shared && other == options_.shared.end()) continue;
    const std::string& variable = shared ? other->second : setting.variable;
    const auto it = options_.variables.find(variable);
    if (setting.source != "default" || it == options_.variables.end() || it->second.empty()) {
      continue;
    }
    const std::vector<std::string> values =
        setting.repeated ? absl::StrSplit(it->second, ',') : std::vector<std::string>{it->second};
    MUSTER_RETURN_IF_ERROR(Apply(&setting, values, variable));
  }
  return absl::OkStatus();
}

absl::Status ServiceSettings::ReadConfig(const std::string& path, absl::string_view from) {
  const absl::StatusOr<std::string> text = ReadFile(path, kMostBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(
        absl::StrCat("config file ", path, " (from ", from, ") does not exist"));
  }
  MUSTER_RETURN_IF_ERROR(text.status());
  MUSTER_ASSIGN_OR_RETURN(const YamlDocument document, ParseYaml(*text, path));
  if (document.value.is_null()) return absl::OkStatus();
  if (!document.value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the file must be a list of KEY: VALUE"));
  }
  for (const auto& [key, value] : document.value.items()) {
    const auto line = document.lines.find("/" + key);
    const std::string where =
        line == document.lines.end() ? path : absl::StrCat(path, ":", line->second);
    Setting* const setting = Find(key);
    if (setting == nullptr) {
      std::vector<std::string> names;
      for (const Setting& known : settings_) names.push_back(known.name);
      return absl::InvalidArgumentError(absl::StrCat(where, ": unknown key ", key,
                                                     DidYouMean(key, names), " (", options_.program,
                                                     " --print_config shows all keys)"));
    }
    if (value.is_null()) continue;
    std::vector<std::string> values;
    const json list = value.is_array() ? value : json::array({value});
    for (const json& one : list) {
      const std::optional<std::string> scalar = ScalarText(one);
      if (!scalar.has_value() || (value.is_array() && !setting->repeated)) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, ": ", key, " must be one value",
                         setting->repeated ? ", or a list of them" : ", not a list or a map"));
      }
      values.push_back(*scalar);
    }
    if (values.empty()) continue;
    if (setting->source == "default") {
      MUSTER_RETURN_IF_ERROR(Apply(setting, values, where));
    }
  }
  return absl::OkStatus();
}

std::string ServiceSettings::Print() const {
  std::vector<std::pair<std::string, std::string>> lines;
  size_t width = 0;
  for (const Setting& setting : settings_) {
    const std::vector<std::string>& results = setting.option->results();
    std::string text = setting.option->get_default_str();
    if (setting.source != "default") {
      std::vector<std::string> words;
      words.reserve(results.size());
      for (const std::string& result : results) words.push_back(YamlScalar(result));
      text = setting.repeated ? absl::StrCat("[", absl::StrJoin(words, ", "), "]")
             : words.empty()  ? "true"
                              : words.back();
    } else if (setting.flag) {
      text = "false";
    } else if (!text.empty()) {
      text = YamlScalar(text);
    }
    std::string line = text.empty() ? absl::StrCat("# ", setting.name, ":")
                                    : absl::StrCat(setting.name, ": ", text);
    width = std::max(width, std::min<size_t>(line.size(), 60));
    lines.emplace_back(std::move(line), text.empty() ? "not set" : setting.source);
  }
  std::string text;
  for (const auto& [line, source] : lines) {
    absl::StrAppend(&text, line, std::string(width - std::min(width, line.size()), ' '), "  # ",
                    source, "\n");
  }
  return text;
}

absl::StatusOr<std::optional<std::string>> ServiceSettings::Parse(std::vector<std::string> words) {
  // CLI11 takes any number for a yes or a no, and after "--name=" the next word.
  for (const std::string& word : words) {
    absl::string_view text = word;
    if (text == "--") break;
    const size_t equals = text.find('=');
    if (equals == text.npos || !absl::ConsumePrefix(&text, "--")) continue;
    const absl::string_view value = absl::string_view(word).substr(equals + 1);
    const Setting* const setting = Find(text.substr(0, text.find('=')));
    if (setting == nullptr) continue;
    if (setting->flag && !ParseBoolWord(value).has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", setting->name, ": ", Printable(value), " is neither true nor false"));
    }
    if (!setting->flag && value.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--", setting->name,
                                                     ": nothing follows the =: write --",
                                                     setting->name, "=VALUE, or leave it out"));
    }
  }
  std::reverse(words.begin(), words.end());
  try {
    app_->parse(words);
  } catch (const CLI::CallForHelp&) {
    return Help();
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(error.what(), "; see ", options_.program, " --help"));
  }
  for (const CLI::Option* const given : app_->parse_order()) {
    for (Setting& setting : settings_) {
      if (setting.option == given) setting.source = "--" + setting.name;
    }
  }
  MUSTER_RETURN_IF_ERROR(ReadVariables(/*shared=*/false));
  const std::string variable = options_.prefix + "CONFIG";
  const auto it = options_.variables.find(variable);
  if (!config_.empty()) {
    MUSTER_RETURN_IF_ERROR(ReadConfig(config_, "--config"));
  } else if (it != options_.variables.end() && !it->second.empty()) {
    MUSTER_RETURN_IF_ERROR(ReadConfig(it->second, variable));
  }
  MUSTER_RETURN_IF_ERROR(ReadVariables(/*shared=*/true));
  if (print_) return Print();
  for (const Setting& setting : settings_) {
    if (setting.required && setting.option->count() == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(setting.name, " is required: give --", setting.name, ", ", setting.variable,
                       " or a key of --config; see ", options_.program, " --help"));
    }
  }
  return std::nullopt;
}

}  // namespace muster
