#include <limits.h>
#include <string.h>
#include <unistd.h>

#include <cerrno>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/descriptor_limit.h"
#include "base/exit_code.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/log_variables.h"
#include "base/status_macros.h"
#include "base/variable_list.h"
#include "client/cli/local_job.h"
#include "client/cli/muster_command.h"
#include "client/cli/output.h"
#include "coordinator/service/server.h"

namespace {

class ServerInThisProcess final : public muster::client::EmbeddedCoordinator {
 public:
  explicit ServerInThisProcess(std::unique_ptr<muster::coordinator::CoordinatorServer> server)
      : server_(std::move(server)) {}
  std::string address() const override { return server_->address(); }
  void End(const std::string& why) override {
    server_->runner().SetEndsForGood(why);
    server_->Shutdown();
  }

 private:
  const std::unique_ptr<muster::coordinator::CoordinatorServer> server_;
};

absl::StatusOr<std::unique_ptr<muster::client::EmbeddedCoordinator>> StartCoordinator(
    const muster::client::EmbeddedCoordinatorOptions& options, bool log_notices) {
  muster::coordinator::CoordinatorServer::Options server;
  server.runner.log_notices = log_notices;
  server.rpc.listen = options.listen;
  server.rpc.tls = options.tls;
  server.token_file = options.token_file;
  server.checkpoint_key = options.checkpoint_key;
  // A job of many machines needs more descriptors than the usual soft limit.
  muster::RaiseDescriptorLimit();
  MUSTER_ASSIGN_OR_RETURN(auto started,
                          muster::coordinator::CoordinatorServer::Start(std::move(server)));
  return std::unique_ptr<muster::client::EmbeddedCoordinator>(
      std::make_unique<ServerInThisProcess>(std::move(started)));
}

}  // namespace

int main(int argc, char** argv) {
  if (const absl::Status armed = muster::ArmFailpointsFromEnvironment(); !armed.ok()) {
    std::cerr << "muster: " << armed.message() << std::endl;
    return muster::kExitUsage;
  }
  const std::map<std::string, std::string> variables = muster::ProcessVariables();
  if (const absl::Status log = muster::CheckLogVariables(variables); !log.ok()) {
    std::cerr << "muster: " << log.message() << std::endl;
    return muster::kExitUsage;
  }
  // The embedded coordinator's logs are for operators, not for the user's terminal, where the
  // launcher reports each failure once.
  const auto level = variables.find("MUSTER_LOG_LEVEL");
  const bool for_operators = level != variables.end() && !level->second.empty();
  if (!for_operators) muster::SetLogLevel(muster::LogLevel::kWarning);
  char self[PATH_MAX] = "";
  if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) self[0] = '\0';
  const int code =
      muster::client::RunMuster({argv + 1, argv + argc},
                                {.variables = variables,
                                 .out = std::cout,
                                 .err = std::cerr,
                                 .in = &std::cin,
                                 .in_is_terminal = isatty(STDIN_FILENO) != 0,
                                 .columns = muster::client::ColumnsIfTerminal(STDOUT_FILENO)},
                                muster::client::LocalBackend([for_operators](const auto& options) {
                                  return StartCoordinator(options, for_operators);
                                }),
                                self);
  // A table or a config file that was cut by a full disk must not pass for complete.
  errno = 0;
  if (!std::cout.flush()) {
    // For a line before the last one, the error is no longer known.
    const std::string why = errno == 0 ? "" : std::string(": ") + strerror(errno);
    std::cerr << "muster: standard output cannot be written" << why << std::endl;
    return code == 0 ? muster::kExitInternal : code;
  }
  return code;
}
