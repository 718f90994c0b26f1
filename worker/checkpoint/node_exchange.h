#ifndef MUSTER_WORKER_CHECKPOINT_NODE_EXCHANGE_H_
#define MUSTER_WORKER_CHECKPOINT_NODE_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/block_transfers.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/manifest.h"
#include "worker/collective/comm.h"

namespace muster {

// Lets ranks get the parts of a checkpoint's files that their nodes lack from ranks whose nodes
// have them. Every function is collective and throws if the ranks cannot reach one another. `dir`:
// the folder where this rank's node has its files. Received bytes are checked against the manifest.
// Errors, unless stated otherwise, are the same on every rank and name the rank: those of reading;
// those of a node that does not find a file that it should have; UNAVAILABLE if bytes arrive that
// do not match the manifest, which ranks that read all of the file can explain.

// Sends `bytes` bytes from `root` to all ranks, in pieces of 8 MiB. `read` provides them on `root`,
// in order; `take` gets them on every rank. An error of `read` ends the transfer and becomes
// UNKNOWN.
absl::Status BroadcastPieces(Comm& comm, int root, uint64_t bytes,
                             absl::FunctionRef<absl::Status(char* to, size_t size)> read,
                             absl::FunctionRef<void(absl::string_view piece)> take);

// Returns, by name, the contents of those files of `wanted` that this rank's node lacks. Each rank
// needs memory for what it wants, and for the largest file.
absl::StatusOr<std::map<std::string, std::string>> GatherFiles(
    Comm& comm, const std::string& dir, const Manifest& manifest, const FilesOnNodes& nodes,
    const std::vector<std::string>& wanted);

// Returns, by name, the bytes before the tensors of safetensors files with block digests, read in
// whole blocks on a node that has the file. `files`: the same on every rank.
absl::StatusOr<std::map<std::string, std::string>> GatherHeaders(
    Comm& comm, const std::string& dir, const std::vector<ManifestFile>& files,
    const FilesOnNodes& nodes);

// The ranks' hosts and needs, as PlanTransfers() takes them.
struct BlockNeeds {
  std::vector<int> host_of;
  std::vector<std::string> needed;
};

// Transfers blocks as PlanTransfers() plans, with all ranks sending and receiving at the same time,
// in rounds of kRoundBytes. `take` gets the blocks that come to this rank. An error of this rank
// goes to `mine`, after which it takes nothing and the ranks that wait for its blocks get none: the
// caller must tell the others. Returns the number of bytes that come to this rank's host. Errors:
// no memory.
absl::StatusOr<uint64_t> MoveBlocks(
    Comm& comm, const std::string& dir, const std::vector<ManifestFile>& files,
    const FilesOnNodes& nodes, const BlockNeeds& needs, const DirectFileOptions& options,
    absl::FunctionRef<absl::Status(size_t file, uint64_t offset, absl::string_view block)> take,
    absl::Status* mine);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_NODE_EXCHANGE_H_
