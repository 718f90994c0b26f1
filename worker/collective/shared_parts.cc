#include "worker/collective/shared_parts.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/from_blob.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "base/file.h"
#include "base/memory_file.h"
#include "base/owned_fd.h"
#include "base/peer_file.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/shm_pool.h"

namespace muster {
namespace {

// Takes `wanted` of the mappings that the kernel allows this process (vm.max_map_count); false:
// half of them are taken, and the other half is for other uses. Memory backed by one file is one
// mapping.
class Mappings {
 public:
  static bool Take(int64_t wanted) {
    if (taken_.fetch_add(wanted) + wanted <= Most()) return true;
    GiveBack(wanted);
    return false;
  }
  static void GiveBack(int64_t count) { taken_.fetch_sub(count); }

 private:
  static int64_t Most() {
    static const int64_t most = [] {
      constexpr int64_t kDefault = 65530;
      int64_t limit = 0;
      const auto text = ReadFile("/proc/sys/vm/max_map_count");
      return (text.ok() && absl::SimpleAtoi(*text, &limit) ? limit : kDefault) / 2;
    }();
    return most;
  }
  static inline std::atomic<int64_t> taken_{0};
};

// Address space that is filled with memory piece by piece.
class Space {
 public:
  // Returns null if there is none.
  static std::shared_ptr<Space> Make(uint64_t bytes, int protection, int64_t mappings) {
    if (!Mappings::Take(mappings)) return nullptr;
    void* const base = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
      Mappings::GiveBack(mappings);
      return nullptr;
    }
    return std::shared_ptr<Space>(new Space(static_cast<char*>(base), bytes, mappings));
  }
  ~Space() {
    munmap(base_, bytes_);
    Mappings::GiveBack(mappings_);
  }
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;

  bool Map(int fd, uint64_t at, uint64_t bytes, int protection) {
    if (mmap(base_ + at, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
      return false;
    // Otherwise a core dump of each rank would contain the parts of all.
    if ((protection & PROT_WRITE) == 0) (void)madvise(base_ + at, bytes, MADV_DONTDUMP);
    return true;
  }
  char* base() const { return base_; }

 private:
  Space(char* base, uint64_t bytes, int64_t mappings)
      : base_(base), bytes_(bytes), mappings_(mappings) {}
  char* const base_;
  const uint64_t bytes_;
  const int64_t mappings_;
};

at::Tensor TensorIn(const std::shared_ptr<Space>& space, int64_t numel,
                    const at::TensorOptions& options) {
  return at::from_blob(
      space->base(), {numel}, [space](void*) {}, options);
}

bool All(Comm& comm, bool mine) {
  bool all = true;
  for (const std::string& answer : comm.AllGatherBytes(mine ? "y" : "n")) all &= answer == "y";
  return all;
}

c10d::Backend* CpuBackend(Comm& comm) {
  c10d::ProcessGroup* const group = comm.process_group();
  if (group == nullptr || comm.size() == 1) return nullptr;
  return group->getBackend(c10::DeviceType::CPU).get();
}

}  // namespace

bool RanksShareMemory(Comm& comm) {
  const c10d::Backend* const backend = CpuBackend(comm);
  return backend != nullptr && backend->getBackendName() == "muster-shm";
}

std::optional<SharedParts> ShareParts(Comm& comm, int64_t part, const at::TensorOptions& options,
                                      bool whole) {
  const int64_t bytes = part * static_cast<int64_t>(options.dtype().itemsize());
  TORCH_CHECK(bytes > 0 && bytes % kSharedPartPage == 0, "ShareParts: parts of ", bytes,
              " bytes do not fill pages");
  if (!RanksShareMemory(comm)) return std::nullopt;
  const int size = comm.size();
  const int rank = comm.rank();
  const auto part_bytes = static_cast<uint64_t>(bytes);
  const OwnedFd file(
      static_cast<int>(syscall(SYS_memfd_create, "muster-part", 1u /* MFD_CLOEXEC */)));
  bool made = file.get() >= 0 && ResizeMemoryFile(file.get(), part_bytes).ok() &&
              ReserveShm(file.get(), 0, part_bytes);
  const std::shared_ptr<Space> all = Space::Make(part_bytes * size, PROT_NONE, size);
  const std::shared_ptr<Space> own =
      Space::Make(part_bytes * (whole ? size : 1), PROT_READ | PROT_WRITE, whole ? 3 : 1);
  made = made && all != nullptr && own != nullptr &&
         own->Map(file.get(), whole ? part_bytes * rank : 0, part_bytes, PROT_READ | PROT_WRITE);
  // Publish where the other ranks find it.
  const absl::StatusOr<std::string> place = PlaceOfFile(file.get());
  made = made && place.ok();
  const std::vector<std::string> places = comm.AllGatherBytes(made ? *place : std::string());
  bool mapped = true;
  for (int r = 0; r < size && mapped; ++r) {
    const absl::StatusOr<OwnedFd> other = OpenPeerFile(places[r], O_RDONLY);
    mapped = other.ok() && all->Map(other->get(), part_bytes * r, part_bytes, PROT_READ);
  }
  // All have mapped the files or given up: they are no longer needed.
  if (!All(comm, mapped)) return std::nullopt;
  SharedParts parts;
  parts.all = TensorIn(all, part * size, options);
  const at::Tensor writable = TensorIn(own, whole ? part * size : part, options);
  parts.mine = whole ? writable.narrow(0, part * rank, part) : writable;
  if (whole) parts.whole = writable;
  return parts;
}

at::Tensor AllocateReachable(Comm& comm, int64_t numel, const at::TensorOptions& options) {
  c10d::Backend* const backend = CpuBackend(comm);
  if (backend == nullptr || !backend->supportsTensorAlloc(-1)) return {};
  return backend->allocateTensor(numel, options);
}

}  // namespace muster
