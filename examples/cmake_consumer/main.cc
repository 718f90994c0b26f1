// The smallest program worth distributing: fits a line, on one process or, under `muster launch`,
// on many.
#include "muster/muster.h"

absl::Status Train(muster::Accelerator& accelerator) {
  muster::set_seed(7);
  torch::Tensor x = torch::rand({512, 1});
  torch::Tensor y = 3 * x + 1;

  torch::nn::Linear net(1, 1);
  torch::optim::SGD sgd(net->parameters(), /*lr=*/0.5);
  auto [model, optimizer, points] = accelerator.prepare(
      net, sgd,
      muster::batches(muster::TensorDataset<torch::Tensor, torch::Tensor>(x, y), 32).shuffle(true));

  for (int64_t epoch : accelerator.epochs(20)) {
    double sum = 0, count = 0;
    for (auto& [inputs, targets] : points) {
      auto scope = accelerator.accumulate();
      torch::Tensor loss = torch::mse_loss(model(inputs), targets);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      sum += accelerator.reduce(loss.detach(), "mean").item<double>();
      ++count;
    }
    if (epoch % 5 == 4) accelerator.print("epoch %ld: loss %.6f\n", epoch, sum / count);
  }
  accelerator.print("y = %.3f x + %.3f, on %d process(es)\n", net->weight.item<double>(),
                    net->bias.item<double>(), accelerator.num_processes());
  return absl::OkStatus();
}

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
