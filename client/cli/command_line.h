#ifndef MUSTER_CLIENT_CLI_COMMAND_LINE_H_
#define MUSTER_CLIENT_CLI_COMMAND_LINE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster::client {

// One option of a command.
struct OptionSpec {
  std::string name;             // without "--", words joined by "_"
  std::string value_name = {};  // empty: a flag, given as --name or --name=true|false
  std::string help = {};
  std::string alias = {};         // another name, not in the help
  std::string group = "Options";  // heading in the help; empty: not in the help
  bool repeated = false;          // may be given more than once; otherwise the last one counts
  bool negative = false;          // "--no_NAME" is accepted too and means false
  std::string letter = {};        // "o": "-o" means the same
  std::vector<std::string> values = {};  // words that shells offer as its value; empty: none
};

struct CommandSpec {
  std::string name;          // "muster launch"
  std::string summary = {};  // one line
  std::string usage = {};    // the text after the name: "[OPTIONS] -- PROGRAM [ARGS...]"
  std::string details = {};  // printed after the options in the help
  std::vector<OptionSpec> options = {};
  // The first word that is not an option begins the program's own command line; nothing after it is
  // interpreted.
  bool takes_program = false;
  int max_words = 0;                    // words that are no options, if it takes no program
  std::vector<std::string> verbs = {};  // the allowed first words; empty: any
  bool external = false;                // another program has the options and reads the arguments
};

struct CommandLine {
  bool help = false;
  // By option name, in the order given. For flags: "true" or "false" or the text after "=".
  std::map<std::string, std::vector<std::string>> options;
  std::vector<std::string> words;  // or the program and its arguments
  bool Has(const std::string& name) const { return options.count(name) != 0; }
  std::string Get(const std::string& name) const {
    const auto it = options.find(name);
    return it == options.end() ? "" : it->second.back();
  }
};

// Reads the arguments after the command's name. The words of an option may be joined by "_" or "-";
// "--name value" and "--name=value" are the same; names are never abbreviated; "--" ends the
// options; -h is --help. A flag takes a value only after "=", a word for yes or no; --output takes
// one of its formats. Errors: INVALID_ARGUMENT, one line: unknown option (with the nearest one), a
// missing or wrong value, too many words.
absl::Status ParseCommandLine(const CommandSpec& spec, const std::vector<std::string>& args,
                              CommandLine* line);

// The text for --help.
std::string HelpText(const CommandSpec& spec);

// --output, -o: the first format is the default.
OptionSpec OutputOption(std::vector<std::string> formats);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_COMMAND_LINE_H_
