// A GAN in the order of LibTorch's dcgan example: two models and two optimizers, three backward
// passes in a step, detach(), zero_grad() at the head. The generator learns to make points that lie
// where the data lie.
#include "examples/loops/result.h"
#include "muster/muster.h"

namespace {

constexpr int64_t kNoise = 8;

struct GeneratorImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& noise) { return out(torch::relu(norm(in(noise)))); }
  torch::nn::Linear in{
      register_module("in", torch::nn::Linear(torch::nn::LinearOptions(kNoise, 32).bias(false)))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(32))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(32, 2))};
};
TORCH_MODULE(Generator);

absl::Status Train(muster::Accelerator& accelerator) {
  muster::set_seed(1);
  Generator generator_net;
  torch::nn::Sequential discriminator_net(torch::nn::Linear(2, 32), torch::nn::ReLU(),
                                          torch::nn::Linear(32, 1));
  torch::optim::Adam generator_adam(generator_net->parameters(),
                                    torch::optim::AdamOptions(2e-3).betas({0.5, 0.9}));
  torch::optim::Adam discriminator_adam(discriminator_net->parameters(),
                                        torch::optim::AdamOptions(2e-3).betas({0.5, 0.9}));
  const torch::Tensor data =
      torch::randn({2048, 2}) * 0.5 + torch::tensor({2.0, -1.0}, torch::kFloat32);

  auto [generator, discriminator, generator_optimizer, discriminator_optimizer, points] =
      accelerator.prepare(
          generator_net, discriminator_net, generator_adam, discriminator_adam,
          muster::batches(data, 64 / accelerator.num_processes()).shuffle(true).drop_last());
  // The weights start equal on all processes; the noise must differ.
  muster::set_seed(accelerator, 1, /*device_specific=*/true);
  const auto loss = [](const torch::Tensor& score, double label) {
    return torch::binary_cross_entropy_with_logits(score, torch::full_like(score, label));
  };

  for ([[maybe_unused]] int64_t epoch : accelerator.epochs(12)) {
    for (auto& [real] : points) {
      auto scope = accelerator.accumulate();
      discriminator_optimizer.zero_grad();
      accelerator.backward(loss(discriminator(real), 1));
      const torch::Tensor noise = torch::randn({real.size(0), kNoise}).to(accelerator.device());
      const torch::Tensor fake = generator(noise);
      accelerator.backward(loss(discriminator(fake.detach()), 0));
      discriminator_optimizer.step();

      // This pass leaves gradients in the discriminator, too: the next step's zero_grad() drops
      // them.
      generator_optimizer.zero_grad();
      accelerator.backward(loss(discriminator(fake), 1));
      generator_optimizer.step();
    }
  }

  generator->eval();
  torch::NoGradGuard no_grad;
  muster::set_seed(2);
  const torch::Tensor made = generator(torch::randn({2048, kNoise}).to(accelerator.device()));
  const double distance = (made.mean(0).cpu() - data.mean(0)).norm().item<double>();
  std::vector<torch::Tensor> weights = generator->parameters();
  const std::vector<torch::Tensor> others[] = {generator->buffers(), discriminator->parameters()};
  for (const auto& other : others) weights.insert(weights.end(), other.begin(), other.end());
  return Report(accelerator, "gan: distance to the data", distance, 0.7, weights);
}

}  // namespace

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
