#include "coordinator/stack_calls.h"

#include <algorithm>
#include <utility>

namespace muster::coordinator {

template <typename Ended>
std::vector<StackCalls::Done> StackCalls::Take(Ended ended) {
  std::vector<Done> done;
  for (Open& open : open_) {
    if (ended(open)) done.push_back(std::move(open.done));
  }
  std::erase_if(open_, ended);
  return done;
}

std::vector<StackCalls::Done> StackCalls::Add(CallId call, absl::Time deadline, int32_t next,
                                              std::vector<Asked> asked) {
  const auto awaited =
      std::count_if(asked.begin(), asked.end(), [](const Asked& one) { return one.query != 0; });
  open_.push_back({.done = {.call = call, .next = next, .asked = std::move(asked)},
                   .deadline = deadline,
                   .awaited = static_cast<size_t>(awaited)});
  return Take([](const Open& open) { return open.awaited == 0; });
}

std::vector<StackCalls::Done> StackCalls::Answered(uint64_t query) {
  if (query == 0) return {};
  for (Open& open : open_) {
    for (Asked& one : open.done.asked) {
      if (one.query != query || one.answered) continue;
      one.answered = true;
      --open.awaited;
    }
  }
  return Take([](const Open& open) { return open.awaited == 0; });
}

std::vector<StackCalls::Done> StackCalls::TakeExpired(absl::Time now) {
  return Take([now](const Open& open) { return open.deadline <= now; });
}

std::vector<StackCalls::Done> StackCalls::TakeAll() {
  return Take([](const Open&) { return true; });
}

void StackCalls::Abandon(CallId call) {
  std::erase_if(open_, [call](const Open& open) { return open.done.call == call; });
}

absl::Time StackCalls::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Open& open : open_) next = std::min(next, open.deadline);
  return next;
}

}  // namespace muster::coordinator
