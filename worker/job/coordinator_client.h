#ifndef MUSTER_WORKER_JOB_COORDINATOR_CLIENT_H_
#define MUSTER_WORKER_JOB_COORDINATOR_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/defaults.h"
#include "base/place.h"
#include "rpc/tls_files.h"
#include "worker/checkpoint/save_progress.h"
#include "worker/collective/progress_board.h"

namespace muster {

namespace v1 {
class BeginCheckpointRequest;
class BeginCheckpointReply;
class ReportShardsRequest;
class ReportShardsReply;
class SealCheckpointRequest;
class SealCheckpointReply;
class PublishCheckpointRequest;
class PublishCheckpointReply;
class AbortCheckpointRequest;
class AbortCheckpointReply;
class CheckpointDeletedRequest;
class CheckpointDeletedReply;
class ListCheckpointsRequest;
class ListCheckpointsReply;
class MarkCheckpointRequest;
class MarkCheckpointReply;
class VerifyCheckpointRequest;
class VerifyCheckpointReply;
}  // namespace v1

// A worker's request to a rendezvous.
struct JoinOptions {
  int min_workers = 1;
  int max_workers = 1;  // equal to min_workers: fixed size
  absl::Duration timeout = absl::Minutes(10);
  absl::Duration last_call = absl::Seconds(5);  // elastic only
  int divisible_by = 1;
  bool end_generation_on_failure = true;
  absl::Duration lease = kDefaultLease;
  int preferred_rank = -1;  // -1: none
  bool spare = false;
  std::string host = "";  // empty: this machine's name
  std::string rack = "";
  std::string nvlink_domain = "";
  int local_rank = 0;
  int local_world_size = 1;
  std::string endpoint = "";
};

// A place in one generation.
struct Seat : Place {
  uint64_t generation = 0;
  // Keys with this prefix are deleted with the generation.
  std::string key_prefix = "";
};

// A row of the rank table.
struct PeerInfo {
  int rank = 0;
  std::string worker_id = "";
  uint64_t incarnation = 0;
  std::string host = "";
  std::string endpoint = "";
  int local_rank = 0;
  int node_rank = 0;
  int64_t pid = 0;
};

// The coordinator's facts about a rank, from its last heartbeat and from its node's agent.
struct MemberInfo {
  int rank = 0;
  std::string worker_id = "";
  std::string host = "";
  int64_t pid = 0;
  int64_t step = 0;  // the last one that it has finished
  std::string phase = "";
  std::string last_collective = "";  // as ProgressBoard::Facts
  absl::Duration heartbeat_age = absl::ZeroDuration();
  // Empty while it runs, otherwise how it ended: "it has exited with code 1".
  std::string gone = "";
};

struct BarrierCall {
  std::string payload = "";            // at most 4 KiB; reaches every rank
  std::vector<int> participants = {};  // empty: every rank of the generation
  // When the coordinator logs the late ranks. Zero: 60 s or half the timeout.
  absl::Duration soft_timeout = absl::ZeroDuration();
  // Whether all ranks must call from the same line. Otherwise only with the same name.
  bool same_line = true;
};

// The coordinator's facts about a missing rank.
struct AbsentRank {
  int rank = 0;
  std::string host = "";
  int64_t pid = 0;
  std::string process_state = "";
  absl::Duration heartbeat_age = absl::ZeroDuration();
  int64_t last_step = 0;
  std::string last_collective = "";
  std::string native_stack = "";  // of its threads; empty if there was none
};

// The same for every rank that waited.
struct BarrierReport {
  std::string message = "";  // one line
  int first_rank = -1;       // the first that arrived
  std::vector<AbsentRank> absent = {};
};

struct BarrierResult {
  // By rank; empty if no rank sent one.
  std::vector<std::string> payloads;
  int last_rank = -1;
  absl::Duration open_for;  // first arrival to release
};

// A rank that was alive at the moment that AgreeAlive determines.
struct LivingRank {
  int rank = 0;
  uint64_t incarnation = 0;
};

// Whether a barrier failed because ranks did not arrive, died or wait elsewhere: then there is a
// report.
bool IsBarrierVerdict(const absl::Status& status);

struct TriggerInfo {
  uint64_t id = 0;
  std::string name = "";
  std::string payload = "";
  bool decided = false;  // false: name it in the next poll's `pending`
  // all ranks act before this step begins; -1: not decided, or at once
  int64_t effective_step = -1;
  int raised_by_rank = -1;  // -1: an operator
};

// A rank's state in a poll for triggers. Steps count from 1.
struct TriggerPoll {
  int64_t step = 0;                         // the last one that it has finished
  int64_t horizon = 0;                      // 0: step + 1
  std::vector<uint64_t> pending = {};       // undecided triggers for which it promises not to begin
                                            // step `horizon` before it knows the decision
  std::vector<uint64_t> acknowledged = {};  // acted upon
};

struct Heartbeat {
  uint64_t generation = 0;
  bool generation_ended = false;
  std::string why = "";
};

// A worker's connection to the coordinator: rendezvous, key-value store, barriers, triggers and
// heartbeats over gRPC.
//
// Every call carries the fence (job, term, generation, incarnation) and a deadline; a call that the
// transport loses is sent again, with the same request id, until its deadline, so that it takes
// effect once. While the coordinator is away, calls wait for it. Thread-safe; methods block, at
// most for their timeout, the outage tolerance and a short grace period.
//
// Errors of every call, in the coordinator's words: UNAVAILABLE (no coordinator until the
// deadline), FAILED_PRECONDITION (this worker's generation has ended), ABORTED (a newer incarnation
// took the seat, or the generation ended while the call waited: join again), DEADLINE_EXCEEDED
// (names the missing ranks), INVALID_ARGUMENT, UNAUTHENTICATED.
class CoordinatorClient {
 public:
  struct Options {
    std::string address = "";  // "10.0.0.1:29400", "name:29400", "unix:PATH" of this node's agent
    std::string job = "";
    std::string worker_id = "";
    uint64_t incarnation = 0;  // 0: drawn at random
    absl::Duration connect_timeout = absl::Seconds(30);
    absl::Duration call_timeout = absl::Seconds(30);
    // How much longer than its timeout a call waits for an answer: a shorter outage of the
    // coordinator fails no call.
    absl::Duration outage_tolerance = kDefaultOutageTolerance;
    // How long triggers, beats and the goodbye may delay a process that ends, all together: see
    // BeginExit.
    absl::Duration exit_patience = absl::Seconds(3);
    // The time between heartbeats once seated. Zero: none (an agent speaks for this worker).
    absl::Duration heartbeat_period = absl::Seconds(2);
    rpc::TlsFiles tls = {};
    std::string token_file = "";  // see rpc/token.h
    // What heartbeats and barriers report about this worker. Null: what ReportProgress() was given.
    std::shared_ptr<const ProgressBoard> progress = nullptr;
    // The checkpoints that this worker writes: heartbeats report them. Null: none.
    std::shared_ptr<const SaveProgress> saves = nullptr;
    // Called once per generation, on the heartbeat thread, when the coordinator reports that
    // `generation` has ended or that another incarnation holds the seat. A Join may give a seat in
    // the next generation at the same moment: compare. Must not call back into the client's
    // destructor.
    std::function<void(uint64_t generation, const absl::Status&)> on_generation_ended = nullptr;
  };

