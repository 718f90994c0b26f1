#ifndef MUSTER_BENCH_COORDINATOR_CLUSTER_H_
#define MUSTER_BENCH_COORDINATOR_CLUSTER_H_

#include <grpcpp/completion_queue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

// Not session.pb.h: those who include this also meet LibTorch's copy of protobuf's headers.
namespace muster::v1 {
class AgentFrame;
class OpResult;
}  // namespace muster::v1

namespace muster::bench {

// Many simulated agents of one job in one thread, each with its own connection and stream, each
// speaking for some ranks. Sends and receives real frames; nothing about the coordinator is faked.
// Not thread-safe; methods block.
class Cluster {
 public:
  struct Options {
    std::string address;
    std::string job = "bench";
    int agents = 1;
    int ranks_per_agent = 1;
    absl::Duration lease = absl::Seconds(600);
  };
  explicit Cluster(const Options& options);
  ~Cluster();

  int agents() const;
  int ranks() const;

  // Opens every agent's stream and waits for every Welcome.
  absl::Status Attach(absl::Duration timeout);
  // Every rank asks for a seat; waits until all are seated.
  absl::Status Join(absl::Duration timeout);
  // All ranks arrive at one barrier (one message an agent); waits until every agent was told that
  // it passed.
  absl::StatusOr<absl::Duration> Barrier(const std::string& id, uint64_t counter,
                                         absl::Duration timeout);
  // Each agent sends `frames` transactions of `puts` puts each, `in_flight` at a time; waits for
  // all answers.
  absl::StatusOr<absl::Duration> Puts(int frames, int puts, int in_flight, bool durable,
                                      absl::Duration timeout);
  // Tells by agent 0 that its first rank was killed; waits until every agent was told. The time of
  // each agent.
  absl::StatusOr<std::vector<absl::Duration>> ReportKill(absl::Time killed, absl::Duration timeout);
  // Sends a beat for all ranks from every agent, spread evenly over `period`, for `total`.
  absl::Status Beat(absl::Duration period, absl::Duration total);
  // The server went away: every agent connects again until it is welcome.
  absl::Status Reattach(absl::Duration timeout);

 private:
  struct Agent;

  void Open(Agent& agent);
  void Send(Agent& agent, v1::AgentFrame frame);
  void Pump(Agent& agent);
  void Received(Agent& agent);
  void Restart(Agent& agent);
  // Handles events until `done()` or the time is over.
  absl::Status RunUntil(const std::function<bool()>& done, absl::Duration timeout,
                        const char* what);
  bool HandleOne(absl::Time deadline);

  const Options options_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Agent>> agents_;
  absl::Status error_;
  int welcome_ = 0;
  int results_wanted_ = 0;  // still to come
  int told_wanted_ = 0;     // agents that have not heard of the end of the generation
  bool reconnect_ = false;
  std::function<void(Agent&, const v1::OpResult&)> on_result_;
  std::function<void(Agent&)> on_ended_;
};

}  // namespace muster::bench

#endif  // MUSTER_BENCH_COORDINATOR_CLUSTER_H_
