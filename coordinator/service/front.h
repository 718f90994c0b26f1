#ifndef MUSTER_COORDINATOR_SERVICE_FRONT_H_
#define MUSTER_COORDINATOR_SERVICE_FRONT_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "coordinator/service/engine.h"
#include "coordinator/service/rpc_metrics.h"

namespace muster::coordinator {

// The value of AdminStatus.version and Welcome.version.
inline constexpr char kVersion[] = "0.1.0";

// The gRPC face of the coordinator: every method of muster.v1 and the standard health service, in
// front of an Engine. No policy: it turns messages into operations and answers into messages.
//
// All connections share one completion queue and one thread, which reads, applies (the engine lets
// whoever brings an event apply it) and writes. With gRPC's own callback threads the same message
// costs twice the CPU: they hand each event to one another. So methods are not registered one by
// one but looked up in a table (front.cc) behind a generic service.
//
// Order of use: construct; Register() with the builder; Serve() once the server runs; after
// grpc::Server::Shutdown() has returned, Shutdown(). Thread-safe.
class Front {
 public:
  // `engine` and `metrics` outlive it.
  Front(Engine* engine, RpcMetrics* metrics, absl::Time started);
  ~Front();  // only after Shutdown, or before Serve
  Front(const Front&) = delete;
  Front& operator=(const Front&) = delete;

  void Register(grpc::ServerBuilder& builder);
  void Serve();
  // What the health service says of every service, and tells those who watch it. Starts as serving.
  void SetServing(bool serving);
  // Ends the streams of those who watch the health, which end by nothing else.
  void EndHealthWatches();
  // Blocks until every call has ended, and every wish for one, which the engine's Stop() and the
  // server's Shutdown() see to. Repeatable.
  void Shutdown();

 private:
  struct Rpc;
  class Handler;
  class UnaryCall;
  class AgentStream;
  class WatchStream;
  class HealthWatch;
  class NamedService;
  struct Method;

  static const Method kMethods[];

  // Whether the health service knows it; the empty name is the whole server.
  bool Knows(absl::string_view service) const;
  bool AddHealthWatch(const std::shared_ptr<HealthWatch>& watch);
  void Accept();
  void Run();
  // The next event; false: none will come. A thread that sleeps takes longer to wake than a small
  // barrier takes; so where events follow one another closely it does not sleep between them.
  bool Next(void** tag, bool* ok);
  // Posts the reads that were put off.
  void ReadOn();
  void Handle(Rpc* rpc, int event, bool ok);
  void Begin(Rpc* rpc);
  void Closed();

  Engine& engine_;
  RpcMetrics& metrics_;
  const absl::Time started_;
  std::atomic<bool> serving_{true};
  struct Served {
    const Method* method;
    MethodMetrics* metrics;
  };
  absl::flat_hash_map<std::string, Served> methods_;  // by path

  // So that reflection lists them.
  std::vector<std::unique_ptr<grpc::Service>> names_;
  grpc::AsyncGenericService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::thread thread_;
  // Streams whose next read waits for the queue to have nothing at hand. Queue's thread.
  std::vector<std::shared_ptr<AgentStream>> put_off_;
  size_t events_since_put_off_ = 0;  // since the first of them
  bool soon_ = false;                // whether the last event came soon; queue's thread

  Mutex mu_;
  CondVar ended_;
  int open_ ABSL_GUARDED_BY(mu_) = 0;  // calls wished for that have not ended
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool health_ended_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::weak_ptr<HealthWatch>> health_watches_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_FRONT_H_
