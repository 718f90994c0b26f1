#include "worker/models/sparse_experts.h"

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/argsort.h"
#include "ATen/ops/bincount.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/one_hot.h"
#include "ATen/ops/softmax.h"
#include "ATen/ops/topk.h"
#include "torch/nn/modules/container/modulelist.h"

namespace muster::models {

GatedMlpImpl::GatedMlpImpl(const DecoderConfig& config, const Names& names)
    : activation_(config.activation) {
  gate_ = register_module(names.gate,
                          Linear(config.hidden_size, config.intermediate_size, config.mlp_bias));
  up_ = register_module(names.up,
                        Linear(config.hidden_size, config.intermediate_size, config.mlp_bias));
  down_ = register_module(names.down,
                          Linear(config.intermediate_size, config.hidden_size, config.mlp_bias));
}

at::Tensor GatedMlpImpl::forward(const at::Tensor& x) {
  return down_(Activate(activation_, gate_(x)) * up_(x));
}

SparseExpertsImpl::SparseExpertsImpl(const DecoderConfig& config)
    : num_chosen_(config.num_experts_per_token), jitter_(config.router_jitter_noise) {
  gate_ = register_module("gate", Linear(config.hidden_size, config.num_experts, false));
  torch::nn::ModuleList list = register_module("experts", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.num_experts; ++i) {
    experts_.emplace_back(config, GatedMlpImpl::Names{"w1", "w3", "w2"});
    list->push_back(experts_.back().ptr());
  }
}

SparseExpertsImpl::Output SparseExpertsImpl::forward(const at::Tensor& x, bool skip_idle) {
  at::Tensor tokens = x.reshape({-1, x.size(-1)});
  if (is_training() && jitter_ > 0) {
    tokens = tokens * at::empty_like(tokens).uniform_(1 - jitter_, 1 + jitter_);
  }
  const at::Tensor router_logits = gate_(tokens);
  const auto [weights, experts] = at::softmax(router_logits, -1, c10::kFloat).topk(num_chosen_, -1);
  const at::Tensor shares = weights / weights.sum(-1, /*keepdim=*/true);

  // The sort is stable, so that an expert has its tokens in their order.
  const at::Tensor chosen = experts.flatten();
  const at::Tensor order = at::argsort(chosen, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor rows = order.div(num_chosen_, "floor");
  const at::Tensor counts =
      at::bincount(chosen, /*weights=*/{}, static_cast<int64_t>(experts_.size())).cpu();
  const std::vector<int64_t> sizes(counts.const_data_ptr<int64_t>(),
                                   counts.const_data_ptr<int64_t>() + counts.numel());
  std::vector<at::Tensor> parts = tokens.index_select(0, rows).split_with_sizes(sizes);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < experts_.size(); ++i) {
    if (sizes[i] > 0 || !skip_idle) results.push_back(experts_[i](parts[i]));
  }
  const at::Tensor weighted =
      at::cat(results) * shares.flatten().index_select(0, order).unsqueeze(-1);
  // Restore the order of the tokens. A token's contributions are added in the type of the shares,
  // float32, and rounded once (docs/decisions/0045).
  const at::Tensor back =
      at::empty_like(order).scatter_(0, order, at::arange(order.numel(), order.options()));
  const at::Tensor sum = weighted.index_select(0, back)
                             .view({tokens.size(0), num_chosen_, tokens.size(1)})
                             .sum(1)
                             .to(tokens.scalar_type());
  return {.x = sum.view(x.sizes()), .router_logits = router_logits};
}

at::Tensor LoadBalancingLoss(const std::vector<at::Tensor>& router_logits, int64_t num_chosen,
                             const at::Tensor& padding) {
  const int64_t num_experts = router_logits.at(0).size(-1);
  const at::Tensor probabilities = at::softmax(at::cat(router_logits), -1, c10::kFloat);
  const at::Tensor experts = std::get<1>(probabilities.topk(num_chosen, -1));
  const at::Tensor chosen = at::one_hot(experts, num_experts).sum(1).to(c10::kFloat);
  if (!padding.defined()) {
    return (chosen.mean(0) * probabilities.mean(0)).sum() * num_experts;
  }
  const at::Tensor counts = padding.flatten()
                                .to(c10::kFloat)
                                .repeat({static_cast<int64_t>(router_logits.size())})
                                .unsqueeze(-1);
  const at::Tensor total = counts.sum();
  return ((chosen * counts).sum(0) / total * ((probabilities * counts).sum(0) / total)).sum() *
         num_experts;
}

}  // namespace muster::models
