#ifndef MUSTER_AGENT_MEMORY_HOLDER_H_
#define MUSTER_AGENT_MEMORY_HOLDER_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/held_memory.h"
#include "base/mutex.h"
#include "base/owned_fd.h"

namespace muster::agent {

// Holds the memory of this node's workers, so that the next attempt of the job finds what a killed
// worker has left (see base/held_memory.h). It never maps or reads it. The memory is freed when
// this object is destroyed, once no worker has it mapped.
//
// The agent of one attempt serves its workers, and the node's agent, which outlives the attempts of
// jobs, serves those agents. Both serve only processes of this user that they know, as the kernel
// reports them, and drop all other connections. Thread-safe.
class MemoryHolder {
 public:
  // The job and worker for which a process speaks.
  struct Client {
    std::string job;     // it sees nothing of other jobs
    std::string worker;  // empty: it speaks for several workers, and names them
  };
  struct Options {
    // Returns the client that a process is; nullopt: none. Called on this object's thread.
    std::function<std::optional<Client>(pid_t)> client_of;
    // The name of the socket; empty: an unused name is chosen.
    std::string address = "";
    // Called when a client has given memory, after the answer. On this object's thread.
    std::function<void(const HeldMemory&)> on_held = nullptr;
    // Called when a client has dropped memory.
    std::function<void(const std::string& worker, int slot)> on_dropped = nullptr;
    // Called with what a worker reports about its re-entry, before the answer, on this object's
    // thread; null: such a message is refused.
    std::function<void(const std::string& worker, Reentry reentry)> on_reentry = nullptr;
  };

  // Errors: UNAVAILABLE with the kernel's message.
  static absl::StatusOr<std::unique_ptr<MemoryHolder>> Start(Options options);
  // Starts a holder for one job. `worker_of`: returns the worker to which a process belongs; empty:
  // none.
  static absl::StatusOr<std::unique_ptr<MemoryHolder>> Start(
      std::function<std::string(pid_t)> worker_of);
  static absl::StatusOr<std::unique_ptr<MemoryHolder>> Start(
      std::function<std::string(pid_t)> worker_of, Options options);
  ~MemoryHolder();
  MemoryHolder(const MemoryHolder&) = delete;
  MemoryHolder& operator=(const MemoryHolder&) = delete;

  // The name of the socket.
  const std::string& address() const { return options_.address; }

  // Adds memory that a worker of `job` has left elsewhere.
  void Add(const std::string& job, HeldMemory piece);
  // Returns descriptors of the memory that is held for a job, as far as this process can open more.
  std::vector<HeldMemory> Held(const std::string& job) const;
  void Drop(const std::string& job);
  // The jobs of which memory is held.
  std::vector<std::string> Jobs() const;

 private:
  using Key = std::pair<std::string, int>;  // worker and slot

  MemoryHolder(Options options, OwnedFd socket);
  void Run();
  void Serve(int connection);
  // The parts of serving one client.
  void Hold(int connection, const Client& client, const HeldMemoryMessage& request, OwnedFd fd);
  void Give(int connection, const Client& client);

  const Options options_;
  const OwnedFd socket_;
  mutable Mutex mu_;
  std::map<std::string, std::map<Key, OwnedFd>> held_ ABSL_GUARDED_BY(mu_);  // by job
  std::thread thread_;  // last: it uses the rest
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MEMORY_HOLDER_H_
