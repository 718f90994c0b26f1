#ifndef MUSTER_BASE_EXIT_CODE_H_
#define MUSTER_BASE_EXIT_CODE_H_

#include "absl/status/status.h"

namespace muster {

// The exit codes of every Muster command and of the agent. docs/cli.md has the same table; 128 + N:
// ended by signal N (130 Ctrl-C, 143 SIGTERM).
enum ExitCode : int {
  kExitOk = 0,
  kExitJobFailed = 1,
  kExitUsage = 2,        // flags, config or layout
  kExitNotFound = 3,     // the requested thing does not exist
  kExitConflict = 4,     // it exists already, or the port is taken
  kExitTimeout = 5,      // the other machines did not arrive in time
  kExitLimit = 6,        // a limit of the coordinator, a quota or a full disk refuses it
  kExitUnreachable = 7,  // no coordinator at that address
  kExitDenied = 8,
  kExitInternal = 70,         // a bug, or the machine is out of processes, memory or descriptors
  kExitNotExecutable = 126,   // the program exists but cannot be run
  kExitProgramMissing = 127,  // the program does not exist
  kExitSignal = 128,
};

// The exit codes of muster-coordinator, in addition to kExitOk and kExitUsage. It has its own
// numbers, because the unit that restarts it distinguishes other causes than the caller of a
// command.
enum CoordinatorExitCode : int {
  kExitCannotServe = 3,  // the port is taken, a file cannot be read, the directory is in use
  kExitJournalCorrupt = 4,
  kExitDeposed = 5,        // a newer coordinator took over, or the directory is an older copy
  kExitJournalFailed = 6,  // the journal cannot be written; not because the disk is full
};

// For errors of the command itself, not of the program that it starts.
inline int ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:  // asked of an older coordinator, or of SLURM
      return kExitUsage;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
      return kExitConflict;
    case absl::StatusCode::kDeadlineExceeded:
      return kExitTimeout;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitDenied;
    default:
      return kExitInternal;
  }
}

}  // namespace muster

#endif  // MUSTER_BASE_EXIT_CODE_H_
