#ifndef MUSTER_AGENT_ORPHANS_H_
#define MUSTER_AGENT_ORPHANS_H_

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace muster::agent {

// Finds the processes that a host's processes have left behind and that the host's keeper could not
// end, or that this process inherited because the keeper was killed. From the first host on this
// process is a subreaper (PR_SET_CHILD_SUBREAPER): a descendant that loses its parent and the
// keeper becomes its child, so none hides by its own session, closed pipes or an empty environment.
//
// A child that this process did not fork itself is a host's orphan if
//  - its session was begun by a process of the host, or
//  - its initial environment has the host's mark, or
//  - it shows neither, and the host is the only one, in a process that had no children before it.
// Children in this process's own session are never orphans: code other than the hosts has forked
// them. Other children are not touched.
//
// One object for the whole process. Thread-safe.
class Orphans {
 public:
  static Orphans& Get();

  void AddHost(const std::string& mark);
  void RemoveHost(const std::string& mark);

  // Calls fork() for a host; the child begins its own session at once and must call nothing here.
  pid_t Fork(const std::string& mark);
  // Notes that the host's keeper has forked `child`, which this process inherits if the keeper is
  // killed.
  void Note(const std::string& mark, pid_t child);
  // Notes that the child was collected or abandoned.
  void Forget(pid_t child);

  // Collects the orphans that have ended; cheap if there are none.
  void Collect(const std::string& mark);
  // Sends SIGKILL to the orphans that have not ended. They are children, so their ids stay theirs
  // until they are collected; their own children come to this process when they end: call again
  // until there are none. Those of another user, which this process may not kill, go into
  // `foreign`. `kill`: replaces the system call in tests; null: the system call.
  std::vector<pid_t> Kill(const std::string& mark, std::set<pid_t>* foreign,
                          int (*kill)(pid_t, int) = nullptr);

 private:
  Orphans() = default;
  std::vector<pid_t> Find(const std::string& mark, bool ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Belongs(const std::string& mark, pid_t pid, pid_t session) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  pid_t process_ ABSL_GUARDED_BY(mu_) = 0;  // the process to which the rest belongs
  // The sessions that each host's processes began, by mark. Includes those of ended processes: a
  // session lives as long as any process in it.
  std::map<std::string, std::set<pid_t>> hosts_ ABSL_GUARDED_BY(mu_);
  std::set<pid_t> children_ ABSL_GUARDED_BY(mu_);  // forked here, not yet collected
  bool had_children_ ABSL_GUARDED_BY(mu_) = false;
};

// Returns whether the environment with which `pid` started contains `text`. Async-signal-safe, on
// one thread at a time.
bool StartedWith(pid_t pid, const char* text, size_t size);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ORPHANS_H_
