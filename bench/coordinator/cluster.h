#ifndef MUSTER_BENCH_COORDINATOR_CLUSTER_H_
#define MUSTER_BENCH_COORDINATOR_CLUSTER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

// Not session.pb.h: files that include this also see LibTorch's copy of protobuf's headers.
namespace muster::v1 {
class AgentFrame;
class CoordinatorFrame;
class OpResult;
}  // namespace muster::v1

namespace muster::bench {

// Many simulated agents of one job in one thread, each with its own connection and stream, each
// speaking for some ranks. Sends and receives real frames; nothing about the coordinator is faked.
// The agents speak gRPC's protocol over nghttp2 and one epoll loop: they share the machine with
// the coordinator, while real ones have machines of their own, so they must cost little. Not
// thread-safe; methods block.
class Cluster {
 public:
  struct Options {
    std::string address;
    std::string job = "bench";
    int agents = 1;  // with streams of their own, not counting hubs
    int ranks_per_agent = 1;
    // Streams of hubs, each of which speaks for `agents_per_hub` agents, itself among them: what
    // the others say comes in its messages, as docs/protocol.md has it.
    int hubs = 0;
    int agents_per_hub = 0;
    absl::Duration lease = absl::Seconds(600);
  };
  explicit Cluster(const Options& options);
  ~Cluster();

  int streams() const;
  int ranks() const;

  // Opens every agent's stream and waits for every Welcome.
  absl::Status Attach(absl::Duration timeout);
  // Every rank asks for a seat; waits until all are seated.
  absl::Status Join(absl::Duration timeout);
  // All ranks arrive at one barrier (one message per stream); waits until every agent knows that it
  // passed.
  absl::StatusOr<absl::Duration> Barrier(const std::string& id, uint64_t counter,
                                         absl::Duration timeout);
  // Each agent sends `frames` transactions of `puts` puts each, `in_flight` at a time; waits for
  // all answers.
  absl::StatusOr<absl::Duration> Puts(int frames, int puts, int in_flight, bool durable,
                                      absl::Duration timeout);
  // Reports through agent 0 that its first rank was killed; waits until every agent knows. Returns
  // the time of each agent.
  absl::StatusOr<std::vector<absl::Duration>> ReportKill(absl::Time killed, absl::Duration timeout);
  // Every stream says for all its ranks that they live, spread evenly over `period`, for `total`; a
  // hub in two beats, each for half of its agents.
  absl::Status Beat(absl::Duration period, absl::Duration total);
  // Opens every stream again, after the server went away, until it is welcome. Hubs list their
  // agents.
  absl::Status Reattach(absl::Duration timeout);

 private:
  struct Agent;

  struct Callbacks;

  void Open(Agent& agent);
  void Connected(Agent& agent);
  // Queues `frame` and, if the stream is open, writes what is queued.
  void Send(Agent& agent, v1::AgentFrame& frame);
  // Sends a hub's first beat: its list of agents.
  void SendRoster(Agent& agent);
  void Write(Agent& agent);
  // Arms epoll for what the agent waits for.
  void Watch(Agent& agent, bool writable);
  void Readable(Agent& agent);
  void Received(Agent& agent, const char* bytes, size_t size);
  // Handles the end of a stream: reconnects a little later, or fails.
  void Ended(Agent& agent, const std::string& why);
  // Handles events until `done()` or the deadline.
  absl::Status RunUntil(const std::function<bool()>& done, absl::Duration timeout,
                        const char* what);
  // Returns false if nothing happened until `deadline`.
  bool HandleSome(absl::Time deadline);

  const Options options_;
  const int epoll_;
  const std::unique_ptr<v1::CoordinatorFrame> frame_;  // the one being read
  std::deque<std::pair<absl::Time, Agent*>> reopen_;   // by time
  std::vector<std::unique_ptr<Agent>> agents_;
  absl::Status error_;
  int welcome_ = 0;
  int results_wanted_ = 0;  // still to come
  int told_wanted_ = 0;     // agents that do not know the end of the generation yet
  bool reconnect_ = false;
  bool reading_ = false;  // nghttp2 calls back: what is sent goes out afterwards
  std::function<void(Agent&, const v1::OpResult&)> on_result_;
  std::function<void(Agent&)> on_ended_;
};

}  // namespace muster::bench

#endif  // MUSTER_BENCH_COORDINATOR_CLUSTER_H_
