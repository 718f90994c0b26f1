#include "coordinator/jobs/schedule.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

// What the job holds, given back to the nodes or taken from them.
using Change = void (NodeSpace::*)(const v1::Placement&, const v1::ProcessResources&);
void ChangeAll(Change change, const ActiveJob& job, CandidateNodes* nodes) {
  for (const v1::Placement& placement : job.attempt->placements()) {
    if (placement.state() == v1::PLACEMENT_STATE_ENDED) continue;
    const auto it = nodes->find(placement.node());
    if (it != nodes->end()) (it->second.space.*change)(placement, job.record->spec().per_process());
  }
}
template <typename Placements>
void ChangeEach(Change change, const Placements& placements, const v1::JobSpec& spec,
                CandidateNodes* nodes) {
  for (const v1::Placement& placement : placements) {
    const auto it = nodes->find(placement.node());
    if (it != nodes->end()) (it->second.space.*change)(placement, spec.per_process());
  }
}

template <typename Placements>
int Count(const Placements& placements) {
  int processes = 0;
  for (const v1::Placement& placement : placements) processes += placement.processes();
  return processes;
}

std::tuple<int64_t, uint64_t> Rank(const v1::JobRecord& job) {
  return {-int64_t(job.spec().priority()), job.sequence()};
}

// It is being stopped to be queued again at once, with another number of processes.
bool IsReturning(const ActiveJob& job) {
  return job.attempt->stop() && job.attempt->end().end_class() == v1::END_CLASS_RESIZED &&
         job.record->wanted() == v1::JOB_ACTION_UNSPECIFIED;
}

// Longer delays are those of jobs that fail again and again soon after their start.
constexpr absl::Duration kHeldAtMost = absl::Minutes(1);
constexpr char kAwaited[] = "nodes that may come back after the start of the coordinator";

// Jobs of one shape fit or do not fit alike.
std::string Shape(const v1::JobRecord& job) {
  std::string shape = DescribeDemand(job.spec());
  if (job.spec().files_size() > 0) absl::StrAppend(&shape, " with files");  // see TakesFiles
  for (const std::string& node : job.avoided_nodes()) absl::StrAppend(&shape, "\n", node);
  // Nobody else has the room that is kept for it.
  if (job.spares_size() > 0) absl::StrAppend(&shape, "\n\n", job.job_id());
  return shape;
}

// Those that `job` may stop to make room; the first to go is the first.
std::vector<const ActiveJob*> Victims(const v1::JobRecord& job,
                                      const std::vector<ActiveJob>& active) {
  std::vector<const ActiveJob*> victims;
  for (const ActiveJob& other : active) {
    if (other.record->spec().preemptible() && !other.attempt->stop() &&
        other.record->spec().priority() < job.spec().priority()) {
      victims.push_back(&other);
    }
  }
  std::sort(victims.begin(), victims.end(), [](const ActiveJob* a, const ActiveJob* b) {
    return std::make_tuple(a->record->spec().priority(), -int64_t(a->record->sequence())) <
           std::make_tuple(b->record->spec().priority(), -int64_t(b->record->sequence()));
  });
  return victims;
}

// The space that is kept for the first job that waits.
struct Reservation {
  CandidateNodes later;   // what is free, beside it, when it starts
  CandidateNodes beside;  // of that, what is free now
  absl::Time starts = absl::InfiniteFuture();
};

class Scheduler {
 public:
  explicit Scheduler(ScheduleQuestion question) : question_(std::move(question)) {}

