#ifndef MUSTER_CLIENT_CLI_RUNNING_LAUNCH_H_
#define MUSTER_CLIENT_CLI_RUNNING_LAUNCH_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "rpc/tls_files.h"

namespace muster::client {

// How to reach the coordinator of a `muster launch` that runs on this machine.
struct RunningLaunch {
  std::string job;
  int64_t pid = 0;
  absl::Time started = absl::InfinitePast();
  std::string address;  // the coordinator's
  // The credentials that the coordinator requires; empty: none.
  std::string token_file = {};
  rpc::TlsFiles tls = {};
};

// System functions that tests replace.
struct LaunchSystem {
  std::string tmp = "/tmp";
  std::string host = {};                   // empty: this machine's name
  int (*lock)(int fd, int how) = nullptr;  // null: flock
};

// The files that one launch keeps in a folder that only its user can enter (mode 0700): the socket
// of its coordinator, a token, and a note by which the same user's `muster status` and similar
// commands find it. All of them are removed with the record; those of a killed launch are removed
// by the next one on the same machine that looks into the folder. Other files there, and the
// launches of other machines, are left alone. Not thread-safe.
//
// The folder is $MUSTER_RUNTIME_DIR, if that is set. Else the first of /tmp/muster-UID,
// $XDG_RUNTIME_DIR/muster and $TMPDIR/muster-UID that is usable and private to this user. A folder
// that belongs to another user, or that other users can enter, is refused: its owner could
// impersonate the coordinator.
class LaunchRecord {
 public:
  // Errors: PERMISSION_DENIED for a folder that is not private to this user, INVALID_ARGUMENT for
  // one whose name is too long for a socket, FAILED_PRECONDITION for one without locks, or what the
  // system says; all name the folders and MUSTER_RUNTIME_DIR.
  static absl::StatusOr<std::unique_ptr<LaunchRecord>> Create(
      const std::map<std::string, std::string>& variables, const LaunchSystem& system = {});
  ~LaunchRecord();
  LaunchRecord(const LaunchRecord&) = delete;
  LaunchRecord& operator=(const LaunchRecord&) = delete;

  // A path at which the coordinator may listen, short enough for a socket. Nothing exists there
  // yet.
  std::string socket_path() const;
  // Makes a file with a new token, mode 0600, and returns its path. Call it once.
  absl::StatusOr<std::string> MakeToken();
  // From now on, other processes find `launch`.
  absl::Status Publish(const RunningLaunch& launch);

 private:
  LaunchRecord(std::string stem, std::string host, int note, int folder)
      : stem_(std::move(stem)), host_(std::move(host)), note_(note), folder_(folder) {}
  static absl::StatusOr<std::unique_ptr<LaunchRecord>> CreateIn(const std::string& folder,
                                                                const LaunchSystem& system);

  const std::string stem_;  // the beginning of the files' paths
  const std::string host_;
  const int note_;    // holds the lock by which other processes see that this launch lives
  const int folder_;  // holds a shared lock; below 0: could not be opened
};

// Returns the launches of this user that run on this machine, oldest first. `looked_in` (may be
// null) receives the folders. Never fails: a folder that is not private to this user is ignored.
std::vector<RunningLaunch> ListRunningLaunches(const std::map<std::string, std::string>& variables,
                                               std::vector<std::string>* looked_in = nullptr,
                                               const LaunchSystem& system = {});

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_RUNNING_LAUNCH_H_
