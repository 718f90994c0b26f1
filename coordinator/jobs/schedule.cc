#include "coordinator/jobs/schedule.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
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
void GiveAll(const ActiveJob& job, CandidateNodes* nodes) {
  ChangeAll(&NodeSpace::Give, job, nodes);
}
void TakeAll(const ActiveJob& job, CandidateNodes* nodes) {
  ChangeAll(&NodeSpace::Take, job, nodes);
}

void TakeAll(const PlacementDecision& decision, const v1::JobSpec& spec, CandidateNodes* nodes) {
  for (const v1::Placement& placement : decision.placements) {
    nodes->at(placement.node()).space.Take(placement, spec.per_process());
  }
}

PlacementDecision PlaceJob(const v1::JobRecord& job, const CandidateNodes& nodes) {
  return Place(job.spec(), job.avoided_nodes(), nodes);
}

std::tuple<int64_t, uint64_t> Rank(const v1::JobRecord& job) {
  return {-int64_t(job.spec().priority()), job.sequence()};
}

// It is being stopped to be queued again at once, with another number of processes.
bool IsReturning(const ActiveJob& job) {
  return job.attempt->stop() && job.attempt->end().end_class() == v1::END_CLASS_RESIZED &&
         job.record->wanted() == v1::JOB_ACTION_UNSPECIFIED;
}

