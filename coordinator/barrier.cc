#include "coordinator/barrier.h"

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/barrier_names.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

constexpr int kNamedInMessage = 4;
constexpr int kLatestInReport = 3;
constexpr int kCompared = 1024;
// Limits the culprits of a report, which is a single answer: with thousands of ranks, and a stack
// of 16 KiB for each once an operator has requested them, not all would fit. The rest are named by
// number.
constexpr size_t kMaxCulpritBytes = 3 << 20;

// The longest wait of a caller; it keeps sums of microseconds from overflowing.
constexpr int64_t kLongestUs = int64_t{24} * 365 * 3600 * 1'000'000;
constexpr absl::Duration kLongest = absl::Microseconds(kLongestUs);

int64_t EarlierUs(int64_t now_us, int64_t by_us) {
  return now_us - std::clamp<int64_t>(by_us, 0, kLongestUs);
}

std::string DurationText(absl::Duration duration) {
  return absl::FormatDuration(absl::Trunc(duration, absl::Milliseconds(1)));
}

}  // namespace

BarrierSet::BarrierSet(const BarrierOptions& options, uint64_t generation, int world_size,
                       bool counters_known, BarrierHost* host)
    : options_(options),
      generation_(generation),
      world_size_(world_size),
      counters_known_(counters_known),
      host_(host) {}

int BarrierSet::Position(const Instance& instance, int rank) const {
  if (instance.members.empty()) return rank;
  const auto it = std::lower_bound(instance.members.begin(), instance.members.end(), rank);
  if (it == instance.members.end() || *it != rank) return -1;
  return static_cast<int>(it - instance.members.begin());
}

int BarrierSet::RankAt(const Instance& instance, int position) const {
  return instance.members.empty() ? position : instance.members[position];
}

std::string BarrierSet::Place(const Instance& instance) const {
  std::string place = absl::StrCat("barrier ", Quoted(instance.id), " counter ", instance.counter);
  if (!instance.call_site_text.empty())
    absl::StrAppend(&place, " at ", Quoted(instance.call_site_text));
  return place;
}

std::optional<v1::OpError> BarrierSet::CheckArrival(const Arrival& arrival) const {
  if (arrival.barrier_id.empty() || arrival.barrier_id.size() > kMaxId) {
    return BadField("barrier_id", absl::StrCat("a barrier_id has 1 to ", kMaxId, " bytes, not ",
                                               arrival.barrier_id.size()));
  }
  if (arrival.ranks.empty()) {
    return BadField("ranks", absl::StrCat("the arrival at barrier ", Quoted(arrival.barrier_id),
                                          " lists no ranks: list one or more"));
  }
  if (!arrival.payloads.empty() && arrival.payloads.size() != arrival.ranks.size()) {
    return BadField(
        "payloads",
        absl::StrCat("barrier ", Quoted(arrival.barrier_id), " got ", arrival.payloads.size(),
                     " payloads for ", arrival.ranks.size(), " ranks: give one for each, or none"));
  }
  if (!arrival.lateness_us.empty() && arrival.lateness_us.size() != arrival.ranks.size()) {
    return BadField(
        "lateness_us",
        absl::StrCat("barrier ", Quoted(arrival.barrier_id), " got ", arrival.lateness_us.size(),
                     " entries for ", arrival.ranks.size(), " ranks: give one for each, or none"));
  }
  if (!arrival.waited_less_us.empty() && arrival.waited_less_us.size() != arrival.ranks.size()) {
    return BadField(
        "waited_less_us",
        absl::StrCat("barrier ", Quoted(arrival.barrier_id), " got ", arrival.waited_less_us.size(),
                     " entries for ", arrival.ranks.size(), " ranks: give one for each, or none"));
  }
  for (const int rank : arrival.ranks) {
    if (rank < 0 || rank >= world_size_) {
      return BadField("rank", absl::StrCat("rank ", rank, " does not exist in a world of ",
                                           world_size_, ": use the rank of the join reply"));
    }
  }
  // All payloads go into one reply, and a message has at most 4 MiB.
  const size_t expected_ranks =
      arrival.participants.empty() ? world_size_ : arrival.participants.size();
  const size_t max_payload = std::min(kMaxPayload, kMaxPayloads / expected_ranks);
  for (const absl::string_view payload : arrival.payloads) {
    if (payload.size() > max_payload) {
      return TooLarge("payload",
                      absl::StrCat("a payload of barrier ", Quoted(arrival.barrier_id), " has ",
                                   payload.size(), " bytes: at most ", max_payload, " for ",
                                   expected_ranks, " ranks; put it under a key and send the key"));
    }
  }
  for (size_t i = 0; i < arrival.participants.size(); ++i) {
    const int rank = arrival.participants[i];
    if (rank < 0 || rank >= world_size_ || (i > 0 && rank <= arrival.participants[i - 1])) {
      return BadField("participants",
                      absl::StrCat("the participants of barrier ", Quoted(arrival.barrier_id),
                                   " must be ascending ranks below ", world_size_));
    }
  }
  return std::nullopt;
}