  ScheduleDecision Run() {
    std::vector<QueuedJob>& queued = question_.queued;
    absl::flat_hash_set<const v1::JobRecord*> returning;
    for (const ActiveJob& job : question_.active) {
      if (!IsReturning(job)) continue;
      queued.push_back({job.record});
      returning.insert(job.record);
    }
    std::sort(queued.begin(), queued.end(), [](const QueuedJob& a, const QueuedJob& b) {
      return Rank(*a.record) < Rank(*b.record);
    });
    for (const QueuedJob& job : queued) NoteSpares(*job.record);
    for (const ActiveJob& job : question_.active) {
      if (!returning.contains(job.record)) NoteSpares(*job.record);
      for (const v1::Placement& placement : job.attempt->placements()) {
        if (placement.state() == v1::PLACEMENT_STATE_ENDED) continue;
        processes_of_[job.record->owner()] += placement.processes();
      }
      // Its owner's other jobs do not take what it comes back for.
      if (IsReturning(job)) {
        processes_of_[job.record->owner()] +=
            std::max(0, job.record->spec().max_processes() - CountProcesses(*job.attempt));
      }
    }
    int looked_at = 0;
    held_ = question_.may_run_unseen;
    for (const QueuedJob& job : queued) {
      if (returning.contains(job.record)) {
        if (reservation_.has_value()) continue;
        CandidateNodes later = Freed();
        KeepIfItFits(*job.record, &later, question_.now);
      } else if (job.not_before > question_.now) {
        delayed_ = true;
        decision_.next = std::min(decision_.next, job.not_before);
        Wait(*job.record, "the end of the delay before its restart");
        if (!reservation_.has_value()) HoldRoom(job);
      } else if (held_) {
        Wait(*job.record, kAwaited);
      } else if (!decision_.waits.empty() &&
                 (examined_ >= kMaxExamined || ++looked_at > kMaxLookedAt)) {
        Wait(*job.record, "the jobs before it");
      } else {
        Consider(*job.record);
      }
    }
    if (question_.settled && !delayed_ && !reservation_.has_value()) {
      Grow();
      if (decision_.grows.empty()) FillSpares();
    }
    return std::move(decision_);
  }

 private:
  void Wait(const v1::JobRecord& job, std::string why) {
    decision_.waits.emplace_back(job.job_id(), std::move(why));
  }

  void WaitForFirst(const v1::JobRecord& job) {
    Wait(job, absl::StrCat(first_waiting_,
                           ", which came first or has a higher priority, to start: it needs the "
                           "room that is free now"));
  }

  // A job whose restart is delayed holds what it would start on, as if it ran there: jobs behind it
  // would run for longer than the delay, and a large job would have lost its nodes to small ones.
  // A job that does not fit now blocks no other job.
  void HoldRoom(const QueuedJob& delayed) {
    const v1::JobRecord& job = *delayed.record;
    // One that fails again and again must not keep nodes that it hardly uses.
    if (delayed.not_before - question_.now > kHeldAtMost) return;
    const int most = question_.max_processes_of_owner;
    int64_t& processes = processes_of_[job.owner()];
    const int own_spares = OwnSpares(job);
    if (room_held_.size() >= kMaxExamined ||
        (most > 0 && !job.owner().empty() &&
         processes - own_spares + job.spec().max_processes() > most)) {
      return;
    }
    if (refused_held_.contains(Shape(job))) return;
    const PlacementDecision placement = PlaceJob(job, &question_.nodes);
    if (placement.placements.empty()) {
      refused_held_.insert(Shape(job));
      return;
    }
    v1::JobAttempt& attempt = room_held_.emplace_back();
    for (const v1::Placement& one : placement.placements) {
      // Its spares are kept already.
      const bool spare =
          std::any_of(job.spares().begin(), job.spares().end(),
                      [&](const v1::Placement& other) { return other.node() == one.node(); });
      if (!spare || !spared_.contains(&job)) *attempt.add_placements() = one;
    }
    question_.active.push_back({.record = &job, .attempt = &attempt});
    // As for one that runs: a reservation may count on its end.
    if (job.spec().has_time_limit()) {
      question_.active.back().ends_by = delayed.not_before + FromProto(job.spec().time_limit()) +
                                        FromProto(job.spec().stop_grace());
    }
    ChangeAll(&NodeSpace::Take, question_.active.back(), &question_.nodes);
    // Its owner's other jobs do not take what it comes back for.
    processes += std::max(0, job.spec().max_processes() - own_spares);
    if (first_held_.empty()) first_held_ = job.job_id();
  }
  // Whether the job would start if no room were held.
  bool LacksHeldRoom(const v1::JobRecord& job) const {
    if (room_held_.empty()) return false;
    CandidateNodes all = question_.nodes;
    for (size_t i = question_.active.size() - room_held_.size(); i < question_.active.size(); ++i) {
      ChangeAll(&NodeSpace::Give, question_.active[i], &all);
    }
    return !PlaceJob(job, &all).placements.empty();
  }

