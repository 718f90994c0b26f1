#ifndef MUSTER_AGENT_MEMORY_HOLDER_H_
#define MUSTER_AGENT_MEMORY_HOLDER_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "base/held_memory.h"

namespace muster::agent {

// Holds the memory of this node's workers, so that the next attempt of the job finds what a killed
// worker has left (see base/held_memory.h). It never maps or reads it. What it holds is freed when
// this ends, once no worker has it mapped.
//
// It serves processes of this user that `worker_of` knows, as the kernel reports them, and drops
// the connections of all others.
class MemoryHolder {
 public:
  // `worker_of`: the worker that a process belongs to; empty: none. Called on this object's thread.
  // Errors: UNAVAILABLE what the kernel says.
  static absl::StatusOr<std::unique_ptr<MemoryHolder>> Start(
      std::function<std::string(pid_t)> worker_of);
  ~MemoryHolder();
  MemoryHolder(const MemoryHolder&) = delete;
  MemoryHolder& operator=(const MemoryHolder&) = delete;

  // The name of the socket.
  const std::string& address() const { return address_; }

 private:
  MemoryHolder(std::string address, OwnedFd socket, std::function<std::string(pid_t)> worker_of);
  void Run();
  void Serve(int connection);

  const std::string address_;
  const OwnedFd socket_;
  const std::function<std::string(pid_t)> worker_of_;
  std::map<std::pair<std::string, int>, OwnedFd> held_;  // by worker and slot; of the thread
  std::thread thread_;                                   // last: it uses the rest
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MEMORY_HOLDER_H_
