#ifndef MUSTER_INTERNAL_SAVE_PLAN_H_
#define MUSTER_INTERNAL_SAVE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "muster/internal/full_state.h"
#include "muster/internal/model_slot.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "worker/checkpoint/planned_files.h"
#include "worker/checkpoint/safetensors.h"

namespace muster::internal {

// Which rank writes which tensor of a save, and into which file.

// The largest size of one rank's list of the tensors of a plan, which fits into a report to the
// coordinator. The plan of a larger model lists files instead.
inline constexpr size_t kMaxListedBytes = 512 << 10;

// The key in an optimizer's file of the text that describes which parameters its states belong to.
inline constexpr char kParametersKey[] = "parameters";

// Digests of what is saved, without its values.
struct SaveLayout {
  uint64_t here = 0;    // everything that a plan depends on, on this process
  uint64_t shared = 0;  // the models that processes write together: equal on all
  friend bool operator==(const SaveLayout&, const SaveLayout&) = default;
};
SaveLayout LookAtLayout(const Process& process, const Registry& registry);

// The files that the ranks write together, for each divided model; none for the others, which rank
// 0 writes.
struct SaveDivision {
  std::vector<DividedModel> models;
  std::vector<std::map<std::string, int>> writers;  // rank by tensor, for each model

  void Add(DividedModel model);
  bool Divides(size_t model) const { return !models[model].files.empty(); }
  bool DividesAny() const;
  // Whether rank `rank` writes tensor `name` of model `model`.
  bool Writes(int rank, size_t model, const std::string& name) const;
};

struct SavePlan {
  // A file of the states of the parameters in one file of a model.
  struct OptimizerPart {
    int rank = 0;                       // the rank that writes it
    std::vector<std::string> known_as;  // the parameters' names in the optimizer
  };

  // What the plan was made for.
  SaveLayout layout;
  bool hooks = false, apart = false;

  SaveDivision division;
  std::vector<std::string> indexes;                       // of each model; empty: the model is one
                                                          // file
  std::vector<std::vector<OptimizerPart>> optimizers;     // for each optimizer, its files of states
  std::map<std::pair<size_t, size_t>, StateSlots> slots;  // for each optimizer and model

  // The tensors that the checkpoint must hold, as far as this process knows, and the parts that it
  // writes, for the save that is under way: see kPlanKey.
  nlohmann::json tensors = nlohmann::json::array();
  nlohmann::json parts = nlohmann::json::object();
  size_t listed_bytes = 0;                       // of `tensors`, at least as many as in a report
  std::map<std::string, TensorList> files = {};  // the same tensors, by file

  void BeginSave();
  // Adds a tensor. `group`: the file that holds it or, if that is divided, the whole of which
  // `file` is the part that holds the tensor.
  void Holds(const std::string& group, const std::string& file, const std::string& name,
             at::ScalarType type, at::IntArrayRef shape);
  void Holds(const std::string& group, const std::string& file, const std::string& name,
             const at::Tensor& tensor);
  // Returns the metadata of a rank's last file, in which the report has `most` bytes for the list
  // of tensors; above that it lists files. Takes the lists.
  std::string TakeReport(size_t most);
};

// `hooks`: some process has save hooks; `apart`: some process has trained apart.
SavePlan MakeSavePlan(const Process& process, const Registry& registry, const SaveLayout& layout,
                      bool hooks, bool apart);

// Visits the tensors of a divided model, including those in the files of other processes.
void VisitDividedModel(ModelSlot& model, const std::vector<DividedFile>& files,
                       const std::function<void(size_t file, const std::string& name,
                                                at::ScalarType type, at::IntArrayRef shape)>& add);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_SAVE_PLAN_H_
