#ifndef MUSTER_WORKER_CHECKPOINT_SHARED_FILES_H_
#define MUSTER_WORKER_CHECKPOINT_SHARED_FILES_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/owned_fd.h"
#include "worker/checkpoint/block_transfers.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/manifest.h"
#include "worker/collective/comm.h"

namespace muster {

// What errors call the copy in memory of the checkpoint's file `path`.
std::string NameOfShared(const std::string& path);

// Files of a checkpoint that every rank needs, read once on each host: the ranks of a host each
// read and digest a share of the blocks, past the page cache, into memory that they share. The
// memory holds the files once on a host and goes when no rank uses it any more. Where the folder is
// in memory itself (tmpfs), or by choice, the files are digested and used where they are.
// Thread-safe.
class SharedFiles {
 public:
  struct Options {
    DirectFileOptions read = {};
    // Ranks with the same text can open each other's files under /proc. Empty: HostIdentity().
    std::string host = "";
    // Of files of which this rank needs a part: the ranges, in any order. Absent: all of it.
    std::map<std::string, std::vector<FileRange>> ranges = {};
    // Uses the files where they are, and so without memory that the kernel could not take back:
    // they are read twice, and a disk that fails under the second time ends the process (SIGBUS).
    bool in_place = false;
    // Where nodes have files of their own: which has which. What a host needs of files that its
    // node lacks, it gets from nodes that have them. Then all ranks name the same files, and these
    // may have no digests of blocks. The same on every rank; borrowed. Null: each rank sees all.
    const FilesOnNodes* nodes = nullptr;
    // By name what is at the beginning of files, checked: it is put there without being read.
    // Borrowed; may be null.
    const std::map<std::string, std::string>* headers = nullptr;
    // A folder on a disk, where in_place puts what comes from other nodes, in files without names.
    std::string scratch = "";
    // A new file in memory: its descriptor, or -1 with errno. Null: the system's.
    std::function<int(const char* name)> create = nullptr;
  };

  // Collective. Reads `files` of the folder `dir`; all of them must have digests of blocks. Ranks
  // of one host read together if they name the same files with the same digests: the blocks that
  // one of them needs (Options::ranges), each once. The other blocks take no memory and read as
  // zeros; in files that are used in place they are present but unchecked. If the ranks of a host
  // cannot share memory, or if a host's only rank needs all blocks, nothing is read, unless the
  // files are used in place or come from other nodes. Errors, the same on every rank: those of
  // ReadDirectFile, with the rank; RESOURCE_EXHAUSTED if there is no memory; those of MoveBlocks;
  // FAILED_PRECONDITION if ranks name other files, where they must not.
  static absl::StatusOr<std::unique_ptr<SharedFiles>> Read(Comm& comm, const std::string& dir,
                                                           const std::vector<ManifestFile>& files,
                                                           const Options& options);
  SharedFiles(const SharedFiles&) = delete;
  SharedFiles& operator=(const SharedFiles&) = delete;

  // A path by which this process can open the file while this object lives; what was read of it has
  // been checked. Its contents do not change unless a published checkpoint is written to. Empty: it
  // was not read.
  std::string PathOf(absl::string_view name) const;

  // Of the files, by this rank's host: from its disk, and from other nodes.
  uint64_t bytes_read() const { return bytes_read_; }
  uint64_t bytes_received() const { return bytes_received_; }

 private:
  struct Reading;
  SharedFiles() = default;

  std::map<std::string, OwnedFd, std::less<>> files_;  // by name
  uint64_t bytes_read_ = 0;
  uint64_t bytes_received_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SHARED_FILES_H_
