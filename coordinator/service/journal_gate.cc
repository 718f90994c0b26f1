#include "coordinator/service/journal_gate.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_join.h"
#include "coordinator/service/error_answer.h"
#include "coordinator/service/op_kinds.h"

namespace muster::coordinator {
namespace {

// Returns what a directive that may be repeated tells its node; empty: it comes once.
std::string Told(const NodeDirective& directive) {
  if (directive.directive == nullptr) return "";
  const v1::Directive& one = *directive.directive;
  if (one.has_generation_ended()) {
    return absl::StrJoin(std::make_tuple(directive.node, "ended", one.generation_ended().job_id(),
                                         one.generation_ended().generation()),
                         "\n");
  }
  if (one.has_kill_worker()) {
    return absl::StrJoin(
        std::make_tuple(directive.node, "kill", one.kill_worker().job_id(),
                        one.kill_worker().worker_id(), one.kill_worker().incarnation()),
        "\n");
  }
  return "";
}

}  // namespace

JournalGate::JournalGate(const RunnerLimits& limits)
    : max_backlog_bytes_(limits.journal_backlog_bytes),
      failed_answer_(ErrorAnswer(
          absl::StatusCode::kUnavailable,
          "the coordinator's journal cannot be written (disk full or failed): nothing was "
          "acknowledged; see its log, then try again",
          v1::ERROR_REASON_JOURNAL_FAILED, /*retryable=*/true)),
      behind_answer_(OverloadedAnswer(
          "the coordinator's disk is slower than the writes: nothing was done; try "
          "again later")) {}

void JournalGate::Sent(uint64_t revision, size_t bytes) {
  backlog_.emplace_back(revision, bytes);
  backlog_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

std::shared_ptr<const Answer> JournalGate::Refusal(const v1::Op& op) const {
  const bool needs_journal = Core::NeedsJournal(op);
  if (needs_journal && !status_.ok()) return failed_answer_;
  const bool behind =
      backlog_bytes() > max_backlog_bytes_ &&
      (needs_journal || (backlog_bytes() > 2 * max_backlog_bytes_ && !OnlyReads(op)));
  return behind ? behind_answer_ : nullptr;
}

void JournalGate::Hold(const NodeDirective& directive) {
  std::string told = Told(directive);
  if (!told.empty() && !told_.insert(std::move(told)).second) return;
  directives_.emplace(directive.durable_revision, directive);
}

std::optional<NodeDirective> JournalGate::NextDirective() {
  std::optional<NodeDirective> next = Next(&directives_);
  if (next.has_value()) told_.erase(Told(*next));
  return next;
}

bool JournalGate::OnProgress(const Journal::Progress& progress) {
  durable_ = std::max(durable_, progress.durable_revision);
  while (!backlog_.empty() && backlog_.front().first <= durable_) {
    backlog_bytes_.fetch_sub(backlog_.front().second, std::memory_order_relaxed);
    backlog_.pop_front();
  }
  const bool changed = status_.code() != progress.status.code();
  status_ = progress.status;
  return changed;
}

std::vector<Reply> JournalGate::TakeReplies() {
  std::vector<Reply> taken;
  for (auto& [revision, reply] : replies_) taken.push_back(std::move(reply));
  replies_.clear();
  return taken;
}

void JournalGate::Clear() {
  replies_.clear();
  directives_.clear();
  told_.clear();
}

}  // namespace muster::coordinator
