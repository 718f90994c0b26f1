#include "worker/train/accumulation.h"

#include <algorithm>
#include <cmath>

#include "c10/util/Exception.h"

namespace muster {

Accumulation::Accumulation(const AccumulationOptions& options) : options_(options) {
  TORCH_CHECK(num_steps() >= 1, "gradient_accumulation_steps must be at least 1, got ",
              num_steps());
}

void Accumulation::BeginAlone() {
  current_ = MicroStep();
  current_.divisor = static_cast<double>(num_steps());
  weighted_steps_ = 0;
  weight_ = 0;
  plain_ = false;
}

bool Accumulation::WouldSync(const std::optional<BatchFacts>& batch) const {
  if (options_.sync_with_dataloader && batch.has_value() && batch->is_last) return true;
  return position_ + 1 >= num_steps();
}

MicroStep Accumulation::Begin(const std::optional<BatchFacts>& batch) {
  double divisor = static_cast<double>(num_steps());
  const bool length_known = batch.has_value() && (batch->is_last || batch->batches_left >= 0);
  if (options_.short_window == ShortWindow::kRescale && options_.sync_with_dataloader &&
      length_known) {
    const int64_t left = batch->is_last ? 0 : batch->batches_left;
    divisor = static_cast<double>(std::min(num_steps(), left + 1));
  }
  return BeginWith(WouldSync(batch), divisor);
}

MicroStep Accumulation::Begin(const std::optional<BatchFacts>& /*batch*/, bool agreed_sync) {
  return BeginWith(agreed_sync, static_cast<double>(num_steps()));
}

MicroStep Accumulation::BeginWith(bool sync, double divisor_of_new_window) {
  if (position_ == 0) {
    window_divisor_ = divisor_of_new_window;
    weighted_steps_ = 0;
    weight_ = 0;
  }
  plain_ = false;
  current_ = MicroStep{};
  current_.sync = sync;
  current_.communicate = sync || options_.sync_each_batch;
  current_.divisor = window_divisor_;
  current_.window_length = position_ + 1;
  if (sync && options_.short_window == ShortWindow::kRescale) {
    current_.gradient_factor = window_divisor_ / static_cast<double>(current_.window_length);
  }
  position_ = sync ? 0 : position_ + 1;
  return current_;
}

double Accumulation::PlainDivisor() {
  TORCH_CHECK(weighted_steps_ == 0,
              "backward(loss) in a window whose other losses have weights (numbers of tokens): its "
              "gradients become the mean over all items of the window, among which this loss has "
              "none; add it to the loss of the micro-step before backward(loss, weight), or pass a "
              "weight with no loss of the window");
  plain_ = true;
  return current_.divisor;
}

double Accumulation::WeightedDivisor(double weight) {
  TORCH_CHECK(std::isfinite(weight) && weight >= 0,
              "the weight of a loss (its number of tokens) must be finite and not negative, got ",
              weight);
  TORCH_CHECK(
      !plain_,
      "backward(loss, weight) in a micro-step that has had a loss without a weight: the "
      "gradients of the window become the mean over all its items (tokens), among which "
      "that loss has none; add both up before backward(loss, weight), or pass a weight with "
      "no loss of the window");
  TORCH_CHECK(weighted_steps_ < current_.window_length,
              "a second backward(loss, weight) in micro-step ", current_.window_length,
              " of this window: each has one weight (its number of tokens); add the losses up "
              "before one backward(loss, weight), or begin a micro-step (accumulate()) for each");
  TORCH_CHECK(weighted_steps_ + 1 == current_.window_length, "micro-step ", current_.window_length,
              " of this window has a weighted loss, but ",
              current_.window_length - 1 - weighted_steps_,
              " earlier one(s) of it had none: pass a weight in every micro-step or in none");
  ++weighted_steps_;
  weight_ += weight;
  // A loss of no items must have no gradient. Divided by infinity, it has none unless its formula
  // makes NaN of 0, as a mean over no items does: that is left to the caller.
  return current_.divisor / weight;
}

double Accumulation::WeightedFactor(double total_weight, int world_size) const {
  TORCH_CHECK(weighted_steps_ == current_.window_length, "only ", weighted_steps_, " of the ",
              current_.window_length, " micro-steps of this window had a weighted loss");
  if (total_weight == 0) return 0;
  return current_.divisor * world_size / total_weight;
}

void Accumulation::set_num_steps(int64_t num_steps) {
  TORCH_CHECK(num_steps >= 1, "gradient_accumulation_steps must be at least 1, got ", num_steps);
  options_.num_steps = num_steps;
}

PlainState Accumulation::SaveState() const {
  return {{"position", {static_cast<double>(position_)}},
          {"window_divisor", {window_divisor_}},
          {"weighted_steps", {static_cast<double>(weighted_steps_)}},
          {"weight", {weight_}}};
}

void Accumulation::LoadState(const PlainState& state) {
  const auto value = [&state](const char* name) {
    const auto it = state.find(name);
    TORCH_CHECK(it != state.end() && it->second.size() == 1,
                "gradient accumulation state has no number '", name, "'");
    return it->second[0];
  };
  const auto position = static_cast<int64_t>(value("position"));
  const double divisor = value("window_divisor");
  const auto weighted_steps = static_cast<int64_t>(value("weighted_steps"));
  const double weight = value("weight");
  TORCH_CHECK(position >= 0 && divisor >= 1 && weight >= 0 && weighted_steps >= 0,
              "gradient accumulation state is out of range: position ", position,
              ", window_divisor ", divisor);
  position_ = position;
  window_divisor_ = divisor;
  weighted_steps_ = weighted_steps;
  weight_ = weight;
}

}  // namespace muster
