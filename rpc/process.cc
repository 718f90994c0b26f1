#include "rpc/process.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <cstdint>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/mutex.h"

namespace muster::rpc {
namespace {

constexpr int kLinesAMinute = 10;

// Sends gRPC's messages to our log, for example why a certificate was refused or that a port is
// taken. But it logs a line for every connection that breaks off, so the rate is limited; the next
// line gives the number of suppressed ones.
void LogOfGrpc(gpr_log_func_args* args) {
  static Mutex mu;
  static absl::Time minute = absl::InfinitePast();
  static int lines = 0;
  static int64_t left_out = 0;
  if (args->severity != GPR_LOG_SEVERITY_ERROR) {
    MUSTER_LOG(Debug) << "grpc: " << args->message;
    return;
  }
  int64_t before = 0;
  {
    MutexLock lock(&mu);
    const absl::Time now = absl::Now();
    if (now >= minute + absl::Minutes(1) || now < minute) {
      minute = now;
      lines = 0;
    }
    if (++lines > kLinesAMinute) {
      ++left_out;
      return;
    }
    before = std::exchange(left_out, 0);
  }
  if (before > 0) {
    MUSTER_LOG(Warning) << "grpc: " << before << " lines were suppressed; at most " << kLinesAMinute
                        << " a minute are logged";
  }
  MUSTER_LOG(Warning) << "grpc: " << args->message;
}

}  // namespace

void PrepareProcess() {
  static const bool done = [] {
    // Debian builds Abseil with its search for lock cycles switched on, which costs gRPC 5 to 10 %
    // of its time.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    gpr_set_log_function(LogOfGrpc);
    // A peer that sends garbage gets an error; it must not fill this process's log.
    google::protobuf::SetLogHandler([](google::protobuf::LogLevel level, const char* file, int line,
                                       const std::string& message) {
      if (level == google::protobuf::LOGLEVEL_FATAL) {
        MUSTER_LOG(Error) << file << ":" << line << ": " << message;
      } else {
        MUSTER_LOG(Debug) << message;
      }
    });
    return true;
  }();
  (void)done;
}

}  // namespace muster::rpc
