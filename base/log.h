#ifndef MUSTER_BASE_LOG_H_
#define MUSTER_BASE_LOG_H_

#include <sstream>
#include <string>

#include "absl/strings/string_view.h"

namespace muster {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

// Lines below this level are not written. Starts at $MUSTER_LOG_LEVEL (debug, info, warning, error)
// or info.
void SetLogLevel(LogLevel level);
LogLevel GetLogLevel();
// "debug", "info", "warning" (or "warn"), "error", in any case; false for anything else.
bool ParseLogLevel(absl::string_view text, LogLevel* level);

// Returns `text` for output within one line: escapes characters that would end the line, move the
// cursor or change colors ("\\n", "\\x1b"), and bytes that are not UTF-8. Names and reasons come
// from other processes; none of them may look like one of our lines.
std::string OneLine(absl::string_view text);

// Sets a name that every line of this process contains, such as "coordinator" or "rank 3". Call it
// once, at the start.
void SetLogIdentity(absl::string_view identity);

// With true (or MUSTER_LOG_FORMAT=json) each line is one JSON object
// {"time","level","who","file","line","message"}.
void SetLogJson(bool json);

namespace log_internal {
// Collects one line and writes it to standard error in one write() when destroyed.
class Line {
 public:
  Line(LogLevel level, const char* file, int line);
  ~Line();
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;
  std::ostream& stream() { return stream_; }

 private:
  const LogLevel level_;
  const char* const file_;
  const int line_;
  std::ostringstream stream_;
};
struct Voidify {
  void operator&(std::ostream&) const {}
};
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const std::string& text);
class CheckLine {
 public:
  CheckLine(const char* file, int line, const char* condition)
      : file_(file), line_(line), condition_(condition) {}
  [[noreturn]] ~CheckLine() { CheckFailed(file_, line_, condition_, stream_.str()); }
  std::ostream& stream() { return stream_; }

 private:
  const char* const file_;
  const int line_;
  const char* const condition_;
  std::ostringstream stream_;
};
}  // namespace log_internal
}  // namespace muster

// MUSTER_LOG(Info) << "text": one line on standard error. Levels: Debug, Info, Warning, Error.
// Thread-safe.
#define MUSTER_LOG(level)                                                                  \
  (::muster::LogLevel::k##level < ::muster::GetLogLevel())                                 \
      ? (void)0                                                                            \
      : ::muster::log_internal::Voidify() &                                                \
            ::muster::log_internal::Line(::muster::LogLevel::k##level, __FILE__, __LINE__) \
                .stream()

// Ends the process if an internal invariant is violated. Never use it for errors of input, peers or
// disks.
#define MUSTER_CHECK(condition)                     \
  (condition) ? (void)0                             \
              : ::muster::log_internal::Voidify() & \
                    ::muster::log_internal::CheckLine(__FILE__, __LINE__, #condition).stream()

#endif  // MUSTER_BASE_LOG_H_
