#ifndef MUSTER_WORKER_MODELS_SPARSE_EXPERTS_H_
#define MUSTER_WORKER_MODELS_SPARSE_EXPERTS_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/models/layers.h"

namespace muster::models {

// Computes down(activation(gate(x)) * up(x)) (Shazeer, 2020). The three have different names in a
// dense model and in an expert.
class GatedMlpImpl : public torch::nn::Module {
 public:
  struct Names {
    const char* gate = "gate_proj";
    const char* up = "up_proj";
    const char* down = "down_proj";
  };
  GatedMlpImpl(const DecoderConfig& config, const Names& names);
  at::Tensor forward(const at::Tensor& x);

 private:
  const Activation activation_;
  Linear gate_{nullptr}, up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(GatedMlp);

// A mixture of experts: each token goes to the k experts that its router prefers, weighted by the
// softmax over those (Jiang et al., 2024). Tokens are sorted by expert, so that each expert
// multiplies one matrix. A token's results are weighted and added in float32. Under autocast
// experts compute in its type, as every linear layer does.
class SparseExpertsImpl : public torch::nn::Module {
 public:
  explicit SparseExpertsImpl(const DecoderConfig& config);

  struct Output {
    at::Tensor x;              // [B, T, width]
    at::Tensor router_logits;  // [B * T, experts]
  };
  // An expert without tokens runs on none of them, so that its gradient is zero rather than
  // undefined and ranks that divide parameters stay in step; with `skip_idle` it does not run, and
  // its weights are not touched.
  Output forward(const at::Tensor& x, bool skip_idle);

 private:
  const int64_t num_chosen_;
  const double jitter_;
  Linear gate_{nullptr};
  std::vector<GatedMlp> experts_;
};
TORCH_MODULE(SparseExperts);

// Returns the loss that keeps the router from always choosing the same experts (Fedus et al., 2021,
// equations 4 to 6): E sum_e f_e p_e, where f_e is the share of (layer, token) pairs that chose e,
// and p_e its mean probability. `router_logits`: for each layer [B * T, E]; `padding`: as from
// PaddingMask(), whose tokens do not count.
at::Tensor LoadBalancingLoss(const std::vector<at::Tensor>& router_logits, int64_t num_chosen,
                             const at::Tensor& padding);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_SPARSE_EXPERTS_H_