  // ---- spares

  void NoteSpares(const v1::JobRecord& job) {
    if (job.spares_size() == 0) return;
    spared_.insert(&job);
    processes_of_[job.owner()] += Count(job.spares());
  }
  void ChangeSpares(Change change, const v1::JobRecord& job, CandidateNodes* nodes) const {
    if (spared_.contains(&job)) ChangeEach(change, job.spares(), job.spec(), nodes);
  }
  // They no longer belong to any job.
  void ReleaseSpares(const v1::JobRecord& job) {
    if (spared_.erase(&job) > 0) processes_of_[job.owner()] -= Count(job.spares());
  }

  int OwnSpares(const v1::JobRecord& job) const {
    return spared_.contains(&job) ? Count(job.spares()) : 0;
  }

  // All that the job holds.
  void GiveAll(const ActiveJob& job, CandidateNodes* nodes) const {
    ChangeAll(&NodeSpace::Give, job, nodes);
    ChangeSpares(&NodeSpace::Give, *job.record, nodes);
  }
  void TakeAll(const ActiveJob& job, CandidateNodes* nodes) const {
    ChangeAll(&NodeSpace::Take, job, nodes);
    ChangeSpares(&NodeSpace::Take, *job.record, nodes);
  }

  // Where the job would run, with the room that is kept for it.
  PlacementDecision PlaceJob(const v1::JobRecord& job, CandidateNodes* nodes) const {
    ChangeSpares(&NodeSpace::Give, job, nodes);
    PlacementDecision decision = Place(job.spec(), job.avoided_nodes(), *nodes);
    ChangeSpares(&NodeSpace::Take, job, nodes);
    return decision;
  }
  // The job runs there, and has other spares.
  void Occupy(const v1::JobRecord& job, const PlacementDecision& decision,
              CandidateNodes* nodes) const {
    ChangeSpares(&NodeSpace::Give, job, nodes);
    ChangeEach(&NodeSpace::Take, decision.placements, job.spec(), nodes);
    ChangeEach(&NodeSpace::Take, decision.spares, job.spec(), nodes);
  }

  // Those with spares behind `job`, the last one first.
  std::vector<const v1::JobRecord*> SparedBehind(const v1::JobRecord& job) const {
    std::vector<const v1::JobRecord*> behind;
    for (const v1::JobRecord* const other : spared_) {
      if (Rank(*other) > Rank(job)) behind.push_back(other);
    }
    std::sort(behind.begin(), behind.end(),
              [](const auto* a, const auto* b) { return Rank(*a) > Rank(*b); });
    return behind;
  }

  // Its spares are free for others.
  void Yield(const v1::JobRecord& job) {
    ChangeSpares(&NodeSpace::Give, job, &question_.nodes);
    ReleaseSpares(job);
    decision_.yields.push_back(job.job_id());
  }

