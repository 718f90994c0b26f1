#include "coordinator/agree.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {
constexpr size_t kKept = 64;
constexpr size_t kMaxOpen = 1024;
}  // namespace

AgreeSet::AgreeSet(int world_size, bool counters_known, Alive alive, Describe describe)
    : world_size_(world_size),
      counters_known_(counters_known),
      alive_(std::move(alive)),
      describe_(std::move(describe)) {}

std::optional<v1::OpError> AgreeSet::Enter(CallId call, const v1::AgreeAliveRequest& request,
                                           int rank, absl::Time now, const v1::ReplyHeader& header,
                                           std::vector<Done>* done) {
  const uint64_t counter = request.counter();
  for (const auto& [kept, answer] : kept_) {
    if (kept != counter) continue;
    done->push_back({false, counter, {call}, answer});
    return std::nullopt;
  }
  std::vector<int32_t> set(request.set().begin(), request.set().end());
  if (set.empty()) {
    for (int i = 0; i < world_size_; ++i) set.push_back(i);
  }
  std::sort(set.begin(), set.end());
  set.erase(std::unique(set.begin(), set.end()), set.end());
  if (set.front() < 0 || set.back() >= world_size_) {
    return BadField("set",
                    absl::StrCat("the set names rank ", set.front() < 0 ? set.front() : set.back(),
                                 ", which does not exist in a world of ", world_size_));
  }
  if (!std::binary_search(set.begin(), set.end(), rank)) {
    return BadField("set", absl::StrCat("rank ", rank, " is not in the set it asks about: add it"));
  }
  const auto begin = [&](Instance* instance) {
    instance->set = std::move(set);
    const absl::Duration timeout = FromProto(request.timeout());
    instance->timeout = timeout == absl::ZeroDuration()  ? absl::Seconds(1800)
                        : timeout < absl::ZeroDuration() ? absl::InfiniteDuration()
                                                         : timeout;
    instance->deadline = absl::InfiniteFuture();
    instance->outside = 0;
    for (const int other : instance->set) instance->outside += alive_(other).has_value() ? 1 : 0;
  };
  auto it = open_.find(counter);
  if (it == open_.end()) {
    // After a restart others may still have to enter earlier agreements again; all that ended are
    // kept.
    const bool before =
        counters_known_ ? counter < next_ : kept_.size() >= kKept && counter < kept_.front().first;
    if (before) {
      return MakeError(
          absl::StatusCode::kOutOfRange, v1::ERROR_REASON_RESULT_FORGOTTEN,
          absl::StrCat("agreement ", counter, " ended before the last ", kKept, " that are kept"));
    }
    if (counters_known_ && counter != next_) {
      return MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_BARRIER_COUNTER,
                       absl::StrCat("the next agreement is ", next_, ", not ", counter,
                                    ": count them from 0 in each generation, one more each time"));
    }
    if (open_.size() >= kMaxOpen) {
      return TooLarge("counter",
                      absl::StrCat("this job has ", kMaxOpen,
                                   " open agreements: wait for some of them before opening one"));
    }
    next_ = std::max(next_, counter + 1);
    it = open_.emplace(counter, Instance()).first;
    begin(&it->second);
  } else if (it->second.set != set && it->second.inside.empty()) {
    // All ranks that named the other set have died: those that are left agree on theirs.
    begin(&it->second);
  } else if (it->second.set != set) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_DESYNC,
        absl::StrCat("rank ", rank, " passes a different set of ranks to agreement ", counter,
                     " than rank ", *it->second.inside.begin(), ": all must name the same"));
  }
  Instance& instance = it->second;
  if (counters_known_) {
    if (instance.deadline == absl::InfiniteFuture()) instance.deadline = now + instance.timeout;
  } else {
    // After a restart, the deadline follows the caller that has waited longest.
    const absl::Duration least = std::max(kLeastRest, hold_until_ - now);
    instance.deadline =
        std::min(instance.deadline, now + RestOf(instance.timeout, request.waited(), least));
  }
  if (instance.inside.insert(rank).second) --instance.outside;
  instance.calls.push_back(call);
  TryFinish(counter, header, done);
  return std::nullopt;
}

