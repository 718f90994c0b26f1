#include "client/cli/completion.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace muster::client {
namespace {

constexpr char kProgram[] = "muster ";

// Returns "checkpoints list" for "muster checkpoints list".
std::string Path(const CommandSpec& spec) { return spec.name.substr(sizeof(kProgram) - 1); }

bool IsMember(const CommandSpec& spec) { return absl::StrContains(Path(spec), ' '); }

std::string LastWord(const CommandSpec& spec) { return spec.name.substr(spec.name.rfind(' ') + 1); }

std::vector<const CommandSpec*> MembersOf(const CommandSpec& group,
                                          const std::vector<CommandSpec>& commands) {
  std::vector<const CommandSpec*> members;
  for (const CommandSpec& spec : commands) {
    if (absl::StartsWith(spec.name, absl::StrCat(group.name, " "))) members.push_back(&spec);
  }
  return members;
}

// Returns every way to write an option: "--output", "-o".
std::vector<std::string> Spellings(const OptionSpec& option) {
  std::vector<std::string> spellings = {absl::StrCat("--", option.name)};
  if (!option.letter.empty()) spellings.push_back(absl::StrCat("-", option.letter));
  return spellings;
}

std::string OneLine(absl::string_view text) { return absl::StrReplaceAll(text, {{"\n", " "}}); }

bool IsFile(const OptionSpec& option) {
  return option.value_name == "FILE" || option.value_name == "FOLDER";
}

// --- bash ---

// Bash splits a line at "=" and at ":", but not in quotes: "--flag=value" is three words.
constexpr char kBashHead[] = R"sh(# bash completion for muster, written by: muster completion bash
_muster() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}
  local command=${COMP_WORDS[1]} start=2 flags='' valued='' values='' verbs='' program='' word i
  COMPREPLY=()
  if [[ $cur == = ]]; then
    cur=
  elif [[ $prev == = ]]; then
    prev=${COMP_WORDS[COMP_CWORD-2]}
  fi
  [[ $prev == --* ]] && prev=--$(_muster_joined "${prev:2}")
)sh";

