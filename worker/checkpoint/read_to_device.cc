#include "worker/checkpoint/read_to_device.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/for_each.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shared_files.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/checkpoint/transfer.h"

namespace muster {
namespace {

// One of the file's tensors, and its destination.
struct Placed {
  uint64_t begin = 0, end = 0;  // in the file
  at::ScalarType type = at::kFloat;
  std::vector<int64_t> sizes;
  at::Tensor on_host;  // undefined: it is on the device
};

bool GoesToDevice(uint64_t begin, const SafetensorsEntry& entry, at::ScalarType type) {
  return entry.end - entry.begin >= kLeastOnDevice &&
         (c10::isFloatingType(type) || c10::isComplexType(type)) &&
         begin % c10::elementSize(type) == 0;
}

// Plans where the tensors go. Absent: StateReader::Read is as good, or reports what is wrong.
std::optional<std::vector<Placed>> Place(const SafetensorsHeader& header) {
  std::vector<Placed> placed;
  bool any = false;
  for (const SafetensorsEntry& entry : header.tensors) {
    const absl::StatusOr<at::ScalarType> type = ToScalarType(entry.type);
    if (!type.ok()) return std::nullopt;
    absl::StatusOr<std::vector<int64_t>> sizes = TensorSizes(entry.shape, "");
    if (!sizes.ok()) return std::nullopt;
    const uint64_t data = 8 + header.header_bytes;
    Placed& to = placed.emplace_back();
    to.begin = data + entry.begin;
    to.end = data + entry.end;
    to.type = *type;
    to.sizes = *std::move(sizes);
    if (GoesToDevice(to.begin, entry, *type)) {
      any = true;
    } else {
      absl::StatusOr<at::Tensor> on_host = NewTensor(to.sizes, *type, "");
      if (!on_host.ok()) return std::nullopt;
      to.on_host = *std::move(on_host);
    }
  }
  return any ? std::optional(std::move(placed)) : std::nullopt;
}

// Allocates the memory of a file on the device; undefined if there is not enough.
at::Tensor MemoryOn(const c10::Device& device, uint64_t bytes) {
  try {
    return at::empty({static_cast<int64_t>(bytes)},
                     at::TensorOptions().dtype(at::kByte).device(device));
  } catch (const c10::OutOfMemoryError&) {
    return at::Tensor();
  }
}

// Copies the parts of a block that belong to tensors on the host.
void CopyToHost(const std::vector<Placed>& placed, uint64_t offset, absl::string_view block) {
  for (const Placed& tensor : placed) {
    if (!tensor.on_host.defined()) continue;
    const uint64_t begin = std::max(tensor.begin, offset);
    const uint64_t end = std::min(tensor.end, offset + block.size());
    if (begin >= end) continue;
    std::memcpy(static_cast<char*>(tensor.on_host.data_ptr()) + (begin - tensor.begin),
                block.data() + (begin - offset), end - begin);
  }
}

// Parses the header of a file in memory.
absl::StatusOr<SafetensorsHeader> HeaderOf(absl::string_view contents, const std::string& path) {
  uint64_t json = 0;
  if (contents.size() >= sizeof(json)) std::memcpy(&json, contents.data(), sizeof(json));
  if (json == 0 || json > contents.size() - sizeof(json)) {
    return absl::DataLossError(absl::StrCat(path, ": the header does not fit into the file"));
  }
  return ParseSafetensorsHeader(contents.substr(sizeof(json), json),
                                contents.size() - sizeof(json) - json, path);
}

}  // namespace

std::unique_ptr<DeviceUploads> UploadsTo(const c10::Device& device) {
  const int threads = ReadingThreads();
  return std::make_unique<DeviceUploads>(
      device, DeviceUploads::Room{
                  .block_bytes = kDirectBlockBytes, .threads = threads, .blocks = threads + 2});
}

uint64_t BytesToDevice(const StateReader& reader, absl::string_view name) {
  const ManifestFile* const file = reader.manifest().Find(name);
  // A file in memory is compared as a whole, and its manifest has no blocks.
  const bool reads = file != nullptr && (reader.in_memory() ? file->digest.bytes > kDirectBlockBytes
                                                            : !file->blocks.empty());
  return reads ? file->digest.bytes : 0;
}

absl::StatusOr<StateDict> ReadToDevice(const StateReader& reader, absl::string_view name,
                                       DeviceUploads& uploads) {
  const uint64_t bytes = BytesToDevice(reader, name);
  if (bytes == 0) return reader.Read(name);
  const ManifestFile* const file = reader.manifest().Find(name);
  if (file->blocks.block_bytes > uploads.block_bytes()) return reader.Read(name);
  const std::string file_path = JoinPath(reader.dir(), name);
  // If several ranks have read it together, it is in the host's memory.
  const std::string shared = reader.PathOfShared(name);
  const std::string path = shared.empty() ? file_path : shared;
  const absl::string_view contents =
      reader.in_memory() ? reader.InMemory(name) : absl::string_view();
  const absl::StatusOr<SafetensorsHeader> header =
      reader.in_memory() ? HeaderOf(contents, file_path) : ReadSafetensorsHeader(path);
  if (!header.ok() || 8 + header->header_bytes + header->data_bytes != bytes) {
    return reader.Read(name);
  }
  const std::optional<std::vector<Placed>> placed = Place(*header);
  if (!placed.has_value()) return reader.Read(name);
  const at::Tensor memory = MemoryOn(uploads.device(), bytes);
  if (!memory.defined()) return reader.Read(name);
  auto* const there = static_cast<char*>(memory.data_ptr());
  // Sets the device of this thread, too, because it may read.
  const c10::DeviceGuard on_device(uploads.device());
  // The memory may be that of tensors which the device still has to read.
  uploads.Follow();
  const auto take = [&](uint64_t offset, absl::string_view block) {
    CopyToHost(*placed, offset, block);
    return uploads.Queue(block.data(),
                         {{.offset = 0, .bytes = block.size(), .to = there + offset}});
  };
  absl::Status read;
  if (reader.in_memory()) {
    const uint64_t blocks = (bytes + uploads.block_bytes() - 1) / uploads.block_bytes();
    const int threads = std::min(TransferThreads(), uploads.threads());
    read = ForEach(blocks, {.threads = threads}, [&](uint64_t i) -> absl::Status {
      const uint64_t offset = i * uploads.block_bytes();
      const absl::string_view from = contents.substr(offset, uploads.block_bytes());
      MUSTER_ASSIGN_OR_RETURN(char* const block, uploads.Take());
      std::memcpy(block, from.data(), from.size());
      return take(offset, absl::string_view(block, from.size()));
    });
  } else {
    DirectFileOptions options{.in_flight = uploads.threads()};
    options.place = [&](uint64_t) -> char* {
      // Queue() reports why there is none.
      const absl::StatusOr<char*> block = uploads.Take();
      return block.ok() ? *block : nullptr;
    };
    read = ReadDirectFile(path, bytes, file->blocks, std::nullopt, take, options);
  }
  read.Update(uploads.Wait());
  if (!read.ok()) return Renamed(read, shared, NameOfShared(file_path));
  // The data that are not tensors are in the metadata.
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsLayout without_tensors,
                          LayOutSafetensors({}, header->metadata, kSafetensorsAlignment));
  MUSTER_ASSIGN_OR_RETURN(StateDict state, ParseStateDict(without_tensors.prefix, file_path));
  for (size_t i = 0; i < placed->size(); ++i) {
    const Placed& tensor = (*placed)[i];
    state.SetTensor(header->tensors[i].name,
                    tensor.on_host.defined()
                        ? tensor.on_host
                        : at::for_blob(there + tensor.begin, tensor.sizes)
                              .deleter([memory](void*) {})
                              .options(at::TensorOptions(uploads.device()).dtype(tensor.type))
                              .target_device(uploads.device())
                              .make_tensor());
  }
  return state;
}

}  // namespace muster
