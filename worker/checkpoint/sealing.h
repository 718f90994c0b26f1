#ifndef MUSTER_WORKER_CHECKPOINT_SEALING_H_
#define MUSTER_WORKER_CHECKPOINT_SEALING_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// sealing.json: rank 0 asks the registry to seal the checkpoint in this staging folder. Between the
// registry's record and seal.json beside the files a disk may be full and a process may be killed:
// a folder with this file is never mistaken for one that was never sealed. It also has the room
// that seal.json needs, which it becomes. Functions block on the disk.
inline constexpr char kSealingName[] = "sealing.json";
// The "format" of kSealName (manifest.h), which it becomes.
inline constexpr char kSealFormat[] = "muster-seal";

struct Sealing {
  enum class State {
    kNone,    // there is no such file
    kAsked,   // only the registry knows whether it is sealed
    kSealed,  // the record is in the file, which lacks only its name
  };
  State state = State::kNone;
  // Of kAsked: which job's checkpoint it is, and which registry was asked: see
  // CheckpointRegistrar. Empty: it is not known.
  std::string job = {};
  std::string registry = {};
  uint64_t id = 0;  // of the checkpoint there
};

// Whether the folder has that file and no seal.json. False where it cannot be examined.
bool HasAskedForSeal(const std::string& dir);

// Durable. `asked`: without its state. `room`: for how many bytes of a record.
absl::Status BeginSealing(const std::string& dir, const Sealing& asked, size_t room);

// Errors: those that may pass. A damaged file counts as kAsked.
absl::StatusOr<Sealing> ReadSealing(const std::string& dir);

// Makes `record`, the text of seal.json, durable in the place of BeginSealing(), without more room
// on the disk where the file system writes in place. NOT_FOUND: there is no such file, or it has
// not the room.
absl::Status FinishSealing(const std::string& dir, absl::string_view record);

// Of a dead writer: gives a record that lacks only its name that name.
absl::Status NameSealing(const std::string& dir);

// The registry has not sealed it, or the record is beside the files.
absl::Status ForgetSealing(const std::string& dir);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SEALING_H_
