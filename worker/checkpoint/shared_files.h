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

// Returns the name in errors of the copy in memory of the checkpoint's file `path`.
std::string NameOfShared(const std::string& path);

// Files of a checkpoint that every rank needs, read once on each host: the ranks of a host each
// read and digest a share of the blocks, past the page cache, into memory that they share. The
// memory holds the files once on a host and is freed when no rank uses it any more. If the folder
// is itself in memory (tmpfs), or by choice, the files are digested and used in place. Thread-safe.
class SharedFiles {
 public:
  struct Options {
    DirectFileOptions read = {};
    // Ranks with the same text can open each other's files under /proc. Empty: HostIdentity().
    std::string host = "";
    // For files of which this rank needs only a part: the ranges, in any order. Absent: all of the
    // file.
    std::map<std::string, std::vector<FileRange>> ranges = {};
    // Uses the files in place, and so without memory that the kernel could not take back: they are
    // read twice, and a disk that fails at the second reading ends the process (SIGBUS).
    bool in_place = false;
    // If nodes have files of their own: which node has which. A host gets what it needs of files
    // that its node lacks from nodes that have them. Then all ranks must name the same files, which
    // may lack block digests. The same on every rank; borrowed. Null: each rank sees all files.
    const FilesOnNodes* nodes = nullptr;
    // By name, the checked bytes at the beginning of files, which are put there without being read.
    // Borrowed; may be null.
    const std::map<std::string, std::string>* headers = nullptr;
    // A folder on a disk in which in_place stores what comes from other nodes, in files without
    // names.
    std::string scratch = "";
    // Makes a new file in memory and returns its descriptor, or -1 with errno. Null: the system's.
    std::function<int(const char* name)> create = nullptr;
  };

  // Collective. Reads `files` of the folder `dir`; all of them must have block digests. Ranks of
  // one host read together if they name the same files with the same digests: they read the blocks
  // that any of them needs (Options::ranges), each once. The other blocks take no memory and read
  // as zeros; in files that are used in place they are present but unchecked. If the ranks of a
  // host cannot share memory, or if a host's only rank needs all blocks, nothing is read, unless
  // the files are used in place or come from other nodes. Errors, the same on every rank: those of
  // ReadDirectFile, with the rank; RESOURCE_EXHAUSTED if there is no memory; those of MoveBlocks;
  // FAILED_PRECONDITION if ranks name different files although they must name the same.
  static absl::StatusOr<std::unique_ptr<SharedFiles>> Read(Comm& comm, const std::string& dir,
                                                           const std::vector<ManifestFile>& files,
                                                           const Options& options);
  SharedFiles(const SharedFiles&) = delete;
  SharedFiles& operator=(const SharedFiles&) = delete;

  // Returns a path by which this process can open the file while this object exists; the parts that
  // were read have been checked. Its contents do not change unless a published checkpoint is
  // written to. Empty: the file was not read.
  std::string PathOf(absl::string_view name) const;

  // The bytes of the files that this rank's host got from its disk, and from other nodes.
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
