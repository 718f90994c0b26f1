#include "client/cli/open_backend.h"

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "client/cli/connection.h"
#include "client/cli/planned_checkpoint.h"
#include "client/jobs/client_on_channel.h"
#include "client/jobs/slurm_backend.h"

namespace muster::client {
namespace {

std::string Place(const CommandLine& line, const CommandContext& context) {
  return line.Has("on") ? line.Get("on") : Variable(context.variables, "MUSTER_ON");
}

// The folder of records and logs of jobs in SLURM's queue: on a file system that its nodes share,
// as they usually do homes.
std::string SlurmFolder(const CommandContext& context) {
  const std::string given = Variable(context.variables, "MUSTER_SLURM_FOLDER");
  return given.empty() ? JoinPath(Variable(context.variables, "HOME"), ".muster/slurm/jobs")
                       : given;
}

std::unique_ptr<JobBackend> OnSlurm(const CommandLine& line, const CommandContext& context,
                                    const std::string& folder) {
  SlurmOptions options = {
      .folder = folder, .user = Variable(context.variables, "USER"), .run = context.run_program};
  if (const auto given = line.options.find("sbatch"); given != line.options.end()) {
    options.sbatch_options = given->second;
  }
  options.partition = Variable(context.variables, "SBATCH_PARTITION");
  options.project = Variable(context.variables, "MUSTER_PROJECT_DIR");
  options.find_checkpoint = FindCheckpoint;
  std::error_code unknown;
  options.here = std::filesystem::current_path(unknown).string();
  // This command itself, which may not be in the PATH of the nodes.
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", unknown);
  const std::string chosen = Variable(context.variables, "MUSTER");
  options.muster = !chosen.empty() ? chosen : unknown ? "muster" : self.string();
  return SlurmBackend(std::move(options));
}

}  // namespace

std::vector<OptionSpec> JobOptions(std::vector<OptionSpec> more) {
  more.push_back({.name = "on",
                  .value_name = "agents|slurm",
                  .help = "Where jobs run: a coordinator's agents, or the SLURM cluster of this "
                          "machine (MUSTER_ON; default agents)",
                  .values = {"agents", "slurm"}});
  return ConnectionOptions(std::move(more));
}

bool IsOnSlurm(const CommandLine& line, const CommandContext& context) {
  return Place(line, context) == "slurm";
}

std::unique_ptr<JobBackend> OpenBackend(const CommandSpec& spec, const CommandLine& line,
                                        const CommandContext& context, int* code, bool keeps_jobs) {
  const std::string on = Place(line, context);
  const auto refuse = [&](const std::string& what) {
    *code = Fail(spec, context, absl::InvalidArgumentError(what), kExitUsage);
    return nullptr;
  };
  if (IsOnSlurm(line, context)) {
    if (line.Has("coordinator")) {
      return refuse(
          "--coordinator and --on slurm exclude each other: SLURM has its own controller");
    }
    const std::string folder = SlurmFolder(context);
    if (folder.empty() || folder[0] != '/') {
      return refuse(absl::StrCat("MUSTER_SLURM_FOLDER: ", folder,
                                 " is no absolute path: name a folder that all nodes share"));
    }
    return OnSlurm(line, context, folder);
  }
  if (!on.empty() && on != "agents") {
    return refuse(
        absl::StrCat(line.Has("on") ? "--on " : "MUSTER_ON=", on, ": write agents or slurm"));
  }
  if (line.Has("sbatch")) return refuse("--sbatch is for jobs on SLURM: add --on slurm");
  Connection connection;
  *code = Dial(spec, line, context, &connection);
  if (*code >= 0) return nullptr;
  // A launch's coordinator has no nodes, and its queue ends with the launch.
  if (keeps_jobs && !connection.launch.empty()) {
    *code = Fail(spec, context,
                 absl::FailedPreconditionError(absl::StrCat(
                     "the coordinator at ", connection.address, " is that of your launch ",
                     connection.launch,
                     ": no agent waits for jobs there, and a job would be lost "
                     "when the launch ends; name another one with --coordinator or "
                     "MUSTER_COORDINATOR, or start one: muster coordinator --listen IP:PORT")),
                 kExitUsage);
    return nullptr;
  }
  return CoordinatorBackend(
      StoppableOn(connection.channel, connection.timeout, connection.timeout));
}

}  // namespace muster::client
