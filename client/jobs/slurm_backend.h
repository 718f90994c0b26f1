#ifndef MUSTER_CLIENT_JOBS_SLURM_BACKEND_H_
#define MUSTER_CLIENT_JOBS_SLURM_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/jobs/job_backend.h"
#include "client/jobs/program_runner.h"

namespace muster::client {

struct SlurmOptions {
  // A folder on a file system that all nodes share: the records and logs of the jobs.
  std::string folder;
  std::string muster = "muster";  // the command on the nodes
  std::string user = {};          // the owner of all jobs
  std::vector<std::string> sbatch_options = {};
  ProgramRunner run;
  absl::Duration poll = absl::Seconds(2);  // how often watch and follow_log look again
  // And how long a controller that does not answer is waited for then.
  absl::Duration patience = absl::Minutes(5);
};

// Jobs in the queue of a SLURM cluster, by its commands: sbatch, squeue, scontrol, scancel, sinfo,
// and sacct where the cluster keeps accounts. SLURM decides where and when; the script that it runs
// (RenderSlurmScript) starts `muster launch` on each node, restarts programs within the allocation,
// and puts the job back into the queue when it was stopped before its end or lost a node.
//
// A job is NAME-ID with SLURM's id. Of each there are in `folder`: ID.job, the job file; ID.events,
// a line for each start and end; ID.log, what the script and srun print; and ID.logs/S/attempt_A/,
// the output of the ranks after S requeues and A restarts in place. Attempts count starts of the
// script. ID.cancel and ID.suspend say what a person wants.
std::unique_ptr<JobBackend> SlurmBackend(SlurmOptions options);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_SLURM_BACKEND_H_
