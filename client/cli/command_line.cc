#include "client/cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/bool_word.h"
#include "base/suggest.h"

namespace muster::client {
namespace {

constexpr char kOutput[] = "output";

std::string Underscored(absl::string_view name) { return absl::StrReplaceAll(name, {{"-", "_"}}); }

struct Found {
  const OptionSpec* option = nullptr;
  bool negated = false;
};

Found Find(const CommandSpec& spec, const std::string& name) {
  for (const OptionSpec& option : spec.options) {
    if (option.name == name || (!option.alias.empty() && option.alias == name))
      return {&option, false};
    if (option.negative && absl::StrCat("no_", option.name) == name) return {&option, true};
  }
  return {};
}

absl::Status Unknown(const CommandSpec& spec, absl::string_view arg, const std::string& name) {
  std::vector<std::string> names = {"help"};
  for (const OptionSpec& option : spec.options) {
    if (option.group.empty()) continue;
    names.push_back(option.name);
    if (option.negative) names.push_back("no_" + option.name);
  }
  const std::string near = DidYouMean(name, names, "--");
  return absl::InvalidArgumentError(
      absl::StrCat("unknown option ", arg, near,
                   near.empty() ? absl::StrCat("; see ", spec.name, " --help") : ""));
}

// CLI11 formats the help; the parsing is our own because the words after the program belong to the
// program.
class Formatter final : public CLI::Formatter {
 public:
  explicit Formatter(const CommandSpec& spec) : spec_(spec) { column_width(40); }
  std::string make_usage(const CLI::App*, std::string) const override {
    return absl::StrCat("Usage: ", spec_.name, spec_.usage.empty() ? "" : " ", spec_.usage, "\n");
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    for (const OptionSpec& o : spec_.options) {
      if (option->get_lnames().front() == o.name && !o.value_name.empty())
        return " " + o.value_name;
    }
    return "";
  }

 private:
  const CommandSpec& spec_;
};

}  // namespace

absl::Status ParseCommandLine(const CommandSpec& spec, const std::vector<std::string>& args,
                              CommandLine* line) {
  size_t i = 0;
  for (; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--") {
      ++i;
      break;
    }
    if (arg == "-h" || arg == "--help") {
      line->help = true;
      return absl::OkStatus();
    }
    if (!absl::StartsWith(arg, "-") || arg == "-") {
      if (spec.takes_program) break;
      line->words.push_back(arg);
      continue;
    }
    const size_t equals = arg.find('=');
    std::string name;
    Found found;
    if (absl::StartsWith(arg, "--")) {
      name = Underscored(
          absl::string_view(arg).substr(2, equals == std::string::npos ? equals : equals - 2));
      found = Find(spec, name);
    } else {
      for (const OptionSpec& option : spec.options) {
        if (option.letter.empty() || arg != absl::StrCat("-", option.letter)) continue;
        name = option.name;
        found = {&option, false};
      }
      if (found.option == nullptr) return Unknown(spec, arg, arg.substr(1));
    }
    if (found.option == nullptr) return Unknown(spec, arg.substr(0, equals), name);
    std::string value;
    if (equals != std::string::npos) {
      if (found.negated) {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " takes no value"));
      }
      value = arg.substr(equals + 1);
      // Launch distinguishes Accelerate's flags from its own by their spelling.
      if (found.option->value_name.empty() && !spec.takes_program) {
        const std::optional<bool> truth = ParseBoolWord(value);
        if (!truth.has_value()) {
          return absl::InvalidArgumentError(absl::StrCat("--", name, "=", value, ": write --", name,
                                                         ", or yes or no after the ="));
        }
        value = *truth ? "true" : "false";
      }
    } else if (found.option->value_name.empty()) {
      value = found.negated ? "false" : "true";
    } else if (i + 1 < args.size() && args[i + 1] != "--") {
      value = args[++i];
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " needs a value: --", name, " ", found.option->value_name));
    }
    const std::vector<std::string>& formats = found.option->values;
    if (found.option->name == kOutput && !formats.empty() &&
        std::find(formats.begin(), formats.end(), value) == formats.end()) {
      const std::string last = formats.size() > 1 ? " or " + formats.back() : "";
      return absl::InvalidArgumentError(absl::StrCat(
          "--output ", value, ": write ",
          absl::StrJoin(formats.begin(), formats.end() - (last.empty() ? 0 : 1), ", "), last));
    }
    std::vector<std::string>& values = line->options[found.option->name];
    if (!found.option->repeated) values.clear();
    values.push_back(std::move(value));
  }
  line->words.insert(line->words.end(), args.begin() + i, args.end());
  if (!spec.takes_program && static_cast<int>(line->words.size()) > spec.max_words) {
    return absl::InvalidArgumentError(absl::StrCat("unexpected word ", line->words[spec.max_words],
                                                   "; see ", spec.name, " --help"));
  }
  return absl::OkStatus();
}

std::string HelpText(const CommandSpec& spec) {
  CLI::App app(spec.summary, spec.name);
  app.formatter(std::make_shared<Formatter>(spec));
  app.set_help_flag("-h,--help", "Print this help and exit");
  for (const OptionSpec& option : spec.options) {
    const std::string help =
        option.negative ? absl::StrCat(option.help, "; --no_", option.name, " turns it off")
                        : option.help;
    const std::string names = absl::StrCat(
        option.letter.empty() ? "" : absl::StrCat("-", option.letter, ","), "--", option.name);
    CLI::Option* const added =
        option.value_name.empty() ? app.add_flag(names, help) : app.add_option(names, help);
    added->group(option.group);
  }
  if (!spec.details.empty()) app.footer(spec.details);
  return app.help();
}

OptionSpec OutputOption(std::vector<std::string> formats) {
  std::string help = absl::StrCat(formats[0], " (default)");
  for (size_t i = 1; i < formats.size(); ++i) {
    absl::StrAppend(&help, i + 1 == formats.size() ? " or " : ", ", formats[i]);
  }
  return {.name = kOutput,
          .value_name = "FORMAT",
          .help = std::move(help),
          .letter = "o",
          .values = std::move(formats)};
}

}  // namespace muster::client
