#ifndef MUSTER_COORDINATOR_SERVICE_GRPC_FRONTEND_H_
#define MUSTER_COORDINATOR_SERVICE_GRPC_FRONTEND_H_

#include <grpcpp/alarm.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>
#include <grpcpp/support/string_ref.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/log_level_control.h"
#include "base/mutex.h"
#include "coordinator/access.h"
#include "coordinator/service/audit_log.h"
#include "coordinator/service/callers.h"
#include "coordinator/service/core_runner.h"
#include "coordinator/service/rpc_metrics.h"

namespace muster::coordinator {

// The value of AdminStatus.version and Welcome.version.

// The quota of one caller.
struct CallerQuota {
  size_t calls;    // calls and streams
  size_t streams;  // of these, agents' streams and watches
  size_t silent;   // of these, calls and streams that have sent nothing yet
  // The bytes of the requests of calls that wait for their answer; small ones
  // (OpenCalls::kSmallCall) may go to twice as much.
  size_t held_bytes;
};

// The open calls of a caller, which is a connection or a user.
struct CallerShare {
  std::string name;
  CallerShare* user = nullptr;  // a connection's user
  size_t calls = 0, streams = 0, silent = 0, held_bytes = 0;
};

// The events of a call.
enum class RpcEvent : uintptr_t { kBegun, kRead, kWritten, kFinished, kGone };

class RpcHandler {
 public:
  virtual ~RpcHandler() = default;
};

// The transport's half of a call: gRPC's, or that of a test. An operation that a Start... begins
// ends with an event, which may come after any other, also after kGone (the caller went away or
// knows the end). Deleted by the frontend after kGone, once every started operation has ended.
class RpcCall {
 public:
  virtual ~RpcCall() = default;
  // The path, such as "/muster.v1.Admin/Status".
  virtual const std::string& method() const = 0;
  virtual std::chrono::system_clock::time_point deadline() const = 0;
  virtual const std::multimap<grpc::string_ref, grpc::string_ref>& metadata() const = 0;
  // The connection it came by, such as "ipv4:10.0.0.7:4711"; empty: not known.
  virtual std::string peer() const { return ""; }
  // The name in the connection's verified certificate; empty: none.
  virtual std::string certificate() const { return ""; }

 protected:
  friend class GrpcFrontend;
  virtual void StartRead(grpc::ByteBuffer* message) = 0;                  // kRead
  virtual void StartWrite(const grpc::ByteBuffer& message) = 0;           // kWritten
  virtual void StartFinish(const grpc::Status& status) = 0;               // kFinished
  virtual void StartWriteAndFinish(const grpc::ByteBuffer& message) = 0;  // kFinished
  // Ends the call at once, even if the client takes nothing.
  virtual void Cancel() = 0;

 private:
  std::shared_ptr<RpcHandler> handler_;
  std::shared_ptr<const Identity> who_;  // null: not asked for
  CallerShare* caller_ = nullptr;        // whose quota it counts against; null: none
  bool is_stream_ = false;
  size_t held_bytes_ = 0;
  int in_flight_ = 0;  // under the handler's lock
  // Used by the queue's thread.
  bool gone_ = false;
  bool finished_ = false;
  // The call's place among all calls that have sent no message yet.
  std::list<RpcCall*>::iterator silent_;
  bool is_silent_ = false;
  bool is_health_ = false;
  absl::Time begun_ = absl::InfinitePast();
};

// The gRPC face of the coordinator: every method of muster.v1 and the standard health service, in
// front of a CoreRunner. No policy: it turns messages into operations and answers into messages.
//
// All connections share one completion queue and one thread, which reads, applies (in the runner,
// the thread that brings an event applies it) and writes. With gRPC's own callback threads the same
// message costs twice the CPU: they hand each event to one another. So methods are not registered
// one by one but looked up in a table (grpc_frontend.cc) behind a generic service. Work that has to
// wait for the disk (backups) runs on a thread of its own.
//
// Order of use: construct; Register() with the builder; Serve() once the server runs; after
// grpc::Server::Shutdown() has returned, Shutdown(). Thread-safe.
class GrpcFrontend {
 public:
  // For callers that open calls and send nothing, which the runner never sees.
  struct Limits {
    // How long a call or stream may last without its first message; then it is ended.
    absl::Duration first_message = absl::Seconds(30);
    // Calls and streams without a message so far; more are refused with OVERLOADED. Those of the
    // health service, which needs no authentication, are counted separately.
    size_t silent_calls = 1 << 14;
    size_t silent_health_calls = 1 << 10;
    // Open watches of the health service.
    size_t health_watches = 1 << 12;
    // Quotas, so that one caller cannot take what there is for all. A connection is that of gRPC; a
    // user is one of the users file, an attempt, or the name in the certificate; else the source
    // address. Callers on a unix socket are this machine's own user and have no quota; the health
    // service has its own limits.
    CallerQuota connection = {
        .calls = 1 << 16, .streams = 1 << 14, .silent = 1 << 12, .held_bytes = 32 << 20};
    CallerQuota user = {
        .calls = 1 << 18, .streams = 1 << 15, .silent = 1 << 13, .held_bytes = 64 << 20};
  };

