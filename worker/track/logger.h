#ifndef MUSTER_WORKER_TRACK_LOGGER_H_
#define MUSTER_WORKER_TRACK_LOGGER_H_

#include <functional>
#include <set>
#include <string>

#include "absl/strings/string_view.h"
#include "base/log.h"
#include "base/mutex.h"
#include "worker/collective/comm.h"

namespace muster {

struct LogOptions {
  // Only rank 0 logs; otherwise every rank does.
  bool main_process_only = true;
  // Ranks log one after another, in rank order. Collective: every rank must make the call, whatever
  // its log level; main_process_only is then ignored.
  bool in_order = false;
};

// Log lines of a job of several processes, prefixed "[RANK i]". Levels below GetLogLevel()
// (base/log.h) are not written. Thread-safe except with in_order, which uses the Comm.
class RankLogger {
 public:
  // Receives each line; the default is standard error through base/log.h, with the caller's file
  // and line.
  using Sink =
      std::function<void(LogLevel level, const std::string& line, const char* file, int at)>;

  // `comm` must outlive the logger. `check` is called before each call that is a collective, and
  // throws if not all ranks would make it.
  explicit RankLogger(Comm& comm, Sink sink = nullptr, std::function<void()> check = nullptr);

  void Log(LogLevel level, absl::string_view text, const LogOptions& options = {},
           const char* file = __builtin_FILE(), int line = __builtin_LINE());

  void Debug(absl::string_view text, const LogOptions& options = {},
             const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    Log(LogLevel::kDebug, text, options, file, line);
  }
  void Info(absl::string_view text, const LogOptions& options = {},
            const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    Log(LogLevel::kInfo, text, options, file, line);
  }
  void Warning(absl::string_view text, const LogOptions& options = {},
               const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    Log(LogLevel::kWarning, text, options, file, line);
  }
  void Error(absl::string_view text, const LogOptions& options = {},
             const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    Log(LogLevel::kError, text, options, file, line);
  }

  // Logs a warning, once per text and logger. With in_order a collective each time, even if this
  // rank has already logged it.
  void WarningOnce(absl::string_view text, const LogOptions& options = {},
                   const char* file = __builtin_FILE(), int line = __builtin_LINE());

 private:
  // `speaks`: whether this rank logs a line.
  void Write(LogLevel level, absl::string_view text, const LogOptions& options, bool speaks,
             const char* file, int line);

  Comm& comm_;
  const Sink sink_;
  const std::function<void()> check_;
  Mutex mu_;
  std::set<std::string> said_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_LOGGER_H_
