#ifndef MUSTER_COORDINATOR_STACK_CALLS_H_
#define MUSTER_COORDINATOR_STACK_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/answer.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::coordinator {

// The content of a call for stacks.
struct StacksAsked {
  std::vector<int32_t> ranks;
  int32_t next = 0;  // `first` of the call for the ranks after them; 0: there are none
  absl::Duration timeout;
};
// Checks a request for stacks of a job of `size` ranks. Errors: BAD_FIELD.
std::optional<v1::OpError> CheckStacks(const v1::CaptureStacksRequest& request, int32_t size,
                                       StacksAsked* asked);
v1::OpError TooManyStackCalls(absl::string_view job_id);

// The callers that wait for stacks of one job's ranks. Pure; not thread-safe.
class StackCalls {
 public:
  static constexpr size_t kMaxOpen = 8;

  struct Asked {
    int32_t rank = 0;
    uint64_t query = 0;  // 0: there is no agent to ask
    bool answered = false;
  };
  // A call that is to be answered now.
  struct Done {
    CallId call = 0;
    int32_t next = 0;  // as given to Add
    std::vector<Asked> asked;
  };

  bool full() const { return open_.size() >= kMaxOpen; }
  bool empty() const { return open_.empty(); }
  // Adds a call, which is returned at once if no agent could be asked.
  std::vector<Done> Add(CallId call, absl::Time deadline, int32_t next, std::vector<Asked> asked);
  // Notes that the answer to one question has come.
  std::vector<Done> Answered(uint64_t query);
  // Takes the calls whose deadline has passed, with what has come.
  std::vector<Done> TakeExpired(absl::Time now);
  std::vector<Done> TakeAll();
  // Abandons a call whose caller is gone.
  void Abandon(CallId call);
  // Infinite if no call is open.
  absl::Time NextDeadline() const;

 private:
  struct Open {
    Done done;
    absl::Time deadline;
    size_t awaited = 0;  // answers
  };
  template <typename Ended>
  std::vector<Done> Take(Ended ended);

  std::vector<Open> open_;  // at most kMaxOpen
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_STACK_CALLS_H_
