#include "worker/checkpoint/aligned_memory.h"

#include <errno.h>
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

// A huge page: sizes are multiples of it, so that growing leaves no small remainders.
constexpr size_t kUnit = size_t{2} << 20;

}  // namespace

AlignedMemory::AlignedMemory(AlignedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

AlignedMemory& AlignedMemory::operator=(AlignedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AlignedMemory::~AlignedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

absl::Status AlignedMemory::Grow(size_t bytes) {
  if (bytes <= size_) return absl::OkStatus();
  const size_t rounded = bytes > SIZE_MAX - kUnit ? 0 : (bytes + kUnit - 1) / kUnit * kUnit;
  void* grown = MAP_FAILED;
  errno = ENOMEM;
  if (rounded > 0) {
    grown = data_ == nullptr
                ? mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                : mremap(data_, size_, rounded, MREMAP_MAYMOVE);
  }
  if (grown == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot get ", bytes, " bytes of memory: ", std::strerror(errno)));
  }
  // Only advice: small pages do as well.
  (void)madvise(grown, rounded, MADV_HUGEPAGE);
  data_ = static_cast<char*>(grown);
  size_ = rounded;
  return absl::OkStatus();
}

}  // namespace muster
