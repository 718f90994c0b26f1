#include "worker/checkpoint/scratch_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory_file.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/checkpoint/direct_pieces.h"

namespace muster {
namespace {

// Whether this process asks for the first time.
bool IsNew(const std::string& folder) {
  static Mutex mu;
  static std::set<std::string> known ABSL_GUARDED_BY(mu);
  const MutexLock lock(&mu);
  return known.insert(folder).second;
}

}  // namespace

ScratchFile::ScratchFile(const DirectFileSystem& system, DirectFile file)
    : system_(system), file_(std::move(file)) {}

absl::StatusOr<std::shared_ptr<ScratchFile>> ScratchFile::Create(const std::string& folder,
                                                                 const DirectFileSystem* system) {
  if (system == nullptr) system = &DirectFileSystem::Real();
  MUSTER_RETURN_IF_ERROR(MakeDirectories(folder));
  const std::string path = JoinPath(folder, absl::StrCat(".muster-state-", RandomHex()));
  // Not direct at first: some file systems create the file and then still refuse.
  MUSTER_ASSIGN_OR_RETURN(DirectFile file,
                          DirectFile::Open(*system, path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC,
                                           /*direct=*/false, 0600));
  if (unlink(path.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove the name of ", path));
  }
  if (IsInMemory(file.fd(), {}) && IsNew(folder)) {
    MUSTER_LOG(Warning) << folder << ", to which state is offloaded, is in memory, not on a disk";
  }
  // Errors name something that a person can find.
  file.set_path(absl::StrCat("the file for offloaded state in ", folder));
  file.TurnDirect();
  return absl::WrapUnique(new ScratchFile(*system, std::move(file)));
}

absl::StatusOr<uint64_t> ScratchFile::Reserve(uint64_t bytes) {
  const uint64_t at = size_;
  const uint64_t end = at + DirectAlignedUp(bytes);
  if (end == at) return at;
  const auto failed = [&] {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot reserve ", bytes, " bytes more, of ",
                                                   end, ", for ", file_.path()));
  };
  // The kernel kills a process whose file becomes larger than its limit.
  MUSTER_RETURN_IF_ERROR(CheckMemoryFileSize(end));
  if (TEMP_FAILURE_RETRY(system_.allocate(file_.fd(), static_cast<off_t>(end))) != 0) {
    if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) return failed();
    if (TEMP_FAILURE_RETRY(ftruncate(file_.fd(), static_cast<off_t>(end))) != 0) return failed();
  }
  size_ = end;
  return at;
}

absl::Status ScratchFile::Read(uint64_t at, char* to, uint64_t bytes) {
  return file_.Read(to, bytes, at);
}

absl::Status ScratchFile::Write(uint64_t at, absl::string_view bytes) {
  return file_.Write(bytes, at);
}

absl::StatusOr<std::shared_ptr<char>> ScratchFile::Map(uint64_t at, uint64_t bytes) const {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                            file_.fd(), static_cast<off_t>(at));
  if (memory == MAP_FAILED) return DirectIoError("map", file_.path(), at);
  return std::shared_ptr<char>(static_cast<char*>(memory),
                               [bytes](char* mapped) { munmap(mapped, bytes); });
}

}  // namespace muster
