#ifndef MUSTER_AGENT_CONTROL_GROUP_H_
#define MUSTER_AGENT_CONTROL_GROUP_H_

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/owned_fd.h"

namespace muster::agent {

// System calls that tests replace: in an ordinary folder no kernel makes the files of a new group.
struct ControlGroupCalls {
  int (*mkdir)(const char*, mode_t) = ::mkdir;
  int (*rmdir)(const char*) = ::rmdir;
};

// A group's counts about the memory of its processes.
struct MemoryUse {
  int64_t limit = -1;      // bytes; -1: none
  int64_t peak = -1;       // the most memory they had, in bytes; -1: the kernel does not report it
  int64_t limit_hits = 0;  // how often the group's own limit was reached
  int64_t kills = 0;       // processes that the kernel has killed for memory
};

// Returns why the kernel has killed a process of the group: its limit, or memory that ran out
// elsewhere. A text that follows "was killed"; empty: it has killed none. Pure.
std::string DescribeMemoryKill(const MemoryUse& use);

// One group of cgroup v2, by its folder. Copying it copies the name. Thread-safe; each call reads
// or writes files of the kernel. Errors name the file.
class ControlGroup {
 public:
  explicit ControlGroup(std::string folder, ControlGroupCalls calls = {});

  const std::string& folder() const { return folder_; }
  ControlGroup Below(absl::string_view name) const;

  // Makes the group. OK if it exists.
  absl::Status Make() const;
  bool Exists() const;
  // Whether the group has this file: a controller's files exist if the parent group enables it;
  // newer files depend on the kernel.
  bool Has(absl::string_view file) const;
  absl::Status Write(absl::string_view file, absl::string_view text) const;
  absl::StatusOr<std::string> Read(absl::string_view file) const;

  // The controllers that the group may give to the groups below it.
  std::vector<std::string> Controllers() const;
  // Gives the groups below it those of `controllers` that it has. Errors: FAILED_PRECONDITION the
  // group has processes of its own.
  absl::Status Enable(const std::vector<std::string>& controllers) const;

  // Moves this process into the group.
  absl::Status Enter() const;
  // Returns a descriptor of the group's folder, with which a process can be started in the group.
  absl::StatusOr<OwnedFd> Open() const;
  // Some of the processes in the group and below it.
  std::vector<int64_t> Processes() const;

  // Whether a process is in the group or below it. A group that does not exist is empty.
  bool IsPopulated() const;
  // Sends SIGKILL to all processes in the group and below it, including those that are being
  // forked. No effect on kernels before 5.14.
  void Kill() const;
  // Blocks until the group is empty. DEADLINE_EXCEEDED naming processes.
  absl::Status AwaitEmpty(absl::Duration timeout) const;
  // Removes the group with all groups below it. OK if it does not exist. Errors:
  // FAILED_PRECONDITION naming processes that are in it.
  absl::Status Remove() const;

  MemoryUse Memory() const;

 private:
  std::string PathOf(absl::string_view file) const;
  std::vector<ControlGroup> Children() const;

  std::string folder_;
  ControlGroupCalls calls_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_CONTROL_GROUP_H_
