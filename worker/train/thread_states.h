#ifndef MUSTER_WORKER_TRAIN_THREAD_STATES_H_
#define MUSTER_WORKER_TRAIN_THREAD_STATES_H_

#include <cstdint>
#include <vector>

namespace muster {

// State that code above worker/train keeps per thread and that affects how operators run: the
// second run of a checkpointed function, in an autograd thread, needs the same state as the first.
struct ThreadState {
  int64_t (*get)();
  void (*set)(int64_t value);
};

// Adds a state, permanently. Thread-safe.
void AddThreadState(const ThreadState& state);

// Returns the states of the calling thread.
std::vector<int64_t> SaveThreadStates();

// In this scope the calling thread has the states that SaveThreadStates() returned; kinds of state
// that were added since keep their values.
class ThreadStatesScope {
 public:
  explicit ThreadStatesScope(const std::vector<int64_t>& states);
  ~ThreadStatesScope();
  ThreadStatesScope(const ThreadStatesScope&) = delete;
  ThreadStatesScope& operator=(const ThreadStatesScope&) = delete;

 private:
  const std::vector<int64_t> before_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_THREAD_STATES_H_
