#include "worker/train/disk_parts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/train/guard.h"
#include "worker/train/pin_memory.h"

namespace muster {
namespace {

constexpr uint64_t kBlockBytes = uint64_t{8} << 20;

// Returns a tensor over memory that it does not own.
at::Tensor BytesAt(char* data, uint64_t bytes, const c10::Device& device) {
  return at::for_blob(data, {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

std::shared_ptr<ScratchFile> MakeScratchFile(const std::string& folder) {
  absl::StatusOr<std::shared_ptr<ScratchFile>> file = ScratchFile::Create(folder);
  ThrowIfError(file.status());
  return *std::move(file);
}

DiskParts::DiskParts(std::string folder) : folder_(std::move(folder)) {}

DiskParts::DiskParts(std::shared_ptr<ScratchFile> file) : file_(std::move(file)) {}

uint64_t DiskParts::Reserve(uint64_t bytes) {
  if (file_ == nullptr) file_ = MakeScratchFile(folder_);
  const absl::StatusOr<uint64_t> place = file_->Reserve(bytes);
  ThrowIfError(place.status());
  return *place;
}

AlignedMemory DiskParts::TakeBlock(uint64_t bytes, const c10::Device& device) {
  AlignedMemory block;
  {
    MutexLock lock(&mu_);
    if (!idle_.empty()) {
      block = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  ThrowIfError(block.Grow(std::min(kBlockBytes, DirectAlignedUp(bytes))));
  PinFor(device, &block);
  return block;
}

void DiskParts::GiveBack(AlignedMemory block) {
  MutexLock lock(&mu_);
  idle_.push_back(std::move(block));
}

template <typename Copy>
void DiskParts::ReadBlocks(uint64_t place, uint64_t bytes, const c10::Device& device,
                           const Copy& copy) {
  AlignedMemory block = TakeBlock(bytes, device);
  for (uint64_t done = 0; done < bytes; done += kBlockBytes) {
    const uint64_t size = std::min(kBlockBytes, bytes - done);
    ThrowIfError(file_->Read(place + done, block.data(), DirectAlignedUp(size)));
    copy(block.data(), done, size);
  }
  GiveBack(std::move(block));
}

template <typename Copy>
void DiskParts::WriteBlocks(uint64_t place, uint64_t bytes, const c10::Device& device,
                            const Copy& copy) {
  AlignedMemory block = TakeBlock(bytes, device);
  for (uint64_t done = 0; done < bytes; done += kBlockBytes) {
    const uint64_t size = std::min(kBlockBytes, bytes - done);
    copy(block.data(), done, size);
    ThrowIfError(
        file_->Write(place + done, absl::string_view(block.data(), DirectAlignedUp(size))));
  }
  GiveBack(std::move(block));
}

void DiskParts::Read(uint64_t place, void* to, uint64_t bytes) {
  ReadBlocks(place, bytes, at::kCPU, [&](const char* block, uint64_t done, uint64_t size) {
    std::memcpy(static_cast<char*>(to) + done, block, size);
  });
}

void DiskParts::Write(uint64_t place, const void* from, uint64_t bytes) {
  WriteBlocks(place, bytes, at::kCPU, [&](char* block, uint64_t done, uint64_t size) {
    std::memcpy(block, static_cast<const char*>(from) + done, size);
  });
}

void DiskParts::ReadTo(uint64_t place, const at::Tensor& to) {
  if (to.is_cpu()) return PartStore::ReadTo(place, to);
  const at::NoGradGuard no_grad;
  char* const data = static_cast<char*>(to.mutable_data_ptr());
  ReadBlocks(place, to.nbytes(), to.device(), [&](char* block, uint64_t done, uint64_t size) {
    // It returns when the block may be reused.
    BytesAt(data + done, size, to.device()).copy_(BytesAt(block, size, at::kCPU));
  });
}

void DiskParts::WriteFrom(uint64_t place, const at::Tensor& from) {
  if (from.is_cpu()) return PartStore::WriteFrom(place, from);
  const at::NoGradGuard no_grad;
  // The memory is only read; for_blob() accepts no const pointer.
  char* const data = static_cast<char*>(const_cast<void*>(from.const_data_ptr()));
  WriteBlocks(place, from.nbytes(), from.device(), [&](char* block, uint64_t done, uint64_t size) {
    // It returns when the block has the values.
    BytesAt(block, size, at::kCPU).copy_(BytesAt(data + done, size, from.device()));
  });
}

}  // namespace muster