constexpr char kBashTail[] = R"sh(  # Past the flags: files, or what the program itself completes.
  for ((i = start; i < COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    if [[ $word == -- ]]; then
      ((++i))
      break
    elif [[ $word == -* ]]; then
      [[ $word == --* ]] && word=--$(_muster_joined "${word:2}")
      if [[ ${COMP_WORDS[i+1]} == = ]]; then
        ((i += 2))
      elif [[ $valued == *" $word "* ]]; then
        ((++i))
      fi
    elif [[ -n $program ]]; then
      break
    fi
  done
  if ((i < COMP_CWORD)) || [[ ${COMP_WORDS[i-1]} == -- ]]; then
    if [[ -n $program ]] && declare -F _command_offset >/dev/null; then
      _command_offset "$i"
    fi
    return
  fi
  if [[ $valued == *" $prev "* ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
  elif [[ $cur == --* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "--$(_muster_joined "${cur:2}")"))
  elif [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  elif [[ -n $verbs ]] && ((COMP_CWORD == start)); then
    COMPREPLY=($(compgen -W "$verbs" -- "$cur"))
  elif [[ -n $program ]]; then
    COMPREPLY=($(compgen -c -- "$cur"))
  fi
}
# The words of a flag may be joined by "_" or "-".
_muster_joined() { printf '%s' "${1//-/_}"; }
complete -o default -F _muster muster
)sh";

std::vector<std::string> FlagsOf(const CommandSpec& spec) {
  std::vector<std::string> flags = {"--help", "-h"};
  for (const OptionSpec& option : spec.options) {
    if (option.group.empty()) continue;
    for (std::string& spelling : Spellings(option)) flags.push_back(std::move(spelling));
    if (option.negative) flags.push_back(absl::StrCat("--no_", option.name));
  }
  return flags;
}

std::string Names(const std::vector<const CommandSpec*>& commands) {
  return absl::StrJoin(commands, " ", [](std::string* out, const CommandSpec* spec) {
    absl::StrAppend(out, LastWord(*spec));
  });
}

std::string BashScript(const std::vector<CommandSpec>& commands) {
  std::vector<const CommandSpec*> top;
  for (const CommandSpec& spec : commands) {
    if (!IsMember(spec)) top.push_back(&spec);
  }
  std::string text = kBashHead;
  absl::StrAppend(&text, "  if ((COMP_CWORD == 1)); then\n    COMPREPLY=($(compgen -W '",
                  Names(top), " --help --version' -- \"$cur\"))\n    return\n  fi\n");
  for (const CommandSpec* spec : top) {
    const auto members = MembersOf(*spec, commands);
    if (members.empty()) continue;
    absl::StrAppend(&text, "  if [[ $command == ", Path(*spec),
                    " ]]; then\n    if ((COMP_CWORD == 2)); then\n      COMPREPLY=($(compgen -W '",
                    Names(members),
                    " --help' -- \"$cur\"))\n      return\n    fi\n"
                    "    command+=\" ${COMP_WORDS[2]}\" start=3\n  fi\n");
  }
  absl::StrAppend(&text, "  case $command in\n");
  for (const CommandSpec& spec : commands) {
    absl::StrAppend(&text, "    '", Path(spec), "')\n");
    if (spec.external) {
      absl::StrAppend(&text, "      flags=$(muster ", Path(spec),
                      " --help 2>/dev/null | grep -oE -- '--[a-z_]+' | sort -u)\n");
    } else {
      absl::StrAppend(&text, "      flags='", absl::StrJoin(FlagsOf(spec), " "), "'\n");
    }
    std::string valued;
    for (const OptionSpec& option : spec.options) {
      if (option.value_name.empty() || option.group.empty()) continue;
      absl::StrAppend(&valued, absl::StrJoin(Spellings(option), " "), " ");
    }
    if (!valued.empty()) absl::StrAppend(&text, "      valued=' ", valued, "'\n");
    if (!spec.verbs.empty()) {
      absl::StrAppend(&text, "      verbs='", absl::StrJoin(spec.verbs, " "), "'\n");
    }
    if (spec.takes_program) absl::StrAppend(&text, "      program=yes\n");
    absl::StrAppend(&text, "      ;;\n");
  }
  absl::StrAppend(&text, "  esac\n  case \"$command $prev\" in\n");
  for (const CommandSpec& spec : commands) {
    for (const OptionSpec& option : spec.options) {
      if (option.values.empty() || option.group.empty()) continue;
      const std::string either = absl::StrJoin(
          Spellings(option), " | ", [&](std::string* out, const std::string& spelling) {
            absl::StrAppend(out, "'", Path(spec), " ", spelling, "'");
          });
      absl::StrAppend(&text, "    ", either, ") values='", absl::StrJoin(option.values, " "),
                      "' ;;\n");
    }
  }
  return absl::StrCat(text, "  esac\n", kBashTail);
}

// --- zsh ---

// Quotes for use inside single quotes.
std::string ZshQuoted(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"'", "'\\''"}, {"\n", " "}});
}
// Quotes for the brackets and messages of _arguments.
std::string ZshText(absl::string_view text) {
  return ZshQuoted(
      absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"[", "\\["}, {"]", "\\]"}, {":", "\\:"}}));
}