  // `runner` and `metrics` outlive it. `callers` establishes who calls, except for the health
  // service; null: every caller may do everything. `audit` records what people change; null: none.
  GrpcFrontend(CoreRunner* runner, RpcMetrics* metrics, absl::Time started, const Limits& limits,
               std::unique_ptr<Callers> callers = nullptr,
               std::unique_ptr<AuditLog> audit = nullptr);
  ~GrpcFrontend();  // only after Shutdown, or before Serve
  GrpcFrontend(const GrpcFrontend&) = delete;
  GrpcFrontend& operator=(const GrpcFrontend&) = delete;

  void Register(grpc::ServerBuilder& builder);
  void Serve();
  // The status that the health service reports for every service, and sends to its watchers. Starts
  // as serving.
  void SetServing(bool serving);
  // Ends the watches of the health service, which nothing else ends.
  void EndHealthWatches();
  // Blocks until every call, and every pending accept of one, has ended; the runner's Stop() and
  // the server's Shutdown() end them. Repeatable.
  void Shutdown();

  // Hands every message received so far to the runner, then calls CoreRunner::CaughtUp. One at a
  // time. Thread-safe; does not block.
  void CatchUp(absl::Time asked);

  // Handles the beginning of a call of another transport than gRPC's, which tests have, as kBegun
  // of one of its own. Like Handle(), from one thread at a time.
  void Adopt(std::unique_ptr<RpcCall> rpc);
  // `ok` is false if the started operation has failed, or a read has found the end of what the
  // client sends.
  void Handle(RpcCall* rpc, RpcEvent event, bool ok);
  // Ends the calls that began by `now` minus the limit and have sent nothing. Like Handle().
  void EndSilent(absl::Time now);

  size_t silent_calls() const { return silent_count_.load(std::memory_order_relaxed); }
  // The refusals because of the quota of a connection, or of a user.
  uint64_t quota_refusals(bool user) const {
    return quota_refused_[user ? 1 : 0].load(std::memory_order_relaxed);
  }
  uint64_t refused_calls() const { return refused_.load(std::memory_order_relaxed); }

 private:
  class GrpcCall;
  class Handler;
  class UnaryCall;
  class GrpcAgentStream;
  template <typename Request>
  class GrpcWatchStream;
  class HealthWatch;
  class DiskThread;
  class NamedService;
  struct Method;

  static const Method kMethods[];

