#ifndef MUSTER_BENCH_COORDINATOR_SERVER_PROCESS_H_
#define MUSTER_BENCH_COORDINATOR_SERVER_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace muster::bench {

// A server in its own process. Killed by the destructor, and with this process.
class ServerProcess {
 public:
  // Starts `argv`; with `reads_line`, waits for the first line it prints. Errors: it ended before,
  // or cannot be started.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const std::vector<std::string>& argv,
                                                              bool reads_line);
  ~ServerProcess();

  const std::string& line() const { return line_; }
  pid_t pid() const { return pid_; }
  // Sends SIGKILL, and waits for the end.
  void Kill();
  double RssMb() const;
  absl::Duration CpuTime() const;

 private:
  ServerProcess() = default;
  pid_t pid_ = -1;
  std::string line_;
};

}  // namespace muster::bench

#endif  // MUSTER_BENCH_COORDINATOR_SERVER_PROCESS_H_
