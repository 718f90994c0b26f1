// Transfer learning with gradual unfreezing: first the new head alone, then the late layer with it,
// then all. Layers join the optimizer, as groups with rates of their own, when they are unfrozen.
#include <memory>
#include <vector>

#include "examples/loops/result.h"
#include "muster/muster.h"

namespace {

struct ClassifierImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return head(torch::relu(late(torch::relu(early(x))))).squeeze(1);
  }
  torch::nn::Linear early{register_module("early", torch::nn::Linear(16, 64))};
  torch::nn::Linear late{register_module("late", torch::nn::Linear(64, 32))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(32, 1))};
};
TORCH_MODULE(Classifier);

void Freeze(torch::nn::Module& layer) {
  for (torch::Tensor& parameter : layer.parameters()) parameter.set_requires_grad(false);
}
void Unfreeze(torch::nn::Module& layer, torch::optim::AdamW& optimizer, double lr) {
  for (torch::Tensor& parameter : layer.parameters()) parameter.set_requires_grad(true);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(
      layer.parameters(), std::make_unique<torch::optim::AdamWOptions>(lr)));
}

absl::Status Train(muster::Accelerator& accelerator) {
  muster::set_seed(1);
  // A program would read pre-trained weights from a file here.
  Classifier net;
  Freeze(*net->early);
  Freeze(*net->late);
  torch::optim::AdamW adamw(net->head->parameters(), torch::optim::AdamWOptions(1e-2));
  const torch::Tensor inputs = torch::randn({1024, 16});
  const torch::Tensor labels = (inputs.select(1, 0) * inputs.select(1, 1) > 0).to(torch::kFloat32);
  const torch::Tensor early_before = net->early->weight.detach().clone();

  auto [model, optimizer, samples] = accelerator.prepare(
      net, adamw,
      muster::batches(muster::TensorDataset<torch::Tensor, torch::Tensor>(inputs, labels),
                      64 / accelerator.num_processes())
          .shuffle(true));
  const auto unchanged = [&] { return model->early->weight.detach().cpu().equal(early_before); };

  for (int64_t epoch : accelerator.epochs(12)) {
    if (epoch == 3) Unfreeze(*model->late, adamw, 5e-3);
    if (epoch == 6) {
      if (!unchanged()) return absl::InternalError("a frozen layer has changed");
      Unfreeze(*model->early, adamw, 2e-3);
    }
    for (auto& [x, y] : samples) {
      auto scope = accelerator.accumulate();
      accelerator.backward(torch::binary_cross_entropy_with_logits(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  if (unchanged()) return absl::InternalError("the layer that was unfrozen last has not changed");

  torch::NoGradGuard no_grad;
  const torch::Tensor loss = torch::binary_cross_entropy_with_logits(
      model(inputs.to(accelerator.device())), labels.to(accelerator.device()));
  return Report(accelerator, "unfreezing: loss", loss.item<double>(), 0.45, model->parameters());
}

}  // namespace

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