std::string ZshArguments(const CommandSpec& spec, const std::string& indent) {
  const std::string next = absl::StrCat(" \\\n", indent, "  ");
  std::string text =
      absl::StrCat("_arguments -S", next, "'(- *)'{-h,--help}'[Print this help and exit]'");
  for (const OptionSpec& option : spec.options) {
    if (option.group.empty()) continue;
    const std::string help = ZshText(option.help);
    std::string value;
    if (!option.value_name.empty()) {
      absl::StrAppend(&value, ":", ZshText(option.value_name), ":");
      if (!option.values.empty()) {
        absl::StrAppend(&value, "(", absl::StrJoin(option.values, " "), ")");
      } else if (IsFile(option)) {
        absl::StrAppend(&value, "_files");
      }
    }
    const char* const repeated = option.repeated ? "*" : "";
    absl::StrAppend(&text, next, "'", repeated, "--", option.name,
                    option.value_name.empty() ? "" : "=", "[", help, "]", value, "'");
    if (!option.letter.empty()) {
      absl::StrAppend(&text, next, "'", repeated, "-", option.letter, "[", help, "]", value, "'");
    }
    if (option.negative) {
      absl::StrAppend(&text, next, "'--no_", option.name, "[Not: ", help, "]'");
    }
  }
  if (spec.takes_program) {
    absl::StrAppend(&text, next, "'(-):program: _command_names -e'", next,
                    "'*::arguments: _normal'");
  } else if (!spec.verbs.empty()) {
    absl::StrAppend(&text, next, "'1: :(", absl::StrJoin(spec.verbs, " "), ")'", next,
                    "'*: :_files'");
  } else {
    absl::StrAppend(&text, next, "'*: :_files'");
  }
  return text;
}

// Returns the options that the program's own help lists.
std::string ZshExternal(const CommandSpec& spec) {
  return absl::StrCat("compadd -- ${(f)\"$(muster ", Path(spec),
                      " --help 2>/dev/null | grep -oE -- '--[a-z_]+')\"}; _default");
}

// Returns a `case` for the words after a command or a group; $words[1] is its name.
std::string ZshCase(const std::vector<const CommandSpec*>& members,
                    const std::vector<CommandSpec>& commands, const std::string& indent) {
  std::string text = absl::StrCat(indent, "case $words[1] in\n");
  for (const CommandSpec* spec : members) {
    absl::StrAppend(&text, indent, LastWord(*spec), ")\n");
    const std::string inner = absl::StrCat(indent, "  ");
    const auto nested = MembersOf(*spec, commands);
    if (nested.empty()) {
      absl::StrAppend(&text, inner,
                      spec->external ? ZshExternal(*spec) : ZshArguments(*spec, inner), "\n");
    } else {
      absl::StrAppend(&text, inner, "if (( CURRENT == 2 )); then\n", inner, "  commands=(\n");
      for (const CommandSpec* member : nested) {
        absl::StrAppend(&text, inner, "    '", LastWord(*member), ":", ZshQuoted(member->summary),
                        "'\n");
      }
      absl::StrAppend(&text, inner, "  )\n", inner, "  _describe -t commands 'command' commands\n",
                      inner, "else\n", inner, "  shift words\n", inner, "  (( CURRENT-- ))\n",
                      ZshCase(nested, commands, inner + "  "), inner, "fi\n");
    }
    absl::StrAppend(&text, inner, ";;\n");
  }
  return absl::StrCat(text, indent, "esac\n");
}

std::string ZshScript(const std::vector<CommandSpec>& commands) {
  std::vector<const CommandSpec*> top;
  for (const CommandSpec& spec : commands) {
    if (!IsMember(spec)) top.push_back(&spec);
  }
  std::string text =
      "#compdef muster\n"
      "# zsh completion for muster, written by: muster completion zsh\n"
      "_muster() {\n"
      "  local curcontext=$curcontext state line\n"
      "  local -a commands\n"
      "  _arguments -C '(- *)'{-h,--help}'[Print the commands and exit]' \\\n"
      "    '(- *)--version[Print the version and exit]' '1: :->command' '*:: :->rest' && return\n"
      "  if [[ $state == command ]]; then\n"
      "    commands=(\n";
  for (const CommandSpec* spec : top) {
    absl::StrAppend(&text, "      '", Path(*spec), ":", ZshQuoted(spec->summary), "'\n");
  }
  return absl::StrCat(text,
                      "    )\n"
                      "    _describe -t commands 'command' commands\n"
                      "    return\n"
                      "  fi\n",
                      ZshCase(top, commands, "  "),
                      "}\n"
                      "# As a file of $fpath this is the function; sourced, it must register it.\n"
                      "if [[ $funcstack[1] == _muster ]]; then\n"
                      "  _muster \"$@\"\n"
                      "else\n"
                      "  compdef _muster muster\n"
                      "fi\n");
}

