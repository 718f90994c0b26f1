#ifndef MUSTER_COORDINATOR_AGENTS_H_
#define MUSTER_COORDINATOR_AGENTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/silence.h"

namespace muster::coordinator {

// The agents that have a session, of all jobs: when each last sent a message, and whether most of
// them fell silent at once, as in a network partition. Not thread-safe.
class Agents {
 public:
  // The times at which an agent was heard.
  struct LastHeard {
    absl::Time beat;  // the last one
    absl::Time back;  // the first message after missed beats, or of all
  };

  void Attach(absl::string_view node, absl::Time now);
  void Detach(absl::string_view node) { agents_.erase(node); }
  // `for_others`: the agent speaks for other agents, as a hub does. Returns the number of its
  // session; 0: it has none.
  uint64_t Beat(absl::string_view node, bool for_others, absl::Time now);

  size_t size() const { return agents_.size(); }
  bool Has(absl::string_view node) const { return agents_.contains(node); }
  // Returns whether the agent has spoken for other agents in its session.
  bool SpeaksForOthers(absl::string_view node) const {
    const auto it = agents_.find(node);
    return it != agents_.end() && it->second.was_hub;
  }
  // Returns the number of the session, which no other session ever has; 0: there is none.
  uint64_t NumberOf(absl::string_view node) const;
  // Returns nullopt if the agent has no session, or has sent no beat in it.
  std::optional<LastHeard> LastHeardOf(absl::string_view node) const;
  // The last beat of the agent of `node`, if it is evidence about a worker that the agent reported
  // in the session with number `via`. It is not if the agent has another session now, nor if the
  // agent is a hub, whose beats come whether the worker's own agent lives or not.
  std::optional<absl::Time> WitnessBeat(absl::string_view node, uint64_t via) const;

  // Counts, for a worker last seen at `last_seen`, the agents that still send and those that fell
  // silent when the worker did. O(agents), but earlier counts are reused.
  void CountFor(absl::Time last_seen, absl::Duration lease, absl::Time now, Silence* silence);
  // The time at which the last cut ended: most agents were back.
  absl::Time cut_ended() const { return partition_ended_; }

 private:
  struct Agent {
    uint64_t number = 0;                      // from 1
    absl::Time heard = absl::InfinitePast();  // last
    absl::Time back = absl::InfinitePast();
    absl::Time beat = absl::InfinitePast();
    bool was_hub = false;  // in this session: its messages prove nothing about others' workers
  };
  void Heard(absl::string_view node, Agent* agent, absl::Time now);
  static bool FellSilent(const Agent& agent, absl::Duration lease, absl::Time now);

  absl::flat_hash_map<std::string, Agent> agents_;  // by node
  uint64_t next_number_ = 1;
  // Agents that fell silent at once, and how many there were in all; without those that are back.
  // Empty: there is no cut, or most are back.
  absl::flat_hash_set<std::string> partitioned_;
  int before_partition_ = 0;
  absl::Time cut_began_ = absl::InfinitePast();
  absl::Time partition_ended_ = absl::InfinitePast();
  int heard_ = 0, silent_ = 0;  // the last counts
  absl::Time counted_ = absl::InfinitePast();
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_AGENTS_H_
