#ifndef MUSTER_INTERNAL_INCOMING_WEIGHTS_H_
#define MUSTER_INTERNAL_INCOMING_WEIGHTS_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/ScalarType.h"
#include "muster/internal/model_slot.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/torch_file.h"
#include "worker/checkpoint/weight_loader.h"

namespace muster::internal {

// Weights on their way into one prepared model. Call Compare(), Decide() and Store() in this order
// on every rank; no model changes before all are compared with their weights.
class IncomingWeights {
 public:
  virtual ~IncomingWeights() = default;

  // Throws c10::Error or a status unless the weights fit. Returns '1' or '0' for each pair of names
  // of one tensor of the model that come with separate values: whether these are equal, as far as
  // this rank reads them.
  virtual std::string Compare() = 0;
  // `equal`: the results of Compare() on all ranks. Throws the same on every rank.
  virtual void Decide(const std::vector<std::string>& equal) = 0;
  virtual void Store() = 0;
  virtual const LoadedWeights& report() const = 0;

  // A digest of what this rank is about to load, for a comparison with that of other ranks; call it
  // after Compare(). If the files have no digests, `values` is a digest of samples: enough to tell
  // revisions of a model apart without reading all of it.
  struct Fingerprint {
    std::string tensors, values;
  };
  virtual Fingerprint FingerprintHere() const;
};

// Returns weights in memory, whole, for a model that is not sharded. `where` is for messages.
std::unique_ptr<IncomingWeights> IncomingTensors(ModelSlot& model, const std::string& where,
                                                 NamedTensors weights,
                                                 const LoadWeightsOptions& rules);

// Returns weights in the files of any library (WeightFiles). For a sharded model each rank reads
// its parts of the parameters into its shards. Additional memory: that of FillWeights(), and one
// tensor if its strides differ between the file and the model. Throws the error of
// WeightFiles::Open.
std::unique_ptr<IncomingWeights> IncomingFiles(ModelSlot& model, const std::string& path,
                                               const LoadWeightsOptions& rules);

// Weights for a sharded model. Of tensors under several names the first name in the model's order
// counts.
class IncomingShards : public IncomingWeights {
 public:
  IncomingShards(ModelSlot& model, std::string where, LoadWeightsOptions rules);

  std::string Compare() override;
  void Decide(const std::vector<std::string>& equal) override;
  void Store() override;
  const LoadedWeights& report() const override { return match_.report; }

 protected:
  // The parameter of the model that a tensor of the files goes to, or null.
  const at::Tensor* ParameterOf(const std::string& in_file) const;
  bool IsBuffer(const std::string& in_file) const;
  // The name by which the sharded model knows a parameter.
  const std::string& FirstNameOf(const std::string& in_file) const;

  // Whether this rank's parts of the two tensors, of the same parameter, or the two buffers, are
  // equal when converted to `type`.
  virtual bool AreEqual(size_t first, size_t second, at::ScalarType type) = 0;
  struct Copy {
    size_t from;
    std::string name;  // a parameter's first name; a buffer's own name
    at::Tensor to;     // the shard, or the buffer
  };
  // Fills shards and buffers.
  virtual void Fill(const std::vector<Copy>& shards, const std::vector<Copy>& buffers) = 0;

  ModelSlot& model_;
  std::vector<StoredTensor> tensors_;  // the tensors of the files
  MatchedEntries match_;               // set by Compare()

 private:
  std::string InModel(const std::string& in_file) const;
  MatchedEntries Match(std::vector<bool>* equal);

  const std::string where_;
  LoadWeightsOptions rules_;
  std::map<std::string, at::Tensor> parameters_;  // the module's, by each name
  NamedTensors buffers_, wanted_;
  std::string equal_here_;
};

// Weights from a checkpoint, read file by file: a rank keeps its parts until Store().
class CheckpointShards final : public IncomingShards {
 public:
  using IncomingShards::IncomingShards;
  // Returns the bytes of a file that Take() reads, including its header.
  std::vector<FileRange> Ranges(const SafetensorsHeader& header) const;
  // Takes the tensors of one file. Keeps none of their memory.
  void Take(const NamedTensors& tensors);
  // Makes Compare() ignore the values of tied weights, because another object has compared them.
  void SetValuesChecked() { values_checked_ = true; }

 private:
  bool AreEqual(size_t first, size_t second, at::ScalarType type) override;
  void Fill(const std::vector<Copy>& shards, const std::vector<Copy>& buffers) override;

  bool values_checked_ = false;
  std::vector<at::Tensor> values_;  // of tensors_: parts, or whole buffers; undefined: not needed
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_INCOMING_WEIGHTS_H_