  // Gives `job` the spares of jobs behind it, as few as it needs to fit, the last one's first. An
  // empty decision: all of them do not help.
  PlacementDecision PlaceOnSpares(const v1::JobRecord& job) {
    const std::vector<const v1::JobRecord*> behind = SparedBehind(job);
    if (behind.empty()) return {};
    CandidateNodes all = question_.nodes;
    for (const v1::JobRecord* const other : behind) {
      ChangeSpares(&NodeSpace::Give, *other, &all);
    }
    if (PlaceJob(job, &all).placements.empty()) return {};
    std::vector<const v1::JobRecord*> yields;
    CandidateNodes nodes = question_.nodes;
    for (const v1::JobRecord* const other : behind) {
      ChangeSpares(&NodeSpace::Give, *other, &nodes);
      yields.push_back(other);
      if (!PlaceJob(job, &nodes).placements.empty()) break;
    }
    // Some that came first may not have helped.
    for (size_t i = yields.size() - 1; i-- > 0;) {
      ChangeSpares(&NodeSpace::Take, *yields[i], &nodes);
      if (!PlaceJob(job, &nodes).placements.empty()) {
        yields.erase(yields.begin() + i);
      } else {
        ChangeSpares(&NodeSpace::Give, *yields[i], &nodes);
      }
    }
    for (const v1::JobRecord* const other : yields) Yield(*other);
    return PlaceJob(job, &question_.nodes);
  }

  // Frees spares of the owner's jobs behind `job`, if that makes `processes` fewer.
  void YieldToQuota(const v1::JobRecord& job, int64_t processes) {
    std::vector<const v1::JobRecord*> yields;
    for (const v1::JobRecord* const other : SparedBehind(job)) {
      if (processes <= 0 || other->owner() != job.owner()) continue;
      processes -= Count(other->spares());
      yields.push_back(other);
    }
    if (processes > 0) return;
    for (const v1::JobRecord* const other : yields) Yield(*other);
  }

  // ----

  // The nodes whose space has changed.
  std::vector<std::string> Start(const v1::JobRecord& job, PlacementDecision placement) {
    std::vector<std::string> changed;
    const auto note = [&](const auto& placements) {
      for (const v1::Placement& one : placements) changed.push_back(one.node());
    };
    note(placement.placements);
    note(placement.spares);
    if (spared_.contains(&job)) note(job.spares());
    Occupy(job, placement, &question_.nodes);
    ReleaseSpares(job);
    processes_of_[job.owner()] += placement.processes + Count(placement.spares);
    decision_.starts.push_back({job.job_id(), std::move(placement)});
    return changed;
  }

  // How many of `spares` the owner may have beside `processes` more that it is about to run.
  size_t SparesAllowed(const v1::JobRecord& job, const std::vector<v1::Placement>& spares,
                       int64_t processes) {
    const int most = question_.max_processes_of_owner;
    if (spares.empty() || most <= 0 || job.owner().empty()) return spares.size();
    const int64_t left = std::max<int64_t>(0, most - processes_of_[job.owner()] - processes);
    return std::min<size_t>(spares.size(), left / spares.front().processes());
  }

