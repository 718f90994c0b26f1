// Fine-tunes a TorchScript module, as torch::jit::load() reads one that was written in Python or
// here.
#include <sstream>
#include <vector>

#include "examples/loops/result.h"
#include "muster/muster.h"
#include "torch/script.h"

namespace {

// Returns what a file with a scripted module would hold.
std::string ScriptedModule() {
  torch::jit::Module module("Net");
  module.register_parameter("weight1", 0.3 * torch::randn({8, 32}), /*is_buffer=*/false);
  module.register_parameter("bias1", torch::zeros({32}), /*is_buffer=*/false);
  module.register_parameter("weight2", 0.2 * torch::randn({32, 1}), /*is_buffer=*/false);
  module.register_parameter("bias2", torch::zeros({1}), /*is_buffer=*/false);
  module.define(R"(
    def forward(self, x):
        hidden = torch.tanh(torch.addmm(self.bias1, x, self.weight1))
        return torch.addmm(self.bias2, hidden, self.weight2)
  )");
  std::ostringstream file;
  module.save(file);
  return file.str();
}

absl::Status Train(muster::Accelerator& accelerator) {
  muster::set_seed(1);
  std::istringstream file(ScriptedModule());
  torch::jit::Module module = torch::jit::load(file);
  std::vector<torch::Tensor> parameters;
  for (const torch::Tensor& parameter : module.parameters()) {
    parameters.push_back(parameter.set_requires_grad(true));
  }
  torch::optim::Adam adam(parameters, torch::optim::AdamOptions(1e-2));
  const torch::Tensor inputs = torch::randn({512, 8});
  const torch::Tensor wanted = torch::sin(inputs.sum(1, /*keepdim=*/true));

  auto [model, optimizer, samples] = accelerator.prepare(
      module, adam,
      muster::batches(muster::TensorDataset<torch::Tensor, torch::Tensor>(inputs, wanted),
                      64 / accelerator.num_processes())
          .shuffle(true));

  model->train();
  for ([[maybe_unused]] int64_t epoch : accelerator.epochs(30)) {
    for (auto& [x, y] : samples) {
      auto scope = accelerator.accumulate();
      accelerator.backward(torch::mse_loss(model(x).toTensor(), y));
      optimizer.step();
      optimizer.zero_grad();
    }
  }

  model->eval();
  torch::NoGradGuard no_grad;
  const torch::Tensor loss = torch::mse_loss(model(inputs.to(accelerator.device())).toTensor(),
                                             wanted.to(accelerator.device()));
  return Report(accelerator, "torchscript: squared error", loss.item<double>(), 0.25, parameters);
}

}  // namespace

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
