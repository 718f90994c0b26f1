// A job that trains until it is stopped, and prints each trigger with its step: `triggered FOLDER`.
// `triggered resume FOLDER` loads what it has saved and prints it.
#include <unistd.h>

#include <cstdio>
#include <string>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "torch/nn/modules/linear.h"

int main(int argc, char** argv) {
  muster::AcceleratorOptions options;
  options.project.directory = argv[argc - 1];
  const bool resume = argc > 2 && std::string(argv[1]) == "resume";
  return muster::run(
      argc, argv, options, [resume](muster::Accelerator& accelerator, const muster::Arguments&) {
        torch::nn::Linear net(1, 1);
        muster::FusedSGD sgd(net->parameters());
        auto [model, optimizer] = accelerator.prepare(net, sgd);
        const int rank = accelerator.process_index();
        const auto say_state = [&](const char* what) {
          std::printf("%s after %ld with weight %.9g\n", what,
                      static_cast<long>(accelerator.global_step()), net->weight.item<float>());
          std::fflush(stdout);
        };
        if (resume) {
          if (absl::Status s = accelerator.load_state(); !s.ok()) return s;
          say_state("resumed");
          return absl::OkStatus();
        }
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
            if (absl::Status s = accelerator.set_trigger("mark", "from 2"); !s.ok()) return s;
          }
          if (const auto trigger = accelerator.check_trigger("mark")) {
            std::printf("marked after %ld by %d: %s\n", step, trigger->raised_by,
                        trigger->payload.c_str());
            std::fflush(stdout);
          }
          if (!accelerator.should_stop()) continue;
          if (absl::Status s = accelerator.save_state(); !s.ok()) return s;
          say_state("stopped");
          return absl::OkStatus();
        }
      });
}
