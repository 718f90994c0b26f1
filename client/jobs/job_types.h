#ifndef MUSTER_CLIENT_JOBS_JOB_TYPES_H_
#define MUSTER_CLIENT_JOBS_JOB_TYPES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

// Jobs and nodes as a coordinator keeps them, without protobuf. docs/jobs.md explains them.

// A small file that is submitted with a job and put into the private folder of each attempt.
struct JobFile {
  std::string path = {};     // below that folder
  std::string content = {};  // empty in a coordinator's answers
  bool executable = false;
  std::string sha256 = {};  // of the content; hexadecimal; in a coordinator's answers
  int64_t size = 0;         // also only in a coordinator's answers; in bytes
};

// What to run. Zero or empty: the coordinator's default.
struct JobSpec {
  std::string name = {};                        // job_id is NAME-NUMBER
  std::vector<std::string> command = {};        // the program and its arguments; no shell
  std::map<std::string, std::string> env = {};  // in addition to the agent's own
  std::string workdir = {};                     // absolute; empty: a private folder of the attempt
  int min_processes = 1;
  int max_processes = 1;
  int processes_per_node = 0;  // 0: the same number on each, as few nodes as possible
  int gpus_per_process = 0;
  int64_t gpu_memory = 0;                          // minimum bytes of each GPU; 0: any
  int cpus_per_process = 0;                        // 0: one
  int64_t memory_per_process = 0;                  // bytes; 0: not counted
  std::map<std::string, std::string> labels = {};  // a node must have all of them
  int priority = 0;                                // larger first
  bool preemptible = false;
  int max_restarts = 0;
  // Limits of restarts for each class of ends, in addition to max_restarts: "failed", "oom",
  // "hang", which also count against max_restarts, and "node_lost", "preempted". A class not listed
  // has no limit.
  std::map<std::string, int> class_limits = {};
  absl::Duration restart_delay = absl::ZeroDuration();
  absl::Duration time_limit = absl::ZeroDuration();  // of each attempt; 0: none
  absl::Duration stop_grace = absl::ZeroDuration();  // 0: 30 s
  // An attempt with fewer than max_processes that has run for this long restarts as soon as more
  // fit. 0: it keeps its size.
  absl::Duration grow_after = absl::ZeroDuration();
  // After its first finished step, an attempt fails if no rank shows progress for this long. 0:
  // never.
  absl::Duration hang_timeout = absl::ZeroDuration();
  // On how many additional nodes room is kept for the next attempt, as far as available.
  int spare_nodes = 0;
  std::vector<int> user_error_codes = {};
  std::vector<JobFile> files = {};                  // at most 256, of 96 KiB together
  absl::Duration retention = absl::ZeroDuration();  // of its record, once it has ended; 0: any
  bool wait_for_nodes = false;                      // queued even if larger than all nodes together
  std::string mixed_precision = {};                 // "", "no", "bf16", "fp16"
  int gradient_accumulation_steps = 0;
  bool cpu = false;
  bool debug = false;
};

enum class JobState {
  kUnknown,  // a state of a newer coordinator
  kQueued,
  kStarting,
  kRunning,
  kStopping,
  kSuspended,
  kSucceeded,
  kFailed,
  kCancelled,
};
// "QUEUED", ...
absl::string_view JobStateName(JobState state);
// SUCCEEDED, FAILED and CANCELLED.
bool HasEnded(JobState state);

struct Placement {
  std::string node = {};
  int node_rank = 0;
  int processes = 0;
  std::vector<int> gpus = {};  // indices on the node
  std::string state = {};      // "ASSIGNED", "RUNNING", "ENDED"
};

// When an attempt reached its stages, in this order, by the coordinator's clock. InfinitePast: it
// did not, or the time is unknown.
struct AttemptTimes {
  absl::Time placed = absl::InfinitePast();    // its nodes were chosen
  absl::Time sealed = absl::InfinitePast();    // its workers had met
  absl::Time restored = absl::InfinitePast();  // rank 0 had loaded its state
  absl::Time stepped = absl::InfinitePast();   // rank 0 had finished a step
  absl::Time failed = absl::InfinitePast();    // a process had ended; for a lost node: last contact
  absl::Time detected = absl::InfinitePast();  // the coordinator noticed
  absl::Time decided = absl::InfinitePast();   // its nodes were asked to end it
  absl::Time fenced = absl::InfinitePast();    // nothing of it was left
};

// What ranks were doing when they were found to hang; ranks with the same stack are grouped.
struct HungRanks {
  std::vector<int> ranks = {};
  std::string doing = {};  // one line
  std::string stack = {};  // of several lines; empty: none could be taken
};

// One start of all processes of a job. If it lost some and restarted them while the others
// continued, there is one entry for each stretch between two losses.
struct Attempt {
  int number = 0;    // from 1
  int restarts = 0;  // within the attempt, before this stretch
  std::vector<Placement> placements = {};
  bool has_end = false;
  std::string end_class = {};  // "SUCCEEDED", "PROCESS_FAILED", ...
  std::string why = {};        // one line
  std::string node = {};       // where the end began
  int rank = -1;               // the first failing rank; -1: none
  int exit_code = 0;
  int signal = 0;
  std::vector<std::string> last_lines = {};
  std::vector<HungRanks> hung = {};           // with "HANG"
  absl::Time started = absl::InfinitePast();  // InfinitePast: not started
  absl::Time ended = absl::InfinitePast();
  AttemptTimes times;
};

