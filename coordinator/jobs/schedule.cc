#include "coordinator/jobs/schedule.h"

#include <algorithm>
#include <deque>
#include <limits>
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

// Adds what the job holds to the space of the nodes, or subtracts it.
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

// Returns whether the job is being stopped to be queued again at once with another number of
// processes.
bool IsReturning(const ActiveJob& job) {
  return job.attempt->stop() && job.attempt->end().end_class() == v1::END_CLASS_RESIZED &&
         job.record->wanted() == v1::JOB_ACTION_UNSPECIFIED;
}

// Returns when a job that starts at `starts` has ended at the latest: by its time limit and
// stop_grace.
absl::Time EndsBy(const v1::JobSpec& spec, absl::Time starts) {
  return spec.has_time_limit()
             ? starts + FromProto(spec.time_limit()) + FromProto(spec.stop_grace())
             : absl::InfiniteFuture();
}

// Only jobs that repeatedly fail soon after their start have longer delays.
constexpr absl::Duration kHeldAtMost = absl::Minutes(1);
constexpr char kAwaited[] = "nodes that may come back after the start of the coordinator";

// Returns the jobs that `job` may stop to make room, in the order in which to stop them.
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

// The first job of an owner that waits for the owner's limit, or for the room reserved for it. It
// gets as many as it needs of the processes that the limit allows, before other jobs of the owner.
struct FirstOfOwner {
  std::string job_id;
  absl::Time starts = absl::InfiniteFuture();  // infinite: unknown
  int64_t beside = 0;                          // how many more processes may run at that time
};

