#include "muster/internal/model_source.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>

#include "ATen/MemoryOverlap.h"
#include "ATen/core/grad_mode.h"
#include "torch/csrc/jit/api/module.h"
#include "torch/nn/modules/embedding.h"

namespace muster::internal {
namespace {

class NnSource : public ModelSource {
 public:
  explicit NnSource(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  const void* identity() const override { return module_.get(); }
  bool held_elsewhere() const override { return module_.use_count() > 1; }
  Named parameters() const override { return Defined(module_->named_parameters()); }
  Named buffers() const override { return Defined(module_->named_buffers()); }
  void MoveTo(at::Device device) override {
    const Named all = parameters();
    const bool deferred =
        std::any_of(all.begin(), all.end(), [](const auto& item) { return item.second.is_meta(); });
    if (!deferred) return module_->to(device);
    for (Named tensors : {all, buffers()}) {
      for (auto& [name, tensor] : tensors) {
        if (!tensor.is_meta()) tensor.set_data(tensor.to(device));
      }
    }
  }
  torch::nn::Module* module() override { return module_.get(); }

 private:
  static Named Defined(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
    Named named;
    for (const auto& item : tensors) {
      if (item.value().defined()) named.emplace_back(item.key(), item.value());
    }
    return named;
  }

  const std::shared_ptr<torch::nn::Module> module_;
};

class JitSource : public ModelSource {
 public:
  explicit JitSource(const torch::jit::Module& module) : module_(module) {}

  const void* identity() const override { return module_._ivalue().get(); }
  // The count includes _ivalue(), a copy of the pointer.
  bool held_elsewhere() const override { return module_._ivalue().use_count() > 2; }
  Named parameters() const override { return Defined(module_.named_parameters()); }
  Named buffers() const override { return Defined(module_.named_buffers()); }
  void MoveTo(at::Device device) override { module_.to(device); }

 private:
  template <class List>
  static Named Defined(const List& tensors) {
    Named named;
    for (const auto& item : tensors) {
      if (item.value.defined()) named.emplace_back(item.name, item.value);
    }
    return named;
  }

  torch::jit::Module module_;
};

}  // namespace

std::unique_ptr<ModelSource> SourceOf(std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<NnSource>(std::move(module));
}

std::unique_ptr<ModelSource> SourceOf(const torch::jit::Module& module) {
  return std::make_unique<JitSource>(module);
}

ModelSource::Named TensorsOf(const ModelSource& model) {
  ModelSource::Named tensors;
  for (auto& [name, tensor] : model.parameters()) tensors.emplace_back(name, tensor.detach());
  for (auto& [name, tensor] : model.buffers()) tensors.emplace_back(name, tensor.detach());
  return tensors;
}

void GiveOwnMemory(const ModelSource::Named& tensors) {
  const at::NoGradGuard no_grad;
  using Place = std::tuple<const void*, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<Place, at::Tensor> given;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.layout() != at::kStrided || tensor.is_meta() ||
        at::has_internal_overlap(tensor) != at::MemOverlap::Yes) {
      continue;
    }
    at::Tensor& own =
        given[{tensor.const_data_ptr(), tensor.sizes().vec(), tensor.strides().vec()}];
    if (!own.defined()) own = tensor.contiguous();
    at::Tensor(tensor).set_data(own);
  }
}

std::vector<at::Tensor> SparseParametersOf(torch::nn::Module& module) {
  std::vector<at::Tensor> sparse;
  for (const auto& part : module.modules()) {
    if (const auto* embedding = part->as<torch::nn::EmbeddingImpl>()) {
      if (embedding->options.sparse()) sparse.push_back(embedding->weight);
    } else if (const auto* bag = part->as<torch::nn::EmbeddingBagImpl>()) {
      if (bag->options.sparse()) sparse.push_back(bag->weight);
    }
  }
  return sparse;
}

}  // namespace muster::internal
