#ifndef MUSTER_WORKER_JOB_THREAD_SHARE_H_
#define MUSTER_WORKER_JOB_THREAD_SHARE_H_

#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace muster {

// How many threads a process computes with on the CPU if nobody says so. A launcher of Muster's
// divides the cores of a node among its processes (OMP_NUM_THREADS); mpirun and srun do not, and
// LibTorch takes as many threads as this process may use cores.

// What a process may compute on.
struct Cores {
  int of_node = 1;     // the job's processes of this node together
  int of_process = 1;  // this one: fewer where a launcher has bound it
};

// Of this machine: those that are online, less what its control group (cpuset.cpus.effective,
// cpu.max) and SLURM's step (SLURM_CPUS_ON_NODE in `variables`) leave. `root` prefixes the files,
// for tests.
Cores ReadCores(const std::map<std::string, std::string>& variables, const std::string& root = "");

// How many a list such as "0-3,8" has; 0: it is none.
int CountCpuList(absl::string_view list);

// The threads of one of `processes` that divide the node's cores, at least 1 and at most `alone`:
// what LibTorch takes for this process by itself, one for each core or, on processors with two
// threads to a core, half as many. Fewer than that are the program's own choice, and stay.
int ThreadShare(const Cores& cores, int processes, int alone);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_THREAD_SHARE_H_
