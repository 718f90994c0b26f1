#include "worker/track/logger.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

void ToStandardError(LogLevel level, const std::string& line, const char* file, int at) {
  log_internal::Line(level, file, at).stream() << line;
}

}  // namespace

RankLogger::RankLogger(Comm& comm, Sink sink, std::function<void()> check)
    : comm_(comm), sink_(sink ? std::move(sink) : ToStandardError), check_(std::move(check)) {}

void RankLogger::Log(LogLevel level, absl::string_view text, const LogOptions& options,
                     const char* file, int line) {
  Write(level, text, options, /*speaks=*/true, file, line);
}

void RankLogger::Write(LogLevel level, absl::string_view text, const LogOptions& options,
                       bool speaks, const char* file, int line) {
  const auto speak = [&] {
    if (!speaks || level < GetLogLevel()) return;
    sink_(level, absl::StrCat("[RANK ", comm_.rank(), "] ", text), file, line);
  };
  if (!options.in_order) {
    if (!options.main_process_only || comm_.rank() == 0) speak();
    return;
  }
  if (check_) check_();
  // Levels, and what was logged before, may differ between ranks, so the barriers must not depend
  // on them.
  for (int rank = 0; rank < comm_.size(); ++rank) {
    if (rank == comm_.rank()) speak();
    comm_.Barrier();
  }
}

void RankLogger::WarningOnce(absl::string_view text, const LogOptions& options, const char* file,
                             int line) {
  bool speaks = false;
  {
    MutexLock lock(&mu_);
    speaks = said_.insert(std::string(text)).second;
  }
  Write(LogLevel::kWarning, text, options, speaks, file, line);
}

}  // namespace muster
