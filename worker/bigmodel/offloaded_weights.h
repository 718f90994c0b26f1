#ifndef MUSTER_WORKER_BIGMODEL_OFFLOADED_WEIGHTS_H_
#define MUSTER_WORKER_BIGMODEL_OFFLOADED_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {

struct OffloadOptions {
  // Most bytes of weights that are in memory at once. It must hold the largest unit, and two of
  // them for the next one to be read while this one computes.
  int64_t memory_bytes = int64_t{2} << 30;
  // Reads units before they are used, in the order that the first pass has shown.
  bool prefetch = true;
  // The model's name of a tensor in the file, as in LoadWeightsOptions; empty: not used.
  std::function<std::string(const std::string&)> rename = nullptr;
  // Refuse a file with tensors that the model does not have. What the model lacks is always an
  // error: it would have no value.
  bool strict = true;
};

// What has happened so far.
struct OffloadFigures {
  int64_t num_units = 0;
  int64_t total_bytes = 0;     // of all weights
  int64_t resident_bytes = 0;  // now, with buffers kept for the next unit
  int64_t peak_bytes = 0;
  int64_t bytes_read = 0;
  int64_t num_reads = 0;
  int64_t num_prefetched = 0;  // of these, how many began before they were needed
};

// Weights of a model that stay in their files. The model's tensors have no memory of their own:
// each operator that uses one asks for it (worker/parallel/paged_storage.h), and the unit that it
// is in is read into memory, in place of the one that is used again last. So any module works as
// it is. A unit is what has one numbered name: "model.layers.3" with all below it but
// "model.layers.3.block_sparse_moe.experts.5", which is a unit of its own; the tensors of other
// modules are a unit for each module. The files are read where they are and never copied; they
// must stay as they are.
//
// Values are those of a model that is loaded whole, to the last bit. Weights cannot be written and
// get no gradients; gradients of what is computed with them (adapters) work.
//
// Not thread-safe: one thread at a time uses the model. Keep it as long as the model; afterwards
// uses of the model throw.
class OffloadedWeights {
 public:
  // Gives `targets`, the parameters and buffers of a model on the CPU, the values of the files at
  // `path` (as WeightFiles::Open), converted to their types. They may have no memory (see
  // models::ScopedWeights). Blocks on the headers alone. Errors: those of WeightFiles::Open;
  // INVALID_ARGUMENT that lists names that are missing, unexpected or of another shape, or names
  // the unit that is larger than the memory; nothing changes then.
  static absl::StatusOr<std::unique_ptr<OffloadedWeights>> Create(const std::string& path,
                                                                  const NamedTensors& targets,
                                                                  const OffloadOptions& options);
  ~OffloadedWeights();
  OffloadedWeights(const OffloadedWeights&) = delete;
  OffloadedWeights& operator=(const OffloadedWeights&) = delete;

  OffloadFigures figures() const;

 private:
  class Impl;
  explicit OffloadedWeights(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_OFFLOADED_WEIGHTS_H_
