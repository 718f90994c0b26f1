#ifndef MUSTER_BASE_PLACE_H_
#define MUSTER_BASE_PLACE_H_

namespace muster {

// The place of a worker in its job. Every node of a job has the same number of workers.
struct Place {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node_rank = 0;
  int num_nodes = 1;
};

}  // namespace muster

#endif  // MUSTER_BASE_PLACE_H_
