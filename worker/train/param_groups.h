#ifndef MUSTER_WORKER_TRAIN_PARAM_GROUPS_H_
#define MUSTER_WORKER_TRAIN_PARAM_GROUPS_H_

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/optim/optimizer.h"
#include "worker/train/optimizer.h"

namespace torch::nn {
class Module;
}

namespace muster {

// Parameter groups by rules for names. They hold the module's own tensors, so an optimizer with
// them can be created before or after prepare() and keeps its groups under every strategy: sharding
// replaces each parameter with this process's part of it, in the same group.
//
// A pattern is an ECMAScript regular expression that must match the whole name of a parameter:
// "blocks\\.0\\..*". A tensor with several names (tied weights) is one parameter, in one group.
// All functions throw c10::Error for a pattern that is not a regular expression or matches no name,
// and for a tensor whose names belong to different groups. Frozen parameters are included: to leave
// them out, pass a list of NamedParameters without them. Pure functions.

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

// The parameters with weight decay, and those without.
struct DecayLists {
  std::vector<at::Tensor> decayed, others;
};

// `others` are biases, the parameters of norms, and those whose names match `no_decay`. Biases are
// parameters whose last name component begins or ends with "bias" (bias, bias_hh_l0, in_proj_bias).
// Norms are modules with "norm" in the name of their class or in a component of their own name
// (layers.0.norm1, final_layernorm), or with a component ln or bn, optionally with a number or "_f"
// (ln_1, ln_f, bn2).
DecayLists SplitForDecay(const torch::nn::Module& module, const std::string& no_decay = "");
// The same by names only, for example for TorchScript modules.
DecayLists SplitForDecay(const NamedParameters& parameters, const std::string& no_decay = "");

// Returns, for each pattern, the parameters that match it and no earlier pattern; last, the rest.
std::vector<std::vector<at::Tensor>> SplitByName(const NamedParameters& parameters,
                                                 const std::vector<std::string>& patterns);
NamedParameters NamedParametersOf(const torch::nn::Module& module);

// Returns two groups with `options`, the second without decay:
//
//   muster::FusedAdamW adamw(
//       muster::DecayGroups(*net, muster::AdamWOptions{.lr = 1e-4, .weight_decay = 0.1}));
//   torch::optim::AdamW other(
//       muster::DecayGroups(*net, torch::optim::AdamWOptions(1e-4).weight_decay(0.1)));
//
// Returns one group if the other has no parameters. Throws if there are no parameters at all.
template <class Options>
auto DecayGroups(DecayLists lists, const Options& options) {
  TORCH_CHECK(!lists.decayed.empty() || !lists.others.empty(),
              "DecayGroups(): the model has no parameters");
  const bool is_torch = std::is_base_of_v<torch::optim::OptimizerOptions, Options>;
  std::conditional_t<is_torch, std::vector<torch::optim::OptimizerParamGroup>,
                     std::vector<ParamGroup<Options>>>
      groups;
  const auto add = [&groups](std::vector<at::Tensor> params, Options of_group) {
    if (params.empty()) return;
    if constexpr (is_torch) {
      groups.emplace_back(std::move(params), std::make_unique<Options>(std::move(of_group)));
    } else {
      groups.push_back({std::move(params), std::move(of_group)});
    }
  };
  add(std::move(lists.decayed), options);
  Options without = options;
  if constexpr (is_torch) {
    without.weight_decay(0);
  } else {
    without.weight_decay = 0;
  }
  add(std::move(lists.others), std::move(without));
  return groups;
}
template <class Options>
auto DecayGroups(const torch::nn::Module& module, const Options& options,
                 const std::string& no_decay = "") {
  return DecayGroups(SplitForDecay(module, no_decay), options);
}
template <class Options>
auto DecayGroups(const NamedParameters& parameters, const Options& options,
                 const std::string& no_decay = "") {
  return DecayGroups(SplitForDecay(parameters, no_decay), options);
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_PARAM_GROUPS_H_
