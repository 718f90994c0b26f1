#ifndef MUSTER_INTERNAL_TEST_PARTS_H_
#define MUSTER_INTERNAL_TEST_PARTS_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "muster/internal/loop_tracker.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "muster/internal/step_controller.h"
#include "worker/collective/local_comm.h"
#include "worker/data/loader.h"
#include "worker/job/join_job.h"

// The building blocks of the tests of single parts of an Accelerator.
namespace muster::internal {

// A loader that only has a place.
class PlaceOnlyLoader : public LoaderStateHandle {
 public:
  explicit PlaceOnlyLoader(std::string signature) : signature_(std::move(signature)) {}

  LoaderState State() const override { return state; }
  std::map<std::string, at::Tensor> StateTensors() const override { return {}; }
  void CheckState(const LoaderState&, const std::map<std::string, at::Tensor>&) const override {}
  void LoadState(const LoaderState& loaded, const std::map<std::string, at::Tensor>&) override {
    state = loaded;
  }
  uint64_t live_pass() const override { return pass; }
  LoaderState StateBeforeBatch() const override {
    LoaderState before = state;
    --before.index;
    return before;
  }
  std::string signature() const override { return signature_; }
  LoaderState NextState() const override { return state; }
  int64_t passes() const override { return 0; }
  bool shuffles() const override { return false; }
  void OverrideEvenBatches(std::optional<bool>) override {}

  LoaderState state;
  uint64_t pass = 0;

 private:
  const std::string signature_;
};

// A single process with the parts of an Accelerator.
struct Parts {
  explicit Parts(const AcceleratorOptions& options = {})
      : process(options, Alone(options)),
        registry([this] { ++forgotten; }),
        loops(registry, [] {}),
        steps(process, registry, loops) {}

  static JoinedProcess Alone(const AcceleratorOptions& options) {
    JoinedProcess process;
    process.environment.gradient_accumulation_steps = {
        static_cast<int>(options.gradient_accumulation_steps.value_or(1)), "argument"};
    process.environment.mixed_precision.value = options.mixed_precision.value_or("no");
    process.comm = std::make_unique<LocalComm>();
    return process;
  }

  int forgotten = 0;  // optimizers that were forgotten
  Process process;
  Registry registry;
  LoopTracker loops;
  StepController steps;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_TEST_PARTS_H_
