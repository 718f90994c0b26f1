#ifndef MUSTER_COORDINATOR_SERVICE_SERVER_H_
#define MUSTER_COORDINATOR_SERVICE_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/core.h"
#include "coordinator/service/core_runner.h"
#include "coordinator/service/disk_watch.h"
#include "coordinator/service/grpc_frontend.h"
#include "coordinator/service/rpc_metrics.h"
#include "coordinator/web/http_server.h"
#include "rpc/address.h"
#include "rpc/server.h"

namespace muster::coordinator {

// A whole coordinator: journal, core, gRPC services, and the metrics page. `muster-coordinator`
// runs one; `muster launch` and tests embed one. Thread-safe.
//
//   // 127.0.0.1, a free port, in memory; open to every user of this machine.
//   MUSTER_ASSIGN_OR_RETURN(auto server, CoordinatorServer::Start({.rpc = {.insecure = true}}));
//   Tell(server->address());  // "127.0.0.1:41234"
//   ...
//   server->Shutdown();
class CoordinatorServer {
 public:
  struct Options {
    // Where to listen, and TLS. A unix socket is this user's alone unless there is a token, or
    // `only_user` says otherwise.
    rpc::ServerOptions rpc;
    // Calls that carry the token in this file (rpc/token.h) are an admin's; empty: there is none.
    std::string token_file = {};
    // Users with roles, and their tokens or certificates (callers.h); empty: there are none. With
    // either file, every call must show who makes it.
    std::string users_file = {};
    // The log of who changed what (audit_log.h); empty: it is not written.
    std::string audit_log = {};
    // The private Ed25519 key that signs the records of checkpoints (PEM); empty: they are not
    // signed.
    std::string checkpoint_key = {};
    std::string data_dir = {};        // the journal's; empty: in memory
    std::string metrics_listen = {};  // HOST:PORT of the HTTP page /metrics; empty: none
    CoreRunner::Options runner = {};
    GrpcFrontend::Limits frontend = {};
    // Called when a caller has seen a newer coordinator: this one has stopped serving and should be
    // shut down. Runs in the runner's turn, must not block or call Shutdown.
    std::function<void()> on_deposed = nullptr;
    // Called when the journal has failed permanently (Journal::Progress::status): every request
    // that needs it is refused until another coordinator has replayed it. The rules are those of
    // on_deposed.
    std::function<void()> on_journal_broken = nullptr;
    DiskLimits disk = {};  // limits for data_dir
    // Called instead of MeasureDisk, in tests; null: MeasureDisk is called.
    std::function<absl::StatusOr<DiskSizes>()> measure_disk = nullptr;
    std::unique_ptr<Journal> journal = nullptr;  // instead of data_dir, for tests
  };

  // Opens and replays the journal, then serves. Errors: as rpc::Server::Start, rpc::ReadToken,
  // ReadSecretFile, SigningKey::Parse, SqliteJournal::Open, CoreRunner::Start and
  // HttpServer::Start.
  static absl::StatusOr<std::unique_ptr<CoordinatorServer>> Start(Options options);
  ~CoordinatorServer();

  // The address that workers and agents connect to, with the port that was bound.
  const std::string& address() const { return server_->address(); }
  int port() const { return server_->port(); }
  int metrics_port() const { return http_ == nullptr ? 0 : http_->port(); }
  CoreRunner& runner() { return *runner_; }
  // Null if the coordinator keeps nothing on a disk.
  DiskWatch* disk() { return disk_.get(); }

  // Return what GET /metrics and GET /healthz serve.
  std::string Metrics();
  HttpServer::Response Health() const;

  // Answers waiting calls with UNAVAILABLE / STOPPING, closes streams, writes queued records.
  // Blocks up to a few seconds. Repeatable; the destructor does it too.
  void Shutdown();

 private:
  CoordinatorServer() = default;
  absl::Status StartHttp(const rpc::Address& address);

  // Members are in the order in which they are made, and shut down in reverse.
  RpcMetrics rpc_metrics_;
  size_t kv_limit_ = 0;
  absl::Time started_;
  std::unique_ptr<AttemptTokens> attempts_;
  std::unique_ptr<CoreRunner> runner_;
  std::unique_ptr<DiskWatch> disk_;
  std::unique_ptr<GrpcFrontend> frontend_;
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<HttpServer> http_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_SERVER_H_