// The space reserved for the first job that waits.
struct Reservation {
  CandidateNodes later;   // what is free besides the reservation when the job starts
  CandidateNodes beside;  // the part of `later` that is free now
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
    for (size_t i = 0; i < question_.active.size(); ++i) {
      const ActiveJob& job = question_.active[i];
      active_of_[job.record->owner()].push_back(i);
      if (!returning.contains(job.record)) NoteSpares(*job.record);
      int live = 0;
      for (const v1::Placement& placement : job.attempt->placements()) {
        if (placement.state() != v1::PLACEMENT_STATE_ENDED) live += placement.processes();
      }
      processes_of_[job.record->owner()] += live;
      // Other jobs of its owner must not take the processes for which it comes back.
      if (IsReturning(job)) {
        processes_of_[job.record->owner()] +=
            std::max(0, job.record->spec().max_processes() - live);
      }
    }
    awaits_ = question_.may_run_unseen;
    for (const QueuedJob& job : queued) {
      if (returning.contains(job.record)) {
        if (reservation_.has_value()) continue;
        CandidateNodes later = Freed();
        KeepIfItFits(*job.record, &later, question_.now);
      } else if (job.not_before > question_.now) {
        decision_.next = std::min(decision_.next, job.not_before);
        Wait(*job.record, "the end of the delay before its restart");
        // A job that holds no room is not delayed by jobs that take some.
        if (!reservation_.has_value() && HoldRoom(job)) delayed_ = true;
      } else if (awaits_) {
        Wait(*job.record, kAwaited);
      } else {
        Consider(*job.record);
      }
    }
    if (skipped_) FindTooLarge();
    if (question_.settled && !delayed_ && !reservation_.has_value()) {
      Grow();
      if (decision_.grows.empty()) FillSpares();
    }
    return std::move(decision_);
  }

 private:
  // Returns the job's shape: jobs of the same shape fit on the same nodes.
  std::string Shape(const v1::JobRecord& job) const {
    const v1::JobSpec& spec = job.spec();
    const v1::ProcessResources& process = spec.per_process();
    std::string shape = absl::StrCat(spec.min_processes(), " ", Most(job), " ",
                                     spec.processes_per_node(), " ", process.cpus(), " ");
    absl::StrAppend(&shape, process.memory_bytes(), " ", process.gpus(), " ",
                    process.gpu_memory_bytes(), spec.files_size() > 0 ? " files" : "");
    std::vector<std::string> labels;
    for (const v1::NameValue& label : spec.node_labels()) {
      // With lengths, because names and values may contain anything.
      labels.push_back(absl::StrCat(label.name().size(), " ", label.name(), "=", label.value()));
    }
    std::sort(labels.begin(), labels.end());
    for (const std::string& label : labels) {
      absl::StrAppend(&shape, "\n", label.size(), " ", label);
    }
    for (const std::string& node : job.avoided_nodes()) {
      absl::StrAppend(&shape, "\n\n", node.size(), " ", node);
    }
    // The room kept for the job is available to no other job.
    if (job.spares_size() > 0) absl::StrAppend(&shape, "\n\n\n", job.job_id());
    return shape;
  }

  void Wait(const v1::JobRecord& job, std::string why) {
    decision_.waits.emplace_back(job.job_id(), std::move(why));
  }

  void WaitForFirst(const v1::JobRecord& job) {
    Wait(job, absl::StrCat(first_waiting_,
                           ", which came first or has a higher priority, to start: it needs the "
                           "room that is free now"));
  }

  // Adds the job to the active ones, as the holder of `room`: a reservation behind it may count on
  // its end.
  const ActiveJob& AddActive(const v1::JobRecord& job, const std::vector<v1::Placement>& room,
                             absl::Time starts) {
    v1::JobAttempt& attempt = attempts_.emplace_back();
    for (const v1::Placement& one : room) *attempt.add_placements() = one;
    active_of_[job.owner()].push_back(question_.active.size());
    return question_.active.emplace_back(
        ActiveJob{.record = &job, .attempt = &attempt, .ends_by = EndsBy(job.spec(), starts)});
  }

  // Makes a job whose restart is delayed hold the room on which it would start, as if it ran there:
  // jobs behind it would run for longer than the delay, and a large job would lose its nodes to
  // small ones. A job that does not fit now blocks no other job. Returns whether the job holds any
  // room.
  bool HoldRoom(const QueuedJob& delayed) {
    const v1::JobRecord& job = *delayed.record;
    // A job that fails repeatedly must not keep nodes that it hardly uses.
    if (delayed.not_before - question_.now > kHeldAtMost) return false;
    const int own_spares = OwnSpares(job);
    if (held_.size() >= kMaxExamined ||
        job.spec().max_processes() > LeftFor(job, delayed.not_before) + own_spares) {
      return false;
    }
    if (refused_held_.contains(Shape(job))) return false;
    const PlacementDecision placement = PlaceJob(job, &question_.nodes);
    if (placement.placements.empty()) {
      refused_held_.insert(Shape(job));
      return false;
    }
    std::vector<v1::Placement> room;
    for (const v1::Placement& one : placement.placements) {
      // The room of its spares is kept already.
      const bool spare =
          std::any_of(job.spares().begin(), job.spares().end(),
                      [&](const v1::Placement& other) { return other.node() == one.node(); });
      if (!spare || !spared_.contains(&job)) room.push_back(one);
    }
    held_.push_back(question_.active.size());
    ChangeAll(&NodeSpace::Take, AddActive(job, room, delayed.not_before), &question_.nodes);
    // Other jobs of its owner must not take the processes for which it comes back.
    TakeOfLimit(job, std::max(0, job.spec().max_processes() - own_spares), delayed.not_before);
    if (first_held_.empty()) first_held_ = job.job_id();
    return true;
  }
  // Returns whether the job would start if no room were held.
  bool LacksHeldRoom(const v1::JobRecord& job) {
    if (held_.empty()) return false;
    CandidateNodes* const nodes = &question_.nodes;
    for (const size_t i : held_) ChangeAll(&NodeSpace::Give, question_.active[i], nodes);
    const bool fits = Fits(job, nodes);
    for (const size_t i : held_) ChangeAll(&NodeSpace::Take, question_.active[i], nodes);
    return fits;
  }

  // ---- spares

  void NoteSpares(const v1::JobRecord& job) {
    if (job.spares_size() == 0) return;
    spared_.insert(&job);
    processes_of_[job.owner()] += Count(job.spares());
    spares_of_[job.owner()] += Count(job.spares());
  }
  void ChangeSpares(Change change, const v1::JobRecord& job, CandidateNodes* nodes) const {
    if (spared_.contains(&job)) ChangeEach(change, job.spares(), job.spec(), nodes);
  }
  // Records that the job's spares no longer belong to any job.
  void ReleaseSpares(const v1::JobRecord& job) {
    if (spared_.erase(&job) == 0) return;
    processes_of_[job.owner()] -= Count(job.spares());
    spares_of_[job.owner()] -= Count(job.spares());
  }

  int OwnSpares(const v1::JobRecord& job) const {
    return spared_.contains(&job) ? Count(job.spares()) : 0;
  }

  // Add to `nodes`, or take from them, all that the job holds.
  void GiveAll(const ActiveJob& job, CandidateNodes* nodes) const {
    ChangeAll(&NodeSpace::Give, job, nodes);
    ChangeSpares(&NodeSpace::Give, *job.record, nodes);
  }
  void TakeAll(const ActiveJob& job, CandidateNodes* nodes) const {
    ChangeAll(&NodeSpace::Take, job, nodes);
    ChangeSpares(&NodeSpace::Take, *job.record, nodes);
  }

  // Returns the fewest processes with which the job starts.
  static int Least(const v1::JobSpec& spec) {
    const int each = std::max(1, spec.processes_per_node());
    return (spec.min_processes() + each - 1) / each * each;
  }
  // Returns the number of processes with which the job starts if they fit.
  int Most(const v1::JobRecord& job) const {
    const auto it = at_most_.find(&job);
    return it == at_most_.end() ? job.spec().max_processes() : it->second;
  }

  // Returns where the job would run, if the room kept for it may be used.
  PlacementDecision PlaceJob(const v1::JobRecord& job, CandidateNodes* nodes) const {
    ChangeSpares(&NodeSpace::Give, job, nodes);
    PlacementDecision decision = Place(job.spec(), job.avoided_nodes(), *nodes, Most(job));
    ChangeSpares(&NodeSpace::Take, job, nodes);
    return decision;
  }
  // Returns whether PlaceJob finds a place.
  bool Fits(const v1::JobRecord& job, CandidateNodes* nodes) const {
    ChangeSpares(&NodeSpace::Give, job, nodes);
    const bool fits = HasRoom(job.spec(), job.avoided_nodes(), *nodes, Most(job));
    ChangeSpares(&NodeSpace::Take, job, nodes);
    return fits;
  }
  // Returns all nodes as if nothing ran and no room were kept.
  const CandidateNodes& Whole() {
    if (!whole_.has_value()) {
      whole_ = question_.nodes;
      for (const ActiveJob& job : question_.active) ChangeAll(&NodeSpace::Give, job, &*whole_);
      for (const v1::JobRecord* const job : spared_) {
        ChangeSpares(&NodeSpace::Give, *job, &*whole_);
      }
    }
    return *whole_;
  }
  // Returns whether the job would not start even if nothing else ran. Then it blocks no other job.
  bool IsTooLarge(const v1::JobRecord& job) {
    if (HasRoom(job.spec(), job.avoided_nodes(), Whole(), Most(job))) return false;
    decision_.too_large.try_emplace(Shape(job),
                                    Place(job.spec(), job.avoided_nodes(), Whole(), Most(job)).why);
    return true;
  }
  // Finds requests that are too large for all nodes, so that later schedules skip them and examine
  // the jobs that this one did not.
  void FindTooLarge() {
    for (const v1::JobRecord* const job : examined_in_vain_) IsTooLarge(*job);
    for (const auto& [shape, why] : decision_.too_large) {
      decision_.unfinished = decision_.unfinished || !question_.too_large.contains(shape);
    }
  }

  // Takes the space for the job to run at `decision`, which replaces its spares.
  void Occupy(const v1::JobRecord& job, const PlacementDecision& decision,
              CandidateNodes* nodes) const {
    ChangeSpares(&NodeSpace::Give, job, nodes);
    ChangeEach(&NodeSpace::Take, decision.placements, job.spec(), nodes);
    ChangeEach(&NodeSpace::Take, decision.spares, job.spec(), nodes);
  }

  // Returns the jobs with spares behind `job`, the last one first.
  std::vector<const v1::JobRecord*> SparedBehind(const v1::JobRecord& job) const {
    std::vector<const v1::JobRecord*> behind;
    for (const v1::JobRecord* const other : spared_) {
      if (Rank(*other) > Rank(job)) behind.push_back(other);
    }
    std::sort(behind.begin(), behind.end(),
              [](const auto* a, const auto* b) { return Rank(*a) > Rank(*b); });
    return behind;
  }

  // Frees the job's spares for others.
  void Yield(const v1::JobRecord& job) {
    ChangeSpares(&NodeSpace::Give, job, &question_.nodes);
    ReleaseSpares(job);
    decision_.yields.push_back(job.job_id());
  }

  // Gives `job` the spares of jobs behind it: as few as it needs to fit, those of the last job
  // first. Returns an empty decision if all of them are not enough.
  PlacementDecision PlaceOnSpares(const v1::JobRecord& job) {
    const std::vector<const v1::JobRecord*> behind = SparedBehind(job);
    if (behind.empty()) return {};
    CandidateNodes all = question_.nodes;
    for (const v1::JobRecord* const other : behind) {
      ChangeSpares(&NodeSpace::Give, *other, &all);
    }
    if (!Fits(job, &all)) return {};
    std::vector<const v1::JobRecord*> yields;
    CandidateNodes nodes = question_.nodes;
    for (const v1::JobRecord* const other : behind) {
      ChangeSpares(&NodeSpace::Give, *other, &nodes);
      yields.push_back(other);
      if (Fits(job, &nodes)) break;
    }
    // Some of the first ones may not have helped.
    for (size_t i = yields.size() - 1; i-- > 0;) {
      ChangeSpares(&NodeSpace::Take, *yields[i], &nodes);
      if (Fits(job, &nodes)) {
        yields.erase(yields.begin() + i);
      } else {
        ChangeSpares(&NodeSpace::Give, *yields[i], &nodes);
      }
    }
    for (const v1::JobRecord* const other : yields) Yield(*other);
    return PlaceJob(job, &question_.nodes);
  }

  // Frees as many spares of the owner's jobs behind `job` as are needed to release `processes`
  // processes; none if all of them are not enough.
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

  // Starts the job. Returns the nodes whose space has changed.
  std::vector<std::string> Start(const v1::JobRecord& job, PlacementDecision placement) {
    std::vector<std::string> changed;
    const auto note = [&](const auto& placements) {
      for (const v1::Placement& one : placements) changed.push_back(one.node());
    };
    note(placement.placements);
    note(placement.spares);
    if (spared_.contains(&job)) note(job.spares());
    Occupy(job, placement, &question_.nodes);
    TakeOfLimit(job, placement.processes + Count(placement.spares) - OwnSpares(job), question_.now);
    processes_of_[job.owner()] += OwnSpares(job);  // Start gives these back
    ReleaseSpares(job);
    std::vector<v1::Placement> room = placement.placements;
    room.insert(room.end(), placement.spares.begin(), placement.spares.end());
    AddActive(job, room, question_.now);
    started_.insert(&job);
    decision_.starts.push_back({job.job_id(), std::move(placement)});
    return changed;
  }

  // Returns whether a job that starts at `from` has ended when another one starts at `starts`. If
  // `starts` is unknown, so is this, and the result is false.
  static bool EndsBefore(const v1::JobRecord& job, absl::Time from, absl::Time starts) {
    return starts != absl::InfiniteFuture() && EndsBy(job.spec(), from) <= starts;
  }

  // ---- the limit of an owner

  bool IsLimited(const v1::JobRecord& job) const {
    return question_.max_processes_of_owner > 0 && !job.owner().empty();
  }

  // Returns how many processes the job's owner may get for it if it starts at `from`, besides those
  // that the owner has. Negative: the owner has more than allowed.
  int64_t LeftFor(const v1::JobRecord& job, absl::Time from) const {
    if (!IsLimited(job)) return std::numeric_limits<int32_t>::max();
    const auto processes = processes_of_.find(job.owner());
    const int64_t left = question_.max_processes_of_owner -
                         (processes == processes_of_.end() ? 0 : processes->second);
    const auto first = first_of_owner_.find(job.owner());
    return first == first_of_owner_.end() || EndsBefore(job, from, first->second.starts)
               ? left
               : std::min(left, first->second.beside);
  }
  void TakeOfLimit(const v1::JobRecord& job, int64_t processes, absl::Time from) {
    processes_of_[job.owner()] += processes;
    const auto first = first_of_owner_.find(job.owner());
    if (first != first_of_owner_.end() && !EndsBefore(job, from, first->second.starts)) {
      first->second.beside -= processes;
    }
  }

  // Returns how many of `spares` the owner may have besides `processes` more that are about to run.
  size_t SparesAllowed(const v1::JobRecord& job, const std::vector<v1::Placement>& spares,
                       int64_t processes) const {
    if (spares.empty()) return 0;
    const int64_t left = std::max<int64_t>(0, LeftFor(job, question_.now) - processes);
    return std::min<size_t>(spares.size(), left / spares.front().processes());
  }

  // Returns whether the limit of its owner lets the job start now, with at most Most(job)
  // processes. If not, the job waits for that.
  bool IsAllowed(const v1::JobRecord& job) {
    if (!IsLimited(job)) return true;
    const v1::JobSpec& spec = job.spec();
    const int own_spares = OwnSpares(job);
    const bool is_first = !first_of_owner_.contains(job.owner());
    int64_t left = LeftFor(job, question_.now) + own_spares;
    if (is_first && !reservation_.has_value()) {
      for (const int size : {spec.max_processes(), Least(spec)}) {
        if (size > left) YieldToQuota(job, size - left);
        left = LeftFor(job, question_.now) + own_spares;
      }
    }
    if (Least(spec) > left) {
      if (is_first && MayEverStart(job)) AwaitLimit(job, Least(spec));
      WaitForLimit(job);
      return false;
    }
    if (spec.max_processes() > left) {
      const int each = std::max(1, spec.processes_per_node());
      at_most_[&job] = static_cast<int>(left / each * each);
    }
    return true;
  }

  // Returns whether the job would start if nothing else ran, neither of its owner's jobs nor of
  // others. A job that would not reserves nothing of the limit.
  bool MayEverStart(const v1::JobRecord& job) {
    if (Least(job.spec()) > question_.max_processes_of_owner) return false;
    const auto known = question_.too_large.find(Shape(job));
    if (known != question_.too_large.end()) {
      decision_.too_large.insert(*known);
      return false;
    }
    if (limits_examined_ >= kMaxExamined) return true;
    ++limits_examined_;
    return !IsTooLarge(job);
  }

  void WaitForLimit(const v1::JobRecord& job) {
    const int most = question_.max_processes_of_owner;
    // The limit was lowered after the job was submitted.
    if (Least(job.spec()) > most) {
      return Wait(job, absl::StrCat("a higher limit, or a smaller size (muster resize): it needs ",
                                    Least(job.spec()), " processes, and each user may run ", most));
    }
    const int64_t others = processes_of_[job.owner()] - OwnSpares(job);
    if (others + Least(job.spec()) <= most) {
      return Wait(job, absl::StrCat(first_of_owner_.at(job.owner()).job_id,
                                    ", which came first or has a higher priority, to start: it "
                                    "needs what is left of the ",
                                    most, " processes that each user may run"));
    }
    const int64_t kept = spares_of_[job.owner()] - OwnSpares(job);
    std::string held = absl::StrCat("they run ", others - kept, " processes");
    if (kept > 0) absl::StrAppend(&held, " and keep room for ", kept);
    Wait(job, absl::StrCat("other jobs of user ", Quoted(job.owner()), " to end: ", held,
                           " of the ", most, " that each user may run"));
  }

  // Reserves `size` of the processes that the owner's limit allows for the job, just as the first
  // job that waits for room reserves nodes: otherwise the owner's later jobs might run in its place
  // forever.
  void AwaitLimit(const v1::JobRecord& job, int size) {
    std::vector<const ActiveJob*> order;
    for (const size_t i : active_of_[job.owner()]) {
      const ActiveJob& other = question_.active[i];
      if (!IsReturning(other)) order.push_back(&other);
    }
    // Jobs that are being stopped end first.
    const auto ends_by = [this](const ActiveJob& other) {
      return other.attempt->stop() ? question_.now : other.ends_by;
    };
    std::stable_sort(order.begin(), order.end(), [&](const ActiveJob* a, const ActiveJob* b) {
      return ends_by(*a) < ends_by(*b);
    });
    FirstOfOwner first{.job_id = job.job_id()};
    int64_t left = LeftFor(job, question_.now) + OwnSpares(job) - size;
    for (size_t i = 0; i < order.size() && left < 0; ++i) {
      for (const v1::Placement& placement : order[i]->attempt->placements()) {
        if (placement.state() != v1::PLACEMENT_STATE_ENDED) left += placement.processes();
      }
      left += OwnSpares(*order[i]->record);
      if (left >= 0) first.starts = ends_by(*order[i]);
    }
    first.beside = std::max<int64_t>(0, left);
    first_of_owner_.emplace(job.owner(), std::move(first));
  }

  // Reserves the whole size for a job that does not fit: what the limit leaves it may be a number
  // that does not fit on any nodes.
  void AwaitMore(const v1::JobRecord& job) {
    if (!at_most_.contains(&job) || first_of_owner_.contains(job.owner())) return;
    const int size = std::min(job.spec().max_processes(), question_.max_processes_of_owner);
    if (HasRoom(job.spec(), job.avoided_nodes(), Whole(), size)) AwaitLimit(job, size);
  }

  // ----

  void Consider(const v1::JobRecord& job) {
    if (!IsAllowed(job)) return;
    const std::string shape = Shape(job);
    if (const auto refused = refused_.find(shape); refused != refused_.end()) {
      return Wait(job, refused->second);
    }
    if (const auto known = question_.too_large.find(shape); known != question_.too_large.end()) {
      decision_.too_large.insert(*known);
      NoteRefused(job, shape);
      AwaitMore(job);
      return Wait(job, known->second);
    }
    // Like an earlier job of the same shape, it would fit only on reserved space, and it does not
    // end before that is needed.
    const bool ends_before =
        reservation_.has_value() && EndsBefore(job, question_.now, reservation_->starts);
    if (!ends_before && refused_beside_.contains(shape)) return WaitForFirst(job);
    if (!decision_.waits.empty()) {
      if (examined_ >= kMaxExamined) {
        skipped_ = true;
        return Wait(job, "the jobs before it");
      }
      ++examined_;
    }
    PlacementDecision now = PlaceJob(job, &question_.nodes);
    if (question_.awaits_nodes && now.processes < Most(job)) {
      awaits_ = true;
      return Wait(job, now.placements.empty() ? now.why : kAwaited);
    }
    if (now.placements.empty() && !reservation_.has_value()) {
      PlacementDecision instead = PlaceOnSpares(job);
      if (!instead.placements.empty()) now = std::move(instead);
    }
    if (now.placements.empty()) {
      NoteRefused(job, shape);
      examined_in_vain_.push_back(&job);
      Wait(job, !reservation_.has_value() && LacksHeldRoom(job)
                    ? absl::StrCat(first_held_,
                                   ", which is about to start again, and keeps the "
                                   "room for that")
                    : now.why);
      if (reservation_.has_value()) return;
      Reserve(job);
      if (!reservation_.has_value()) AwaitMore(job);
      // The owner's later jobs must not take the processes that the limit allows this one.
      if (reservation_.has_value() && IsLimited(job)) {
        const int64_t beside = LeftFor(job, question_.now) + OwnSpares(job) - Most(job);
        first_of_owner_.try_emplace(job.owner(),
                                    FirstOfOwner{job.job_id(), reservation_->starts, beside});
      }
      return;
    }
    now.spares.resize(SparesAllowed(job, now.spares, now.processes - OwnSpares(job)));
    if (!reservation_.has_value()) {
      Start(job, std::move(now));
      return;
    }
    std::vector<std::string> stale;  // nodes whose space besides the reservation has changed
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
      if (node == question_.nodes.end()) continue;  // a former spare on a node that is away
      NodeSpace& space = reservation_->beside.at(name).space;
      space = node->second.space;
      space.AtMost(reservation_->later.at(name).space);
    }
  }

  void NoteRefused(const v1::JobRecord& job, const std::string& shape) {
    refused_.emplace(
        shape, absl::StrCat("room for ", DescribeDemand(job.spec()), ", as a job before it does"));
  }

  // Returns what is free or about to be freed by jobs that are being stopped. A job that comes back
  // keeps its spares.
  CandidateNodes Freed() const {
    CandidateNodes freed = question_.nodes;
    for (const ActiveJob& job : question_.active) {
      if (job.attempt->stop()) ChangeAll(&NodeSpace::Give, job, &freed);
    }
    return freed;
  }

  void Reserve(const v1::JobRecord& job) {
    if (IsTooLarge(job)) return;
    // Spares of jobs behind this one no longer delay it, whether it waits for that room or others
    // would take it meanwhile.
    for (const v1::JobRecord* const other : SparedBehind(job)) Yield(*other);
    // The room of stopping jobs is freed first, then that of the others in the order of their time
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
    if (const size_t given = GiveUntilItFits(job, order, &later); given > 0) {
      KeepIfItFits(job, &later, order[given - 1]->ends_by);
    }
  }

  // Adds to `nodes`, on which the job does not fit, what the first of `jobs` hold, from as few jobs
  // as needed. Returns how many; 0 if all together are not enough. A binary search works, because
  // more room never makes a job fit less.
  size_t GiveUntilItFits(const v1::JobRecord& job, const std::vector<const ActiveJob*>& jobs,
                         CandidateNodes* nodes) const {
    size_t given = 0;
    const auto fits_with = [&](size_t count) {
      for (; given < count; ++given) GiveAll(*jobs[given], nodes);
      for (; given > count; --given) TakeAll(*jobs[given - 1], nodes);
      return Fits(job, nodes);
    };
    size_t too_few = 0, enough = jobs.size();
    if (!fits_with(enough)) return 0;
    while (enough - too_few > 1) {
      const size_t middle = too_few + (enough - too_few) / 2;
      (fits_with(middle) ? enough : too_few) = middle;
    }
    fits_with(enough);
    return enough;
  }

  // Makes the reservation for the job, and takes `later`, if the job fits on it.
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

  // Stops jobs so that `job` fits. `later`: the nodes with their space, on which it does not fit.
  bool Preempt(const v1::JobRecord& job, CandidateNodes later) {
    std::vector<const ActiveJob*> stopped = Victims(job, question_.active);
    const size_t given = GiveUntilItFits(job, stopped, &later);
    if (given == 0) return false;
    stopped.resize(given);
    // Some of the first ones may not have helped; the last one has.
    for (size_t i = given - 1; i-- > 0;) {
      TakeAll(*stopped[i], &later);
      if (Fits(job, &later)) {
        stopped.erase(stopped.begin() + i);
      } else {
        GiveAll(*stopped[i], &later);
      }
    }
    for (const ActiveJob* victim : stopped) {
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
          started_.contains(job.record) ||  // it has all spares for which there is room
          first_of_owner_.contains(job.record->owner()) ||
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
    // Shapes for which no node has room, whichever nodes their jobs run on: all jobs of one shape
    // cost one search together.
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

  // Returns whether the job may grow, as far as can be determined quickly.
  bool MayGrow(const ActiveJob& job) {
    const v1::JobSpec& spec = job.record->spec();
    const int most = question_.max_processes_of_owner;
    if (most > 0 && !job.record->owner().empty()) {
      // What the limit leaves is reserved.
      if (first_of_owner_.contains(job.record->owner())) return false;
      if (processes_of_[job.record->owner()] - CountProcesses(*job.attempt) -
              OwnSpares(*job.record) + spec.max_processes() >
          most) {
        return false;
      }
    }
    if (OwnSpares(*job.record) > 0) return true;
    // Its own nodes have no room for more processes than it has there, unless some of their space
    // is free.
    return std::any_of(question_.nodes.begin(), question_.nodes.end(), [&](const auto& node) {
      return node.second.space.Fits(spec.per_process()) > 0;
    });
  }

  ScheduleQuestion question_;
  ScheduleDecision decision_;
  std::optional<Reservation> reservation_;
  std::string first_waiting_;
  std::deque<v1::JobAttempt> attempts_;                // those of jobs added to question_.active
  absl::flat_hash_set<const v1::JobRecord*> started_;  // by this schedule
  std::vector<size_t> held_;  // the jobs of question_.active whose room is held
  std::string first_held_;
  absl::flat_hash_set<std::string> refused_held_;  // shapes for which no room can be held
  int examined_ = 0;      // jobs behind the first one for which nodes were searched
  bool delayed_ = false;  // a job waits for its delayed restart and holds room for it
  bool awaits_ = false;   // all jobs from here on wait for awaited nodes
  absl::flat_hash_map<std::string, int64_t> processes_of_;  // by owner, of jobs that hold space
  absl::flat_hash_map<std::string, int64_t> spares_of_;     // the part of these in spares
  // By owner: the indices of its jobs in question_.active.
  absl::flat_hash_map<std::string, std::vector<size_t>> active_of_;
  int limits_examined_ = 0;  // first jobs of owners that were compared with all nodes
  absl::flat_hash_map<std::string, FirstOfOwner> first_of_owner_;
  // The most processes that a job may have, if that is fewer than it would take.
  absl::flat_hash_map<const v1::JobRecord*, int> at_most_;
  absl::flat_hash_set<const v1::JobRecord*> spared_;  // jobs that still have their spares
  absl::flat_hash_map<std::string, std::string>
      refused_;  // shapes that do not fit, and what they wait for
  std::vector<const v1::JobRecord*> examined_in_vain_;
  bool skipped_ = false;                             // some jobs were not examined
  std::optional<CandidateNodes> whole_;              // see Whole
  absl::flat_hash_set<std::string> refused_beside_;  // shapes that fit only on reserved space
};

}  // namespace

ScheduleDecision Schedule(ScheduleQuestion question) {
  return Scheduler(std::move(question)).Run();
}

}  // namespace muster::coordinator