  // Connects and waits until the coordinator answers. Errors: INVALID_ARGUMENT (address, missing
  // job or worker id), UNAVAILABLE naming the address.
  static absl::StatusOr<std::unique_ptr<CoordinatorClient>> Connect(Options options);
  ~CoordinatorClient();
  CoordinatorClient(const CoordinatorClient&) = delete;
  CoordinatorClient& operator=(const CoordinatorClient&) = delete;

  // Takes a seat; blocks until the generation is sealed. Further calls are fenced by that
  // generation.
  absl::StatusOr<Seat> Join(const JoinOptions& options);
  // The seat of the last Join; absent before it.
  std::optional<Seat> seat() const;
  // Gives up the seat on purpose, after a last heartbeat. Does not wait for a coordinator that is
  // away.
  absl::Status Leave(const std::string& reason);
  // Declares that this process is about to end. Triggers that are raised or polled, beats,
  // descriptions and Leave, also those in flight, have Options::exit_patience from here, all
  // together: a coordinator that is away delays no exit for longer. Only the first call counts.
  // Does not block.
  void BeginExit();
  // Returns all ranks of the seat's generation, in rank order. Fetched in pages, and again only if
  // a rank has been taken over since.
  absl::StatusOr<std::vector<PeerInfo>> Peers();
  // Returns the facts about every seated rank of the job, in rank order. For reports: does not wait
  // for a coordinator that is away.
  absl::StatusOr<std::vector<MemberInfo>> Members();
  uint64_t incarnation() const;