// --- fish ---

std::string FishQuoted(absl::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(OneLine(text), {{"\\", "\\\\"}, {"'", "\\'"}}), "'");
}

std::string FishScript(const std::vector<CommandSpec>& commands) {
  std::string text =
      "# fish completion for muster, written by: muster completion fish\n"
      "# Whether the line so far is `muster` and these words; with --next, whether the word after\n"
      "# them is being written.\n"
      "function __muster_is\n"
      "    set -l words (commandline -opc)\n"
      "    set -l next no\n"
      "    if test \"$argv[1]\" = --next\n"
      "        set next yes\n"
      "        set -e argv[1]\n"
      "    end\n"
      "    set -l length (math (count $argv) + 1)\n"
      "    test (count $words) -ge $length; or return 1\n"
      "    test $next = no -o (count $words) -eq $length; or return 1\n"
      "    test $length -eq 1 -o \"$words[2..$length]\" = \"$argv\"\n"
      "end\n"
      "complete -c muster -n '__muster_is --next' -f\n"
      "complete -c muster -n '__muster_is --next' -s h -l help -d 'Print the commands and exit'\n"
      "complete -c muster -n '__muster_is --next' -l version -d 'Print the version and exit'\n";
  for (const CommandSpec& spec : commands) {
    const std::string path = Path(spec);
    const size_t space = path.rfind(' ');
    const std::string group = space == std::string::npos ? "" : " " + path.substr(0, space);
    absl::StrAppend(&text, "complete -c muster -n '__muster_is --next", group, "' -f -a ",
                    LastWord(spec), " -d ", FishQuoted(spec.summary), "\n");
    const std::string begin = absl::StrCat("complete -c muster -n '__muster_is ", path, "'");
    absl::StrAppend(&text, begin, " -s h -l help -d 'Print this help and exit'\n");
    if (!spec.verbs.empty()) {
      absl::StrAppend(&text, "complete -c muster -n '__muster_is --next ", path, "' -f -a '",
                      absl::StrJoin(spec.verbs, " "), "'\n");
    }
    if (spec.external) {
      absl::StrAppend(&text, begin, " -a \"(muster ", path,
                      " --help 2>/dev/null | string match -ar -- '--[a-z_]+')\"\n");
    }
    for (const OptionSpec& option : spec.options) {
      if (option.group.empty()) continue;
      absl::StrAppend(&text, begin);
      if (!option.letter.empty()) absl::StrAppend(&text, " -s ", option.letter);
      absl::StrAppend(&text, " -l ", option.name);
      if (!option.value_name.empty()) absl::StrAppend(&text, IsFile(option) ? " -r -F" : " -x");
      if (!option.values.empty()) {
        absl::StrAppend(&text, " -a '", absl::StrJoin(option.values, " "), "'");
      }
      absl::StrAppend(&text, " -d ", FishQuoted(option.help), "\n");
      if (option.negative) {
        absl::StrAppend(&text, begin, " -l no_", option.name, " -d ",
                        FishQuoted(absl::StrCat("Not: ", option.help)), "\n");
      }
    }
  }
  return text;
}

}  // namespace

const std::vector<std::string>& CompletionShells() {
  static const auto* const shells = new std::vector<std::string>{"bash", "zsh", "fish"};
  return *shells;
}

std::string CompletionScript(absl::string_view shell, const std::vector<CommandSpec>& commands) {
  return shell == "bash"  ? BashScript(commands)
         : shell == "zsh" ? ZshScript(commands)
                          : FishScript(commands);
}

}  // namespace muster::client
