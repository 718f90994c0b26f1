#include "worker/track/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/columns.h"
#include "base/log.h"
#include "base/units.h"

namespace muster {
namespace {

constexpr double kSmoothing = 0.3;
constexpr int kWidestBar = 30;

ProgressOptions WithClock(ProgressOptions options) {
  if (options.clock == nullptr) options.clock = &Clock::Real();
  return options;
}

std::string Bar(double share, int columns) {
  constexpr const char* kPartial[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = static_cast<int>(std::clamp(share, 0.0, 1.0) * columns * 8);
  std::string bar;
  for (int i = 0; i < eighths / 8; ++i) bar += "█";
  bar += kPartial[eighths % 8];
  bar.append(columns - eighths / 8 - (eighths % 8 > 0 ? 1 : 0), ' ');
  return bar;
}

std::string Rate(double per_second, const std::string& unit) {
  if (per_second <= 0) return absl::StrCat("?", unit, "/s");
  if (per_second >= 1) return absl::StrFormat("%.3g%s/s", per_second, unit);
  return absl::StrFormat("%.3gs/%s", 1 / per_second, unit);
}

}  // namespace

Progress::Progress(ProgressOptions options)
    : options_(WithClock(std::move(options))),
      visible_(options_.enabled && options_.terminal.value_or(isatty(options_.fd) == 1)),
      done_(options_.initial),
      start_(options_.clock->Now()),
      drawn_at_(start_),
      drawn_done_(done_) {
  if (visible_) Draw();
}

Progress::~Progress() { Close(); }

void Progress::Advance(int64_t by) {
  done_ += by;
  if (!visible_ || closed_) return;
  const absl::Time now = options_.clock->Now();
  if (now - drawn_at_ < options_.period) return;
  const double recent =
      static_cast<double>(done_ - drawn_done_) / absl::ToDoubleSeconds(now - drawn_at_);
  rate_ = rate_ == 0 ? recent : kSmoothing * recent + (1 - kSmoothing) * rate_;
  drawn_at_ = now;
  drawn_done_ = done_;
  Draw();
}

void Progress::Restart(int64_t initial) {
  options_.initial = initial;
  done_ = drawn_done_ = initial;
  start_ = drawn_at_ = options_.clock->Now();
  rate_ = 0;
  if (visible_ && !closed_) Draw();
}

void Progress::SetPostfix(std::vector<std::pair<std::string, std::string>> postfix) {
  postfix_ = std::move(postfix);
}

void Progress::SetPostfix(const std::vector<std::pair<std::string, double>>& postfix) {
  postfix_.clear();
  for (const auto& [name, value] : postfix) {
    postfix_.emplace_back(name, absl::StrFormat("%.4g", value));
  }
}

void Progress::Close() {
  if (!visible_ || closed_) return;
  // At the end, the mean over everything says more than the last rate.
  const double seconds = absl::ToDoubleSeconds(options_.clock->Now() - start_);
  if (seconds > 0) rate_ = static_cast<double>(done_ - options_.initial) / seconds;
  Draw();
  closed_ = true;
  if (write(options_.fd, "\n", 1) < 0) return;  // The terminal is gone, so the error is ignored.
}

std::string Progress::Line(int columns) const {
  const absl::Duration elapsed = options_.clock->Now() - start_;
  std::string postfix;
  for (const auto& [name, value] : postfix_) {
    absl::StrAppend(&postfix, ", ", OneLine(name), "=", OneLine(value));
  }
  const std::string prefix =
      options_.description.empty() ? "" : absl::StrCat(OneLine(options_.description), ": ");
  if (options_.total <= 0) {
    const std::string line =
        absl::StrCat(prefix, done_, options_.unit, " [", ClockDuration(elapsed), ", ",
                     Rate(rate_, options_.unit), postfix, "]");
    return std::string(FitColumns(line, columns));
  }
  const double share = static_cast<double>(done_) / static_cast<double>(options_.total);
  const absl::Duration left =
      rate_ > 0
          ? absl::Seconds(static_cast<double>(std::max<int64_t>(options_.total - done_, 0)) / rate_)
          : absl::InfiniteDuration();
  const std::string head =
      absl::StrFormat("%s%3d%%|", prefix, static_cast<int>(std::clamp(share, 0.0, 1.0) * 100));
  const std::string tail =
      absl::StrCat("| ", done_, "/", options_.total, " [", ClockDuration(elapsed), "<",
                   ClockDuration(left), ", ", Rate(rate_, options_.unit), postfix, "]");
  const int room = std::clamp(columns - Columns(head) - Columns(tail), 0, kWidestBar);
  return std::string(FitColumns(absl::StrCat(head, Bar(share, room), tail), columns));
}

void Progress::Draw() {
  const int columns = options_.columns > 0 ? options_.columns : TerminalColumns(options_.fd);
  // One column stays free, so that no terminal wraps. The code clears what a longer line left.
  const std::string text = absl::StrCat("\r", Line(columns - 1), "\x1b[K");
  if (write(options_.fd, text.data(), text.size()) < 0) return;  // ignored, as in Close
}

}  // namespace muster
