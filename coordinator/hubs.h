#ifndef MUSTER_COORDINATOR_HUBS_H_
#define MUSTER_COORDINATOR_HUBS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

struct HubOptions {
  int direct_agents = 64;   // hubs come on top
  int agents_per_hub = 48;  // 0: there are no hubs
};

// The agent `node` reaches the coordinator through `hub` from now on.
struct HubMove {
  std::string node;
  std::string hub;
  std::string address;
  std::string why;
};

// Decides which agents keep a stream to the coordinator and which reach it through another agent,
// their hub (docs/protocol.md, "Hubs"). Its inputs are the agents that attach and detach, and the
// agents behind each hub; Decide() returns the resulting moves.
//
// Rules. While more than `direct_agents` agents that are no hubs are attached, the newest of them
// that knows UseHub goes to the hub that has the most agents and still room, else to the agent that
// has been attached longest among those that offer an address, which is a hub from then on. An
// agent that has others behind it, or on their way to it, never moves. An agent on its way counts
// for its hub until the hub lists it or kArrival has passed. A hub that failed an agent is not
// assigned to it for kBarred, and to no agent if it is not attached or has failed another agent
// within that time; each repetition doubles the time. An agent that has moved twice within kMemory
// waits before it moves again, twice as long each time: agents that reach no hub do not move back
// and forth forever.
//
// Any bytes are fine as input. Thread-safety: none. Nothing depends on the order of a hash map. An
// event costs O(log n) of the agents, plus the length of a roster.
class Hubs {
 public:
  static constexpr absl::Duration kArrival = absl::Seconds(30);
  static constexpr absl::Duration kBarred = absl::Minutes(1);
  static constexpr absl::Duration kMemory = absl::Hours(1);
  // An agent that has had a session before may be a hub of an earlier term: it has this long to say
  // so with its first beat.
  static constexpr absl::Duration kFirstBeat = absl::Seconds(3);
  static constexpr size_t kMaxRoster = 1024;     // more agents behind one hub are not looked at
  static constexpr size_t kMaxListed = 1 << 18;  // nor more behind all hubs together

  explicit Hubs(const HubOptions& options) : options_(options) {}

  // Notes that a stream of the agent began. Without a preceding Detach, its session continues.
  void Attach(absl::string_view node, const v1::Hello& hello, absl::Time now);
  // Notes that the agent's session has ended: the agent ended, moved, or was away for too long.
  void Detach(absl::string_view node, absl::Time now);
  // Takes the list of all agents that `node` speaks for.
  void Roster(absl::string_view node, const v1::HubRoster& roster, absl::Time now);
  void Tick(absl::Time now);
  // Returns when Tick has something to do; InfiniteFuture: nothing waits.
  absl::Time NextDeadline() const;

  // Returns the agents to move now. Call it after each of the above.
  std::vector<HubMove> Decide();
  // Returns one line for operators, once for each time that agents ought to move and no agent can
  // be a hub.
  std::optional<std::string> TakeNotice();

  // Returns an agent on this host that is attached or listed by its hub; empty: there is none.
  std::string AgentOn(absl::string_view host) const;

  int agents_behind() const { return behind_; }
  int hubs() const { return hubs_; }  // hubs that speak for others

 private:
  struct Agent {
    std::string node;
    std::string address;  // empty: it cannot be a hub
    bool follows = false;
    uint64_t order = 0;                            // its place in the order of arrival
    absl::Time movable_at = absl::InfinitePast();  // not before
    absl::Time barred_until = absl::InfinitePast();
    bool under_way = false;  // to its hub
    bool gone = false;       // its hub lists it, though its session here has not ended yet
    bool lost = false;       // it was sent to a hub and never came there: left alone in this
                             // session
    std::vector<std::string> roster;
    int coming = 0;  // under way to it

    int load() const { return static_cast<int>(roster.size()) + coming; }
    bool plain() const { return load() == 0 && !under_way && !gone; }
  };
  struct UnderWay {
    std::string hub;
    absl::Time until;
  };
  // The facts about a node that outlive its session.
  struct Past {
    int moves = 0;
    absl::Time last = absl::InfinitePast();                  // move or failure
    std::vector<std::pair<std::string, absl::Time>> failed;  // hubs that failed it, until when
  };
  struct Suspect {
    std::string reporter;
    absl::Time reported = absl::InfinitePast();
    int times = 0;                              // how often it was barred since it last had agents
    absl::Time until = absl::InfinitePast();    // until when it is barred
    absl::Time look_at = absl::InfinitePast();  // in bars_
  };
  using ByOrder = absl::btree_set<std::pair<uint64_t, Agent*>>;
  using ByTime = absl::btree_set<std::pair<absl::Time, std::string>>;

