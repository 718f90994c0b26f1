#include "client/cli/command.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_replace.h"
#include "base/exit_code.h"

namespace muster::client {

std::string Variable(const std::map<std::string, std::string>& variables, const std::string& name) {
  const auto it = variables.find(name);
  return it == variables.end() ? "" : it->second;
}

int Begin(const CommandSpec& spec, const std::vector<std::string>& args,
          const CommandContext& context, CommandLine* line) {
  if (context.describe != nullptr) {
    context.describe(spec);
    return kExitOk;
  }
  if (const absl::Status status = ParseCommandLine(spec, args, line); !status.ok()) {
    return Fail(spec, context, status, kExitUsage);
  }
  if (!line->help) return -1;
  context.out << HelpText(spec);
  return kExitOk;
}

int Fail(const CommandSpec& spec, const CommandContext& context, const absl::Status& status,
         int code) {
  context.err << spec.name << ": " << absl::StrReplaceAll(status.message(), {{"\n", " "}}) << "\n";
  return code;
}

std::string Dump(const nlohmann::ordered_json& value) {
  return value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace muster::client
