#include "worker/track/logger.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

void ToStandardError(LogLevel level, const std::string& line, const char* file, int at) {
  log_internal::Line(level, file, at).stream() << line;
}

}  // namespace

RankLogger::RankLogger(Comm& comm, Sink sink)
    : comm_(comm), sink_(sink ? std::move(sink) : ToStandardError) {}

void RankLogger::Log(LogLevel level, absl::string_view text, const LogOptions& options,
                     const char* file, int line) {
  const auto speak = [&] {
    if (level < GetLogLevel()) return;
    sink_(level, absl::StrCat("[RANK ", comm_.rank(), "] ", text), file, line);
  };
  if (!options.in_order) {
    if (!options.main_process_only || comm_.rank() == 0) speak();
    return;
  }
  // Levels may differ between ranks, so the barriers must not depend on them.
  for (int rank = 0; rank < comm_.size(); ++rank) {
    if (rank == comm_.rank()) speak();
    comm_.Barrier();
  }
}

void RankLogger::WarningOnce(absl::string_view text, const LogOptions& options, const char* file,
                             int line) {
  {
    MutexLock lock(&mu_);
    if (!said_.insert(std::string(text)).second) return;
  }
  Log(LogLevel::kWarning, text, options, file, line);
}

}  // namespace muster
