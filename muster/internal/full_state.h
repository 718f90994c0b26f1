#ifndef MUSTER_INTERNAL_FULL_STATE_H_
#define MUSTER_INTERNAL_FULL_STATE_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "muster/internal/divided_object.h"
#include "muster/internal/model_slot.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/divided_files.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/state_dict.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/train/optimizer_handle.h"

// The state of sharded models and their optimizers in the form of unsharded ones, which is what
// checkpoints hold, so that they load under any strategy and number of processes.
namespace muster::internal {

// The parameters and buffers of a model by name, to be read. Those of an unsharded model
// are the live ones; those of a sharded one are copies on the CPU.
class FullWeights {
 public:
  // (collective, for a sharded model) `keep` false: this process needs no tensors and gets none.
  // `failure`: as of ShardedModel::FullParameters().
  FullWeights(ModelSlot& model, bool keep, std::exception_ptr* failure = nullptr);
  // (collective, for a sharded model) Only tensors for which keep(name), and tied weights only
  // under their first name.
  FullWeights(ModelSlot& model, const std::function<bool(const std::string&)>& keep,
              std::exception_ptr* failure = nullptr);

  const std::vector<std::pair<std::string, at::Tensor>>& tensors() const { return tensors_; }

 private:
  ModelSlot& model_;
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
};

// (collective, for a sharded model) Returns only the tensors for which wanted(name), which must be
// the same on every rank: no other parameters of a sharded model are exchanged.
std::map<std::string, at::Tensor> SomeWeights(
    ModelSlot& model, const std::function<bool(const std::string& name)>& wanted, bool keep);

// (collective, for a sharded model) Writes the model's tensors as SaveModelFiles does, on ranks
// where `writes`. Only one unit of a sharded model is in memory at a time. Errors: as
// SaveModelFiles.
absl::Status SaveWholeModel(ModelSlot& model, bool writes, const std::string& directory,
                            int64_t max_shard_bytes);

using Models = std::vector<std::shared_ptr<ModelSlot>>;

// How the ranks write the whole tensors of a model together. Parameters go by their first names;
// buffers, which may differ between ranks, are in a file of rank 0.
struct DividedModel {
  std::vector<DividedFile> files;
  uint64_t bytes = 0;
};
DividedModel DivideModel(ModelSlot& model, int ranks);

// Whether a sharded model has parameters of `optimizer`.
bool IsSharded(const OptimizerHandle& optimizer, const Models& models);

// Returns the names of the parameters of a model that `optimizer` has: the name in the optimizer by
// the first name in the model.
std::map<std::string, std::string> NamesIn(const OptimizerHandle& optimizer, ModelSlot& model);

// Describes the parameters of `optimizer` that belong to models, as a text for a checkpoint: a line
// for each, with its name in the optimizer's state (a number, mostly), the model's number and its
// first name there, separated by tabs.
std::string DescribeParameters(const OptimizerHandle& optimizer, const Models& models);
// Throws c10::Error, naming `file` and a parameter, if a state with this description would go to
// other parameters of `models` than those it was saved from. Entries without such a name here are
// not compared: a hook may have renamed them.
void CheckParameters(const std::string& description, const std::string& file,
                     const OptimizerHandle& optimizer, const Models& models);

// The slots in an optimizer's state of a sharded model, on all ranks together, as of the last
// exchange among the ranks.
struct StateSlots {
  bool known = false;
  std::set<std::string> names;
};

// (collective, if a model is sharded) As optimizer.SaveState(), with the whole state of the
// parameters whose shards it updates and for which keep(model, name), and nothing of the others.
// `slots[i]` holds the known slots of models[i], the same on all ranks, and is kept up to date;
// while it is right, the ranks exchange only one number for each parameter, and what they gather.
// `failure`: what this process alone has failed with, as for ShardedModel::FullParameters(); not
// null.
OptimizerState FullState(const OptimizerHandle& optimizer, const Models& models,
                         const std::function<bool(ModelSlot& model, const std::string& name)>& keep,
                         const std::function<StateSlots*(size_t model)>& slots,
                         std::exception_ptr* failure);
// Takes the state of the parameter that the optimizer knows by this name out of `state`.
std::map<std::string, at::Tensor> TakeStateOf(const std::string& parameter, OptimizerState* state);
// The reverse: returns what optimizer.LoadState() takes on this process, from all or a part of the
// state.
OptimizerState LocalState(OptimizerState full, const OptimizerHandle& optimizer,
                          const Models& models);

// Returns a function from the header of a file of such a state to the bytes that LocalState() reads
// of it on this process, including the header. Borrows `models`.
std::function<std::vector<FileRange>(const SafetensorsHeader&)> LocalRanges(
    const OptimizerHandle& optimizer, const Models& models);

// Returns the first names of a divided object's parameters by the names of their tensors in its
// state.
std::map<std::string, std::string> KeysOf(const DividedObject& object, ModelSlot& model);
// As LocalRanges(), for a file of a divided object's state.
std::function<std::vector<FileRange>(const SafetensorsHeader&)> RangesOfParts(
    ModelSlot& model, std::map<std::string, std::string> keys);
// Adds to `parts` this process's parts of the whole tensors of parameters in `file`, in memory of
// their own. Throws c10::Error, naming the tensor, if its shape is not the parameter's.
void TakeParts(ModelSlot& model, const std::map<std::string, std::string>& keys,
               const StateDict& file, StateDict* parts);
void CopyScalars(const StateDict& from, StateDict* to);

// Returns the tensors of the model that `weights` must have: all but the optional ones that it
// lacks (HasOptionalTensors). `options` determine how names match.
NamedTensors WantedOf(ModelSlot& model, const NamedTensors& weights, NamedTensors tensors,
                      const LoadWeightsOptions& options = {});

// Throws c10::Error unless the names, shapes and types of `weights`, or of what they stand for, are
// those of a sharded model's whole tensors. Not collective: looks at no values. `what` is for
// messages.
void CheckWholeWeights(ModelSlot& model,
                       const std::vector<std::pair<std::string, at::Tensor>>& weights,
                       const std::string& what, bool allow_missing);

// Returns the name by which a sharded model knows a parameter: for tied weights the first.
const std::string& FirstName(const ShardedModel& model, const std::string& name,
                             const at::Tensor& parameter);
// Returns a tensor of this shape and type that takes no memory.
at::Tensor ShapeOf(const at::Tensor& tensor, at::ScalarType dtype);
// Returns the bytes of these elements (first, past the last) of a tensor in a file, or of all.
FileRange RangeOf(const SafetensorsHeader& header, const SafetensorsEntry& entry,
                  std::pair<int64_t, int64_t> elements);
FileRange AllOf(const SafetensorsHeader& header, const SafetensorsEntry& entry);

// The values of a sharded model from a checkpoint, read file by file: a rank keeps its parts of the
// parameters.
class LoadedShards {
 public:
  explicit LoadedShards(ModelSlot& model);
  // Returns the bytes of a file that Take() reads, including its header.
  std::vector<FileRange> Ranges(const SafetensorsHeader& header) const;
  // Takes the tensors of one file. Keeps none of their memory.
  void Take(const std::vector<std::pair<std::string, at::Tensor>>& tensors);
  // When all files are taken: throws c10::Error unless the names, shapes and types are the model's,
  // and what this rank keeps of a parameter is the same under each of its names. `what` is for
  // messages.
  void Check(const std::string& what) const;
  void Store() const;

 private:
  ModelSlot& model_;
  std::map<std::string, at::Tensor> parameters_;             // the module's, by each name
  std::vector<std::pair<std::string, at::Tensor>> buffers_;  // the module's
  std::vector<std::pair<std::string, at::Tensor>> found_;    // only shapes and types
  std::vector<std::pair<std::string, at::Tensor>> loaded_buffers_;
  std::map<std::string, at::Tensor> parts_;
  std::map<std::string, std::string> names_of_parts_;  // in the files: the first taken
  std::vector<std::string> tied_differently_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_FULL_STATE_H_
