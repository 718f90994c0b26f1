#ifndef MUSTER_TESTS_E2E_TRAINED_SAMPLES_H_
#define MUSTER_TESTS_E2E_TRAINED_SAMPLES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"

namespace muster {

// The samples that a program has trained, in order, also across its checkpoints: numbers from 0.
// Lives as long as the Accelerator saves and loads.
class TrainedSamples {
 public:
  explicit TrainedSamples(Accelerator& accelerator) : accelerator_(accelerator) {
    accelerator.register_for_checkpointing(
        [this] {
          return PlainState{{"samples", seen_}};
        },
        [this](const PlainState& state) { seen_ = state.at("samples"); });
  }
  TrainedSamples(const TrainedSamples&) = delete;
  TrainedSamples& operator=(const TrainedSamples&) = delete;

  // (collective) Adds those of this process's batch, and of the others'.
  void Add(const at::Tensor& batch) {
    const at::Tensor all =
        accelerator_.gather_for_metrics(batch).to(at::kDouble).flatten().contiguous();
    seen_.insert(seen_.end(), all.data_ptr<double>(), all.data_ptr<double>() + all.numel());
  }

  size_t size() const { return seen_.size(); }

  // Returns the number of epochs of `samples` samples that do not have each of them once; one that
  // is not whole counts.
  int64_t InexactEpochs(int64_t samples) const {
    const auto each = static_cast<size_t>(samples);
    int64_t inexact = seen_.size() % each == 0 ? 0 : 1;
    for (size_t first = 0; first + each <= seen_.size(); first += each) {
      std::vector<int> times(each);
      for (size_t i = first; i < first + each; ++i) ++times.at(static_cast<size_t>(seen_[i]));
      inexact += std::count(times.begin(), times.end(), 1) == samples ? 0 : 1;
    }
    return inexact;
  }

 private:
  Accelerator& accelerator_;
  std::vector<double> seen_;
};

}  // namespace muster

#endif  // MUSTER_TESTS_E2E_TRAINED_SAMPLES_H_
