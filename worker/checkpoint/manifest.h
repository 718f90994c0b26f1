#ifndef MUSTER_WORKER_CHECKPOINT_MANIFEST_H_
#define MUSTER_WORKER_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/digest.h"

namespace muster {

// The record that makes a folder of files a checkpoint: manifest.json, written last.
// docs/checkpoint_format.md specifies the bytes. Everything here is pure and thread-safe.

inline constexpr char kManifestName[] = "manifest.json";
// The registry's record of a checkpoint, beside its manifest: see seal.h.
inline constexpr char kSealName[] = "seal.json";
inline constexpr int kManifestVersion = 1;

// How far training had progressed. All counts are of the whole job, not of a rank.
struct CheckpointInfo {
  int world_size = 1;
  // Number of this checkpoint in its run: the i of checkpoint_{i}.
  int64_t iteration = 0;
  // Optimizer updates and forward-backward passes so far.
  int64_t step = 0;
  int64_t micro_step = 0;
  // Passes over the data begun, from 0.
  int64_t epoch = 0;
  // Further positions by name, such as "samples" drawn in this epoch.
  std::map<std::string, int64_t> cursor = {};
};

struct ManifestFile {
  // The plain file name inside the folder.
  std::string name;
  int rank = 0;  // the writer
  FileDigest digest;
  // For files of more than one block; else empty.
  BlockDigests blocks = {};
};

// Ranks that share a disk.
struct ManifestNode {
  std::string host;
  std::vector<int> ranks;
};

struct Manifest {
  CheckpointInfo info;
  // RFC 3339, for people.
  std::string created;
  // Sorted by name.
  std::vector<ManifestFile> files;
  // If every node keeps its ranks' files on its own disk: which ranks wrote where. Empty: all are
  // on one file system.
  std::vector<ManifestNode> nodes = {};

  // Null if there is no such file.
  const ManifestFile* Find(absl::string_view name) const;
};

// Whether a file of a checkpoint may have the name: of 1 to 255 bytes in UTF-8, of this folder, and
// not that of the manifest.
bool IsPlainName(absl::string_view name);

// Returns JSON that ends with a digest of itself.
// Errors: INVALID_ARGUMENT for a name that is not a plain file name, or that was written twice, by
// two ranks or by one.
absl::StatusOr<std::string> EncodeManifest(Manifest manifest);

// Errors: DATA_LOSS if the digest does not match or the JSON or a field is invalid; UNIMPLEMENTED
// for a newer version; INVALID_ARGUMENT for JSON of another kind. Messages begin with `source`.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text, absl::string_view source);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MANIFEST_H_