std::optional<v1::OpError> BarrierSet::AnswerEnded(const Arrival& arrival) {
  const auto at = kept_at_.find(std::make_pair(std::string(arrival.barrier_id), arrival.counter));
  if (at != kept_at_.end()) {
    host_->Deliver({arrival.call}, kept_[at->second - kept_base_].answer);
    return std::nullopt;
  }
  if (!counters_known_ && kept_base_ == 0) {
    // Every end but PASSED is journaled and would be kept: this instance passed before the restart.
    RecallPassed(std::string(arrival.barrier_id), arrival.counter);
    host_->Deliver({arrival.call}, kept_.back().answer);
    return std::nullopt;
  }
  v1::OpError error =
      MakeError(absl::StatusCode::kOutOfRange, v1::ERROR_REASON_RESULT_FORGOTTEN,
                absl::StrCat("barrier ", Quoted(arrival.barrier_id), " counter ", arrival.counter,
                             " ended before the last ", options_.kept_results,
                             " results that are kept: its result is no longer available"));
  error.mutable_detail()->set_barrier_id(std::string(arrival.barrier_id));
  return error;
}

std::optional<v1::OpError> BarrierSet::FindOrOpen(const Arrival& arrival, absl::Time now,
                                                  Instance** found) {
  Name& name = names_[arrival.barrier_id];
  Instance* instance = name.open;
  if (instance != nullptr && arrival.counter > instance->counter) {
    v1::OpError error;
    const std::string message =
        absl::StrCat("rank ", arrival.ranks[0], " arrived at barrier ", Quoted(arrival.barrier_id),
                     " counter ", arrival.counter, " while counter ", instance->counter,
                     " still waits for ", instance->expected - instance->arrived, " of ",
                     instance->expected, " ranks (rank ", instance->opened_by,
                     " arrived first): one of them skipped or repeated a call, or was restarted");
    error = MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_DESYNC, message);
    error.mutable_detail()->set_barrier_id(std::string(arrival.barrier_id));
    FailDesync(instance, message, now, arrival.ranks[0],
               absl::StrCat("barrier ", Quoted(arrival.barrier_id), " counter ", arrival.counter));
    return error;
  }
  if (instance == nullptr || arrival.counter != instance->counter) {
    const bool finished = (name.next.has_value() && arrival.counter < *name.next) ||
                          (instance != nullptr && arrival.counter < instance->counter);
    if (finished) return AnswerEnded(arrival);
    const uint64_t expected = name.next.value_or(0);
    const bool forgotten = forgot_names_ && !name.next.has_value();
    if (arrival.counter != expected && (counters_known_ || name.anchored) && !forgotten) {
      ForgetUnused(arrival.barrier_id);
      v1::OpError error = MakeError(
          absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_BARRIER_COUNTER,
          absl::StrCat("barrier ", Quoted(arrival.barrier_id), " is at counter ", expected,
                       ", not ", arrival.counter,
                       ": count each barrier from 0 in each generation, one more each time"));
      error.mutable_detail()->set_barrier_id(std::string(arrival.barrier_id));
      return error;
    }
    if (open_.size() >= kMaxOpen) {
      ForgetUnused(arrival.barrier_id);
      return TooLarge("barrier_id",
                      absl::StrCat("this job has ", open_.size(),
                                   " open barriers: wait for some of them before opening ",
                                   Quoted(arrival.barrier_id)));
    }
    instance = Open(arrival, now);
    name.open = instance;
  }
  *found = instance;
  return std::nullopt;
}

void BarrierSet::Count(const Arrival& arrival, absl::Time now, Instance* instance) {
  const int64_t now_us = absl::ToInt64Microseconds(now - instance->opened);
  const absl::Duration waited =
      counters_known_ ? absl::ZeroDuration() : std::min(arrival.waited, kLongest);
  CountWaited(instance, waited, now);
  const int64_t waited_us = absl::ToInt64Microseconds(waited);
  for (size_t i = 0; i < arrival.ranks.size(); ++i) {
    const int position = Position(*instance, arrival.ranks[i]);
    int64_t& at = instance->at_us[position];
    if (at == kAbsent) {
      ++instance->arrived;
      const int64_t late = arrival.lateness_us.empty() ? 0 : arrival.lateness_us[i];
      const int64_t less = arrival.waited_less_us.empty() ? 0 : arrival.waited_less_us[i];
      at = EarlierUs(now_us, std::max(late, waited_us - std::clamp<int64_t>(less, 0, waited_us)));
    }
    if (!arrival.payloads.empty()) {
      if (!instance->has_payloads) {
        instance->has_payloads = true;
        instance->payloads.resize(instance->expected);
      }
      instance->payloads[position] = std::string(arrival.payloads[i]);
    }
  }
}

