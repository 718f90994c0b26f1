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
// own pid namespace a worker may be process 1 or 7, which here is a different process. Thread-safe.
class WorkerProcesses {
 public:
  explicit WorkerProcesses(std::string job) : job_(std::move(job)) {}

  // Called when the agent has started this child as the process of `rank`; the next function when
  // its end is known.
  void Started(const std::string& worker_id, uint64_t incarnation, int rank, int64_t child);
  void Ended(const std::string& worker_id, uint64_t incarnation);

  // Returns the process that speaks for this start of the worker and has the number `claimed` in
  // its own pid namespace: the agent's child or a descendant of it. Returns the child if none of
  // them has that number (a client of a container engine). 0: the agent has not started it. Reads
  // /proc.
  int64_t Find(const std::string& job, const std::string& worker_id, uint64_t incarnation,
               int64_t claimed);

  struct Running {
    std::string worker_id;
    uint64_t incarnation = 0;
    int rank = 0;
    // The process of interest: the child, or the program that the child, a script, has started and
    // waits for.
    int64_t program = 0;
  };
  // Returns the processes that have not ended. Reads /proc.
  std::vector<Running> All();
  const std::string& job() const { return job_; }

  // Returns the worker whose child or child's descendant `pid` is; empty: no running worker. Reads
  // /proc.
  std::string WorkerOf(int64_t pid);

 private:
  struct Entry {
    int rank = 0;
    int64_t child = 0;
    int64_t claimed = 0;  // the number that Find last searched for
    int64_t speaker = 0;  // the process that it found; 0: none
  };
  using Key = std::pair<std::string, uint64_t>;

  const std::string job_;
  Mutex mu_;
  std::map<Key, Entry> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_WORKER_PROCESSES_H_
