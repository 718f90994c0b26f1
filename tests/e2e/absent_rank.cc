// A job of two whose rank 1 makes two steps and then
//   stuck   never comes to the barrier that rank 0 waits in: it hangs in a function of its own
//   hang    the same, after it has said so; rank 0 waits for ten minutes
//   desync  waits in another barrier than rank 0
#include <unistd.h>

#include <iostream>
#include <string>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "torch/nn/modules/linear.h"

volatile bool g_forever = true;

// The name that a stack of rank 1 must show.
__attribute__((noinline)) void AugmentImagesForever() {
  while (g_forever) pause();
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  return muster::run(argc, argv, [&](muster::Accelerator& accelerator) {
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
      if (what == "hang") std::cout << "rank 1 hangs" << std::endl;
      if (what != "desync") AugmentImagesForever();
      accelerator.wait_for_everyone(absl::Minutes(10), "evaluated");
    }
    accelerator.wait_for_everyone(what == "stuck" ? absl::Seconds(8) : absl::Minutes(10), "saved");
    return absl::OkStatus();
  });
}
