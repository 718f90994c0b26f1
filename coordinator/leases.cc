#include "coordinator/leases.h"

#include "absl/strings/str_cat.h"

namespace muster::coordinator {

LeaseDecision JudgeLease(const LeaseQuestion& question, absl::FunctionRef<Silence()> silence) {
  using Kind = LeaseDecision::Kind;
  const absl::Duration length = question.terms.length;
  LeaseDecision decision;
  // A worker that waits for its next seat is alive.
  const absl::Time ends =
      !question.sealed && question.waits ? question.now + length : question.ends;
  if (ends > question.now) {
    decision.why = "its lease runs";
    // A message of its agent may shorten the time that the worker has to return.
    decision.again = question.silent ? std::min(ends, question.now + length / 4) : ends;
    return decision;
  }
  if (question.read_until < ends) {
    if (question.now < ends + std::max(question.terms.outage_tolerance, length)) {
      decision.kind = Kind::kReadFirst;
      decision.why = "what it has sent may not have been read yet";
      decision.again = question.now + length / 2;
      return decision;
    }
    decision.unread = question.now - ends;
  }
  if (!question.sealed) {
    decision.kind = Kind::kEnded;
    decision.why = "its lease has run out, and its generation has ended";
    return decision;
  }
  SilenceVerdict verdict = JudgeSilence(silence());
  decision.kind = verdict.keep ? Kind::kSilent : Kind::kLost;
  decision.why = std::move(verdict.why);
  if (verdict.keep) decision.again = question.now + length / 4;
  return decision;
}

void Leases::BeginGeneration(absl::Time now) {
  checks_.clear();
  unread_.clear();
  silent_ = 0;
  heard_ = now;
  ranks_.assign(members_->size(), Lease{.last_seen = now});
  for (const Seat& seat : members_->seats()) {
    if (seat.alive()) checks_.insert({now + terms_.length, seat.rank()});
  }
}

void Leases::StartTerm(absl::Time now) {
  // Most workers are back sooner than an agent whose connection attempt began while the coordinator
  // was down.
  floor_ = returned_at_ = now;
  checks_.clear();
  ranks_.assign(members_->size(), Lease{.last_seen = now});
  if (!members_->sealed()) return;
  for (const Seat& seat : members_->seats()) {
    if (seat.alive()) checks_.insert({now + terms_.length, seat.rank()});
  }
}

void Leases::EndGeneration() {
  checks_.clear();
  for (const Seat& seat : members_->seats()) {
    Gone(seat.rank());
    if (!seat.alive()) continue;
    ranks_[seat.rank()].awaits_end = true;
    checks_.insert({EndOf(seat.rank()), seat.rank()});
  }
}

void Leases::Replace(int rank, absl::Time now) {
  Gone(rank);
  heard_ = now;
  ranks_[rank] = Lease{.last_seen = now};
  checks_.insert({now + terms_.length, rank});
}

void Leases::Gone(int rank) {
  if (std::exchange(ranks_[rank].silent, false)) --silent_;
}

bool Leases::Renew(int rank, absl::Time now) {
  Lease& lease = ranks_[rank];
  lease.last_seen = heard_ = now;
  if (!lease.silent) return false;
  // The other workers have some time to come back too.
  Gone(rank);
  returned_at_ = now;
  return silent_ == 0;
}

bool Leases::AnyRuns(absl::Time now) const {
  const auto& seats = members_->seats();
  return std::any_of(seats.begin(), seats.end(), [&](const Seat& seat) { return Runs(seat, now); });
}

absl::Duration Leases::SilentFor(absl::Time now) const {
  absl::Duration silent_for = absl::InfiniteDuration();
  for (const Lease& lease : ranks_) {
    if (lease.silent) silent_for = std::min(silent_for, now - lease.last_seen);
  }
  return silent_for;
}

std::optional<int> Leases::TakeDue(absl::Time now) {
  if (judge_at_ <= now) {
    judge_at_ = absl::InfiniteFuture();
    for (int rank = 0; rank < members_->size(); ++rank) {
      if (ranks_[rank].silent) checks_.insert({now, rank});
    }
  }
  while (!checks_.empty() && checks_.begin()->first <= now) {
    const int rank = checks_.begin()->second;
    checks_.erase(checks_.begin());
    // A lease that waited for unread messages has a second check, which may come after it is over.
    const bool open = members_->sealed() || ranks_[rank].awaits_end;
    if (open && members_->at(rank).alive()) return rank;
  }
  return std::nullopt;
}

LeaseDecision Leases::Judge(int rank, const Outside& outside, absl::FunctionRef<bool()> awaited) {
  Lease& lease = ranks_[rank];
  LeaseQuestion question;
  question.terms = terms_;
  question.now = outside.now;
  question.ends = EndOf(rank);
  question.read_until = outside.read_until;
  question.sealed = members_->sealed();
  question.waits = outside.waits;
  question.silent = lease.silent;
  LeaseDecision decision =
      JudgeLease(question, [&] { return SilenceOf(rank, outside.now, awaited); });
  if (decision.again != absl::InfiniteFuture()) checks_.insert({decision.again, rank});
  if (decision.kind == LeaseDecision::Kind::kReadFirst) unread_.push_back(rank);
  if (decision.kind == LeaseDecision::Kind::kEnded) lease.awaits_end = false;
  if (decision.kind == LeaseDecision::Kind::kLost)
    lease.lost_after = outside.now - std::max(lease.last_seen, floor_);
  if (decision.kind == LeaseDecision::Kind::kSilent && !std::exchange(lease.silent, true)) {
    if (++silent_ == 1) silent_why_ = decision.why;
  }
  return decision;
}

void Leases::CaughtUp(absl::Time now) {
  for (const int rank : std::exchange(unread_, {})) checks_.insert({now, rank});
}

absl::Time Leases::EndOf(int rank) const {
  const Seat& seat = members_->at(rank);
  const absl::Time last_seen = ranks_[rank].last_seen;
  const absl::Time end = std::max(last_seen, floor_) + terms_.length;
  const absl::Time back = std::max(returned_at_, agents_->cut_ended());
  if (last_seen > back) return end;
  // If the worker's agent is back and its beats leave the worker out, the worker gets no more time.
  // A hub that is back may still wait for the worker's agent.
  const std::optional<absl::Time> beat = agents_->WitnessBeat(seat.record().node(), seat.via());
  if (beat.has_value() && *beat > back) return end;
  return std::max(end, back + TimeToReturn());
}

Silence Leases::SilenceOf(int rank, absl::Time now, absl::FunctionRef<bool()> awaited) {
  const Seat& seat = members_->at(rank);
  const absl::Time last_seen = ranks_[rank].last_seen;
  Silence silence;
  silence.lease = terms_.length;
  silence.outage_tolerance = terms_.outage_tolerance;
  silence.worker = now - std::max(last_seen, floor_);
  silence.generation = now - LastHeard();
  const std::optional<absl::Time> beat = agents_->WitnessBeat(seat.record().node(), seat.via());
  if (beat.has_value()) silence.agent = now - *beat;
  silence.awaited = silence.generation >= terms_.length / 2 && awaited();
  agents_->CountFor(last_seen, terms_.length, now, &silence);
  return silence;
}

}  // namespace muster::coordinator