  // Keys are 1 to 1,024 bytes; values at most 1 MiB. Writes survive a crash of the coordinator,
  // because no rank would write a lost key again, and others wait for it.
  absl::Status Set(const std::string& key, const std::string& value);
  absl::Status SetAll(const std::vector<std::pair<std::string, std::string>>& entries);  // atomic
  absl::StatusOr<std::optional<std::string>> Find(const std::string& key);
  // Waits until all keys exist and returns their values, in the order of `keys`.
  absl::StatusOr<std::vector<std::string>> Wait(const std::vector<std::string>& keys,
                                                absl::Duration timeout);
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t delta);
  absl::Status Append(const std::string& key, const std::string& value);
  absl::StatusOr<bool> Delete(const std::string& key);
  absl::StatusOr<bool> AllExist(const std::vector<std::string>& keys);
  // As c10d::Store: if the key has the value `expected`, or is absent and `expected` is empty, sets
  // it to `desired`. Returns its value afterwards, or `expected` if it is absent.
  absl::StatusOr<std::string> CompareSet(const std::string& key, const std::string& expected,
                                         const std::string& desired);
  // Returns keys and values below `prefix`, sorted by key. Errors: RESOURCE_EXHAUSTED if there are
  // more than the coordinator sends at once.
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(const std::string& prefix,
                                                                        bool keys_only = false);

  // Waits for all ranks of the generation. `name` may be used repeatedly: its instances are counted
  // here, so every rank must call the barriers of a name the same number of times. The timeout of
  // the first rank that arrives counts. `payload` (at most 4 KiB) reaches every rank. Errors:
  // DEADLINE_EXCEEDED and FAILED_PRECONDITION naming the ranks that are missing or dead, with their
  // hosts and what they do; FAILED_PRECONDITION if ranks call from different lines.
  absl::StatusOr<BarrierResult> Barrier(
      const std::string& name, absl::Duration timeout, const std::string& payload = "",
      std::source_location where = std::source_location::current());

  absl::StatusOr<BarrierResult> Barrier(
      const std::string& name, absl::Duration timeout, const BarrierCall& call,
      std::source_location where = std::source_location::current());
  // Fails the instance of `name` in which others wait, for all of them: CANCELLED, with this rank
  // and the reason. This rank's next Barrier() of that name is the following instance. Errors:
  // NOT_FOUND.
  absl::Status CancelBarrier(const std::string& name, const std::string& reason);
  // Returns the report of the last instance of `name` that ended for this rank. Waits 5 s at most.
  // Errors: NOT_FOUND.
  absl::StatusOr<BarrierReport> DescribeBarrier(const std::string& name);

  // Waits until every living rank of `set` (ascending ranks; empty: all) has called or is dead, and
  // gives all callers the same answer: the ranks that had called at one moment at which all others
  // of the set were dead. Calls are counted: all ranks must make them in the same order. Errors:
  // DEADLINE_EXCEEDED naming the living ranks that did not call.
  absl::StatusOr<std::vector<LivingRank>> AgreeAlive(absl::Duration timeout,
                                                     const std::vector<int>& set = {});

  // Raises a trigger from any rank; every rank learns the step before which all act. Returns its
  // id.
  absl::StatusOr<uint64_t> RaiseTrigger(const std::string& name, const std::string& payload = "");
  // Returns the triggers that this rank has not acknowledged yet. Poll on a separate thread: see
  // TriggerWatch. Waits for a coordinator that is away no longer than `timeout`; zero is
  // Options::call_timeout.
  absl::StatusOr<std::vector<TriggerInfo>> PollTriggers(
      const TriggerPoll& poll, absl::Duration timeout = absl::ZeroDuration());

  // The calls of the service Checkpoints, for checkpoint_client.h. Fills in the fence.
  absl::Status CallCheckpoints(v1::BeginCheckpointRequest* request,
                               v1::BeginCheckpointReply* reply);
  absl::Status CallCheckpoints(v1::ReportShardsRequest* request, v1::ReportShardsReply* reply);
  absl::Status CallCheckpoints(v1::SealCheckpointRequest* request, v1::SealCheckpointReply* reply);
  absl::Status CallCheckpoints(v1::PublishCheckpointRequest* request,
                               v1::PublishCheckpointReply* reply);
  absl::Status CallCheckpoints(v1::AbortCheckpointRequest* request,
                               v1::AbortCheckpointReply* reply);
  absl::Status CallCheckpoints(v1::CheckpointDeletedRequest* request,
                               v1::CheckpointDeletedReply* reply);
  absl::Status CallCheckpoints(v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsReply* reply);
  absl::Status CallCheckpoints(v1::MarkCheckpointRequest* request, v1::MarkCheckpointReply* reply);
  absl::Status CallCheckpoints(v1::VerifyCheckpointRequest* request,
                               v1::VerifyCheckpointReply* reply);

  // Sets what the next heartbeat and barrier report about this rank. Does not block.
  void ReportProgress(int64_t step, const std::string& phase,
                      const std::string& last_collective = "");
  // Sends a heartbeat now.
  absl::StatusOr<Heartbeat> Beat();
  // The job for which it is connected.
  const std::string& job() const;

 private:
  class Impl;
  explicit CoordinatorClient(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_COORDINATOR_CLIENT_H_
