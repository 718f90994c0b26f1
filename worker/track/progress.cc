#include "worker/track/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "base/units.h"

namespace muster {
namespace {

constexpr double kSmoothing = 0.3;
constexpr int kWidestBar = 30;

ProgressOptions WithClock(ProgressOptions options) {
  if (options.clock == nullptr) options.clock = &Clock::Real();
  return options;
}

int TerminalColumns(int fd) {
  winsize size{};
  if (ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

struct Range {
  uint32_t first, last;
};

// Characters that a terminal shows in two columns, and in none: East Asian Wide and Fullwidth with
// emoji, and combining marks, roughly as wcwidth() has them, which knows none in the C locale.
constexpr Range kWide[] = {{0x1100, 0x115F},   {0x2E80, 0x303E},   {0x3041, 0x33FF},
                           {0x3400, 0x4DBF},   {0x4E00, 0x9FFF},   {0xA000, 0xA4CF},
                           {0xA960, 0xA97F},   {0xAC00, 0xD7A3},   {0xF900, 0xFAFF},
                           {0xFE30, 0xFE6F},   {0xFF00, 0xFF60},   {0xFFE0, 0xFFE6},
                           {0x1F300, 0x1F64F}, {0x1F680, 0x1F6FF}, {0x1F900, 0x1F9FF},
                           {0x1FA70, 0x1FAFF}, {0x20000, 0x3FFFD}};
constexpr Range kNone[] = {{0x0300, 0x036F}, {0x200B, 0x200F}, {0x20D0, 0x20FF}, {0xFE00, 0xFE0F}};

template <size_t size>
bool IsIn(const Range (&ranges)[size], uint32_t point) {
  return std::any_of(std::begin(ranges), std::end(ranges), [point](const Range& range) {
    return range.first <= point && point <= range.last;
  });
}

// Columns of a character of UTF-8.
int Columns(absl::string_view character) {
  const auto lead = static_cast<uint8_t>(character.front());
  if (lead < 0x80) return 1;
  uint32_t point = lead & (0xFF >> (character.size() + 1));
  for (const char c : character.substr(1)) point = point << 6 | (static_cast<uint8_t>(c) & 0x3F);
  return IsIn(kWide, point) ? 2 : IsIn(kNone, point) ? 0 : 1;
}

// The longest start of `text` that takes at most `columns`, which are reduced by what it takes.
absl::string_view Fitting(absl::string_view text, int* columns) {
  size_t end = 0;
  while (end < text.size()) {
    const size_t size = std::max<size_t>(1, Utf8CharacterBytes(text.substr(end)));
    const int width = Columns(text.substr(end, size));
    if (width > *columns) break;
    *columns -= width;
    end += size;
  }
  return text.substr(0, end);
}

int Width(absl::string_view text) {
  int left = std::numeric_limits<int>::max();
  Fitting(text, &left);
  return std::numeric_limits<int>::max() - left;
}

std::string CutTo(absl::string_view text, int columns) {
  return std::string(Fitting(text, &columns));
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
  // At the end the mean over everything says more than the last moments.
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
    return CutTo(absl::StrCat(prefix, done_, options_.unit, " [", ClockDuration(elapsed), ", ",
                              Rate(rate_, options_.unit), postfix, "]"),
                 columns);
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
  const int room = std::clamp(columns - Width(head) - Width(tail), 0, kWidestBar);
  return CutTo(absl::StrCat(head, Bar(share, room), tail), columns);
}

void Progress::Draw() {
  const int columns = options_.columns > 0 ? options_.columns : TerminalColumns(options_.fd);
  // One column stays free, so that no terminal wraps. The code clears what a longer line left.
  const std::string text = absl::StrCat("\r", Line(columns - 1), "\x1b[K");
  if (write(options_.fd, text.data(), text.size()) < 0) return;  // As in Close.
}

}  // namespace muster
