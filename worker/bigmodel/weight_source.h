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

// Memory of a reading thread, for bytes that cannot be read in place.
using ReadScratch = AlignedMemory;

// The source of the weights of offloaded modules: files, or host memory, behind one interface so
// that the code that moves them need not distinguish them. Thread-safe; everything blocks on the
// disk.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual size_t size() const = 0;
  // A description for messages: the file, or "host memory"; and the name of the tensor there.
  virtual std::string Describe(size_t i) const = 0;
  virtual at::ScalarType type(size_t i) const = 0;
  virtual uint64_t bytes(size_t i) const = 0;

  // Reads bytes of tensor i to `to`. Errors, with the file and the tensor: DATA_LOSS if the file
  // has become shorter; the system's.
  virtual absl::Status Read(size_t i, uint64_t begin, size_t bytes, char* to,
                            ReadScratch& scratch) const = 0;
  // Returns the same bytes where they are, or in `scratch`, valid until its next use.
  virtual absl::StatusOr<const char*> Fetch(size_t i, uint64_t begin, size_t bytes,
                                            ReadScratch& scratch) const = 0;

  // Whether Fetch returns memory that stays unchanged for as long as this object exists.
  virtual bool is_in_memory() const { return false; }

  // The place of the tensor in a mapping of its file.
  struct MappedPlace {
    const MappedFile* file = nullptr;  // null: the tensor is not used in place
    uint64_t begin = 0;
  };
  virtual MappedPlace Mapped(size_t /*i*/) const { return {}; }
  // Loads these bytes of a mapped tensor into memory. Errors: those of Read().
  virtual absl::Status LoadPages(size_t /*i*/, uint64_t /*begin*/, size_t /*bytes*/) const {
    return absl::OkStatus();
  }
  // Returns DATA_LOSS, with the file and the tensor, if the tensor's file was written to after it
  // was opened. Does not block.
  virtual absl::Status CheckUnchanged(size_t /*i*/) const { return absl::OkStatus(); }

  // The remainder modulo kDirectAlignment of an address to which the tensor is read without a copy.
  virtual size_t Remainder(size_t i) const = 0;
};

// Opens tensors of `files`, by their places in files->entries(), which must be contiguous. Bytes in
// the page cache are read from there; others bypass it (O_DIRECT), if the file system allows.
// Writes nothing. With `mmap`, files are mapped, so that tensors can be used in place, except those
// that do not begin at a multiple of their element's size. Errors: UNIMPLEMENTED naming a tensor
// that is stored transposed or whose type has no counterpart; RESOURCE_EXHAUSTED if a file cannot
// be mapped; the system's.
absl::StatusOr<std::shared_ptr<const WeightSource>> OpenWeightSource(
    std::shared_ptr<const WeightFiles> files, const std::vector<size_t>& entries,
    bool mmap = false);

// Makes a source of contiguous tensors in host memory, which it keeps.
std::shared_ptr<const WeightSource> HostWeightSource(std::vector<std::string> names,
                                                     std::vector<at::Tensor> tensors);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_WEIGHT_SOURCE_H_
