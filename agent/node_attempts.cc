#include "agent/node_attempts.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "rpc/session/duration.h"

namespace muster::agent {

namespace {
constexpr size_t kMostReportBytes = 2 << 20;

// Reports that processes of the attempt are left, whatever its state is.
void AddLeftover(const AttemptKey& key, v1::SyncNodeRequest* request) {
  v1::AttemptReport* const report = request->add_attempts();
  report->set_job_id(key.first);
  report->set_attempt(key.second);
  report->set_state(v1::PLACEMENT_STATE_RUNNING);
}
}  // namespace

void NodeAttempts::Adopt(const AttemptKey& key, bool running, const v1::AttemptEnd& end,
                         absl::Time started, absl::Time ended, absl::Time now, int asked) {
  Attempt& attempt = attempts_[key];
  attempt.report.set_job_id(key.first);
  attempt.report.set_attempt(key.second);
  attempt.report.set_started_unix_ms(absl::ToUnixMillis(started));
  // The monotonic clock does not reach back that far.
  attempt.started = now;
  attempt.report.set_state(running ? v1::PLACEMENT_STATE_RUNNING : v1::PLACEMENT_STATE_ENDED);
  if (!running) {
    *attempt.report.mutable_end() = end;
    attempt.report.set_restart(asked);
    attempt.report.set_ended_unix_ms(absl::ToUnixMillis(ended));
    if (end.failed_unix_ms() != 0) {
      attempt.failed = absl::FromUnixMillis(end.failed_unix_ms());
    }
  }
  ++version_;
}

bool NodeAttempts::AnyRunning() const {
  return std::any_of(attempts_.begin(), attempts_.end(), [](const auto& entry) {
    return entry.second.report.state() == v1::PLACEMENT_STATE_RUNNING;
  });
}

void NodeAttempts::Stop(const AttemptKey& key, Attempt* attempt, absl::Time now, Orders* orders) {
  if (attempt->stopped || attempt->report.state() == v1::PLACEMENT_STATE_ENDED) return;
  attempt->stopped = true;
  attempt->kill_at = now + attempt->grace + kRunnerGrace;
  orders->stop.push_back(key);
}

void NodeAttempts::Allow(const AttemptKey& key, const v1::NodeAssignment& assignment,
                         Attempt* attempt, Orders* orders) {
  v1::AttemptReport& report = attempt->report;
  if (report.state() != v1::PLACEMENT_STATE_RUNNING || assignment.stop() ||
      assignment.restarts() <= attempt->restarts) {
    return;
  }
  attempt->restarts = assignment.restarts();
  orders->restarts.push_back(
      {key, assignment.restarts(), rpc::FromProto(assignment.restart_delay())});
  if (report.restart() > attempt->restarts) return;
  report.clear_restart();
  report.clear_end();
  report.clear_ended_unix_ms();
  attempt->failed = absl::InfinitePast();
}

NodeAttempts::Orders NodeAttempts::Apply(const v1::SyncNodeReply& reply, absl::Time now) {
  Orders orders;
  const std::string& cluster = reply.header().cluster_id();
  const bool other = !attempts_.empty() && !cluster_.empty() && cluster != cluster_;
  if (!other) cluster_ = cluster;
  std::set<AttemptKey> wanted;
  if (other) {
    if (AnyRunning()) {
      orders.notice = absl::StrCat("the coordinator belongs to another cluster (", cluster,
                                   ") than the attempts of this node (", cluster_,
                                   "): they are ended, and nothing starts before");
    }
  } else {
    for (const v1::NodeAssignment& assignment : reply.assignments()) {
      const AttemptKey key(assignment.job_id(), assignment.attempt());
      wanted.insert(key);
      const auto known = attempts_.find(key);
      if (known != attempts_.end()) {
        // A coordinator that was restored from a backup has not heard of the end.
        if (std::exchange(known->second.unwanted, false)) ++version_;
        known->second.grace = rpc::FromProto(assignment.spec().stop_grace());
        if (assignment.stop()) Stop(key, &known->second, now, &orders);
        Allow(key, assignment, &known->second, &orders);
        continue;
      }
      // The specification comes with a later reply: this one had no room for it.
      if (assignment.spec().argv().empty()) continue;
      Attempt& attempt = attempts_[key];
      attempt.report.set_job_id(key.first);
      attempt.report.set_attempt(key.second);
      attempt.grace = rpc::FromProto(assignment.spec().stop_grace());
      attempt.started = now;
      ++version_;
      if (assignment.stop()) {
        // The attempt has never started here.
        attempt.report.set_state(v1::PLACEMENT_STATE_ENDED);
        attempt.report.mutable_end()->set_end_class(v1::END_CLASS_CANCELLED);
        attempt.report.mutable_end()->set_why(assignment.stop_why());
        attempt.report.mutable_end()->set_rank(-1);
        continue;
      }
      attempt.report.set_state(v1::PLACEMENT_STATE_RUNNING);
      attempt.report.set_started_unix_ms(absl::ToUnixMillis(now));
      orders.start.push_back(assignment);
    }
  }
  for (auto it = attempts_.begin(); it != attempts_.end();) {
    if (wanted.count(it->first) != 0) {
      ++it;
    } else if (it->second.left_behind) {
      if (!std::exchange(it->second.unwanted, true)) ++version_;
      ++it;
    } else if (it->second.report.state() == v1::PLACEMENT_STATE_ENDED) {
      orders.forget.push_back(it->first);
      it = attempts_.erase(it);
      ++version_;
    } else {
      Stop(it->first, &it->second, now, &orders);
      ++it;
    }
  }
  return orders;
}

NodeAttempts::Orders NodeAttempts::Tick(absl::Time now) {
  Orders orders;
  for (auto& [key, attempt] : attempts_) {
    if (attempt.kill_at > now || attempt.killed ||
        attempt.report.state() == v1::PLACEMENT_STATE_ENDED) {
      continue;
    }
    attempt.killed = true;
    orders.kill.push_back(key);
  }
  return orders;
}

absl::Time NodeAttempts::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [key, attempt] : attempts_) {
    if (!attempt.killed && attempt.report.state() != v1::PLACEMENT_STATE_ENDED) {
      next = std::min(next, attempt.kill_at);
    }
  }
  return next;
}