std::optional<v1::OpError> BarrierSet::Arrive(const Arrival& arrival, absl::Time now) {
  if (auto error = CheckArrival(arrival)) return error;
  if (arrival.previous_state == v1::BARRIER_STATE_PASSED && arrival.counter > 0) {
    Recall(arrival.barrier_id, arrival.counter - 1, arrival.previous_state);
  }

  if (!HasRoomFor(arrival.barrier_id)) {
    return TooLarge("barrier_id", absl::StrCat("this generation has ", names_.size(),
                                               " barrier names whose results are kept: use one "
                                               "name again, with its next counter"));
  }
  Instance* instance = nullptr;
  if (auto error = FindOrOpen(arrival, now, &instance)) return error;
  if (instance == nullptr) return std::nullopt;  // it has ended, and the call is answered
  instance->calls.push_back(arrival.call);
  if (auto mismatch = CheckSame(*instance, arrival)) {
    FailDesync(instance, mismatch->message(), now, arrival.ranks[0],
               absl::StrCat("barrier ", Quoted(arrival.barrier_id), " counter ", arrival.counter,
                            arrival.call_site_text.empty() ? "" : " at ",
                            arrival.call_site_text.empty() ? "" : Quoted(arrival.call_site_text)));
    return std::nullopt;
  }
  Count(arrival, now, instance);
  if (FailIfGone(instance, now)) return std::nullopt;
  const int needed =
      instance->expected - (options_.release_one_early && instance->expected > 1 ? 1 : 0);
  if (instance->arrived >= needed) {
    Pass(instance, now);
    return std::nullopt;
  }
  if (arrival.call_site != 0 && open_checked_ > 1) CheckOrder(instance, arrival, now);
  return std::nullopt;
}

void BarrierSet::CountWaited(Instance* instance, absl::Duration waited, absl::Time now) {
  if (waited <= absl::ZeroDuration() || instance->timeout == absl::InfiniteDuration()) return;
  const absl::Time deadline =
      std::max(now + std::max(instance->timeout - waited, absl::ZeroDuration()), hold_until_);
  if (deadline >= instance->deadline) return;
  const absl::Duration earlier = instance->deadline - deadline;
  instance->deadline = deadline;
  instance->diag_at = std::max(now, instance->diag_at - earlier);
  if (instance->soft_at >= deadline)
    instance->soft_at = instance->soft_diag_at = absl::InfiniteFuture();
  Schedule(instance);
}

void BarrierSet::ForgetUnused(absl::string_view id) {
  const auto it = names_.find(id);
  if (it->second.open == nullptr && !it->second.next.has_value()) names_.erase(it);
}

bool BarrierSet::HasRoomFor(absl::string_view id) {
  if (names_.size() < kMaxNames || names_.contains(id)) return true;
  while (!idle_names_.empty()) {
    const auto it = names_.find(idle_names_.front());
    idle_names_.pop_front();
    if (it == names_.end()) continue;
    Name& name = it->second;
    name.idle = false;
    if (name.open != nullptr) continue;
    // Used again since: the name is queued here again when its latest result is dropped.
    if (name.next.has_value() && kept_at_.contains(std::make_pair(it->first, *name.next - 1)))
      continue;
    names_.erase(it);
    forgot_names_ = true;
    return true;
  }
  return false;
}

bool BarrierSet::FailIfGone(Instance* instance, absl::Time now) {
  for (const auto& [rank, what] : gone_) {
    const int position = Position(*instance, rank);
    if (position < 0 || instance->at_us[position] != kAbsent) continue;
    if (!instance->anchored && now < hold_until_) {
      instance->gone_at = hold_until_;
      Schedule(instance);
      return false;
    }
    FailGone(instance, rank, what, now);
    return true;
  }
  return false;
}

BarrierSet::Instance* BarrierSet::Open(const Arrival& arrival, absl::Time now) {
  auto owned = std::make_unique<Instance>();
  Instance* const instance = owned.get();
  instance->sequence = next_sequence_++;
  instance->id = std::string(arrival.barrier_id);
  instance->counter = arrival.counter;
  instance->anchored = counters_known_ || names_[arrival.barrier_id].anchored;
  instance->members.assign(arrival.participants.begin(), arrival.participants.end());
  if (instance->members.size() == static_cast<size_t>(world_size_)) instance->members.clear();
  instance->expected =
      instance->members.empty() ? world_size_ : static_cast<int>(instance->members.size());
  instance->at_us.assign(instance->expected, kAbsent);
  instance->call_site = arrival.call_site;
  instance->call_site_text = Cut(arrival.call_site_text, 256);
  instance->opened_by = arrival.ranks[0];
  instance->opened = now;
  instance->timeout =
      arrival.timeout == absl::ZeroDuration() ? options_.default_timeout : arrival.timeout;
  if (instance->timeout < absl::ZeroDuration()) instance->timeout = absl::InfiniteDuration();
  instance->deadline = now + instance->timeout;
  if (!instance->anchored) instance->deadline = std::max(instance->deadline, hold_until_);
  const absl::Duration soft = arrival.soft_timeout > absl::ZeroDuration()
                                  ? arrival.soft_timeout
                                  : std::min(options_.default_soft_timeout, instance->timeout / 2);
  instance->soft_at = soft < instance->timeout ? now + soft : absl::InfiniteFuture();
  instance->soft_diag_at = instance->soft_at - std::min(options_.diag_budget, soft / 4);
  const absl::Duration budget = std::min(options_.diag_budget, instance->timeout / 4);
  instance->diag_at = instance->timeout == absl::InfiniteDuration() ? absl::InfiniteFuture()
                                                                    : instance->deadline - budget;
  if (instance->call_site != 0) ++open_checked_;
  open_.emplace(instance->sequence, std::move(owned));
  instance->next_at = absl::InfinitePast();
  Schedule(instance);
  return instance;
}