// Jobs of one shape fit or do not fit alike.
std::string Shape(const v1::JobRecord& job) {
  std::string shape = DescribeDemand(job.spec());
  for (const std::string& node : job.avoided_nodes()) absl::StrAppend(&shape, "\n", node);
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
    for (const ActiveJob& job : question_.active) {
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
    int examined = 0;
    for (const QueuedJob& job : queued) {
      if (returning.contains(job.record)) {
        if (reservation_.has_value()) continue;
        CandidateNodes later = Freed();
        KeepIfItFits(*job.record, &later, question_.now);
      } else if (job.not_before > question_.now) {
        delayed_ = true;
        decision_.next = std::min(decision_.next, job.not_before);
        Wait(*job.record, "the end of the delay before its restart");
      } else if (!decision_.waits.empty() && ++examined > kMaxExamined) {
        Wait(*job.record, "the jobs before it");
      } else {
        Consider(*job.record);
      }
    }
    if (question_.settled && !delayed_ && !reservation_.has_value()) Grow();
    return std::move(decision_);
  }

 private:
  void Wait(const v1::JobRecord& job, std::string why) {
    decision_.waits.emplace_back(job.job_id(), std::move(why));
  }

  void Start(const v1::JobRecord& job, PlacementDecision placement) {
    processes_of_[job.owner()] += placement.processes;
    TakeAll(placement, job.spec(), &question_.nodes);
    decision_.starts.push_back({job.job_id(), std::move(placement)});
  }

  void Consider(const v1::JobRecord& job) {
    const int most = question_.max_processes_of_owner;
    if (most > 0 && !job.owner().empty()) {
      const int64_t running = processes_of_[job.owner()];
      if (running + job.spec().max_processes() > most) {
        return Wait(job,
                    absl::StrCat("other jobs of user ", Quoted(job.owner()), " to end: they run ",
                                 running, " processes of the ", most, " that each user may"));
      }
    }
    const std::string shape = Shape(job);
    if (refused_.contains(shape)) {
      return Wait(
          job, absl::StrCat("room for ", DescribeDemand(job.spec()), ", as a job before it does"));
    }
    PlacementDecision now = PlaceJob(job, question_.nodes);
    if (now.placements.empty()) {
      refused_.insert(shape);
      Wait(job, now.why);
      if (!reservation_.has_value()) Reserve(job);
      return;
    }
    if (!reservation_.has_value()) return Start(job, std::move(now));
    std::vector<std::string> stale;  // nodes whose space beside the reservation has changed
    const bool ends_before =
        job.spec().has_time_limit() &&
        question_.now + FromProto(job.spec().time_limit()) + FromProto(job.spec().stop_grace()) <=
            reservation_->starts;
    if (ends_before) {
      for (const v1::Placement& placement : now.placements) stale.push_back(placement.node());
      Start(job, std::move(now));
    } else if (!refused_beside_.contains(shape)) {
      PlacementDecision aside = PlaceJob(job, reservation_->beside);
      if (!aside.placements.empty()) {
        for (const v1::Placement& placement : aside.placements) stale.push_back(placement.node());
        TakeAll(aside, job.spec(), &reservation_->later);
        Start(job, std::move(aside));
      }
    }
    if (stale.empty()) {
      refused_beside_.insert(shape);
      return Wait(job, absl::StrCat(first_waiting_,
                                    ", which came first or has a higher priority, to start: it "
                                    "needs the room that is free now"));
    }
    for (const std::string& name : stale) {
      NodeSpace& space = reservation_->beside.at(name).space;
      space = question_.nodes.at(name).space;
      space.AtMost(reservation_->later.at(name).space);
    }
  }

  // What is free, and what is being stopped.
  CandidateNodes Freed() const {
    CandidateNodes freed = question_.nodes;
    for (const ActiveJob& job : question_.active) {
      if (job.attempt->stop()) GiveAll(job, &freed);
    }
    return freed;
  }

  void Reserve(const v1::JobRecord& job) {
    CandidateNodes all = question_.nodes;
    for (const ActiveJob& other : question_.active) GiveAll(other, &all);
    if (PlaceJob(job, all).placements.empty()) return;  // it blocks nobody
    // What is being stopped comes back first, and in the order of their limits the others.
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
    const PlacementDecision placement = PlaceJob(job, *later);
    if (placement.placements.empty()) return false;
    Keep(job, std::move(*later), placement, starts);
    return true;
  }

  void Keep(const v1::JobRecord& job, CandidateNodes later, const PlacementDecision& placement,
            absl::Time starts) {
    TakeAll(placement, job.spec(), &later);
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
      fits = !PlaceJob(job, later).placements.empty();
      if (fits) break;
    }
    if (!fits) return false;
    // Some that came first may not have helped.
    for (size_t i = stopped.size(); i-- > 0;) {
      CandidateNodes without = free;
      for (size_t j = 0; j < stopped.size(); ++j) {
        if (j != i) GiveAll(*stopped[j], &without);
      }
      if (!PlaceJob(job, without).placements.empty()) stopped.erase(stopped.begin() + i);
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
    const PlacementDecision placement = PlaceJob(job, later);
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
      const int then = PlaceJob(*job->record, question_.nodes).processes;
      TakeAll(*job, &question_.nodes);
      if (then <= now) continue;
      decision_.grows.push_back(
          {job->record->job_id(),
           absl::StrCat("there is room for ", then, " processes instead of ", now)});
      return;
    }
  }

  // What is quick to find out.
  bool MayGrow(const ActiveJob& job) {
    const v1::JobSpec& spec = job.record->spec();
    const int most = question_.max_processes_of_owner;
    if (most > 0 && !job.record->owner().empty() &&
        processes_of_[job.record->owner()] - CountProcesses(*job.attempt) + spec.max_processes() >
            most) {
      return false;
    }
    // The nodes on which it is have no room for more than it has there, unless some of it is free.
    return std::any_of(question_.nodes.begin(), question_.nodes.end(), [&](const auto& node) {
      return node.second.space.Fits(spec.per_process()) > 0;
    });
  }

  ScheduleQuestion question_;
  ScheduleDecision decision_;
  std::optional<Reservation> reservation_;
  std::string first_waiting_;
  bool delayed_ = false;                                    // a job waits for its delayed restart
  absl::flat_hash_map<std::string, int64_t> processes_of_;  // by owner, of jobs that hold space
  absl::flat_hash_set<std::string> refused_;                // shapes that do not fit
  absl::flat_hash_set<std::string> refused_beside_;  // and those that only fit on reserved space
};

}  // namespace

ScheduleDecision Schedule(ScheduleQuestion question) {
  return Scheduler(std::move(question)).Run();
}

}  // namespace muster::coordinator
