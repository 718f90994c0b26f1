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
// worker has left (see base/held_memory.h). It never maps or reads it. What it holds is freed when
// this ends, once no worker has it mapped.
//
// The agent of one attempt serves its workers, and the node's agent, which outlives the attempts of
// jobs, serves those agents. Either serves processes of this user that it knows, as the kernel
// reports them, and drops the connections of all others. Thread-safe.
class MemoryHolder {
 public:
  // For whom a process speaks.
  struct Client {
    std::string job;     // sees nothing of others
    std::string worker;  // empty: it speaks for several, and names them
  };
  struct Options {
    // The client that a process is; nullopt: none. Called on this object's thread.
    std::function<std::optional<Client>(pid_t)> client_of;
    // The name of the socket; empty: chooses an unused name.
    std::string address = "";
    // Told of memory that a client has just given, after the answer. Called on this object's
    // thread.
    std::function<void(const HeldMemory&)> on_held = nullptr;
    // And of memory that one has dropped.
    std::function<void(const std::string& worker, int slot)> on_dropped = nullptr;
    // What a worker says of its re-entry; null: such a message is refused. Called before the answer
    // on this object's thread.
    std::function<void(const std::string& worker, Reentry reentry)> on_reentry = nullptr;
  };

  // Errors: UNAVAILABLE what the kernel says.
  static absl::StatusOr<std::unique_ptr<MemoryHolder>> Start(Options options);
  // Of one job. `worker_of`: the worker that a process belongs to; empty: none.
  static absl::StatusOr<std::unique_ptr<MemoryHolder>> Start(
      std::function<std::string(pid_t)> worker_of);
  static absl::StatusOr<std::unique_ptr<MemoryHolder>> Start(
      std::function<std::string(pid_t)> worker_of, Options options);
  ~MemoryHolder();
  MemoryHolder(const MemoryHolder&) = delete;
  MemoryHolder& operator=(const MemoryHolder&) = delete;

  // The name of the socket.
  const std::string& address() const { return options_.address; }

  // Holds what a worker of `job` has left elsewhere.
  void Add(const std::string& job, HeldMemory piece);
  // Descriptors of what is held of a job, as far as this process can have more of them.
  std::vector<HeldMemory> Held(const std::string& job) const;
  void Drop(const std::string& job);
  // Those of which something is held.
  std::vector<std::string> Jobs() const;

 private:
  using Key = std::pair<std::string, int>;  // worker and slot

  MemoryHolder(Options options, OwnedFd socket);
  void Run();
  void Serve(int connection);
  // Parts of it, for a client.
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