void BarrierSet::Schedule(Instance* instance) {
  if (instance->next_at != absl::InfinitePast())
    timers_.erase({instance->next_at, instance->sequence});
  instance->next_at = std::min({instance->soft_at, instance->soft_diag_at, instance->diag_at,
                                instance->gone_at, instance->deadline});
  timers_.emplace(std::make_pair(instance->next_at, instance->sequence), instance);
}

std::optional<v1::OpError> BarrierSet::CheckSame(const Instance& instance, const Arrival& arrival) {
  const bool all = arrival.participants.empty() ||
                   arrival.participants.size() == static_cast<size_t>(world_size_);
  const bool same = all ? instance.members.empty()
                        : std::equal(arrival.participants.begin(), arrival.participants.end(),
                                     instance.members.begin(), instance.members.end());
  if (!same) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_DESYNC,
        absl::StrCat(
            "ranks disagree about the participants of barrier ", Quoted(instance.id), " counter ",
            instance.counter, ": rank ", instance.opened_by, " named ", instance.expected,
            " ranks, rank ", arrival.ranks[0], " named ",
            all ? static_cast<size_t>(world_size_) : arrival.participants.size(),
            instance.expected == static_cast<int>(arrival.participants.size()) ? " other" : "",
            ": use a separate barrier name for each set of ranks"));
  }
  for (const int rank : arrival.ranks) {
    if (Position(instance, rank) >= 0) continue;
    return MakeError(
        absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_DESYNC,
        absl::StrCat("rank ", rank, " arrived at barrier ", Quoted(instance.id), " counter ",
                     instance.counter, ", in which it does not take part: use a separate ",
                     "barrier name for each set of ranks"));
  }
  if (instance.call_site != arrival.call_site) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_DESYNC,
        absl::StrCat("ranks arrived at barrier ", Quoted(instance.id), " counter ",
                     instance.counter, " from different places: rank ", instance.opened_by,
                     " from ", Quoted(instance.call_site_text), ", rank ", arrival.ranks[0],
                     " from ", Quoted(arrival.call_site_text)));
  }
  return std::nullopt;
}

void BarrierSet::CheckOrder(Instance* instance, const Arrival& arrival, absl::Time now) {
  const auto [low, high] = std::minmax_element(arrival.ranks.begin(), arrival.ranks.end());
  for (const auto& [sequence, owned] : open_) {
    Instance* const other = owned.get();
    if (other == instance || other->call_site == 0) continue;
    // After a restart, a rank that is missing here may have passed before.
    if (!instance->anchored || !other->anchored) continue;
    if (!other->members.empty() && (*high < other->members.front() || *low > other->members.back()))
      continue;
    int here = -1;  // came to `instance` now and is missing in `other`
    for (const int rank : arrival.ranks) {
      const int position = Position(*other, rank);
      if (position >= 0 && other->at_us[position] == kAbsent) {
        here = rank;
        break;
      }
    }
    if (here < 0) continue;
    int there = -1;  // waits in `other` and is missing in `instance`
    const Instance& small = instance->expected <= other->expected ? *instance : *other;
    for (int i = 0; i < std::min(small.expected, kCompared) && there < 0; ++i) {
      const int rank = RankAt(small, i);
      const int in_other = Position(*other, rank);
      const int in_this = Position(*instance, rank);
      if (in_other >= 0 && in_this >= 0 && other->at_us[in_other] != kAbsent &&
          instance->at_us[in_this] == kAbsent) {
        there = rank;
      }
    }
    if (there < 0) continue;
    const std::string message = absl::StrCat(
        "ranks disagree about the next call: rank ", there, " waits in ", Place(*other), ", rank ",
        here, " in ", Place(*instance), ": neither can end; make all ranks call them in one order");
    const std::string this_place = Place(*instance);
    FailDesync(instance, message, now, there, Place(*other));
    FailDesync(other, message, now, here, this_place);
    return;
  }
}

