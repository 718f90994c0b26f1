#include "coordinator/stack_calls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

constexpr int kStacksInReply = 64;  // of at most 16 KiB each
constexpr absl::Duration kStacksTimeout = absl::Seconds(5);
constexpr absl::Duration kMaxStacksTimeout = absl::Seconds(30);

}  // namespace

std::optional<v1::OpError> CheckStacks(const v1::CaptureStacksRequest& request, int32_t size,
                                       StacksAsked* asked) {
  const std::string job = Quoted(request.job_id());
  const absl::Duration timeout =
      request.has_timeout() ? FromProto(request.timeout()) : kStacksTimeout;
  if (timeout <= absl::ZeroDuration()) {
    return BadField("timeout", "the time to wait for stacks must be more than 0");
  }
  asked->timeout = std::min(timeout, kMaxStacksTimeout);
  asked->ranks.assign(request.ranks().begin(), request.ranks().end());
  if (asked->ranks.size() > kStacksInReply) {
    return BadField("ranks", absl::StrCat(asked->ranks.size(), " ranks: ask for at most ",
                                          kStacksInReply, " at a time"));
  }
  for (const int32_t rank : asked->ranks) {
    if (rank < 0 || rank >= size) {
      return BadField("ranks", absl::StrCat("job ", job, " has the ranks 0 to ", size - 1,
                                            ", and no rank ", rank));
    }
  }
  if (!asked->ranks.empty()) return std::nullopt;
  const int32_t first = request.first();
  if (first < 0 || first >= size) {
    return BadField("first", absl::StrCat("job ", job, " has the ranks 0 to ", size - 1,
                                          ": none from ", first, " on"));
  }
  const int32_t count = std::min(size - first, kStacksInReply);
  for (int32_t i = 0; i < count; ++i) asked->ranks.push_back(first + i);
  if (first + count < size) asked->next = first + count;
  return std::nullopt;
}

v1::OpError TooManyStackCalls(absl::string_view job_id) {
  return MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_OVERLOADED,
                   absl::StrCat(StackCalls::kMaxOpen, " callers wait for stacks of job ",
                                Quoted(job_id), " already: try again in a few seconds"));
}

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