  // Returns whether the health service knows it; the empty name is the whole server.
  bool Knows(absl::string_view service) const;
  // UNAVAILABLE when stopping or when there are too many.
  absl::Status AddHealthWatch(const std::shared_ptr<HealthWatch>& watch);
  void Accept();
  void Run();
  // Returns the next event; false: none will come. A thread that sleeps takes longer to wake than a
  // small barrier takes; so while events follow one another closely it does not sleep between them.
  bool Next(void** tag, bool* ok);
  // Blocks for the next event, and ends silent calls meanwhile.
  bool Wait(void** tag, bool* ok);
  // Posts the reads that were put off.
  void ReadOn();
  // Handles one event, if any is at hand, as a step towards having seen all; false: none will come.
  template <typename OnEvent>
  bool LookFurther(const OnEvent& handle);
  void Begin(RpcCall* rpc);
  void Heard(RpcCall* rpc);
  // Returns OK if a call to `method` (null: an unknown one) is admitted; sets who calls.
  absl::Status CheckCaller(RpcCall* rpc, const Method* method);
  // Checks whether the caller may do this, which is no operation (access.h); a refusal is audited.
  absl::Status CheckAccess(RpcCall* rpc, Role needs, absl::string_view job, absl::string_view what);
  // Counts a call that begins, or returns which quota it exceeds.
  absl::Status TakeShare(RpcCall* rpc);
  // Counts the bytes of a request whose answer may have to wait.
  absl::Status TakeBytes(RpcCall* rpc, size_t bytes);
  void GiveShareBack(RpcCall* rpc);
  CallerShare* FindCaller(const RpcCall& rpc);
  // Forgets the caller if nothing of it is open any longer.
  void ForgetCaller(CallerShare* connection);
  absl::Status BeyondQuota(const CallerShare& caller, absl::string_view what, size_t most);
  // Ends a call that no handler takes.
  void Refuse(RpcCall* rpc, MethodMetrics* metrics, const absl::Status& status);
  void Closed();

  CoreRunner& runner_;
  RpcMetrics& metrics_;
  const absl::Time started_;
  const Limits limits_;
  const std::unique_ptr<Callers> callers_;  // null: anybody may do everything
  const std::unique_ptr<AuditLog> audit_;   // null: none
  LogLevelControl log_level_;
  std::atomic<bool> serving_{true};
  struct Served {
    const Method* method;
    MethodMetrics* metrics;
  };
  absl::flat_hash_map<std::string, Served> methods_;  // by path

  // Kept so that reflection lists them.
  std::vector<std::unique_ptr<grpc::Service>> names_;
  grpc::AsyncGenericService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::thread thread_;
  // Streams whose next read waits for the queue to have nothing at hand. Queue's thread.
  std::vector<std::shared_ptr<GrpcAgentStream>> put_off_;
  size_t events_since_silent_ = 0;         // since the silent calls were looked at
  size_t events_since_put_off_ = 0;        // since the first of them
  std::optional<absl::Time> catching_up_;  // the argument for CoreRunner::CaughtUp; queue's thread
  int empty_looks_ = 0;                    // in a row, while catching up
  uint64_t looks_ = 0;                     // that found something, while catching up
  bool soon_ = false;                      // whether the last event came soon; queue's thread

  // Calls without a message so far, by their start time. Queue's thread.
  std::list<RpcCall*> silent_;
  size_t silent_health_ = 0;  // those to the health service
  std::atomic<size_t> silent_count_{0};
  std::atomic<uint64_t> refused_{0};
  std::array<std::atomic<uint64_t>, 2> quota_refused_{};
  // Callers with something open, by name. Queue's thread.
  absl::flat_hash_map<std::string, std::unique_ptr<CallerShare>> connections_;
  absl::flat_hash_map<std::string, std::unique_ptr<CallerShare>> users_;

  Mutex mu_;
  CondVar ended_;
  int open_ ABSL_GUARDED_BY(mu_) = 0;  // calls that have not ended, and those asked for
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool running_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time catch_up_asked_ ABSL_GUARDED_BY(mu_);
  grpc::Alarm catch_up_alarm_;
  bool health_ended_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::weak_ptr<HealthWatch>> health_watches_ ABSL_GUARDED_BY(mu_);

  const std::unique_ptr<DiskThread> disk_thread_;  // last: what it does uses the others
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_GRPC_FRONTEND_H_
