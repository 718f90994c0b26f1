#include "worker/train/thread_states.h"

#include <algorithm>
#include <cstddef>

#include "base/mutex.h"

namespace muster {
namespace {

class States {
 public:
  void Add(const ThreadState& state) {
    MutexLock lock(&mu_);
    states_.push_back(state);
  }
  std::vector<ThreadState> all() {
    MutexLock lock(&mu_);
    return states_;
  }

 private:
  Mutex mu_;
  std::vector<ThreadState> states_ ABSL_GUARDED_BY(mu_);
};

States& TheStates() {
  static auto& states = *new States;
  return states;
}

void Set(const std::vector<int64_t>& values) {
  const std::vector<ThreadState> states = TheStates().all();
  for (size_t i = 0; i < std::min(values.size(), states.size()); ++i) states[i].set(values[i]);
}

}  // namespace

void AddThreadState(const ThreadState& state) { TheStates().Add(state); }

std::vector<int64_t> SaveThreadStates() {
  std::vector<int64_t> values;
  for (const ThreadState& state : TheStates().all()) values.push_back(state.get());
  return values;
}

ThreadStatesScope::ThreadStatesScope(const std::vector<int64_t>& states)
    : before_(SaveThreadStates()) {
  Set(states);
}

ThreadStatesScope::~ThreadStatesScope() { Set(before_); }

}  // namespace muster
