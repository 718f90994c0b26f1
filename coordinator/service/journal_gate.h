#ifndef MUSTER_COORDINATOR_SERVICE_JOURNAL_GATE_H_
#define MUSTER_COORDINATOR_SERVICE_JOURNAL_GATE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "coordinator/answer.h"
#include "coordinator/core.h"
#include "coordinator/journal/journal.h"
#include "coordinator/service/runner_limits.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// What waits for the disk: records on their way, and answers and directives that depend on them. If
// the journal fails, an answer that waits, or would, becomes UNAVAILABLE / JOURNAL_FAILED. Used in
// the runner's turn; backlog_bytes() may be read by any thread.
class JournalGate {
 public:
  // `limits.journal_backlog_bytes` counts.
  explicit JournalGate(const RunnerLimits& limits);

  // Notes that all records up to `revision` were read from the disk.
  void Begin(uint64_t revision) { durable_ = revision; }
  // Counts a record of `bytes` bytes that the journal is about to get.
  void Sent(uint64_t revision, size_t bytes);

  uint64_t durable() const { return durable_; }
  const absl::Status& status() const { return status_; }  // the journal's
  bool IsDurable(uint64_t revision) const { return revision <= durable_; }
  // Returns what `op` is refused with, before it changes anything, because the journal has failed
  // or is too far behind; null: it is not refused.
  std::shared_ptr<const Answer> Refusal(const v1::Op& op) const;
  const std::shared_ptr<const Answer>& failed_answer() const { return failed_answer_; }

  void Hold(const Reply& reply) { replies_.emplace(reply.durable_revision, reply); }
  // Drops the directive if an equal one is already held for the node: while the disk is full, each
  // beat of an agent whose workers cannot join again would add one.
  void Hold(const NodeDirective& directive);
  // Returns whether the journal's health has changed.
  bool OnProgress(const Journal::Progress& progress);
  // Return the next reply, or directive, that is durable now, by revision.
  std::optional<Reply> NextReply() { return Next(&replies_); }
  std::optional<NodeDirective> NextDirective();
  bool HoldsAny() const { return !replies_.empty() || !directives_.empty(); }
  // Takes all answers that are held.
  std::vector<Reply> TakeReplies();
  void Clear();

  // The bytes of records that the disk has not taken.
  uint64_t backlog_bytes() const { return backlog_bytes_.load(std::memory_order_relaxed); }

 private:
  template <typename T>
  std::optional<T> Next(std::multimap<uint64_t, T>* held) {
    if (held->empty() || held->begin()->first > durable_) return std::nullopt;
    T next = std::move(held->begin()->second);
    held->erase(held->begin());
    return next;
  }

  const size_t max_backlog_bytes_;
  const std::shared_ptr<const Answer> failed_answer_;
  const std::shared_ptr<const Answer> behind_answer_;
  uint64_t durable_ = 0;
  absl::Status status_;
  std::deque<std::pair<uint64_t, size_t>> backlog_;  // revision and size of records on their way
  std::atomic<uint64_t> backlog_bytes_{0};
  std::multimap<uint64_t, Reply> replies_;
  std::multimap<uint64_t, NodeDirective> directives_;
  absl::flat_hash_set<std::string> told_;  // by directives_, of those that may be repeated
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_JOURNAL_GATE_H_
