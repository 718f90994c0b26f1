// LBFGS, which evaluates the loss several times in a step: step(closure). On several processes each
// evaluation is that of all their samples.
#include "examples/loops/result.h"
#include "muster/muster.h"

namespace {

absl::Status Train(muster::Accelerator& accelerator) {
  muster::set_seed(1);
  constexpr int64_t kSamples = 512;
  const torch::Tensor inputs = torch::randn({kSamples, 8});
  const torch::Tensor labels =
      (inputs.matmul(torch::randn({8, 1})) + 0.5 * torch::randn({kSamples, 1}) > 0)
          .to(torch::kFloat32);
  torch::nn::Linear net(8, 1);
  torch::optim::LBFGS lbfgs(
      net->parameters(), torch::optim::LBFGSOptions(1).max_iter(10).line_search_fn("strong_wolfe"));

  // Uses one batch, which is all the data: LBFGS compares losses, so they must be of the same
  // samples.
  auto [model, optimizer, samples] = accelerator.prepare(
      net, lbfgs,
      muster::batches(muster::TensorDataset<torch::Tensor, torch::Tensor>(inputs, labels),
                      (kSamples - 1) / accelerator.num_processes() + 1));

  for (int64_t epoch : accelerator.epochs(3)) {
    for (auto& [x, y] : samples) {
      const torch::Tensor loss = optimizer.step([&] {
        optimizer.zero_grad();
        torch::Tensor loss = torch::binary_cross_entropy_with_logits(model(x), y);
        accelerator.backward(loss);
        return loss;
      });
      accelerator.print("epoch %ld: loss %.5f\n", epoch, loss.item<double>());
    }
  }

  torch::NoGradGuard no_grad;
  const torch::Tensor loss = torch::binary_cross_entropy_with_logits(
      model(inputs.to(accelerator.device())), labels.to(accelerator.device()));
  return Report(accelerator, "lbfgs: loss", loss.item<double>(), 0.25, model->parameters());
}

}  // namespace

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
