#ifndef MUSTER_AGENT_LOG_FOLDER_H_
#define MUSTER_AGENT_LOG_FOLDER_H_

#include <string>

#include "absl/status/statusor.h"
#include "base/owned_fd.h"

namespace muster::agent {

// A folder in which the agents of one launch write attempt_N/rank_R.log.
struct LogFolder {
  std::string before;  // its subfolder with the logs of the previous launch; empty: none
  // Holds a lock that says that the launch runs, until the last copy of the descriptor in any
  // process is closed. Not open if `launch` was empty.
  OwnedFd runs;
};

// Makes the folder, and moves what an earlier launch has left there into a new folder before_N in
// it, so that nothing is overwritten and every attempt_N belongs to this launch. Several agents may
// share the folder: the file .launch in it names the launch to which the logs belong, and is locked
// meanwhile, so the first agent moves the logs and the others find that it is done; all hold a
// shared lock on .runs, which names them. `launch`: identifies the launch, the same for all its
// machines; empty: not known, and nothing is moved. Blocks on the disk. Errors: ALREADY_EXISTS
// another launch runs that writes there; those of the disk, with the path; UNIMPLEMENTED the file
// system has no locks: nothing is moved.
absl::StatusOr<LogFolder> BeginLogFolder(const std::string& folder, const std::string& launch);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_LOG_FOLDER_H_