  Agent* Find(absl::string_view node);
  // An agent is changed only between these two, which take it out of the indices and put it back.
  void Unindex(Agent* agent);
  void Index(Agent* agent);
  // SetHost notes what an agent or its hub said last; DropHost forgets it unless the node is still
  // attached or listed.
  void SetHost(const std::string& node, absl::string_view host);
  void DropHost(const std::string& node);
  // Adds to the agent's `coming`, also if the agent is not attached at the moment.
  void AddComing(const std::string& hub, int n);
  void EndMove(const std::string& node);
  void List(Agent* hub, const v1::HubRoster* roster);
  void HubFailed(const std::string& hub, const std::string& reporter);
  // Called after a change of `suspect`: sets when it is looked at again, and whether its agent is
  // barred.
  void LookAgain(const std::string& hub, Suspect* suspect);
  // Returns whether `node` does not count as behind a hub although one lists it.
  bool IsDirect(absl::string_view node) const;
  bool Failed(const std::string& node, const std::string& hub) const;
  Agent* HubFor(const Agent& agent);
  absl::Time MayMoveAt(const std::string& node) const;
  Past& Remember(const std::string& node);
  void Advance(absl::Time now);

  const HubOptions options_;
  absl::Time now_ = absl::InfinitePast();
  uint64_t next_order_ = 1;
  absl::flat_hash_map<std::string, std::unique_ptr<Agent>> agents_;  // by node
  absl::flat_hash_map<std::string, Agent*> listed_;               // node -> the last hub to list it
  absl::flat_hash_map<std::string, std::string> host_of_;         // by node, attached or listed
  absl::btree_set<std::pair<std::string, std::string>> on_host_;  // host and node
  absl::flat_hash_map<std::string, UnderWay> under_way_;          // by node
  absl::flat_hash_map<std::string, int> coming_;                  // by hub
  absl::flat_hash_map<std::string, Past> past_;                   // by node
  std::deque<std::pair<absl::Time, std::string>> past_order_;
  absl::flat_hash_map<std::string, Suspect> suspects_;  // by hub

  // Indices of agents_. Plain: neither a hub nor on the way to one.
  int plain_ = 0;
  int hubs_ = 0;
  int behind_ = 0;
  ByOrder movable_;  // plain, may move now
  ByOrder able_;     // plain, may become a hub
  absl::btree_set<std::pair<std::pair<int, uint64_t>, Agent*>>
      rooms_;        // hubs with room, the fullest first
  ByTime waiting_;   // plain, may move then
  ByTime arrivals_;  // in under_way_
  ByTime bars_;      // in suspects_
  bool said_ = false;
  std::optional<std::string> notice_;
};

// Hubs of agents that may not speak for one another: each group has hubs of its own. The methods
// are those of Hubs; an event costs O(log groups) more. A group is forgotten with its last attached
// agent, except the group without a name.
class GroupedHubs {
 public:
  explicit GroupedHubs(const HubOptions& options) : options_(options) {}

  // A node has one group while it is attached.
  void Attach(absl::string_view group, absl::string_view node, const v1::Hello& hello,
              absl::Time now);
  void Detach(absl::string_view node, absl::Time now);
  void Roster(absl::string_view node, const v1::HubRoster& roster, absl::Time now);
  void Tick(absl::Time now);
  absl::Time NextDeadline() const;
  std::vector<HubMove> Decide();
  std::optional<std::string> TakeNotice();
  std::string AgentOn(absl::string_view host) const;
  int agents_behind() const { return behind_; }
  int hubs() const { return hubs_; }

 private:
  struct Group {
    std::unique_ptr<Hubs> hubs;
    int attached = 0;
    absl::Time deadline = absl::InfiniteFuture();  // in deadlines_
  };
  using Groups = absl::btree_map<std::string, Group>;
  // Runs `change` on the group's hubs and updates the counts.
  template <typename F>
  void Change(Groups::value_type* group, F change);

  const HubOptions options_;
  Groups groups_;
  absl::flat_hash_map<std::string, std::string> group_of_;  // by attached node
  absl::btree_set<std::pair<absl::Time, std::string>> deadlines_;
  absl::btree_set<std::string> changed_;  // groups to decide about
  int behind_ = 0, hubs_ = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_HUBS_H_