v1::BarrierReport BarrierSet::MakeReport(const Instance& instance, v1::BarrierState state,
                                         absl::Time end) const {
  v1::BarrierReport report;
  report.set_barrier_id(instance.id);
  report.set_counter(instance.counter);
  report.set_generation(generation_);
  report.set_state(state);
  report.set_expected(instance.expected);
  report.set_arrived(instance.arrived);
  report.set_first_rank(-1);
  report.set_last_rank(-1);
  // The latest few, by one pass: (arrival, rank).
  std::pair<int64_t, int> latest[kLatestInReport];
  int count = 0;
  int64_t first = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < instance.expected; ++i) {
    const int64_t at = instance.at_us[i];
    if (at == kAbsent) continue;
    if (at < first) {
      first = at;
      report.set_first_rank(RankAt(instance, i));
    }
    if (count == kLatestInReport && at <= latest[count - 1].first) continue;
    int j = count < kLatestInReport ? count++ : count - 1;
    for (; j > 0 && latest[j - 1].first < at; --j) latest[j] = latest[j - 1];
    latest[j] = {at, RankAt(instance, i)};
  }
  if (count == 0) return report;
  report.set_last_rank(latest[0].second);
  *report.mutable_open_for() = ToProto(end - instance.opened - absl::Microseconds(first));
  for (int j = 0; j < count; ++j) {
    v1::LateRank* late = report.add_latest();
    late->set_rank(latest[j].second);
    *late->mutable_lateness() =
        ToProto(absl::Microseconds(latest[j].first) - absl::Microseconds(first));
  }
  return report;
}

void BarrierSet::AddMissing(const Instance& instance, v1::BarrierReport* report) const {
  size_t bytes = 0;
  for (int i = 0; i < instance.expected; ++i) {
    if (instance.at_us[i] != kAbsent) continue;
    report->add_missing_ranks(RankAt(instance, i));
    if (bytes > kMaxCulpritBytes) continue;
    v1::Culprit* const culprit = report->add_culprits();
    *culprit = host_->DescribeRank(RankAt(instance, i));
    if (bytes > kMaxCulpritBytes / 3) culprit->clear_native_stack();
    bytes += culprit->ByteSizeLong() + 4;
  }
}

namespace {
std::string MissingText(const v1::BarrierReport& report) {
  std::string text;
  for (int i = 0; i < std::min(report.culprits_size(), kNamedInMessage); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", CulpritText(report.culprits(i)));
  }
  if (report.missing_ranks_size() > kNamedInMessage) {
    absl::StrAppend(&text, " and ", report.missing_ranks_size() - kNamedInMessage, " more");
  }
  return text;
}
}  // namespace

void BarrierSet::Pass(Instance* instance, absl::Time now) {
  v1::BarrierReport report = MakeReport(*instance, v1::BARRIER_STATE_PASSED, now);
  const absl::Duration wait = FromProto(report.open_for());
  // All ranks arrived in this term, so none can have passed a later instance before it.
  names_[instance->id].anchored = true;
  ++counts_.passed;
  counts_.last_wait = wait;
  AddScores(*instance, report.last_rank(),
            absl::ToInt64Microseconds(now - instance->opened - wait));
  v1::OpResult result;
  v1::ArriveReply* reply = result.mutable_arrive();
  *reply->mutable_header() = host_->Header();
  *reply->mutable_report() = report;
  for (std::string& payload : instance->payloads) reply->add_payloads(std::move(payload));
  const bool journal = instance->has_payloads;
  Finish(instance, std::make_shared<Answer>(result), std::move(report), journal);
}

void BarrierSet::Fail(Instance* instance, v1::BarrierReport report, absl::StatusCode code,
                      v1::ErrorReason reason) {
  ++counts_.failed;
  v1::OpResult result;
  *result.mutable_error() = MakeError(code, reason, report.message());
  v1::ErrorDetail* detail = result.mutable_error()->mutable_detail();
  detail->set_barrier_id(report.barrier_id());
  detail->set_current_generation(generation_);
  detail->set_current_term(host_->Header().term());
  for (int i = 0; i < std::min(report.missing_ranks_size(), kMissingInError); ++i) {
    detail->add_missing_ranks(report.missing_ranks(i));
  }
  for (int i = 0; i < std::min(report.culprits_size(), kCulpritsInError); ++i) {
    *detail->add_culprits() = report.culprits(i);
  }
  host_->Report(report, instance->members);
  Finish(instance, std::make_shared<Answer>(result), std::move(report), true);
}

void BarrierSet::FailGone(Instance* instance, int rank, absl::string_view what, absl::Time now) {
  v1::BarrierReport report = MakeReport(*instance, v1::BARRIER_STATE_FAILED, now);
  report.add_missing_ranks(rank);
  *report.add_culprits() = host_->DescribeRank(rank);
  // Does not name the rank that opened the instance, which may have been replaced since.
  std::string waiting;
  if (instance->arrived > 0) {
    waiting = absl::StrCat(", where rank ", report.first_rank());
    waiting += instance->arrived == 1 ? " waits"
                                      : absl::StrCat(" and ", instance->arrived - 1, " more wait");
  }
  report.set_message(absl::StrCat(
      CulpritText(report.culprits(0)), " ", what, " and cannot come to ", Place(*instance), waiting,
      " (", instance->arrived, " of ", instance->expected,
      " ranks had arrived); all ranks must call it equally often: end the generation and join the "
      "next one"));
  Fail(instance, std::move(report), absl::StatusCode::kFailedPrecondition,
       v1::ERROR_REASON_RANK_FAILED);
}

