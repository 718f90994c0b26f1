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

// Which attempt of which job.
using AttemptKey = std::pair<std::string, int>;

// The attempts on this node, and what is to be done about them: the node's side of
// proto/muster/v1/node.proto. Pure; not thread-safe. Its owner starts and ends runners.
class NodeAttempts {
 public:
  // Beyond the grace that a runner gives its workers.
  static constexpr absl::Duration kRunnerGrace = absl::Seconds(30);

  struct Orders {
    std::vector<v1::NodeAssignment> start;
    std::vector<AttemptKey> stop;  // SIGTERM for the runner
    std::vector<AttemptKey> kill;  // it has not ended in time: SIGKILL
    std::vector<AttemptKey> forget;
    struct Restart {
      AttemptKey key;
      int restart;
      absl::Duration delay;
    };
    std::vector<Restart> restarts;  // its runner may start again what the attempt has lost
    // A line for the log; empty: nothing unusual.
    std::string notice;
  };

  // What is found on the disk at the start: `running`, or ended as `end` says, at `ended`. All of
  // one cluster, which is empty if nothing is found. `asked`: see Ended.
  void Adopt(const AttemptKey& key, bool running, const v1::AttemptEnd& end, absl::Time started,
             absl::Time ended, absl::Time now, int asked = 0);
  void SetCluster(std::string cluster_id) { cluster_ = std::move(cluster_id); }
  const std::string& cluster() const { return cluster_; }

  Orders Apply(const v1::SyncNodeReply& reply, absl::Time now);
  // Of runners that do not end.
  Orders Tick(absl::Time now);
  absl::Time NextDeadline() const;

  // At `unix_ms` of the wall clock, which is `now`. `asked`: the restart that this end was asked
  // for before, and may have been counted for; 0: none. The end of a runner that Tick had killed
  // is no failure of the node (NODE_FAILED): it is reported as CANCELLED.
  void Ended(const AttemptKey& key, const v1::AttemptEnd& end, int64_t unix_ms, absl::Time now,
             int asked = 0);
  // As Ended, but the kernel does not end all of its processes. Until Gone, the node says that it
  // still has some of them, beside the end, so that its coordinator starts nothing here; and it
  // does not forget the attempt.
  void LeftBehind(const AttemptKey& key, const v1::AttemptEnd& end, int64_t unix_ms, absl::Time now,
                  int asked = 0);
  void Gone(const AttemptKey& key);
  // Its runner asks for a restart within the attempt since `unix_ms` of the wall clock, when it was
  // `now`. It may be a repeat.
  void Ask(const AttemptKey& key, int restart, const v1::AttemptEnd& end, int64_t unix_ms,
           absl::Time now);
  bool IsRunning(const AttemptKey& key) const;
  bool AnyRunning() const;
  bool Knows(const AttemptKey& key) const { return attempts_.count(key) != 0; }
  // Changes whenever the reports do, beyond the time that an attempt has run.
  uint64_t version() const { return version_; }
  void FillReports(absl::Time now, v1::SyncNodeRequest* request) const;

 private:
  struct Attempt {
    v1::AttemptReport report;
    absl::Time started;
    absl::Time failed = absl::InfinitePast();  // the process that its end names
    int restarts = 0;                          // within the attempt, that were allowed
    absl::Duration grace = absl::Seconds(30);
    absl::Time kill_at = absl::InfiniteFuture();
    bool stopped = false;
    bool killed = false;
    bool left_behind = false;  // some of it
    bool unwanted = false;     // its end was heard; of what is left behind
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