void AgreeSet::TryFinish(uint64_t counter, const v1::ReplyHeader& header, std::vector<Done>* done) {
  const auto it = open_.find(counter);
  Instance& instance = it->second;
  if (instance.outside > 0) return;
  v1::OpResult result;
  v1::AgreeAliveReply* reply = result.mutable_agree_alive();
  *reply->mutable_header() = header;
  for (const int rank : instance.inside) {
    const std::optional<uint64_t> incarnation = alive_(rank);
    if (!incarnation.has_value()) continue;
    reply->add_alive(rank);
    reply->add_incarnations(*incarnation);
  }
  auto answer = std::make_shared<Answer>(result);
  done->push_back({true, counter, std::move(instance.calls), answer});
  open_.erase(it);
  Keep(counter, std::move(answer));
}

void AgreeSet::Keep(uint64_t counter, std::shared_ptr<const Answer> answer) {
  kept_.emplace_back(counter, std::move(answer));
  if (kept_.size() > kKept) kept_.pop_front();
}

void AgreeSet::RankGone(int rank, const v1::ReplyHeader& header, std::vector<Done>* done) {
  std::vector<uint64_t> counters;
  for (auto& [counter, instance] : open_) {
    if (!std::binary_search(instance.set.begin(), instance.set.end(), rank)) continue;
    if (instance.inside.erase(rank) == 0) --instance.outside;
    counters.push_back(counter);
  }
  for (const uint64_t counter : counters) TryFinish(counter, header, done);
}

void AgreeSet::RankReplaced(int rank) {
  for (auto& [counter, instance] : open_) {
    if (std::binary_search(instance.set.begin(), instance.set.end(), rank)) ++instance.outside;
  }
}

void AgreeSet::Restore(uint64_t counter, v1::OpResult answer) {
  Keep(counter, std::make_shared<Answer>(answer));
}

void AgreeSet::EndAll(const v1::OpError& error, std::vector<Done>* done) {
  v1::OpResult result;
  *result.mutable_error() = error;
  const auto answer = std::make_shared<Answer>(result);
  for (auto& [counter, instance] : open_)
    done->push_back({false, counter, std::move(instance.calls), answer});
  open_.clear();
}

void AgreeSet::Tick(absl::Time now, std::vector<Done>* done) {
  for (auto it = open_.begin(); it != open_.end();) {
    Instance& instance = it->second;
    if (instance.deadline > now) {
      ++it;
      continue;
    }
    v1::OpResult result;
    std::vector<int32_t> missing;
    for (const int rank : instance.set) {
      if (!instance.inside.contains(rank) && alive_(rank).has_value()) missing.push_back(rank);
    }
    std::string who;
    for (size_t i = 0; i < std::min<size_t>(missing.size(), 4); ++i) {
      absl::StrAppend(&who, i == 0 ? "" : ", ", describe_(missing[i]));
    }
    *result.mutable_error() = MakeError(
        absl::StatusCode::kDeadlineExceeded, v1::ERROR_REASON_BARRIER_TIMEOUT,
        absl::StrCat("agreement ", it->first, " timed out after ",
                     absl::FormatDuration(instance.timeout), ": ", missing.size(),
                     " living ranks did not arrive: ", who, missing.size() > 4 ? " and more" : ""));
    for (const int rank : missing)
      result.mutable_error()->mutable_detail()->add_missing_ranks(rank);
    auto answer = std::make_shared<Answer>(result);
    const uint64_t counter = it->first;
    done->push_back({true, counter, std::move(instance.calls), answer});
    it = open_.erase(it);
    Keep(counter, std::move(answer));
  }
}

absl::Time AgreeSet::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [counter, instance] : open_) next = std::min(next, instance.deadline);
  return next;
}

}  // namespace muster::coordinator
