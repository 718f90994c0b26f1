#include "digits.h"
#include "muster/muster.h"

absl::Status Train(muster::Accelerator& accelerator) {
  muster::set_seed(42);
  Net net;
  torch::optim::AdamW adamw(net->parameters(), /*lr=*/1e-2);
  auto [model, optimizer, train_set, test_set] =
      accelerator.prepare(net, adamw, muster::batches(Digits(true), 32).shuffle(true),
                          muster::batches(Digits(false), 128));
  if (absl::Status s = accelerator.load_state_if_present(); !s.ok()) return s;

  for (int64_t epoch : accelerator.epochs(3)) {
    model->train();
    for (auto& [images, labels] : train_set) {
      auto scope = accelerator.accumulate();
      torch::Tensor loss = torch::nll_loss(model(images), labels);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
    }
    model->eval();
    torch::NoGradGuard no_grad;
    int64_t correct = 0, seen = 0;
    for (auto& [images, labels] : test_set) {
      auto [guess, truth] = accelerator.gather_for_metrics(model(images).argmax(1), labels);
      correct += guess.eq(truth).sum().item<int64_t>();
      seen += truth.size(0);
    }
    accelerator.print("epoch %ld: %ld of %ld right\n", epoch, correct, seen);
    if (absl::Status s = accelerator.save_state(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