void NodeAttempts::Ended(const AttemptKey& key, const v1::AttemptEnd& end, int64_t unix_ms,
                         absl::Time now, int asked) {
  const auto it = attempts_.find(key);
  if (it == attempts_.end() || it->second.report.state() == v1::PLACEMENT_STATE_ENDED) return;
  it->second.report.set_state(v1::PLACEMENT_STATE_ENDED);
  it->second.report.set_restart(asked);
  *it->second.report.mutable_end() = end;
  // The runner was killed before it could write its report, which says nothing about why the
  // attempt has ended.
  if (it->second.killed && end.end_class() == v1::END_CLASS_NODE_FAILED) {
    v1::AttemptEnd* const killed = it->second.report.mutable_end();
    killed->set_end_class(v1::END_CLASS_CANCELLED);
    killed->set_why(absl::StrCat("its runner was asked to stop, and killed ",
                                 absl::FormatDuration(it->second.grace + kRunnerGrace),
                                 " later: ", end.why()));
  }
  SetFailed(&it->second, unix_ms, now);
  ++version_;
}

void NodeAttempts::LeftBehind(const AttemptKey& key, const v1::AttemptEnd& end, int64_t unix_ms,
                              absl::Time now, int asked) {
  if (!IsRunning(key)) return;
  Ended(key, end, unix_ms, now, asked);
  attempts_.at(key).left_behind = true;
}

void NodeAttempts::Gone(const AttemptKey& key) {
  const auto it = attempts_.find(key);
  if (it == attempts_.end() || !it->second.left_behind) return;
  it->second.left_behind = false;
  ++version_;
}

void NodeAttempts::Ask(const AttemptKey& key, int restart, const v1::AttemptEnd& end,
                       int64_t unix_ms, absl::Time now) {
  const auto it = attempts_.find(key);
  if (it == attempts_.end() || it->second.report.state() != v1::PLACEMENT_STATE_RUNNING ||
      restart <= std::max(it->second.restarts, it->second.report.restart())) {
    return;
  }
  it->second.report.set_restart(restart);
  *it->second.report.mutable_end() = end;
  SetFailed(&it->second, unix_ms, now);
  ++version_;
}

void NodeAttempts::SetFailed(Attempt* attempt, int64_t unix_ms, absl::Time now) {
  attempt->report.set_ended_unix_ms(unix_ms);
  const int64_t failed = attempt->report.end().failed_unix_ms();
  attempt->failed = failed == 0 ? absl::InfinitePast() : now - absl::Milliseconds(unix_ms - failed);
}

bool NodeAttempts::IsRunning(const AttemptKey& key) const {
  const auto it = attempts_.find(key);
  return it != attempts_.end() && it->second.report.state() == v1::PLACEMENT_STATE_RUNNING;
}

void NodeAttempts::FillReports(absl::Time now, v1::SyncNodeRequest* request) const {
  request->set_cluster_id(cluster_);
  size_t bytes = 0;
  for (const auto& [key, attempt] : attempts_) {
    if (attempt.unwanted) {
      if (attempt.left_behind) AddLeftover(key, request);
      continue;
    }
    v1::AttemptReport* const report = request->add_attempts();
    *report = attempt.report;
    bytes += report->ByteSizeLong();
    // The size of a message is limited, and the ends must get through.
    if (bytes > kMostReportBytes) report->mutable_end()->clear_last_lines();
    const absl::Duration adopted =
        absl::Milliseconds(absl::ToUnixMillis(attempt.started) - report->started_unix_ms());
    *report->mutable_ran_for() =
        rpc::ToProto(now - attempt.started + std::max(absl::ZeroDuration(), adopted));
    if (attempt.failed != absl::InfinitePast()) {
      *report->mutable_failed_ago() =
          rpc::ToProto(std::max(absl::ZeroDuration(), now - attempt.failed));
    }
    // The leftover is reported together with the end, so that nothing is placed here in between.
    if (attempt.left_behind) AddLeftover(key, request);
  }
}

}  // namespace muster::agent