  void Consider(const v1::JobRecord& job) {
    const int most = question_.max_processes_of_owner;
    if (most > 0 && !job.owner().empty()) {
      int64_t running = processes_of_[job.owner()] - OwnSpares(job);
      if (!reservation_.has_value() && running + job.spec().max_processes() > most) {
        YieldToQuota(job, running + job.spec().max_processes() - most);
        running = processes_of_[job.owner()] - OwnSpares(job);
      }
      if (running + job.spec().max_processes() > most) {
        waiting_owners_.insert(job.owner());
        int64_t kept = 0;
        for (const v1::JobRecord* const other : spared_) {
          if (other != &job && other->owner() == job.owner()) kept += Count(other->spares());
        }
        std::string held = absl::StrCat("they run ", running - kept, " processes");
        if (kept > 0) absl::StrAppend(&held, " and keep room for ", kept);
        return Wait(job, absl::StrCat("other jobs of user ", Quoted(job.owner()), " to end: ", held,
                                      " of the ", most, " that each user may"));
      }
    }
    const std::string shape = Shape(job);
    if (refused_.contains(shape)) {
      return Wait(
          job, absl::StrCat("room for ", DescribeDemand(job.spec()), ", as a job before it does"));
    }
    // As one before it, it would fit only on what is reserved, and it does not end before.
    const bool ends_before =
        reservation_.has_value() && job.spec().has_time_limit() &&
        question_.now + FromProto(job.spec().time_limit()) + FromProto(job.spec().stop_grace()) <=
            reservation_->starts;
    if (!ends_before && refused_beside_.contains(shape)) return WaitForFirst(job);
    examined_ += decision_.waits.empty() ? 0 : 1;
    PlacementDecision now = PlaceJob(job, &question_.nodes);
    if (question_.awaits_nodes && now.processes < job.spec().max_processes()) {
      held_ = true;
      return Wait(job, now.placements.empty() ? now.why : kAwaited);
    }
    if (now.placements.empty() && !reservation_.has_value()) {
      PlacementDecision instead = PlaceOnSpares(job);
      if (!instead.placements.empty()) now = std::move(instead);
    }
    if (now.placements.empty()) {
      refused_.insert(shape);
      Wait(job, !reservation_.has_value() && LacksHeldRoom(job)
                    ? absl::StrCat(first_held_,
                                   ", which is about to start again, and keeps the "
                                   "room for that")
                    : now.why);
      if (!reservation_.has_value()) Reserve(job);
      return;
    }
    now.spares.resize(SparesAllowed(job, now.spares, now.processes - OwnSpares(job)));
    if (!reservation_.has_value()) {
      Start(job, std::move(now));
      return;
    }
    std::vector<std::string> stale;  // nodes whose space beside the reservation has changed
    if (ends_before) {
      stale = Start(job, std::move(now));
    } else {
      PlacementDecision aside = PlaceJob(job, &reservation_->beside);
      if (!aside.placements.empty()) {
        aside.spares.resize(SparesAllowed(job, aside.spares, aside.processes - OwnSpares(job)));
        Occupy(job, aside, &reservation_->later);
        stale = Start(job, std::move(aside));
      }
    }
    if (stale.empty()) {
      refused_beside_.insert(shape);
      return WaitForFirst(job);
    }
    for (const std::string& name : stale) {
      const auto node = question_.nodes.find(name);
      if (node == question_.nodes.end()) continue;  // of a former spare that is away
      NodeSpace& space = reservation_->beside.at(name).space;
      space = node->second.space;
      space.AtMost(reservation_->later.at(name).space);
    }
  }

  // What is free, and what is being stopped. A job that comes back keeps its spares.
  CandidateNodes Freed() const {
    CandidateNodes freed = question_.nodes;
    for (const ActiveJob& job : question_.active) {
      if (job.attempt->stop()) ChangeAll(&NodeSpace::Give, job, &freed);
    }
    return freed;
  }

  void Reserve(const v1::JobRecord& job) {
    CandidateNodes all = question_.nodes;
    for (const ActiveJob& other : question_.active) ChangeAll(&NodeSpace::Give, other, &all);
    for (const v1::JobRecord* const other : spared_) {
      if (other != &job) ChangeSpares(&NodeSpace::Give, *other, &all);
    }
    if (PlaceJob(job, &all).placements.empty()) return;  // it blocks no other job
    // Room that is kept behind it delays it no longer, whether it is what it waits for or only what
    // others would take while it waits.
    for (const v1::JobRecord* const other : SparedBehind(job)) Yield(*other);
    // Room of stopping jobs comes back first, then that of the others in the order of their time
    // limits.
    CandidateNodes later = Freed();
    if (KeepIfItFits(job, &later, question_.now)) return;
    if (question_.settled && Preempt(job, later)) return;
    std::vector<const ActiveJob*> order;
    for (const ActiveJob& other : question_.active) {
      if (!other.attempt->stop()) order.push_back(&other);
    }
    std::stable_sort(order.begin(), order.end(), [](const ActiveJob* a, const ActiveJob* b) {
      return a->ends_by < b->ends_by;
    });
    for (const ActiveJob* other : order) {
      GiveAll(*other, &later);
      if (KeepIfItFits(job, &later, other->ends_by)) return;
    }
  }

