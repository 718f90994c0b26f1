#ifndef MUSTER_WORKER_CHECKPOINT_STATE_DICT_H_
#define MUSTER_WORKER_CHECKPOINT_STATE_DICT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {

class FilePlans;

// The state of an object in a checkpoint: named tensors in order, named scalars, and text metadata.
// Nesting is expressed with dots ("state.0.exp_avg"). A value type; copies share the tensors'
// memory. Not thread-safe.
class StateDict {
 public:
  using Scalar = std::variant<bool, int64_t, double, std::string>;

  // Each sets a name; a new value replaces an earlier one and keeps its place.
  void SetTensor(absl::string_view name, at::Tensor tensor);
  void SetBool(absl::string_view name, bool value);
  void SetInt(absl::string_view name, int64_t value);
  void SetDouble(absl::string_view name, double value);
  void SetText(absl::string_view name, absl::string_view value);
  void SetMetadata(absl::string_view key, absl::string_view value);

  // Errors: NOT_FOUND naming what is missing; INVALID_ARGUMENT if a scalar has another type (an
  // integer is also a double).
  absl::StatusOr<at::Tensor> GetTensor(absl::string_view name) const;
  absl::StatusOr<bool> GetBool(absl::string_view name) const;
  absl::StatusOr<int64_t> GetInt(absl::string_view name) const;
  absl::StatusOr<double> GetDouble(absl::string_view name) const;
  absl::StatusOr<std::string> GetText(absl::string_view name) const;

  const NamedTensors& tensors() const { return tensors_; }
  const std::map<std::string, Scalar>& scalars() const { return scalars_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool empty() const { return tensors_.empty() && scalars_.empty() && metadata_.empty(); }

  // Adds all tensors and scalars of `part` under "PREFIX.name"; Sub extracts them again.
  void Merge(absl::string_view prefix, const StateDict& part);
  StateDict Sub(absl::string_view prefix) const;

 private:
  NamedTensors tensors_;
  std::map<std::string, size_t> places_;  // in tensors_
  std::map<std::string, Scalar> scalars_;
  std::map<std::string, std::string> metadata_;
};

// Writes PATH.safetensors (scalars as one JSON object in the metadata entry "muster.scalars") or,
// without tensors, PATH.json; the extension of `path` decides which. Writes the file completely or
// not at all. Blocks on the disk. Errors: as WriteSafetensors; INVALID_ARGUMENT for another
// extension, for tensors in a .json file, for text that is not UTF-8.
absl::StatusOr<FileDigest> WriteStateDict(const std::string& path, const StateDict& state,
                                          SharedTensors shared = SharedTensors::kWriteAll);

// A file that WriteStateDict would write: its text or, for a safetensors file, its layout and
// tensors.
using PlannedStateFile = std::variant<std::string, SafetensorsPlan>;

// Lays out such a file, with the data of a safetensors file at a multiple of `data_alignment`; uses
// `plans` if not null. Errors: as WriteStateDict, except those of the disk.
absl::StatusOr<PlannedStateFile> PlanStateDict(const std::string& path, const StateDict& state,
                                               SharedTensors shared = SharedTensors::kWriteAll,
                                               uint64_t data_alignment = kSafetensorsAlignment,
                                               FilePlans* plans = nullptr);

// Reads the file back, with tensors by name. With `expected`, DATA_LOSS unless size and contents
// match: the message names the file and both sizes or digests. If `blocks` is not empty, compares
// those digests instead of the file's, and the message names the block. `path` may be any
// safetensors file; its metadata are kept.
absl::StatusOr<StateDict> ReadStateDict(const std::string& path,
                                        const std::optional<FileDigest>& expected = std::nullopt,
                                        const BlockDigests& blocks = {});

// Parses the contents of such a file, with tensors in their own memory. `path` is for messages, and
// its extension determines the kind of file.
absl::StatusOr<StateDict> ParseStateDict(absl::string_view bytes, const std::string& path);

// The same for a safetensors file in memory, such as those of SharedFiles: tensors are its pages,
// which this process copies on write. The file must not change meanwhile. `path` is the file's name
// in messages.
absl::StatusOr<StateDict> MapStateDict(const std::string& memory, const std::string& path);

struct LoadTensorsOptions {
  bool allow_missing = false;
  bool allow_unexpected = false;
  // Only checks; copies nothing.
  bool check_only = false;
  // Reads no values of `source`, and copies nothing.
  bool shapes_only = false;
  // Compares no values, because an earlier call with the same tensors and `check_only` has done so.
  bool values_checked = false;
  // If not null, gets the missing names, if those are allowed, for messages; "": none.
  std::string* missing = nullptr;
};

// Copies tensors of `source` into the tensors of the same name in `targets`, on any device. Copies
// nothing unless everything fits. A target without a source is not missing if it is the same tensor
// as a target that has one (tied weights, of which files keep the first name); if `source` has
// both, their values must be the same. Targets of one type that share elements in another way (a
// matrix and its transpose, a tensor and a part of it) must have the same values for the shared
// elements. Floating-point types convert into each other; other types must be equal. Errors:
// INVALID_ARGUMENT "WHAT: ..." that lists missing and unexpected names, those with another shape or
// type, and those with other values than a target that shares their memory; RESOURCE_EXHAUSTED if
// this process does not get the memory to compare them.
absl::Status LoadTensors(const NamedTensors& source, const NamedTensors& targets,
                         absl::string_view what, const LoadTensorsOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_STATE_DICT_H_
