#ifndef MUSTER_WORKER_BIGMODEL_WEIGHT_SOURCE_H_
#define MUSTER_WORKER_BIGMODEL_WEIGHT_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/mapped_file.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {

// Memory of a thread that reads, for what cannot be read in place.
using ReadScratch = AlignedMemory;

// Where the weights of offloaded modules are: in files, or in host memory. One for both, so that
// what moves them does not care. Thread-safe; everything blocks on the disk.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual size_t size() const = 0;
  // For messages: the file, or "host memory"; and the name of the tensor there.
  virtual std::string Describe(size_t i) const = 0;
  virtual at::ScalarType type(size_t i) const = 0;
  virtual uint64_t bytes(size_t i) const = 0;

  // Reads bytes of tensor i to `to`. Errors, with the file and the tensor: DATA_LOSS if the file
  // has become shorter; the system's.
  virtual absl::Status Read(size_t i, uint64_t begin, size_t bytes, char* to,
                            ReadScratch& scratch) const = 0;
  // The same bytes where they are or in `scratch`, until its next use.
  virtual absl::StatusOr<const char*> Fetch(size_t i, uint64_t begin, size_t bytes,
                                            ReadScratch& scratch) const = 0;

  // Whether Fetch returns memory that stays as it is for as long as this object.
  virtual bool is_in_memory() const { return false; }

  // Where a mapping of the tensor's file has it.
  struct MappedPlace {
    const MappedFile* file = nullptr;  // null: the tensor is not used where it is
    uint64_t begin = 0;
  };
  virtual MappedPlace Mapped(size_t /*i*/) const { return {}; }
  // Of a mapped tensor: has these bytes of it in memory. Errors: those of Read().
  virtual absl::Status LoadPages(size_t /*i*/, uint64_t /*begin*/, size_t /*bytes*/) const {
    return absl::OkStatus();
  }
  // DATA_LOSS, with the file and the tensor, if the tensor's file was written to after it was
  // opened. Does not block.
  virtual absl::Status CheckUnchanged(size_t /*i*/) const { return absl::OkStatus(); }

  // Memory whose address has this remainder for kDirectAlignment is read into without a copy.
  virtual size_t Remainder(size_t i) const = 0;
};

// Tensors of `files`, by their places in files->entries(), which must be contiguous. What is in the
// page cache is read from there; the rest past it (O_DIRECT), if the file system allows. Nothing is
// written. With `mmap` files are mapped, so that tensors can be used where they are, but for those
// that do not begin at a multiple of their element's size. Errors: UNIMPLEMENTED naming a tensor
// that is stored transposed or of a type without counterpart; RESOURCE_EXHAUSTED if a file cannot
// be mapped; the system's.
absl::StatusOr<std::shared_ptr<const WeightSource>> OpenWeightSource(
    std::shared_ptr<const WeightFiles> files, const std::vector<size_t>& entries,
    bool mmap = false);

// Tensors in host memory, contiguous, which it keeps.
std::shared_ptr<const WeightSource> HostWeightSource(std::vector<std::string> names,
                                                     std::vector<at::Tensor> tensors);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_WEIGHT_SOURCE_H_
