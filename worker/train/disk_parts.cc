#include "worker/train/disk_parts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/string_view.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

constexpr uint64_t kBlockBytes = uint64_t{8} << 20;

}  // namespace

std::shared_ptr<ScratchFile> MakeScratchFile(const std::string& folder) {
  absl::StatusOr<std::shared_ptr<ScratchFile>> file = ScratchFile::Create(folder);
  ThrowIfError(file.status());
  return *std::move(file);
}

DiskParts::DiskParts(std::shared_ptr<ScratchFile> file) : file_(std::move(file)) {}

uint64_t DiskParts::Reserve(uint64_t bytes) {
  const absl::StatusOr<uint64_t> place = file_->Reserve(bytes);
  ThrowIfError(place.status());
  return *place;
}

AlignedMemory DiskParts::TakeBlock(uint64_t bytes) {
  AlignedMemory block;
  {
    MutexLock lock(&mu_);
    if (!idle_.empty()) {
      block = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  ThrowIfError(block.Grow(std::min(kBlockBytes, DirectAlignedUp(bytes))));
  return block;
}

void DiskParts::GiveBack(AlignedMemory block) {
  MutexLock lock(&mu_);
  idle_.push_back(std::move(block));
}

void DiskParts::Read(uint64_t place, void* to, uint64_t bytes) {
  AlignedMemory block = TakeBlock(bytes);
  for (uint64_t done = 0; done < bytes; done += kBlockBytes) {
    const uint64_t size = std::min(kBlockBytes, bytes - done);
    ThrowIfError(file_->Read(place + done, block.data(), DirectAlignedUp(size)));
    std::memcpy(static_cast<char*>(to) + done, block.data(), size);
  }
  GiveBack(std::move(block));
}

void DiskParts::Write(uint64_t place, const void* from, uint64_t bytes) {
  AlignedMemory block = TakeBlock(bytes);
  for (uint64_t done = 0; done < bytes; done += kBlockBytes) {
    const uint64_t size = std::min(kBlockBytes, bytes - done);
    std::memcpy(block.data(), static_cast<const char*>(from) + done, size);
    ThrowIfError(
        file_->Write(place + done, absl::string_view(block.data(), DirectAlignedUp(size))));
  }
  GiveBack(std::move(block));
}

}  // namespace muster
