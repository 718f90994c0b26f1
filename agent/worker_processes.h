#ifndef MUSTER_AGENT_WORKER_PROCESSES_H_
#define MUSTER_AGENT_WORKER_PROCESSES_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace muster::agent {

// The processes of this node's workers, as the kernel reports them, not as the workers do: in its
// own pid namespace a worker may be process 1 or 7, which is a different process here. Thread-safe.
class WorkerProcesses {
 public:
  explicit WorkerProcesses(std::string job) : job_(std::move(job)) {}

  // The agent has started this child as the process of `rank`, or its end is known.
  void Started(const std::string& worker_id, uint64_t incarnation, int rank, int64_t child);
  void Ended(const std::string& worker_id, uint64_t incarnation);

  // The process that speaks for this start of the worker and has the number `claimed` where it
  // runs: the agent's child or a descendant of it. The child, if none of them has that number (a
  // client of a container engine). 0: the agent has not started it. Reads /proc.
  int64_t Find(const std::string& job, const std::string& worker_id, uint64_t incarnation,
               int64_t claimed);

  struct Running {
    std::string worker_id;
    uint64_t incarnation = 0;
    int rank = 0;
    // What is of interest in it: the child, or the program that the child, a script, has started
    // and waits for.
    int64_t program = 0;
  };
  // Those that have not ended. Reads /proc.
  std::vector<Running> All();
  const std::string& job() const { return job_; }

  // The worker whose child `pid` is, or a descendant of it; empty: none that runs. Reads /proc.
  std::string WorkerOf(int64_t pid);

 private:
  struct Entry {
    int rank = 0;
    int64_t child = 0;
    int64_t claimed = 0;  // what was looked for, once
    int64_t speaker = 0;  // 0: none found
  };
  using Key = std::pair<std::string, uint64_t>;

  const std::string job_;
  Mutex mu_;
  std::map<Key, Entry> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_WORKER_PROCESSES_H_