  // Reserves for the job if it fits on `later`, which it takes then.
  bool KeepIfItFits(const v1::JobRecord& job, CandidateNodes* later, absl::Time starts) {
    const PlacementDecision placement = PlaceJob(job, later);
    if (placement.placements.empty()) return false;
    Keep(job, std::move(*later), placement, starts);
    return true;
  }

  void Keep(const v1::JobRecord& job, CandidateNodes later, const PlacementDecision& placement,
            absl::Time starts) {
    Occupy(job, placement, &later);
    CandidateNodes beside = question_.nodes;
    for (auto& [name, node] : beside) node.space.AtMost(later.at(name).space);
    reservation_.emplace(Reservation{std::move(later), std::move(beside), starts});
    first_waiting_ = job.job_id();
  }

  bool Preempt(const v1::JobRecord& job, const CandidateNodes& free) {
    CandidateNodes later = free;
    std::vector<const ActiveJob*> stopped;
    bool fits = false;
    for (const ActiveJob* victim : Victims(job, question_.active)) {
      GiveAll(*victim, &later);
      stopped.push_back(victim);
      fits = !PlaceJob(job, &later).placements.empty();
      if (fits) break;
    }
    if (!fits) return false;
    // Some that came first may not have helped.
    for (size_t i = stopped.size(); i-- > 0;) {
      CandidateNodes without = free;
      for (size_t j = 0; j < stopped.size(); ++j) {
        if (j != i) GiveAll(*stopped[j], &without);
      }
      if (!PlaceJob(job, &without).placements.empty()) stopped.erase(stopped.begin() + i);
    }
    later = free;
    for (const ActiveJob* victim : stopped) {
      GiveAll(*victim, &later);
      decision_.preempts.push_back(
          {victim->record->job_id(),
           absl::StrCat("job ", job.job_id(), " of priority ", job.spec().priority(),
                        " needs the room; this one has priority ",
                        victim->record->spec().priority(), " and is preemptible")});
    }
    const PlacementDecision placement = PlaceJob(job, &later);
    Keep(job, std::move(later), placement, question_.now);
    return true;
  }

  void Grow() {
    std::vector<const ActiveJob*> order;
    for (const ActiveJob& job : question_.active) {
      if (job.grows_from > question_.now) {
        decision_.next = std::min(decision_.next, job.grows_from);
      } else if (!job.attempt->stop()) {
        order.push_back(&job);
      }
    }
    std::sort(order.begin(), order.end(), [](const ActiveJob* a, const ActiveJob* b) {
      return Rank(*a->record) < Rank(*b->record);
    });
    int examined = 0;
    for (const ActiveJob* job : order) {
      if (!MayGrow(*job)) continue;
      if (++examined > kMaxExamined) return;
      const int now = CountProcesses(*job->attempt);
      GiveAll(*job, &question_.nodes);
      const int then =
          Place(job->record->spec(), job->record->avoided_nodes(), question_.nodes).processes;
      TakeAll(*job, &question_.nodes);
      if (then <= now) continue;
      decision_.grows.push_back(
          {job->record->job_id(),
           absl::StrCat("there is room for ", then, " processes instead of ", now)});
      return;
    }
  }

