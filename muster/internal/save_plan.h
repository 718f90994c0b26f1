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

// Who writes which tensor of a save, and into which file.

// What the list of the tensors of a plan may have, of one rank: a report to the coordinator has
// room for it. The plan of a larger model is one of files.
inline constexpr size_t kMaxListedBytes = 512 << 10;

// In an optimizer's file: which parameters its states are of.
inline constexpr char kParametersKey[] = "parameters";

// Digests of what is saved, without its values.
struct SaveLayout {
  uint64_t here = 0;    // of everything that a plan is made of, on this process
  uint64_t shared = 0;  // of the models that processes write together: alike on all
  friend bool operator==(const SaveLayout&, const SaveLayout&) = default;
};
SaveLayout LookAtLayout(const Process& process, const Registry& registry);

// The files that the ranks write together, for each divided model; none for the others, which rank
// 0 writes.
struct SaveDivision {
  std::vector<DividedModel> models;
  std::vector<std::map<std::string, int>> writers;  // rank by tensor, of each model

  void Add(DividedModel model);
  bool Divides(size_t model) const { return !models[model].files.empty(); }
  bool DividesAny() const;
  // Whether rank `rank` writes tensor `name` of model `model`.
  bool Writes(int rank, size_t model, const std::string& name) const;
};

struct SavePlan {
  // The states of the parameters in one file of a model are a file, too.
  struct OptimizerPart {
    int rank = 0;                       // its writer
    std::vector<std::string> known_as;  // the optimizer's names
  };

  // What it was made for.
  SaveLayout layout;
  bool hooks = false, apart = false;

  SaveDivision division;
  std::vector<std::string> indexes;                       // of each model; empty: it is one file
  std::vector<std::vector<OptimizerPart>> optimizers;     // of each optimizer, files of states
  std::map<std::pair<size_t, size_t>, StateSlots> slots;  // of each optimizer's part of a model

  // The tensors that the checkpoint must hold, as far as this process knows, and the parts that it
  // writes: see kPlanKey. Of the save that is made.
  nlohmann::json tensors = nlohmann::json::array();
  nlohmann::json parts = nlohmann::json::object();
  size_t listed_bytes = 0;                       // of `tensors`, at least as many as in a report
  std::map<std::string, TensorList> files = {};  // the same tensors, by file

  void BeginSave();
  // `group`: the file that holds it, or of which a part does, `file`.
  void Holds(const std::string& group, const std::string& file, const std::string& name,
             at::ScalarType type, at::IntArrayRef shape);
  void Holds(const std::string& group, const std::string& file, const std::string& name,
             const at::Tensor& tensor);
  // The metadata of the last file of a rank, in which its report has `most` bytes for the list of
  // tensors; above that it lists files. Takes the lists.
  std::string TakeReport(size_t most);
};

// `hooks`, `apart`: one of the processes has hooks of saves, or has trained apart.
SavePlan MakeSavePlan(const Process& process, const Registry& registry, const SaveLayout& layout,
                      bool hooks, bool apart);

// The tensors of a divided model, those in the files of other processes included.
void VisitDividedModel(ModelSlot& model, const std::vector<DividedFile>& files,
                       const std::function<void(size_t file, const std::string& name,
                                                at::ScalarType type, at::IntArrayRef shape)>& add);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_SAVE_PLAN_H_
