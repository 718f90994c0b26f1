#ifndef MUSTER_AGENT_STACK_SOURCE_H_
#define MUSTER_AGENT_STACK_SOURCE_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace muster::agent {

// The current activity of a process.
struct StackSnapshot {
  // As in muster.v1.Culprit: "running", "sleeping", "stopped", "zombie", "unknown", ...
  std::string process_state;
  std::string native_stack;  // of its threads, for people; empty if it could not be read
};

// Inspects a local process. Thread-safe.
class StackSource {
 public:
  virtual ~StackSource() = default;

  // Blocks up to `budget`. A process that is gone, or may not be inspected, has an empty stack and
  // a process_state that says so.
  virtual StackSnapshot Capture(int64_t pid, absl::Duration budget) = 0;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_STACK_SOURCE_H_
