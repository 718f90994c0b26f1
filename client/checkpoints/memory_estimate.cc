#include "client/checkpoints/memory_estimate.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/text.h"

namespace muster::client {
namespace {

// Returns "bert.embeddings", which has word_embeddings among others: transformers keeps such a
// module whole, as it does layers. Empty if the tensor is in no such module.
std::string EmbeddingsOf(absl::string_view name) {
  const size_t words = name.rfind(".word_embeddings.");
  const absl::string_view above = name.substr(0, words == absl::string_view::npos ? 0 : words);
  return above == "embeddings" || absl::EndsWith(above, ".embeddings") ? std::string(above) : "";
}

// Returns "model.layers.3" for "model.layers.3.mlp.up.weight", "lm_head" for "lm_head.weight".
std::string PartOf(absl::string_view name, const std::set<std::string>& embeddings) {
  constexpr absl::string_view kEmbeddings = "embeddings.";
  for (size_t at = name.find(kEmbeddings); at != absl::string_view::npos;
       at = name.find(kEmbeddings, at + 1)) {
    std::string whole(name.substr(0, at + kEmbeddings.size() - 1));
    if (embeddings.count(whole) != 0) return whole;
  }
  std::vector<absl::string_view> path = absl::StrSplit(name, '.');
  path.pop_back();
  const auto number = std::find_if(path.begin(), path.end(), IsDigits);
  if (number != path.end()) path.erase(number + 1, path.end());
  return absl::StrJoin(path, ".");
}

int64_t CeilOf(int64_t bytes, int64_t parts) { return (bytes + parts - 1) / parts; }

}  // namespace

ModelSize SizeOf(const std::vector<EstimatedTensor>& tensors) {
  ModelSize size;
  std::map<std::string, int64_t> parts;
  std::set<std::string> embeddings;
  for (const EstimatedTensor& tensor : tensors) {
    if (std::string whole = EmbeddingsOf(tensor.name); !whole.empty()) embeddings.insert(whole);
  }
  for (const EstimatedTensor& tensor : tensors) {
    ++size.tensors;
    if (!tensor.floating) {
      size.other_bytes += tensor.bytes;
      continue;
    }
    size.elements += tensor.elements;
    size.largest_tensor = std::max(size.largest_tensor, tensor.elements);
    parts[PartOf(tensor.name, embeddings)] += tensor.elements;
  }
  for (const auto& [name, elements] : parts) {
    if (elements <= size.largest_elements) continue;
    size.largest = name;
    size.largest_elements = elements;
  }
  return size;
}

absl::StatusOr<DtypeEstimate> EstimateDtype(const ModelSize& size, absl::string_view dtype) {
  static const auto& bits = *new std::map<absl::string_view, int64_t>{
      {"float32", 32}, {"float16", 16}, {"bfloat16", 16}, {"int8", 8}, {"int4", 4}};
  const auto found = bits.find(dtype);
  if (found == bits.end()) {
    return absl::InvalidArgumentError(absl::StrCat("--dtypes ", dtype,
                                                   ": write float32, float16, bfloat16, int8 or "
                                                   "int4, several separated by commas"));
  }
  const auto bytes = [&](int64_t elements) { return CeilOf(elements * found->second, 8); };
  DtypeEstimate estimate{.dtype = std::string(dtype),
                         .largest = bytes(size.largest_elements),
                         .total = bytes(size.elements) + size.other_bytes,
                         .training = -1};
  if (found->second >= 16) estimate.training = 4 * bytes(size.elements) + size.other_bytes;
  return estimate;
}

std::vector<StrategyEstimate> EstimateStrategies(const ModelSize& size, int64_t processes,
                                                 int64_t group_size, int64_t state_bytes,
                                                 const EstimatedOffload& offload) {
  const int64_t whole = 4 * size.elements, states = state_bytes * size.elements;
  const int64_t unit = 4 * size.largest_elements;
  const bool moves_gradients = offload.gradients != EstimatedOffload::Place::kNone;
  const bool moves_parameters = offload.parameters != EstimatedOffload::Place::kNone;
  // The gradients of a process that has a part of each one.
  const auto gradients_of = [&](int64_t ranks) {
    const int64_t part = CeilOf(whole, ranks);
    return offload.optimizer_in_backward ? std::min(part, 3 * CeilOf(unit, ranks)) : part;
  };
  const auto divided = [&](const char* name, int64_t ranks) {
    // Two units of parameters, or one and the gradients of another: three at most.
    return StrategyEstimate{.strategy = name,
                            .parameters = CeilOf(whole, ranks) + size.other_bytes,
                            .gradients = gradients_of(ranks),
                            .states = CeilOf(states, ranks),
                            .gathered = ranks == 1 && !moves_parameters ? 0 : 3 * unit};
  };
  // Subtracts from a row what is kept elsewhere. `ranks` divide the states and `parts`: gradients,
  // or parameters as well.
  enum class Parts { kNone, kGradients, kAll };
  const auto take_away = [&](StrategyEstimate* row, int64_t ranks, Parts parts) {
    if (offload.optimizer != EstimatedOffload::Place::kNone) {
      constexpr int64_t kWindow = int64_t{64} << 20;
      const int64_t windows = offload.optimizer == EstimatedOffload::Place::kDisk ? 3 : 1;
      const int64_t largest =
          ranks == 1 ? size.largest_tensor
                     : std::min(size.largest_tensor, CeilOf(size.largest_elements, ranks));
      row->offloaded += row->states;
      row->states = std::min(row->states, windows * std::max(kWindow, state_bytes * largest));
    }
    const bool parameters = moves_parameters && parts == Parts::kAll;
    const int64_t part = CeilOf(whole, ranks);
    if (parameters) {
      row->offloaded += part;
      row->parameters = std::min(part, 2 * CeilOf(unit, ranks)) + size.other_bytes;
    }
    if (parameters || (moves_gradients && parts != Parts::kNone)) {
      row->offloaded += part;
      // The gradients of an optimizer in the backward pass are used at once.
      if (offload.optimizer_in_backward) return;
      row->gradients = std::min(row->gradients, 3 * CeilOf(unit, ranks));
    }
  };
  std::vector<StrategyEstimate> all;
  all.push_back({.strategy = "no_shard",
                 .parameters = whole + size.other_bytes,
                 .gradients = whole,
                 .states = states,
                 .gathered = 0});
  take_away(&all.back(), 1, Parts::kNone);
  if (processes == 1) {
    if (offload.optimizer_in_backward || moves_gradients) {
      all.push_back({.strategy = "zero2",
                     .parameters = whole + size.other_bytes,
                     .gradients = gradients_of(1),
                     .states = states,
                     .gathered = std::min(offload.optimizer_in_backward ? unit : 3 * unit, whole)});
      take_away(&all.back(), 1, Parts::kGradients);
    }
    if (!moves_parameters) return all;
    all.push_back(divided("zero3", 1));
    take_away(&all.back(), 1, Parts::kAll);
    return all;
  }
  const int64_t part = gradients_of(processes);
  all.push_back(
      {.strategy = "zero1",
       .parameters = whole + size.other_bytes,
       .gradients = part,
       .states = CeilOf(states, processes),
       .gathered = offload.optimizer_in_backward ? std::min(3 * unit, whole) : whole - part});
  take_away(&all.back(), processes, Parts::kGradients);
  // Before they are reduced, at the end of the backward pass, all gradients exist.
  if (!offload.optimizer_in_backward) all.back().gathered = whole - all.back().gradients;
  all.push_back({.strategy = "zero2",
                 .parameters = whole + size.other_bytes,
                 .gradients = part,
                 .states = CeilOf(states, processes),
                 .gathered = std::min(3 * unit, whole)});
  take_away(&all.back(), processes, Parts::kGradients);
  all.push_back(divided("zero3", processes));
  take_away(&all.back(), processes, Parts::kAll);
  if (group_size != processes) {
    all.push_back(divided("hybrid", group_size));
    take_away(&all.back(), group_size, Parts::kAll);
  }
  return all;
}

}  // namespace muster::client
