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
  // Its restart is delayed until then.
  absl::Time not_before = absl::InfinitePast();
};

// A job that holds space on nodes.
struct ActiveJob {
  const v1::JobRecord* record = nullptr;
  const v1::JobAttempt* attempt = nullptr;
  // When its time limit, and then its stop_grace, have ended it; infinite: it has no limit.
  absl::Time ends_by = absl::InfiniteFuture();
  // From when on it may be stopped to start again with more processes; infinite: never.
  absl::Time grows_from = absl::InfiniteFuture();
};

struct ScheduleQuestion {
  std::vector<QueuedJob> queued;
  std::vector<ActiveJob> active;
  CandidateNodes nodes;  // with the space that is free now
  // Not all nodes have been heard since the coordinator started: nothing is preempted yet.
  bool settled = true;
  // And there are jobs of before it started: their nodes are awaited, see Schedule.
  bool awaits_nodes = false;
  // Queued jobs may run on them, by what this coordinator has lost: nothing starts yet.
  bool may_run_unseen = false;
  // Of the jobs of one owner, at a time; 0: any number.
  int max_processes_of_owner = 0;
  // As the last decision has it, if no node has come, or has got more than it had, since.
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
  // To start again with more processes; at most one.
  std::vector<Stop> grows;
  // Jobs that lose their spares to one that comes before them, before anything starts.
  std::vector<std::string> yields;
  // More spares of jobs that run.
  std::vector<std::pair<std::string, std::vector<v1::Placement>>> spares;
  // For each queued job that does not start: words that follow "waits for". One that was not
  // examined waits for the jobs before it.
  std::vector<std::pair<std::string, std::string>> waits;
  // What queued jobs ask for that all nodes together do not have, and what they wait for.
  absl::flat_hash_map<std::string, std::string> too_large;
  // Some jobs were not examined, and the next schedule comes further, with `too_large`.
  bool unfinished = false;
  // When a delayed restart is due, or a job may grow; infinite: there is none.
  absl::Time next = absl::InfiniteFuture();
};

// Which jobs start now, and which have to make room. In the order of priority, then of submission.
//
// The first job that does not fit now reserves: if jobs of lower priority that are preemptible hold
// enough, they are stopped (the lowest priority first, the latest first); else it waits for the
// nodes on which it will fit first, as far as time limits tell. Jobs after it start only where that
// does not delay it: on space that it will not need, or if their time limit ends them before it can
// start, where time limits tell when that is. A job that would not fit if nothing else ran reserves
// nothing, nor does one whose owner has to wait for jobs of its own to end.
//
// A job whose restart is delayed by a minute at most, before which no job waits for room, keeps the
// room on which it would start, if there is any, from
// those behind it: it is back in seconds or minutes, and they might run for days.
//
// While nodes are awaited, what fits on the first ones to come says little: a job starts only with
// as many processes as it may have, and the jobs behind the first one that does not start wait.
//
// When no job reserves and none keeps room for a delayed restart, one job that may grow is stopped
// if more of its processes fit, the highest priority and the earliest first. Until nothing of it is
// left it reserves, so that no later job takes the room for which it was stopped.
//
// Room that is kept as a spare of a job is free to it when it starts again, and to jobs before it
// in the order if they do not fit otherwise. Jobs that run and lack spares get them under the
// conditions under which one grows, if none does.
//
// Nodes are searched for at most kMaxExamined jobs behind the first, and for as many that may grow.
// Jobs that ask for the same cost one search, and those that are known to be too large for all
// nodes none: however many of them there are, later schedules examine the jobs behind them.
ScheduleDecision Schedule(ScheduleQuestion question);

inline constexpr int kMaxExamined = 256;

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_SCHEDULE_H_
