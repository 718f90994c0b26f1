// A job that trains until it is told to stop, and says what it was told after which step.
#include <unistd.h>

#include <cstdio>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "torch/nn/modules/linear.h"

int main(int argc, char** argv) {
  muster::AcceleratorOptions options;
  options.project.directory = argv[argc - 1];
  return muster::run(argc, argv, options,
                     [](muster::Accelerator& accelerator, const muster::Arguments&) {
                       torch::nn::Linear net(1, 1);
                       muster::FusedSGD sgd(net->parameters());
                       auto [model, optimizer] = accelerator.prepare(net, sgd);
                       const int rank = accelerator.process_index();
                       while (true) {
                         accelerator.backward(model(at::ones({1, 1})).sum());
                         optimizer.step();
                         optimizer.zero_grad();
                         const long step = accelerator.global_step();
                         if (step == 10) {
                           std::printf("pid %d of rank %d\n", getpid(), rank);
                           std::fflush(stdout);
                         }
                         if (step == 20 && rank == 2) {
                           if (absl::Status s = accelerator.set_trigger("mark", "from 2"); !s.ok())
                             return s;
                         }
                         if (const auto trigger = accelerator.check_trigger("mark")) {
                           std::printf("marked after %ld by %d: %s\n", step, trigger->raised_by,
                                       trigger->payload.c_str());
                           std::fflush(stdout);
                         }
                         if (!accelerator.should_stop()) continue;
                         if (absl::Status s = accelerator.save_state(); !s.ok()) return s;
                         std::printf("stopped after %ld\n", step);
                         std::fflush(stdout);
                         return absl::OkStatus();
                       }
                     });
}
