#ifndef MUSTER_COORDINATOR_SERVICE_OPEN_CALLS_H_
#define MUSTER_COORDINATOR_SERVICE_OPEN_CALLS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "coordinator/answer.h"
#include "coordinator/service/attached_agent.h"
#include "coordinator/service/runner_limits.h"
#include "coordinator/web/histogram.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// Receives the answer of one call. Called exactly once, in the runner's turn or, after the runner
// has stopped, by the caller; must not block.
class CallSink {
 public:
  virtual ~CallSink() = default;
  virtual void OnAnswer(const std::shared_ptr<const Answer>& answer) = 0;
};

struct OpenCall {
  std::shared_ptr<CallSink> sink;          // of a unary call; null for one of a stream
  std::shared_ptr<AttachedAgent> session;  // the stream it came on
  uint64_t op_id = 0;
  size_t bytes = 0;  // size of the request
  // OpenCalls sets the rest.
  v1::Op::KindCase kind = v1::Op::KIND_NOT_SET;
  bool changes = false;  // it may have had an effect
  absl::Time begun = absl::InfinitePast();
};

// The calls that wait for their answer, what they hold, and whether there is room for another. Used
// in the runner's turn; numbers for metrics may be read by any thread.
class OpenCalls {
 public:
  explicit OpenCalls(const RunnerLimits& limits);

  // Returns the answer to a call that is one too many.
  static std::shared_ptr<const Answer> TooManyCalls();

  // Calls of at most this many bytes may be held until twice the bytes of the limits are held.
  static constexpr size_t kSmallCall = 2048;

  // Notes that the call of `op` waits from `now` on; its `bytes` become what it counts for.
  void Add(CallId id, const v1::Op& op, OpenCall call, absl::Time now);
  // Returns what this call, which is among them, is refused with because there are too many calls,
  // or bytes of them; null: it is not refused.
  std::shared_ptr<const Answer> Refusal(CallId id, const v1::Op& op) const;
  bool Contains(CallId id) const { return calls_.contains(id); }
  std::vector<CallId> Ids() const;
  // Returns nullopt if the call does not wait, or no longer.
  std::optional<OpenCall> Remove(CallId id);
  // Returns `answer`, or what goes out in its place if it is too large for a message.
  std::shared_ptr<const Answer> Fit(const OpenCall& call,
                                    std::shared_ptr<const Answer> answer) const;
  // Notes that the answer of a call that was removed goes out.
  void Answered(const OpenCall& call, absl::Time now);

  // May be called by any thread.
  uint64_t size() const { return size_.load(std::memory_order_relaxed); }
  // The bytes of the requests of agents, or of direct callers.
  uint64_t held_bytes(bool agents) const {
    return held_bytes_[agents ? 1 : 0].load(std::memory_order_relaxed);
  }
  // The time from an operation's turn to its answer, by the number of its field in Op; calls and
  // operations of agents' streams alike. kListNodes has the largest number: a test compares it with
  // the proto.
  static constexpr int kOpKinds = v1::Op::kListNodes + 1;
  const DurationHistogram& seconds(int kind) const { return seconds_[kind]; }

 private:
  const RunnerLimits limits_;
  const std::shared_ptr<const Answer> too_many_calls_;
  const std::shared_ptr<const Answer> too_many_bytes_;

  absl::flat_hash_map<CallId, OpenCall> calls_;
  std::atomic<uint64_t> size_{0};
  std::array<std::atomic<uint64_t>, 2> held_bytes_{};  // those of agents second
  std::array<DurationHistogram, kOpKinds> seconds_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_OPEN_CALLS_H_
