#include "rpc/process.h"

#include <google/protobuf/stubs/logging.h>

#include "absl/synchronization/mutex.h"
#include "base/log.h"

namespace muster::rpc {

void PrepareProcess() {
  static const bool done = [] {
    // Debian builds Abseil with its search for lock cycles switched on, which costs gRPC 5 to 10 %
    // of its time.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
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