void BarrierSet::FailDesync(Instance* instance, const std::string& message, absl::Time now,
                            int odd_rank, const std::string& odd_place) {
  v1::BarrierReport report = MakeReport(*instance, v1::BARRIER_STATE_DESYNC, now);
  const auto add = [&](int rank, const std::string& place) {
    v1::Culprit* culprit = report.add_culprits();
    *culprit = host_->DescribeRank(rank);
    culprit->set_waiting_in(place);
  };
  add(odd_rank, odd_place);
  if (instance->opened_by != odd_rank) add(instance->opened_by, Place(*instance));
  report.set_message(message);
  Fail(instance, std::move(report), absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_DESYNC);
}

void BarrierSet::Finish(Instance* instance, std::shared_ptr<const Answer> answer,
                        v1::BarrierReport report, bool journal) {
  const std::unique_ptr<Instance> owned = std::move(open_.find(instance->sequence)->second);
  open_.erase(instance->sequence);
  timers_.erase({instance->next_at, instance->sequence});
  if (instance->call_site != 0) --open_checked_;
  Name& name = names_[instance->id];
  name.open = nullptr;
  name.next = std::max(name.next.value_or(0), instance->counter + 1);
  if (journal) host_->JournalEnd(instance->id, instance->counter, *answer);
  host_->Deliver(instance->calls, answer);
  Keep(std::move(instance->id), instance->counter, std::move(answer), std::move(report), journal);
}

void BarrierSet::Keep(std::string id, uint64_t counter, std::shared_ptr<const Answer> answer,
                      v1::BarrierReport report, bool journaled) {
  Kept kept;
  kept.bytes = 256 + answer->bytes().size() + report.ByteSizeLong();
  kept_bytes_ += kept.bytes;
  kept_at_[std::make_pair(id, counter)] = kept_base_ + kept_.size();
  kept.id = std::move(id);
  kept.counter = counter;
  kept.answer = std::move(answer);
  kept.report = std::move(report);
  kept.journaled = journaled;
  kept_.push_back(std::move(kept));
  while (kept_.size() > options_.kept_results ||
         (kept_bytes_ > options_.kept_bytes && kept_.size() > 1)) {
    const auto at = kept_at_.find(std::make_pair(kept_.front().id, kept_.front().counter));
    if (at != kept_at_.end() && at->second == kept_base_) kept_at_.erase(at);
    if (const auto name = names_.find(kept_.front().id);
        name != names_.end() && !name->second.idle && name->second.next.has_value() &&
        *name->second.next == kept_.front().counter + 1) {
      name->second.idle = true;
      idle_names_.push_back(kept_.front().id);
    }
    kept_bytes_ -= kept_.front().bytes;
    kept_.pop_front();
    ++kept_base_;
  }
}

void BarrierSet::DropPayloads() {
  v1::OpResult passed;
  passed.mutable_arrive();
  const auto none = std::make_shared<const Answer>(passed);
  for (Kept& kept : kept_) {
    if (kept.answer->kind() == v1::OpResult::KIND_NOT_SET) continue;  // the barrier failed
    const size_t bytes = kept.answer->bytes().size();
    if (bytes <= none->bytes().size()) continue;
    kept.bytes -= bytes - none->bytes().size();
    kept_bytes_ -= bytes - none->bytes().size();
    kept.answer = none;
  }
}

void BarrierSet::RecallPassed(const std::string& id, uint64_t counter) {
  v1::OpResult result;
  v1::ArriveReply* reply = result.mutable_arrive();
  *reply->mutable_header() = host_->Header();
  v1::BarrierReport* report = reply->mutable_report();
  report->set_barrier_id(id);
  report->set_counter(counter);
  report->set_generation(generation_);
  report->set_state(v1::BARRIER_STATE_PASSED);
  report->set_first_rank(-1);
  report->set_last_rank(-1);
  report->set_message("passed before the coordinator was restarted");
  v1::BarrierReport copy = *report;
  auto answer = std::make_shared<Answer>(result);
  Name& name = names_[id];
  if (name.open != nullptr && name.open->counter == counter) {
    Finish(name.open, std::move(answer), std::move(copy), false);
  } else {
    name.next = std::max(name.next.value_or(0), counter + 1);
    Keep(id, counter, std::move(answer), std::move(copy), false);
  }
}

void BarrierSet::Recall(absl::string_view barrier_id, uint64_t counter, v1::BarrierState state) {
  // Every end but PASSED is journaled; and a set that saw its generation begin knows everything.
  if (counters_known_ || state != v1::BARRIER_STATE_PASSED || barrier_id.empty() ||
      barrier_id.size() > kMaxId || counter == std::numeric_limits<uint64_t>::max() ||
      !HasRoomFor(barrier_id)) {
    return;
  }
  const std::string id(barrier_id);
  Name& name = names_[id];
  if (name.open != nullptr && !name.open->anchored && name.open->counter <= counter) {
    RecallPassed(id, name.open->counter);
  }
  if (name.open != nullptr && name.open->counter <= counter) return;
  if (!kept_at_.contains(std::make_pair(id, counter))) RecallPassed(id, counter);
}

