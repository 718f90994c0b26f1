#ifndef MUSTER_COORDINATOR_SERVICE_RPC_METRICS_H_
#define MUSTER_COORDINATOR_SERVICE_RPC_METRICS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/web/histogram.h"
#include "coordinator/web/prometheus.h"

namespace muster::coordinator {

// Counts of one gRPC method, under the names that gRPC's Prometheus middlewares use. Thread-safe.
struct MethodMetrics {
  std::string service;
  std::string method;
  std::string type;  // "unary", "server_stream", "bidi_stream"
  std::atomic<uint64_t> started{0};
  std::array<std::atomic<uint64_t>, 17> handled{};  // by status code
  DurationHistogram seconds;

  void Started() { started.fetch_add(1, std::memory_order_relaxed); }
  void Handled(int code, absl::Duration took) {
    handled[static_cast<size_t>(code) % handled.size()].fetch_add(1, std::memory_order_relaxed);
    seconds.Observe(took);
  }
};

// All methods of a server. Add() before serving; the rest is thread-safe.
class RpcMetrics {
 public:
  // `service` is the full name, "muster.v1.Barrier".
  MethodMetrics* Add(absl::string_view service, absl::string_view method, absl::string_view type);
  // Writes grpc_server_started_total, grpc_server_handled_total, grpc_server_handling_seconds.
  void Write(PrometheusText* text) const;

 private:
  std::deque<MethodMetrics> methods_;  // deque: addresses stay
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_RPC_METRICS_H_
