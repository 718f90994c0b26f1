// Trains a step, saves, and waits: `saving_worker beside|synchronous END`. Each rank prints "saved"
// when the checkpoint is on the disk, and ends when the test writes to the pipe END.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "torch/nn/modules/linear.h"

namespace {

using muster::Accelerator;

absl::Status Train(Accelerator& a, const char* end) {
  torch::nn::Linear net(256, 256);
  muster::FusedAdamW adamw(net->parameters(), {.lr = 0.05});
  auto [model, optimizer] = a.prepare(net, adamw);
  a.backward(model(at::ones({1, 256})).mean());
  optimizer.step();
  optimizer.zero_grad();
  if (absl::Status s = a.save_state(); !s.ok()) return s;
  if (absl::Status s = a.wait_for_checkpoint(); !s.ok()) return s;
  std::printf("saved\n");
  std::fflush(stdout);
  const int pipe = open(end, O_RDONLY | O_CLOEXEC);
  char byte;
  TORCH_CHECK(pipe >= 0 && read(pipe, &byte, 1) == 1, "cannot read ", end);
  close(pipe);
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  muster::AcceleratorOptions options;
  options.cpu = true;
  options.checkpoint.asynchronous = std::string(argv[1]) == "beside";
  return muster::run(argc, argv, options, [&](Accelerator& a) { return Train(a, argv[2]); });
}
