#ifndef MUSTER_WORKER_CHECKPOINT_SAFETENSORS_H_
#define MUSTER_WORKER_CHECKPOINT_SAFETENSORS_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/safetensors_format.h"

namespace muster {

// Named tensors, in an order that is meaningful to the caller.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Convert element types that have a counterpart. UNIMPLEMENTED, naming the type, for the others (F4
// and F6; quantized and wide complex tensors).
absl::StatusOr<at::ScalarType> ToScalarType(SafetensorsType type);
absl::StatusOr<SafetensorsType> ToSafetensorsType(at::ScalarType type);

// An open file. Read and Map may be called from several threads. Tensors are on the CPU,
// contiguous.
class SafetensorsReader {
 public:
  // Opens a file and reads its header. Errors: as ReadSafetensorsHeader.
  static absl::StatusOr<SafetensorsReader> Open(const std::string& path);

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }

  // Returns the tensor in its own memory. Blocks on the disk. NOT_FOUND names the tensor and the
  // file.
  absl::StatusOr<at::Tensor> Read(absl::string_view name) const;

  // Returns the tensor in pages of the file that are loaded on first access; writing to it changes
  // only this process's copy. The mapping lives as long as a tensor in it. A tensor at an offset
  // that is misaligned for its type is read instead. Only for files that no process truncates
  // meanwhile, which would cause a bus error.
  absl::StatusOr<at::Tensor> Map(absl::string_view name) const;

  // Returns every tensor, by name. If `digest` is not null, also computes the digest of the whole
  // file in the same pass.
  absl::StatusOr<NamedTensors> ReadAll(FileDigest* digest = nullptr) const;

  // Returns every tensor, by name, bypassing the page cache and checking block by block (see
  // ReadDirectFile).
  absl::StatusOr<NamedTensors> ReadAllBlocks(const BlockDigests& blocks) const;

 private:
  struct File;
  SafetensorsReader(std::string path, SafetensorsHeader header, std::shared_ptr<const File> file);
  absl::StatusOr<at::Tensor> Allocate(const SafetensorsEntry& entry) const;
  absl::Status ReadInto(const SafetensorsEntry& entry, const at::Tensor& tensor) const;

  std::string path_;
  SafetensorsHeader header_;
  std::shared_ptr<const File> file_;
};

// How to handle several names of one tensor (same memory, shape, strides and type; empty tensors
// never count).
enum class SharedTensors {
  kKeepFirst,  // Write the first name only, as model files do.
  kWriteAll,   // Write the data under every name.
};

struct WriteSafetensorsOptions {
  std::optional<SafetensorsMetadata> metadata = std::nullopt;
  SharedTensors shared = SharedTensors::kKeepFirst;
  // See LayOutSafetensors.
  uint64_t data_alignment = kSafetensorsAlignment;
};

// A laid-out file with its contents.
struct SafetensorsPlan {
  SafetensorsLayout layout;
  // The data of layout.tensors, in their order, on any device and with any strides.
  std::vector<at::Tensor> sources;

  uint64_t file_bytes() const { return layout.prefix.size() + layout.data_bytes; }
};

// Returns the name, type and shape of each tensor, in order. `path` is for messages. Errors: as
// WriteSafetensors, except those of names and the disk.
absl::StatusOr<std::vector<SafetensorsEntry>> DescribeTensors(const std::string& path,
                                                              const NamedTensors& tensors);

// Lays out the file that WriteSafetensors writes. Copies nothing. `path` is for messages. Errors:
// as WriteSafetensors, except those of the disk.
absl::StatusOr<SafetensorsPlan> PlanSafetensors(const std::string& path,
                                                const NamedTensors& tensors,
                                                const WriteSafetensorsOptions& options);

// Copies the whole file, header and data, to `to`, which has plan.file_bytes() bytes and is aligned
// for the tensors' elements. Omits the data of sources, by number, for which `skip` is true. Throws
// c10::Error if a copy from a device fails.
void CopySafetensors(
    const SafetensorsPlan& plan, char* to,
    absl::FunctionRef<bool(size_t)> skip = [](size_t) { return false; });

// Passes the whole file, header and data, to `append` in parts, in order, until that fails. Copies
// tensors one at a time if necessary. Throws c10::Error if a copy from a device fails.
absl::Status StreamSafetensors(const SafetensorsPlan& plan,
                               absl::FunctionRef<absl::Status(absl::string_view)> append);

// Writes the file completely or not at all: temporary name, sync, rename, sync of the folder.
// Tensors may be on any device and have any strides; they are copied one at a time if necessary.
// Blocks on the disk. Errors: INVALID_ARGUMENT naming file and tensor for a duplicate name or an
// undefined, sparse or meta tensor; UNIMPLEMENTED for a type that the format lacks; those of the
// disk. Throws c10::Error if a copy from a device fails.
absl::StatusOr<FileDigest> WriteSafetensors(const std::string& path, const NamedTensors& tensors,
                                            const WriteSafetensorsOptions& options = {});

// Returns the list without additional names of tensors that are already in it (see SharedTensors).
NamedTensors WithoutSharedTensors(const NamedTensors& tensors);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SAFETENSORS_H_
