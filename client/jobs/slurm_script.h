#ifndef MUSTER_CLIENT_JOBS_SLURM_SCRIPT_H_
#define MUSTER_CLIENT_JOBS_SLURM_SCRIPT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/jobs/job_types.h"

namespace muster::client {

// The batch script that runs a job under SLURM. All pure.

// Refuses settings that a job may have, but that SLURM cannot honour or decides itself.
// INVALID_ARGUMENT names the setting, and the option of sbatch to use instead.
absl::Status CheckSlurmJob(const JobSpec& spec);

// Refuses options of sbatch that the script needs itself, and words that are not options.
// INVALID_ARGUMENT.
absl::Status CheckSbatchOptions(const std::vector<std::string>& options);

// Returns the variables by which sbatch would override what the script of this job sets, or change
// the kind of submission: for sbatch they take precedence over the options in a script.
std::vector<std::string> SbatchVariablesOfScript(const JobSpec& spec);

struct SlurmNode {
  std::string name;
  int cpus = 0;
  int64_t memory_bytes = 0;
  int gpus = 0;
  bool in_default_partition = false;  // in the partition of jobs that name none
  bool takes_jobs = true;             // neither down nor drained
};
// Reads the nodes from the output of `sinfo -h -N -o "%N|%c|%m|%G|%P|%t"`: CPUs, MiB, generic
// resources, partition and state. A node in several partitions counts once. INVALID_ARGUMENT: any
// other output.
absl::StatusOr<std::vector<SlurmNode>> ParseSlurmNodes(absl::string_view sinfo);

// The same number of processes on each node.
struct SlurmLayout {
  int processes_per_node = 0;
  int min_nodes = 0;
  int max_nodes = 0;
};
// Chooses the layout as a coordinator does for nodes that are all free: max_processes if they fit,
// else as many as fit, on as few nodes as possible. FAILED_PRECONDITION: the job fits on no number
// of them.
absl::StatusOr<SlurmLayout> ChooseSlurmLayout(const JobSpec& spec,
                                              const std::vector<SlurmNode>& nodes);

struct SlurmScriptOptions {
  std::string muster;  // the command
  std::string folder;  // the folder of the records, which all nodes share
  std::string key;     // the key of this submission
};
// Returns a script that makes the settings for this job and then runs the body of
// deploy/slurm/train.sbatch. INVALID_ARGUMENT: a folder or a name of a variable that no script can
// have.
absl::StatusOr<std::string> RenderSlurmScript(const JobSpec& spec, const SlurmLayout& layout,
                                              const SlurmScriptOptions& options);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_SLURM_SCRIPT_H_
