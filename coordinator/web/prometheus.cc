#include "coordinator/web/prometheus.h"

#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/log.h"

namespace muster::coordinator {
namespace {

bool IsName(absl::string_view name, bool colon) {
  if (name.empty() || absl::ascii_isdigit(name[0])) return false;
  for (const char c : name) {
    if (!absl::ascii_isalnum(c) && c != '_' && !(colon && c == ':')) return false;
  }
  return true;
}

std::string Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  if (value == std::floor(value) && std::fabs(value) < 9e15) return absl::StrFormat("%.0f", value);
  return absl::StrFormat("%.9g", value);
}

}  // namespace

void PrometheusText::Family(absl::string_view name, Type type, absl::string_view help) {
  MUSTER_CHECK(IsName(name, true)) << "metric name '" << std::string(name) << "'";
  MUSTER_CHECK((type == Type::kCounter) == absl::EndsWith(name, "_total"))
      << "only counters end in _total: " << std::string(name);
  family_ = std::string(name);
  type_ = type;
  absl::StrAppend(&text_, "# HELP ", name, " ",
                  absl::StrReplaceAll(help, {{"\\", "\\\\"}, {"\n", "\\n"}}), "\n");
  absl::StrAppend(&text_, "# TYPE ", name, " ",
                  type == Type::kCounter ? "counter"
                  : type == Type::kGauge ? "gauge"
                                         : "histogram",
                  "\n");
}

void PrometheusText::Line(absl::string_view suffix, const Labels& labels, absl::string_view le,
                          double value) {
  absl::StrAppend(&text_, family_, suffix);
  absl::string_view separator = "{";
  const auto add = [&](absl::string_view name, absl::string_view text) {
    MUSTER_CHECK(IsName(name, false)) << "label name '" << std::string(name) << "'";
    absl::StrAppend(&text_, separator, name, "=\"",
                    absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}}),
                    "\"");
    separator = ",";
  };
  for (const auto& [name, text] : labels) add(name, text);
  if (!le.empty()) add("le", le);
  if (separator == ",") absl::StrAppend(&text_, "}");
  absl::StrAppend(&text_, " ", Number(value), "\n");
}

void PrometheusText::Sample(const Labels& labels, double value) {
  MUSTER_CHECK(type_ != Type::kHistogram) << family_;
  Line("", labels, "", value);
}

void PrometheusText::Histogram(const Labels& labels, const std::vector<double>& bounds,
                               const std::vector<uint64_t>& counts, double sum) {
  MUSTER_CHECK(type_ == Type::kHistogram && counts.size() == bounds.size() + 1) << family_;
  uint64_t total = 0;
  for (size_t i = 0; i < bounds.size(); ++i) {
    total += counts[i];
    Line("_bucket", labels, Number(bounds[i]), static_cast<double>(total));
  }
  total += counts.back();
  Line("_bucket", labels, "+Inf", static_cast<double>(total));
  Line("_sum", labels, "", sum);
  Line("_count", labels, "", static_cast<double>(total));
}

}  // namespace muster::coordinator
