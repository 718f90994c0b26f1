#ifndef MUSTER_WORKER_CHECKPOINT_WEIGHT_LOADER_H_
#define MUSTER_WORKER_CHECKPOINT_WEIGHT_LOADER_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "c10/core/ScalarType.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {

class WeightFiles;
struct WeightEntry;

// How muster::load_model reads weights. See muster/weights.h for an example.
struct LoadWeightsOptions {
  // Refuse weights that leave a tensor of the model without a value, or hold one that the model
  // does not have.
  bool strict = true;
  // Leave tensors of the model unchanged if the file has another shape or type for them, and list
  // them. By default they are an error, even without `strict`.
  bool skip_mismatched = false;
  // Reads only tensors whose name begins with this prefix, and removes the prefix: "transformer."
  // reads transformer.wte.weight into wte.weight.
  std::string prefix = "";
  // Returns the model's name of a tensor, from its name in the file without the prefix. An empty
  // result leaves the tensor out.
  std::function<std::string(const std::string&)> rename = nullptr;
  // Returns the names of the matrices of which a tensor in the files consists, one below the other,
  // as experts of one layer are stored; none: it is one tensor. They count as if the files had
  // them, so `prefix` and `rename` get their names (see WeightFiles::Divide). Tensors of a
  // checkpoint are never divided.
  std::function<std::vector<std::string>(const std::string&)> parts = nullptr;
  // The type that the model's floating-point tensors get; integers keep their type. By default the
  // model keeps its types, and values convert to them.
  std::optional<at::ScalarType> dtype = std::nullopt;
};

// What was done with each tensor. Lists are in the order of the model or of the file.
struct LoadedWeights {
  // Names in the model. Tensors that are the same under another name are loaded with it.
  std::vector<std::string> loaded = {};
  // Missing: in the model but not in the file. Unexpected: in the file but not in the model, by the
  // name in the file.
  std::vector<std::string> missing = {};
  std::vector<std::string> unexpected = {};
  // With `skip_mismatched`: "NAME (what is in the file, what is here)".
  std::vector<std::string> mismatched = {};
  // Tensors that `prefix` and `rename` left out, by their names in the file.
  std::vector<std::string> ignored = {};
};

// A tensor of a model and its source.
struct MatchedWeight {
  size_t target;        // in the model's list
  size_t from;          // in the files' entries
  at::ScalarType type;  // the type of the target afterwards
};
struct MatchedEntries {
  // In the order of the targets; a tensor with several names occurs once.
  std::vector<MatchedWeight> matches;
  LoadedWeights report;
};

// Weights that fit a model but are not copied yet, for callers who load several models or none.
// Movable. Not thread-safe.
class MatchedWeights {
 public:
  // Compares weights in memory with `targets`, as LoadWeights does, and copies nothing. `where` is
  // for messages. Errors: those of LoadWeights, except those of the disk.
  static absl::StatusOr<MatchedWeights> Match(const std::string& where, NamedTensors weights,
                                              NamedTensors targets,
                                              const LoadWeightsOptions& options = {});
  MatchedWeights(MatchedWeights&&) noexcept;
  MatchedWeights& operator=(MatchedWeights&&) noexcept;
  ~MatchedWeights();

  const LoadedWeights& report() const;
  absl::Status Copy();

 private:
  struct Plan;
  friend absl::StatusOr<LoadedWeights> LoadWeights(const WeightFiles& files,
                                                   const NamedTensors& targets,
                                                   const LoadWeightsOptions& options);
  friend absl::StatusOr<MatchedEntries> MatchEntries(const WeightFiles& files,
                                                     const NamedTensors& targets,
                                                     const LoadWeightsOptions& options);
  explicit MatchedWeights(std::unique_ptr<Plan> plan);

  std::unique_ptr<Plan> plan_;
};

// Returns one tensor in its own memory, contiguous or with the strides that it has in the file.
// Blocks on the disk; several threads read a large tensor.
absl::StatusOr<at::Tensor> ReadWeight(const WeightFiles& weights, const WeightEntry& entry);

// Copies weights into `targets`, the parameters and buffers of a model, on any device and with any
// strides. Floating-point types convert into each other; other types must be equal. Everything is
// compared before the first tensor changes, including views of the same elements by other strides
// (a matrix and its transpose); if targets share memory in another way, the later one wins. Several
// threads read, and bypass the page cache for data that it does not hold. Memory in addition to the
// model: a block of 2 MiB for each of up to 16 reading threads, and two pinned blocks for a GPU;
// one tensor at a time whose strides differ in the file; on a device also tensors that it converts,
// up to TensorUploadOptions::converted_bytes. With `dtype`, memory for the new values of a tensor
// whose type changes replaces that of the old values before the first tensor is read.
//
// Errors: those of WeightFiles::Open; INVALID_ARGUMENT "PATH: ..." that lists the names that are
// missing, unexpected (with `strict`) or different in shape or type, targets without memory (meta
// device), and names of one tensor, or views of the same elements, for which the file has different
// values; then nothing has changed. DATA_LOSS if the file becomes shorter meanwhile, and the
// system's error if the disk fails; then part of the model may have changed, and tensors whose type
// changes may have no values.
absl::StatusOr<LoadedWeights> LoadWeights(const std::string& path, const NamedTensors& targets,
                                          const LoadWeightsOptions& options = {});
// Opens the files at `path`, divided by options.parts. Errors: those of WeightFiles::Open and
// WeightFiles::Divide.
absl::StatusOr<WeightFiles> OpenWeights(const std::string& path, const LoadWeightsOptions& options);
// LoadWeights() from open files, even if other files have their names by now.
absl::StatusOr<LoadedWeights> LoadWeights(const WeightFiles& files, const NamedTensors& targets,
                                          const LoadWeightsOptions& options = {});

// Determines what LoadWeights would copy where, for callers that read themselves. Targets may be on
// the meta device. Errors: those of LoadWeights; reads values only to compare two names of one
// tensor.
absl::StatusOr<MatchedEntries> MatchEntries(const WeightFiles& files, const NamedTensors& targets,
                                            const LoadWeightsOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WEIGHT_LOADER_H_