void BarrierSet::RestoreEnd(absl::string_view barrier_id, uint64_t counter, v1::OpResult result) {
  v1::BarrierReport report;
  if (result.has_arrive()) {
    report = result.arrive().report();
  } else {
    const v1::ErrorDetail& detail = result.error().detail();
    report.set_barrier_id(std::string(barrier_id));
    report.set_counter(counter);
    report.set_generation(generation_);
    report.set_first_rank(-1);
    report.set_last_rank(-1);
    report.set_message(result.error().message());
    *report.mutable_missing_ranks() = detail.missing_ranks();
    *report.mutable_culprits() = detail.culprits();
    switch (detail.reason()) {
      case v1::ERROR_REASON_BARRIER_TIMEOUT:
        report.set_state(v1::BARRIER_STATE_TIMED_OUT);
        break;
      case v1::ERROR_REASON_DESYNC:
        report.set_state(v1::BARRIER_STATE_DESYNC);
        break;
      case v1::ERROR_REASON_CANCELLED_BY_PEER:
        report.set_state(v1::BARRIER_STATE_CANCELLED);
        break;
      default:
        report.set_state(v1::BARRIER_STATE_FAILED);
    }
  }
  Name& name = names_[barrier_id];
  name.next = std::max(name.next.value_or(0), counter + 1);
  Keep(std::string(barrier_id), counter, std::make_shared<Answer>(result), std::move(report), true);
}

std::optional<v1::OpError> BarrierSet::Cancel(absl::string_view barrier_id, uint64_t counter,
                                              absl::string_view by, absl::string_view reason,
                                              absl::Time now) {
  const auto it = names_.find(barrier_id);
  Instance* const instance = it == names_.end() ? nullptr : it->second.open;
  if (instance == nullptr || instance->counter != counter) {
    return MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                     absl::StrCat("no open barrier ", Quoted(barrier_id), " counter ", counter,
                                  ": it has ended, or no rank has arrived yet"));
  }
  v1::BarrierReport report = MakeReport(*instance, v1::BARRIER_STATE_CANCELLED, now);
  AddMissing(*instance, &report);
  report.set_message(absl::StrCat("barrier ", Quoted(barrier_id), " counter ", counter,
                                  " was cancelled by ", by, reason.empty() ? "" : ": ", reason));
  Fail(instance, std::move(report), absl::StatusCode::kCancelled,
       v1::ERROR_REASON_CANCELLED_BY_PEER);
  return std::nullopt;
}

void BarrierSet::RankGone(int rank, absl::string_view what, absl::Time now) {
  gone_[rank] = std::string(what);
  std::vector<Instance*> waiting;
  for (const auto& [sequence, instance] : open_) waiting.push_back(instance.get());
  for (Instance* const instance : waiting) {
    const int position = Position(*instance, rank);
    if (position >= 0 && instance->at_us[position] == kAbsent) FailIfGone(instance, now);
  }
}

void BarrierSet::RankReplaced(int rank, absl::Time) {
  gone_.erase(rank);
  for (const auto& [sequence, instance] : open_) {
    const int position = Position(*instance, rank);
    if (position < 0 || instance->at_us[position] == kAbsent) continue;
    instance->at_us[position] = kAbsent;
    --instance->arrived;
    if (instance->has_payloads) instance->payloads[position].clear();
  }
}

void BarrierSet::EndAll(const v1::OpError& error) {
  std::vector<CallId> calls;
  for (const auto& [sequence, instance] : open_) {
    calls.insert(calls.end(), instance->calls.begin(), instance->calls.end());
    names_[instance->id].open = nullptr;
  }
  open_.clear();
  timers_.clear();
  open_checked_ = 0;
  if (calls.empty()) return;
  v1::OpResult result;
  *result.mutable_error() = error;
  host_->Deliver(calls, std::make_shared<Answer>(result));
}

void BarrierSet::AskStacks(const Instance& instance) {
  int asked = 0;
  for (int i = 0; i < instance.expected && asked < options_.diag_max_stacks; ++i) {
    if (instance.at_us[i] != kAbsent) continue;
    host_->AskStack(RankAt(instance, i));
    ++asked;
  }
}

void BarrierSet::Tick(absl::Time now) {
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    Instance* const instance = timers_.begin()->second;
    if (instance->deadline <= now) {
      v1::BarrierReport report = MakeReport(*instance, v1::BARRIER_STATE_TIMED_OUT, now);
      AddMissing(*instance, &report);
      report.set_message(absl::StrCat(
          "barrier ", Quoted(instance->id), " counter ", instance->counter, " timed out after ",
          DurationText(instance->timeout), ": ", report.missing_ranks_size(), " of ",
          instance->expected, " ranks did not arrive: ", MissingText(report)));
      if (!absl::StartsWith(instance->id, kAfterLoss)) {
        host_->Blame(report.missing_ranks());
      }
      Fail(instance, std::move(report), absl::StatusCode::kDeadlineExceeded,
           v1::ERROR_REASON_BARRIER_TIMEOUT);
      continue;
    }
    if (instance->gone_at <= now) {
      instance->gone_at = absl::InfiniteFuture();
      if (FailIfGone(instance, now)) continue;
    }
    for (absl::Time* const at : {&instance->soft_diag_at, &instance->diag_at}) {
      if (*at > now) continue;
      AskStacks(*instance);
      *at = absl::InfiniteFuture();
    }
    if (instance->soft_at <= now) {
      v1::BarrierReport report = MakeReport(*instance, v1::BARRIER_STATE_OPEN, now);
      AddMissing(*instance, &report);
      report.set_message(absl::StrCat(
          "barrier ", Quoted(instance->id), " counter ", instance->counter, " has waited ",
          DurationText(FromProto(report.open_for())), " for ", report.missing_ranks_size(), " of ",
          instance->expected, " ranks: ", MissingText(report)));
      host_->Report(report, instance->members);
      instance->soft_at = absl::InfiniteFuture();
    }
    Schedule(instance);
  }
}

