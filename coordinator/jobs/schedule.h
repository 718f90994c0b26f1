#ifndef MUSTER_COORDINATOR_JOBS_SCHEDULE_H_
#define MUSTER_COORDINATOR_JOBS_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "coordinator/jobs/placement.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::coordinator {

// A job that waits for nodes. All pointers are borrowed.
struct QueuedJob {
  const v1::JobRecord* record = nullptr;
  // The time until which its restart is delayed.
  absl::Time not_before = absl::InfinitePast();
};

// A job that holds space on nodes.
struct ActiveJob {
  const v1::JobRecord* record = nullptr;
  const v1::JobAttempt* attempt = nullptr;
  // When the job will have ended by its time limit and stop_grace; infinite: it has no limit.
  absl::Time ends_by = absl::InfiniteFuture();
  // When the job may be stopped at the earliest to start again with more processes; infinite:
  // never.
  absl::Time grows_from = absl::InfiniteFuture();
};

struct ScheduleQuestion {
  std::vector<QueuedJob> queued;
  std::vector<ActiveJob> active;
  CandidateNodes nodes;  // with the space that is free now
  // All nodes have had the time to connect since the coordinator started; until then, nothing is
  // preempted.
  bool settled = true;
  // The coordinator also started with jobs whose nodes are awaited, see Schedule.
  bool awaits_nodes = false;
  // Queued jobs may already run on nodes, because this coordinator has lost records: nothing starts
  // yet.
  bool may_run_unseen = false;
  // The most processes of one owner's jobs at a time; 0: any number.
  int max_processes_of_owner = 0;
  // ScheduleDecision::too_large of the last schedule; empty if a node has joined, or has more than
  // before, since then.
  absl::flat_hash_map<std::string, std::string> too_large;
  absl::Time now;
};

struct ScheduleDecision {
  struct Start {
    std::string job_id;
    PlacementDecision placement;
  };
  struct Stop {
    std::string job_id;
    std::string why;
  };
  std::vector<Start> starts;
  std::vector<Stop> preempts;
  // Jobs to stop so that they start again with more processes; at most one.
  std::vector<Stop> grows;
  // Jobs that lose their spares to a job before them. Apply before `starts`.
  std::vector<std::string> yields;
  // Additional spares for running jobs.
  std::vector<std::pair<std::string, std::vector<v1::Placement>>> spares;
  // For each queued job that does not start, the text that follows "waits for". A job that was not
  // examined waits for the jobs before it.
  std::vector<std::pair<std::string, std::string>> waits;
  // The requests of queued jobs that exceed all nodes together, and what these jobs wait for.
  absl::flat_hash_map<std::string, std::string> too_large;
  // Some jobs were not examined. The next schedule will get further, if it is given `too_large`.
  bool unfinished = false;
  // When the next delayed restart is due or a job may grow; infinite: never.
  absl::Time next = absl::InfiniteFuture();
};

// Decides which jobs start now and which have to make room, in the order of priority, then of
// submission.
//
// The first job that does not fit now makes a reservation: if preemptible jobs of lower priority
// hold enough, they are stopped (the lowest priority first, then the latest first); otherwise it
// waits for the nodes on which it will fit first, as far as time limits tell. Jobs after it start
// only if that does not delay it: on space that it will not need, or if their time limit ends them
// before it can start, provided that time limits tell when that is. A job that would not fit even
// if nothing else ran reserves nothing, nor does one whose owner has to wait for other jobs of the
// same owner to end.
//
// A job whose restart is delayed by at most a minute keeps the room on which it would start, if
// there is any, from the jobs behind it, unless a job before it waits for room: it is back in
// seconds or minutes, and those jobs might run for days.
//
// While nodes are awaited, what fits on the first ones to connect says little: a job starts only
// with the most processes it may have, and the jobs behind the first one that does not start wait.
//
// If there is no reservation and no delayed restart keeps room, one job that may grow is stopped if
// more of its processes fit; the highest priority and the earliest submission come first. It has a
// reservation until nothing of it is left, so that no later job takes the room for which it was
// stopped.
//
// A job's spares are free for its own next start, and for jobs before it in the order if they do
// not fit otherwise. Running jobs that lack spares get them under the conditions under which a job
// grows, if none does.
//
// Nodes are searched for at most kMaxExamined jobs behind the first, and for at most as many jobs
// that may grow. Jobs with equal requests cost one search, and those known to be too large for all
// nodes cost none, so later schedules examine the jobs behind them however many there are.
ScheduleDecision Schedule(ScheduleQuestion question);

inline constexpr int kMaxExamined = 256;

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_SCHEDULE_H_
