#ifndef MUSTER_CLIENT_JOBS_SLURM_BACKEND_H_
#define MUSTER_CLIENT_JOBS_SLURM_BACKEND_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "client/jobs/job_backend.h"
#include "client/jobs/job_types.h"
#include "client/jobs/program_runner.h"

namespace muster::client {

struct SlurmOptions {
  // A folder on a file system that all nodes share: the records and logs of the jobs.
  std::string folder;
  std::string muster = "muster";  // the command on the nodes
  std::string user = {};          // the owner of all jobs
  std::vector<std::string> sbatch_options = {};
  std::string partition = {};  // used if sbatch gets none of those options; empty: its default
  // What the processes get of this environment: the folder in which they run, unless the job names
  // another one, and the variable MUSTER_PROJECT_DIR.
  std::string here = {};
  std::string project = {};
  // Fills in the path and step of the checkpoint that a program would load from a folder, if there
  // is one, and why, or that it is not known. For a dry run; null: not looked up.
  std::function<void(const std::string& folder, PlannedCheckpoint* checkpoint)> find_checkpoint =
      nullptr;
  ProgramRunner run;
  absl::Duration poll = absl::Seconds(2);  // how often watch and follow_log poll
  // How long they wait for a controller that does not answer.
  absl::Duration patience = absl::Minutes(5);
  const Clock* clock = &Clock::Real();
};

// Jobs in the queue of a SLURM cluster, through its commands: sbatch, squeue, scontrol, scancel,
// sinfo, and sacct if the cluster keeps accounts. SLURM decides where and when a job runs; the
// script that it runs (RenderSlurmScript) starts `muster launch` on each node, restarts programs
// within the allocation, and puts the job back into the queue if it was stopped before its end or
// lost a node.
//
// A job is NAME-ID with SLURM's id. For each job, `folder` has: ID.job, the job file; ID.events, a
// line for each start and end; ID.log, the output of the script and srun; and ID.logs/S/attempt_A/,
// the output of the ranks after S requeues and A restarts in place. Attempts count starts of the
// script. ID.cancel and ID.suspend record what a person wants.
std::unique_ptr<JobBackend> SlurmBackend(SlurmOptions options);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_SLURM_BACKEND_H_
