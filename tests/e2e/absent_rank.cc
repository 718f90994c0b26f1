// A job whose rank 1 makes two steps and then never comes to the barrier that rank 0 waits in.
#include <unistd.h>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "torch/nn/modules/linear.h"

int main(int argc, char** argv) {
  return muster::run(argc, argv, [](muster::Accelerator& accelerator) {
    torch::nn::Linear net(1, 1);
    muster::FusedSGD sgd(net->parameters());
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (int step = 0; step < 2; ++step) {
      accelerator.backward(model(at::ones({1, 1})).sum());
      optimizer.step();
      optimizer.zero_grad();
    }
    accelerator.wait_for_everyone();
    if (accelerator.process_index() == 1) {
      for (;;) pause();
    }
    accelerator.wait_for_everyone(absl::Seconds(2));
    return absl::OkStatus();
  });
}
