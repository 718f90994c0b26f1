#ifndef MUSTER_CLIENT_CONFIG_CLUSTER_LAUNCH_H_
#define MUSTER_CLIENT_CONFIG_CLUSTER_LAUNCH_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "client/config/launch_config.h"

namespace muster::client {

// Returns the numeric address of a host, for main_process_ip. May wait for a name server. Errors:
// UNAVAILABLE: there is none; FAILED_PRECONDITION: it is an address of this machine that others
// cannot reach (127.0.1.1).
absl::StatusOr<std::string> AddressOfHost(const std::string& host);

// Returns, as settings, the machines on which a cluster's launcher (srun, mpirun) has started this
// command, once on each: num_machines, machine_rank and, under SLURM, main_process_ip and
// main_process_port; the first of these is the name of a host. Empty if there is only one process
// of this command. Source: the variables that SLURM's srun, Open MPI, MVAPICH and Intel MPI set for
// their processes. Pure. Errors: INVALID_ARGUMENT, one line with the way out: several processes on
// a machine, each of which would start all of the machine's processes; an allocation of several
// machines of which a launch without srun would use one; a variable that is not a number.
absl::StatusOr<Layer> LayerFromCluster(const std::map<std::string, std::string>& variables);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_CLUSTER_LAUNCH_H_
