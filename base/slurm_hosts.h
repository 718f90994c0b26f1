#ifndef MUSTER_BASE_SLURM_HOSTS_H_
#define MUSTER_BASE_SLURM_HOSTS_H_

#include <string>

namespace muster {

// Returns the first host of a SLURM node list: "gpu[03-05,9],login" gives "gpu03". Empty if the
// list cannot be read.
std::string FirstSlurmHost(const std::string& node_list);

}  // namespace muster

#endif  // MUSTER_BASE_SLURM_HOSTS_H_
