#ifndef MUSTER_AGENT_PYTHON_STACK_H_
#define MUSTER_AGENT_PYTHON_STACK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "agent/memory_reader.h"
#include "agent/python_layout.h"

namespace muster::agent {

struct PythonFrame {
  std::string function;  // printable
  std::string file;      // printable; only its end, if it is long
  int64_t line = 0;      // 0: not known

  // "Trainer.step (/srv/train.py:41)"
  std::string ToString() const;
  bool operator==(const PythonFrame&) const = default;
};

struct PythonStack {
  std::vector<PythonFrame> frames;  // the innermost first
  int more_frames = 0;              // outer frames that are not in `frames`
  bool more_than_that = false;      // there are still more, which were not counted
  // Where the memory stops to make sense, for example because the thread ran meanwhile: the outer
  // frames are missing. Empty: the stack is complete.
  std::string torn;

  bool empty() const { return frames.empty() && torn.empty(); }
  bool operator==(const PythonStack&) const = default;
};

// A thread that the interpreter knows.
struct PythonThread {
  uint64_t state = 0;      // address of its PyThreadState
  uint64_t thread_id = 0;  // the id of pthreads
  uint64_t native_id = 0;  // the kernel's, in the pid namespace of the process; 0: not kept
};

// Reads the Python frames of a process from its memory. The memory may change meanwhile and contain
// anything: each read is checked, and the work is limited whatever is read. Thread-safe if `memory`
// is.
class PythonStackReader {
 public:
  static constexpr int kMaxInterpreters = 64;
  static constexpr int kMaxThreads = 4096;
  // The most frames that are followed, as many as a thread with the usual recursion limit has.
  static constexpr int kMaxFollowed = 1024;
  static constexpr uint64_t kMaxTextBytes = 256;       // of a name or path
  static constexpr uint64_t kMaxTableBytes = 1 << 20;  // of a line table; longer: no lines
  static constexpr uint64_t kMaxBytes = 8 << 20;       // read for one stack

  // `memory` is borrowed. `runtime`: the address of _PyRuntime.
  PythonStackReader(const MemoryReader& memory, PythonLayout layout, uint64_t runtime)
      : memory_(memory), layout_(std::move(layout)), runtime_(runtime) {}

  const PythonLayout& layout() const { return layout_; }

  // Returns the threads of all interpreters that could be read. Threads that never ran Python are
  // not included.
  std::vector<PythonThread> Threads() const;

  // Reads the stack of a thread of Threads(). The thread must not run, or the stack may be
  // inconsistent. Returns at most `max_frames` frames and counts the others.
  PythonStack Stack(const PythonThread& thread, int max_frames) const;

 private:
  class Walk;

  const MemoryReader& memory_;
  const PythonLayout layout_;
  const uint64_t runtime_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_PYTHON_STACK_H_
