#ifndef MUSTER_COORDINATOR_WEB_PROMETHEUS_H_
#define MUSTER_COORDINATOR_WEB_PROMETHEUS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::coordinator {

// Writes the Prometheus text exposition format, version 0.0.4: for each family a HELP and a TYPE
// line, then its samples. Names are checked (MUSTER_CHECK), label values escaped. Not thread-safe.
class PrometheusText {
 public:
  using Labels = std::vector<std::pair<absl::string_view, absl::string_view>>;
  enum class Type { kCounter, kGauge, kHistogram };

  // Starts a family. All its samples follow before the next family starts. Counters end in
  // "_total", durations in "_seconds", sizes in "_bytes".
  void Family(absl::string_view name, Type type, absl::string_view help);
  // A sample of the current family (a counter or a gauge).
  void Sample(const Labels& labels, double value);
  // A histogram of the current family: `counts[i]` fell into (bounds[i-1], bounds[i]], the last one
  // above all bounds.
  void Histogram(const Labels& labels, const std::vector<double>& bounds,
                 const std::vector<uint64_t>& counts, double sum);

  const std::string& text() const { return text_; }

 private:
  void Line(absl::string_view suffix, const Labels& labels, absl::string_view le, double value);

  std::string text_;
  std::string family_;
  Type type_ = Type::kGauge;
};

// The content type of the format.
inline constexpr char kPrometheusContentType[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_WEB_PROMETHEUS_H_