// How long each stage took from the end of one attempt to the first step of the next, counted from
// the stage before. nullopt: one of its two times is unknown; foreign programs have no restore and
// no step.
struct Recovery {
  int attempt = 0;                           // the attempt that ended
  int restarts = 0;                          // within the attempt, before that end
  std::optional<absl::Duration> detect;      // until the coordinator knew of the failure
  std::optional<absl::Duration> decide;      // until it had recorded the cause and told all nodes
  std::optional<absl::Duration> fence;       // until nothing of the attempt was left
  std::optional<absl::Duration> place;       // in the queue, until the next one had its nodes
  std::optional<absl::Duration> rendezvous;  // until its workers had met
  std::optional<absl::Duration> restore;     // until rank 0 had loaded its state
  // Until rank 0 had finished a step; counted from the rendezvous if the program loads no state.
  std::optional<absl::Duration> first_step;
  std::optional<absl::Duration> total;  // from the failure to the first step
};

struct Job {
  std::string id = {};
  JobSpec spec;
  std::string owner = {};
  JobState state = JobState::kUnknown;
  std::string why = {};                // the state in words
  int attempts = 0;                    // the number of the last attempt
  int restarts = 0;                    // restarts that count
  std::vector<Attempt> history = {};   // the latest attempts, oldest first
  std::vector<Placement> spares = {};  // room that is kept for the next attempt
  uint64_t sequence = 0;               // order of submission
  uint64_t revision = 0;               // of its last change
  absl::Time submitted = absl::InfinitePast();
};

// What a watch of several jobs reports.
struct JobUpdate {
  std::string id = {};
  // nullopt: it has been removed, or is no longer in any of the requested states.
  std::optional<Job> job = std::nullopt;
};

// A port that a part of the job will listen on and that is not reserved yet.
struct PlannedPort {
  std::string name = {};  // "master_port", "processes"
  std::string node = {};
  int first = 0;  // the node's kernel chooses a free one from here to `last`; 0: unknown
  int last = 0;
  std::string why = {};  // who listens, and who chooses
};

// Where the job would continue if its program loads the newest state.
struct PlannedCheckpoint {
  // "coordinator": a checkpoint registered for this job. "program": rank 0 takes the newest
  // complete one in `folder`. Empty: unknown, as with an older coordinator.
  std::string decided_by = {};
  // Empty: none. With "program": the newest one known in that folder, of another job.
  std::string path = {};
  // The folder cannot be read; `why` says why.
  bool unknown = false;
  int64_t step = 0;
  std::string saved_by = {};  // the attempt or launch; empty: this job's
  std::string folder = {};    // empty: a private folder of the attempt
  std::string why = {};
};

struct JobPlan {
  bool starts_now = false;
  std::string why = {};  // what the job waits for
  std::vector<Placement> placements = {};
  std::vector<Placement> spares = {};
  int processes = 0;
  std::vector<PlannedPort> ports = {};
  PlannedCheckpoint checkpoint = {};  // for a dry run
  std::string script = {};            // for SLURM: the submitted script
};

struct Submission {
  Job job;  // with dry_run: as it would be created
  JobPlan plan;
  bool existed = false;  // an earlier call with the same key created it
};

struct LogChunk {
  std::string data = {};
  int64_t offset = 0;
  int64_t next_offset = 0;
  bool ended = false;  // nothing comes after `data`
  int attempt = 0;
  std::string node = {};
};

struct Node {
  std::string name = {};
  bool known = false;  // false: not heard from since the coordinator started; the rest is empty
  std::string host = {};
  std::string version = {};
  int cpus = 0;
  int64_t memory_bytes = 0;
  std::vector<std::string> gpus = {};          // names, by index
  std::vector<int64_t> gpu_memory_bytes = {};  // by index; 0: unknown
  std::map<std::string, std::string> labels = {};
  std::string rack = {};
  std::string nvlink_domain = {};
  // What control groups limit for each process of a job: "memory", "cpus"; and why the rest is
  // missing.
  std::vector<std::string> limits = {};
  std::string limits_why = {};
  bool cordoned = false;
  bool draining = false;
  bool lost = false;
  std::string why = {};
  absl::Duration heard_ago = absl::ZeroDuration();
  int used_cpus = 0;
  int64_t used_memory_bytes = 0;
  std::vector<int> used_gpus = {};
  std::vector<std::string> jobs = {};
  std::vector<std::string> spare_of = {};  // jobs with room kept here for their next attempt
  // How much its agent logs: "debug", "info", "warning", "error". Empty: an older agent.
  std::string log_level = {};
};

}  // namespace muster

#endif  // MUSTER_CLIENT_JOBS_JOB_TYPES_H_
