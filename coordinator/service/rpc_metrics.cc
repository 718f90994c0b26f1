#include "coordinator/service/rpc_metrics.h"

namespace muster::coordinator {
namespace {

constexpr const char* kCodeNames[] = {
    "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
    "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
    "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
    "DataLoss", "Unauthenticated"};

}  // namespace

MethodMetrics* RpcMetrics::Add(absl::string_view service, absl::string_view method,
                               absl::string_view type) {
  MethodMetrics& metrics = methods_.emplace_back();
  metrics.service = std::string(service);
  metrics.method = std::string(method);
  metrics.type = std::string(type);
  return &metrics;
}

void RpcMetrics::Write(PrometheusText* text) const {
  using Type = PrometheusText::Type;
  const auto labels = [](const MethodMetrics& m) {
    return PrometheusText::Labels{
        {"grpc_type", m.type}, {"grpc_service", m.service}, {"grpc_method", m.method}};
  };
  text->Family("grpc_server_started_total", Type::kCounter, "Calls started on the server.");
  for (const MethodMetrics& m : methods_)
    text->Sample(labels(m), static_cast<double>(m.started.load()));
  text->Family("grpc_server_handled_total", Type::kCounter,
               "Calls completed on the server, by status code.");
  for (const MethodMetrics& m : methods_) {
    for (size_t code = 0; code < m.handled.size(); ++code) {
      const uint64_t count = m.handled[code].load();
      if (count == 0 && code != 0) continue;
      PrometheusText::Labels with_code = labels(m);
      with_code.emplace_back("grpc_code", kCodeNames[code]);
      text->Sample(with_code, static_cast<double>(count));
    }
  }
  text->Family(
      "grpc_server_handling_seconds", Type::kHistogram,
      "Time from the arrival of a call to its answer; calls that wait by design wait here too.");
  const std::vector<double> bounds = DurationHistogram::BoundsInSeconds();
  for (const MethodMetrics& m : methods_) {
    text->Histogram(labels(m), bounds, m.seconds.Counts(), m.seconds.SumSeconds());
  }
}

}  // namespace muster::coordinator
