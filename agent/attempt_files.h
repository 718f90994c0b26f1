#ifndef MUSTER_AGENT_ATTEMPT_FILES_H_
#define MUSTER_AGENT_ATTEMPT_FILES_H_

#include <sys/stat.h>

#include <map>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"

namespace muster::agent {

// Writes a file that must outlive this process, but not a loss of power: it appears whole at
// `path`, without waiting for the disk. `mode` is reduced by the umask.
absl::Status PutFile(const std::string& path, absl::string_view contents, mode_t mode = 0666);

// Writes the variables of an attempt's processes to a file that only its owner may read; a runner
// reads them from there, and removes the file. In the runner's own environment they would also
// affect the runner: LD_LIBRARY_PATH, for example, decides which libraries it runs with.
absl::Status PutVariables(const std::string& path,
                          const std::map<std::string, std::string>& variables);
absl::StatusOr<std::map<std::string, std::string>> TakeVariables(const std::string& path);

// When this returns, the files that PutFile wrote to an attempt's folder, and the folder itself,
// are durable. Blocks on the disk. Errors: INTERNAL, naming what could not be synced.
absl::Status SyncAttempt(const std::string& folder);

// Runs SyncAttempt on its own thread. Thread-safe.
class AttemptSync {
 public:
  explicit AttemptSync(std::string folder);
  // Blocks until the disk has answered.
  ~AttemptSync();
  AttemptSync(const AttemptSync&) = delete;
  AttemptSync& operator=(const AttemptSync&) = delete;

  // Blocks until SyncAttempt has returned; returns its status, in every call.
  absl::Status Wait();

 private:
  const std::string folder_;
  absl::Status status_;  // used only by the thread until done_
  Notification done_;
  std::thread thread_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ATTEMPT_FILES_H_
