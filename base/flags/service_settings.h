#ifndef MUSTER_BASE_FLAGS_SERVICE_SETTINGS_H_
#define MUSTER_BASE_FLAGS_SERVICE_SETTINGS_H_

#include <CLI/CLI.hpp>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// The settings of a service. Each is defined once, as an option of CLI11, which gives the flag
// --NAME, the variable PREFIX_NAME (or the option's envname), the key NAME of a config file, the
// help and the checks. The first source that has a setting wins: flag, variable, file, a variable
// shared with other programs if the setting has one, default.
//
// CLI11 reads config files, too, but it prefers them to the environment, and knows neither the line
// nor the source of a value.
class ServiceSettings {
 public:
  struct Options {
    std::string program;                 // "muster-coordinator"
    std::string prefix;                  // prefix of the variables: "MUSTER_COORDINATOR_"
    std::set<std::string> actions = {};  // options that are no settings, such as "version"
    // Settings that also have a variable that other programs use, {"tls_ca", "MUSTER_TLS_CA"}. It
    // may have been set for those programs, so it counts only if no other source has the setting.
    std::map<std::string, std::string> shared = {};
    // The environment of the service's process.
    std::map<std::string, std::string> variables = {};
  };

  // Adds --config and --print_config to `app`, which has all its options and outlives this object.
  // Required options may come from any source.
  ServiceSettings(CLI::App* app, Options options);

  // Reads all sources into the app's variables. `words` are the arguments after the program's name.
  // Returns a text to print instead of serving (--help, --print_config), or nothing.
  // Errors: INVALID_ARGUMENT one line that names the flag, the variable, or file, line and key, and
  // what to write; NOT_FOUND the config file.
  absl::StatusOr<std::optional<std::string>> Parse(std::vector<std::string> words);

 private:
  struct Setting {
    CLI::Option* option;
    std::string name;
    std::string variable;
    bool required = false;
    bool flag = false;      // true or false
    bool repeated = false;  // a list
    std::string source = "default";
  };

  std::string Help();
  absl::Status ReadVariables(bool shared);
  absl::Status ReadConfig(const std::string& path, absl::string_view from);
  absl::Status Apply(Setting* setting, const std::vector<std::string>& values,
                     const std::string& where);
  std::string Print() const;
  Setting* Find(absl::string_view name);

  CLI::App* const app_;
  const Options options_;
  std::vector<Setting> settings_;
  std::string config_;
  bool print_ = false;
};

}  // namespace muster

#endif  // MUSTER_BASE_FLAGS_SERVICE_SETTINGS_H_
