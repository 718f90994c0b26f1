#ifndef MUSTER_WORKER_CHECKPOINT_SEALING_H_
#define MUSTER_WORKER_CHECKPOINT_SEALING_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// sealing.json: shows that rank 0 has asked the registry to seal the checkpoint in this staging
// folder. Between the registry's record and seal.json beside the files, the disk may fill up or the
// process may be killed: a folder with this file is never mistaken for one that was never sealed.
// It also reserves the space for seal.json, which it becomes. Functions block on the disk.
inline constexpr char kSealingName[] = "sealing.json";
// The "format" of kSealName (manifest.h), which the file becomes.
inline constexpr char kSealFormat[] = "muster-seal";

struct Sealing {
  enum class State {
    kNone,    // there is no such file
    kAsked,   // only the registry knows whether it is sealed
    kSealed,  // the record is in the file, which lacks only its final name
  };
  State state = State::kNone;
  // For kAsked: the job of the checkpoint, and the registry that was asked: see
  // CheckpointRegistrar. Empty: not known.
  std::string job = {};
  std::string registry = {};
  uint64_t id = 0;  // the checkpoint's id at the registry
};

// Whether the folder has that file and no seal.json. False if it cannot be examined.
bool HasAskedForSeal(const std::string& dir);

// Writes the file durably. `asked`: its state is ignored. `room`: the bytes to reserve for a
// record.
absl::Status BeginSealing(const std::string& dir, const Sealing& asked, size_t room);

// Errors: transient ones. A damaged file counts as kAsked.
absl::StatusOr<Sealing> ReadSealing(const std::string& dir);

// Writes `record`, the text of seal.json, durably in the place of the file of BeginSealing(),
// without further space on the disk if the file system writes in place. NOT_FOUND if there is no
// such file, or if it is too small.
absl::Status FinishSealing(const std::string& dir, absl::string_view record);

// For a folder of a dead writer: gives a record that lacks only its final name that name.
absl::Status NameSealing(const std::string& dir);

// Removes the file: the registry has not sealed the checkpoint, or the record is beside the files.
absl::Status ForgetSealing(const std::string& dir);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SEALING_H_
