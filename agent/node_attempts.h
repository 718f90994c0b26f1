#ifndef MUSTER_AGENT_NODE_ATTEMPTS_H_
#define MUSTER_AGENT_NODE_ATTEMPTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "proto/muster/v1/node.pb.h"

namespace muster::agent {

// Identifies an attempt: its job's id and its number.
using AttemptKey = std::pair<std::string, int>;

// The attempts on this node, and what is to be done about them: the node's side of
// proto/muster/v1/node.proto. Its owner starts and ends the runners. Pure; not thread-safe.
class NodeAttempts {
 public:
  // Time that a runner gets in addition to the grace it gives its workers.
  static constexpr absl::Duration kRunnerGrace = absl::Seconds(30);

  struct Orders {
    std::vector<v1::NodeAssignment> start;
    std::vector<AttemptKey> stop;  // send SIGTERM to the runner
    std::vector<AttemptKey> kill;  // send SIGKILL: the runner has not ended in time
    std::vector<AttemptKey> forget;
    struct Restart {
      AttemptKey key;
      int restart;
      absl::Duration delay;
    };
    std::vector<Restart> restarts;  // the runner may start again what the attempt has lost
    // A line for the log; empty: nothing unusual happened.
    std::string notice;
  };

  // Adds an attempt found on the disk at the start of the service: still `running`, or ended as
  // `end` says, at `ended`. All of them belong to one cluster (see SetCluster), which is empty if
  // nothing is found. `asked`: see Ended.
  void Adopt(const AttemptKey& key, bool running, const v1::AttemptEnd& end, absl::Time started,
             absl::Time ended, absl::Time now, int asked = 0);
  void SetCluster(std::string cluster_id) { cluster_ = std::move(cluster_id); }
  const std::string& cluster() const { return cluster_; }

  Orders Apply(const v1::SyncNodeReply& reply, absl::Time now);
  // Returns the orders that are due for runners that have not ended in time.
  Orders Tick(absl::Time now);
  absl::Time NextDeadline() const;

  // Records that an attempt has ended, at `unix_ms` of the wall clock and at `now`. `asked`: the
  // restart that was requested for this end before, and may have been counted; 0: none. If Tick had
  // the runner killed, its end is reported as CANCELLED rather than as a failure of the node
  // (NODE_FAILED).
  void Ended(const AttemptKey& key, const v1::AttemptEnd& end, int64_t unix_ms, absl::Time now,
             int asked = 0);
  // Does the same as Ended for an attempt with processes that the kernel does not end. Until Gone,
  // the node reports, besides the end, that some processes are left, so that the coordinator starts
  // nothing here, and does not forget the attempt.
  void LeftBehind(const AttemptKey& key, const v1::AttemptEnd& end, int64_t unix_ms, absl::Time now,
                  int asked = 0);
  void Gone(const AttemptKey& key);
  // Records that a runner has asked for a restart within the attempt, at `unix_ms` of the wall
  // clock and at `now`. May be called again with the same request.
  void Ask(const AttemptKey& key, int restart, const v1::AttemptEnd& end, int64_t unix_ms,
           absl::Time now);
  bool IsRunning(const AttemptKey& key) const;
  bool AnyRunning() const;
  bool Knows(const AttemptKey& key) const { return attempts_.count(key) != 0; }
  // Changes whenever the reports do, except for how long an attempt has run.
  uint64_t version() const { return version_; }
  void FillReports(absl::Time now, v1::SyncNodeRequest* request) const;

 private:
  struct Attempt {
    v1::AttemptReport report;
    absl::Time started;
    absl::Time failed = absl::InfinitePast();  // when the process that `end` names failed
    int restarts = 0;                          // the restarts within the attempt that were granted
    absl::Duration grace = absl::Seconds(30);
    absl::Time kill_at = absl::InfiniteFuture();
    bool stopped = false;
    bool killed = false;
    bool left_behind = false;  // some of its processes are left
    bool unwanted = false;     // the coordinator has its end, but processes are left
  };
  static void Allow(const AttemptKey& key, const v1::NodeAssignment& assignment, Attempt* attempt,
                    Orders* orders);
  static void SetFailed(Attempt* attempt, int64_t unix_ms, absl::Time now);
  void Stop(const AttemptKey& key, Attempt* attempt, absl::Time now, Orders* orders);

  std::string cluster_;
  std::map<AttemptKey, Attempt> attempts_;
  uint64_t version_ = 1;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_NODE_ATTEMPTS_H_
