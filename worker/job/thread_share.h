#ifndef MUSTER_WORKER_JOB_THREAD_SHARE_H_
#define MUSTER_WORKER_JOB_THREAD_SHARE_H_

#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace muster {

// How many threads a process computes with on the CPU by default. Muster's launchers divide the
// cores of a node among its processes (OMP_NUM_THREADS); mpirun and srun do not, and LibTorch then
// uses as many threads as this process may use cores.

// The cores that a process may compute on.
struct Cores {
  int of_node = 1;           // the job's processes of this node together
  int of_process = 1;        // this process: fewer if a launcher has bound it
  int threads_per_core = 1;  // with 2, LibTorch uses half as many threads as there are cores here
};

// Returns the cores of this machine: those that are online, but no more than its control group
// (cpuset.cpus.effective, cpu.max) and SLURM's step (SLURM_CPUS_ON_NODE in `variables`) allow.
// `root` prefixes the files, for tests.
Cores ReadCores(const std::map<std::string, std::string>& variables, const std::string& root = "");

// Returns the number of CPUs in a list such as "0-3,8"; 0 if it is malformed.
int CountCpuList(absl::string_view list);

// Returns the number of threads for one of `processes` that divide the node's cores: at least 1 and
// at most `alone`, the number that LibTorch uses for this process by itself (one for each core or,
// on processors with two threads to a core, half as many). If `alone` is another number, the
// program or its user has chosen it, and it is returned unchanged.
int ThreadShare(const Cores& cores, int processes, int alone);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_THREAD_SHARE_H_