absl::Time BarrierSet::NextDeadline() const {
  return timers_.empty() ? absl::InfiniteFuture() : timers_.begin()->first.first;
}

std::optional<v1::OpError> BarrierSet::Describe(absl::string_view barrier_id, uint64_t counter,
                                                absl::Time now, v1::BarrierReport* report) const {
  const auto it = names_.find(barrier_id);
  if (it != names_.end() && it->second.open != nullptr && it->second.open->counter == counter) {
    *report = MakeReport(*it->second.open, v1::BARRIER_STATE_OPEN, now);
    AddMissing(*it->second.open, report);
    report->set_message(absl::StrCat("waiting for ", report->missing_ranks_size(), " of ",
                                     report->expected(), " ranks: ", MissingText(*report)));
    return std::nullopt;
  }
  const auto at = kept_at_.find(std::make_pair(std::string(barrier_id), counter));
  if (at != kept_at_.end()) {
    *report = kept_[at->second - kept_base_].report;
    return std::nullopt;
  }
  return MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                   absl::StrCat("barrier ", Quoted(barrier_id), " counter ", counter,
                                " is neither open nor among the results kept of this generation"));
}

void BarrierSet::List(bool only_open, absl::Time now, v1::ListBarriersReply* reply) const {
  for (const auto& [sequence, instance] : open_) {
    *reply->add_reports() = MakeReport(*instance, v1::BARRIER_STATE_OPEN, now);
  }
  if (only_open) return;
  for (auto it = kept_.rbegin(); it != kept_.rend() && reply->reports_size() < 1000; ++it) {
    v1::BarrierReport* report = reply->add_reports();
    *report = it->report;
    report->clear_culprits();
  }
}

void BarrierSet::AddScores(const Instance& instance, int last_rank, int64_t first_us) {
  if (scored_++ % std::max<size_t>(1, options_.kept_results / 2) == 0) {
    std::swap(scores_[0], scores_[1]);
    scores_[0].assign(world_size_, RankScore());
  }
  for (int i = 0; i < instance.expected; ++i) {
    if (instance.at_us[i] == kAbsent) continue;
    RankScore& score = scores_[0][RankAt(instance, i)];
    const int64_t late = instance.at_us[i] - first_us;
    ++score.barriers;
    score.sum_us += late;
    score.max_us = std::max(score.max_us, late);
  }
  if (last_rank >= 0) ++scores_[0][last_rank].times_last;
}

void BarrierSet::InheritScores(const BarrierSet& former, absl::Span<const int> former_ranks) {
  scored_ = former.scored_;
  for (int window = 0; window < 2; ++window) {
    const std::vector<RankScore>& from = former.scores_[window];
    std::vector<RankScore>& to = scores_[window];
    if (from.empty()) continue;
    to.assign(world_size_, RankScore());
    for (int rank = 0; rank < world_size_; ++rank) {
      if (former_ranks[rank] >= 0) to[rank] = from[former_ranks[rank]];
    }
  }
}

void BarrierSet::Stragglers(v1::StragglerReportReply* reply) const {
  for (int rank = 0; rank < world_size_; ++rank) {
    RankScore sum;
    for (const std::vector<RankScore>& window : scores_) {
      if (window.empty()) continue;
      const RankScore& score = window[rank];
      sum.barriers += score.barriers;
      sum.times_last += score.times_last;
      sum.sum_us += score.sum_us;
      sum.max_us = std::max(sum.max_us, score.max_us);
    }
    if (sum.barriers == 0) continue;
    v1::StragglerRow* row = reply->add_rows();
    row->set_rank(rank);
    row->set_barriers(sum.barriers);
    row->set_times_last(sum.times_last);
    *row->mutable_mean_lateness() = ToProto(absl::Microseconds(sum.sum_us) / sum.barriers);
    *row->mutable_max_lateness() = ToProto(absl::Microseconds(sum.max_us));
  }
  std::stable_sort(reply->mutable_rows()->begin(), reply->mutable_rows()->end(),
                   [](const v1::StragglerRow& a, const v1::StragglerRow& b) {
                     return FromProto(a.mean_lateness()) > FromProto(b.mean_lateness());
                   });
}

}  // namespace muster::coordinator