  void FillSpares() {
    std::vector<const ActiveJob*> order;
    for (const ActiveJob& job : question_.active) {
      const auto& placements = job.attempt->placements();
      if (job.record->spares_size() >= job.record->spec().spare_nodes() || job.attempt->stop() ||
          waiting_owners_.contains(job.record->owner()) ||
          decision_.yields.end() !=
              std::find(decision_.yields.begin(), decision_.yields.end(), job.record->job_id()) ||
          std::any_of(placements.begin(), placements.end(), [](const v1::Placement& placement) {
            return placement.state() == v1::PLACEMENT_STATE_ENDED;
          })) {
        continue;
      }
      order.push_back(&job);
    }
    std::sort(order.begin(), order.end(), [](const ActiveJob* a, const ActiveJob* b) {
      return Rank(*a->record) < Rank(*b->record);
    });
    // Of a shape for which no node has room, wherever its jobs run: they cost one look together.
    absl::flat_hash_set<std::string> refused;
    int examined = 0;
    for (const ActiveJob* const job : order) {
      const v1::JobRecord& record = *job->record;
      const int each = job->attempt->placements(0).processes();
      const std::string shape = absl::StrCat(each, "\n", DescribeDemand(record.spec()), "\n",
                                             absl::StrJoin(record.avoided_nodes(), "\n"));
      if (refused.contains(shape)) continue;
      if (++examined > kMaxExamined) return;
      if (PlaceSpares(record.spec(), each, 1, record.avoided_nodes(), {}, question_.nodes)
              .empty()) {
        refused.insert(shape);
        continue;
      }
      std::vector<const v1::Placement*> taken;
      for (const v1::Placement& placement : job->attempt->placements()) taken.push_back(&placement);
      for (const v1::Placement& spare : record.spares()) taken.push_back(&spare);
      std::vector<v1::Placement> more =
          PlaceSpares(record.spec(), each, record.spec().spare_nodes() - record.spares_size(),
                      record.avoided_nodes(), taken, question_.nodes);
      more.resize(SparesAllowed(record, more, 0));
      if (more.empty()) continue;
      ChangeEach(&NodeSpace::Take, more, record.spec(), &question_.nodes);
      processes_of_[record.owner()] += Count(more);
      decision_.spares.emplace_back(record.job_id(), std::move(more));
    }
  }

  // What is quick to find out.
  bool MayGrow(const ActiveJob& job) {
    const v1::JobSpec& spec = job.record->spec();
    const int most = question_.max_processes_of_owner;
    if (most > 0 && !job.record->owner().empty() &&
        processes_of_[job.record->owner()] - CountProcesses(*job.attempt) - OwnSpares(*job.record) +
                spec.max_processes() >
            most) {
      return false;
    }
    if (OwnSpares(*job.record) > 0) return true;
    // The nodes on which it is have no room for more than it has there, unless some of it is free.
    return std::any_of(question_.nodes.begin(), question_.nodes.end(), [&](const auto& node) {
      return node.second.space.Fits(spec.per_process()) > 0;
    });
  }

  ScheduleQuestion question_;
  ScheduleDecision decision_;
  std::optional<Reservation> reservation_;
  std::string first_waiting_;
  std::deque<v1::JobAttempt> room_held_;  // the last ones of question_.active have them
  std::string first_held_;
  absl::flat_hash_set<std::string> refused_held_;  // shapes for which there is no room to hold
  int examined_ = 0;      // jobs behind the first, for which nodes were looked for
  bool delayed_ = false;  // a job waits for its delayed restart
  bool held_ = false;     // all behind wait for the nodes that are awaited
  absl::flat_hash_map<std::string, int64_t> processes_of_;  // by owner, of jobs that hold space
  absl::flat_hash_set<const v1::JobRecord*> spared_;        // jobs whose spares are still theirs
  absl::flat_hash_set<std::string>
      waiting_owners_;                        // of jobs that wait for the limit of their user
  absl::flat_hash_set<std::string> refused_;  // shapes that do not fit
  absl::flat_hash_set<std::string> refused_beside_;  // and those that only fit on reserved space
};

}  // namespace

ScheduleDecision Schedule(ScheduleQuestion question) {
  return Scheduler(std::move(question)).Run();
}

}  // namespace muster::coordinator
