#include "worker/train/disk_copies.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/status/statusor.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/scratch_file.h"
#include "worker/train/disk_parts.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

// Writing less costs more than it saves.
constexpr size_t kLeastToDisk = size_t{256} << 10;

std::atomic<uint64_t> made{0};

// Copies share no page, so that each can free its own.
uint64_t WholePages(uint64_t bytes) {
  static const uint64_t page =
      std::max(uint64_t{kDirectAlignment}, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  return (bytes + page - 1) / page * page;
}

}  // namespace

struct DiskCopies::File {
  // Null once the file is full, because descriptors are scarcer than maps.
  std::shared_ptr<ScratchFile> file;
  // Extends beyond the end of a file that is being filled.
  std::shared_ptr<char> memory;
  uint64_t bytes = 0;
};

namespace {

// What a copy keeps alive.
struct Kept {
  std::shared_ptr<void> file;
  void* data;
  uint64_t bytes;
  uint64_t number;
};

// The deleter of copies; its address distinguishes copies from other tensors.
void Drop(void* context) {
  const std::unique_ptr<Kept> kept(static_cast<Kept*>(context));
  // Frees only this copy's pages; others may use the file for long. Pages that were written are
  // memory that the kernel could not reclaim.
  (void)madvise(kept->data, kept->bytes, MADV_DONTNEED);
}

}  // namespace

DiskCopies::DiskCopies(std::string folder, uint64_t file_bytes)
    : folder_(std::move(folder)), file_bytes_(WholePages(file_bytes)) {}

uint64_t DiskCopies::Made() { return made; }

std::shared_ptr<DiskCopies::File> DiskCopies::FileFor(uint64_t bytes) {
  if (const std::shared_ptr<File> filling = filling_.lock(); filling != nullptr) {
    if (filling->file->size() + bytes <= filling->bytes) return filling;
    if (bytes < file_bytes_) {
      filling->file = nullptr;
      filling_.reset();
    }
  }
  auto file = std::make_shared<File>();
  file->file = MakeScratchFile(folder_);
  file->bytes = std::max(bytes, file_bytes_);
  absl::StatusOr<std::shared_ptr<char>> memory = file->file->Map(0, file->bytes);
  ThrowIfError(memory.status());
  file->memory = *std::move(memory);
  if (bytes < file_bytes_) filling_ = file;
  return file;
}

at::Tensor DiskCopies::Copy(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.nbytes() < kLeastToDisk) return at::empty(tensor.sizes(), options).copy_(tensor);
  const at::Tensor contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous();
  const uint64_t bytes = WholePages(contiguous.nbytes());
  const std::shared_ptr<File> file = FileFor(bytes);
  DiskParts parts(file->file);
  const uint64_t at = parts.Reserve(bytes);
  parts.WriteFrom(at, contiguous);
  if (bytes >= file_bytes_) file->file = nullptr;
  char* const data = file->memory.get() + at;
  auto kept =
      std::make_unique<Kept>(Kept{.file = file, .data = data, .bytes = bytes, .number = made++});
  return at::for_blob(data, tensor.sizes())
      .context(kept.release(), &Drop)
      .options(options)
      .target_device(at::kCPU)
      .make_tensor();
}

at::Tensor DiskCopies::Keep(const at::Tensor& tensor, uint64_t since) {
  if (tensor.has_storage() && tensor.is_contiguous() && tensor.is_cpu() && !tensor.is_conj() &&
      !tensor.is_neg()) {
    const at::DataPtr& data = tensor.storage().data_ptr();
    if (data.get_deleter() == &Drop && static_cast<Kept*>(data.get_context())->number >= since) {
      return tensor;
    }
  }
  return Copy(tensor);
}

}  // namespace muster
