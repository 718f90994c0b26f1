#include "muster/internal/backward_watch.h"

#include <algorithm>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"

namespace muster::internal {
namespace {

// The number of elements of a parameter that are recorded: enough to tell an average from a step.
constexpr int64_t kPlaces = 4;

}  // namespace

BackwardWatch::BackwardWatch(std::shared_ptr<BackwardPasses> passes,
                             const std::vector<std::pair<std::string, at::Tensor>>& parameters)
    : passes_(std::move(passes)) {
  for (const auto& [name, parameter] : parameters) {
    if (by_tensor_.count(parameter.unsafeGetTensorImpl()) > 0) continue;
    seen_.push_back(std::make_unique<Seen>());
    seen_.back()->parameter = parameter;
    seen_.back()->name = name;
    by_tensor_[parameter.unsafeGetTensorImpl()] = seen_.back().get();
    frozen_.push_back(seen_.back().get());
  }
  Refresh();
}

void BackwardWatch::Seen::Record() {
  const at::NoGradGuard no_grad;
  version = static_cast<int64_t>(parameter._version());
  place = value = at::Tensor();
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined() || grad.layout() != at::kStrided || grad.numel() == 0) return;
  // The largest element of each part, because topk() would copy the whole gradient, in pairs.
  const at::Tensor flat = grad.abs().flatten();
  const int64_t count = std::min(kPlaces, flat.numel());
  std::vector<at::Tensor> places;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = flat.numel() / count * i;
    const int64_t end = i + 1 == count ? flat.numel() : flat.numel() / count * (i + 1);
    places.push_back(flat.narrow(0, begin, end - begin).argmax().add(begin));
  }
  place = at::stack(places);
  value = parameter.detach().take(place);
}

at::Tensor BackwardWatch::Seen::Changed() const {
  if (version < 0) return at::Tensor();
  const at::NoGradGuard no_grad;
  // Moved or converted since: no longer the tensor that was recorded.
  if (place.defined() &&
      (place.device() != parameter.device() || value.scalar_type() != parameter.scalar_type())) {
    return at::Tensor();
  }
  // If there is a recorded value it decides, because copying averages in and back again also
  // changes the version.
  const bool counted = version != static_cast<int64_t>(parameter._version());
  if (!place.defined()) {
    return at::full({}, counted, parameter.options().dtype(at::kBool).requires_grad(false));
  }
  return parameter.detach().take(place).ne(value).any();
}

at::Tensor BackwardWatch::Seen::Before() const {
  return value.defined() ? value.cpu().to(at::kDouble) : at::Tensor();
}

at::Tensor BackwardWatch::Seen::At(const at::Tensor& other) const {
  const at::Tensor here = place.to(other.device());
  return other.detach().take(here).cpu().to(at::kDouble);
}

void BackwardWatch::Refresh() {
  std::erase_if(frozen_, [this](Seen* seen) {
    if (!seen->parameter.requires_grad() || !seen->parameter.is_leaf()) return false;
    observers_.Add(seen->parameter, [seen, passes = passes_](const at::Tensor& added) {
      if (!added.defined()) return;
      if (const int64_t current = passes->current_; current != 0) {
        seen->pass = current;
      } else {
        seen->plain = true;
        passes->any_plain_ = true;
      }
    });
    return true;
  });
}

BackwardWatch::Seen* BackwardWatch::Find(const at::Tensor& parameter) const {
  const auto found = by_tensor_.find(parameter.unsafeGetTensorImpl());
  return found == by_tensor_.end() ? nullptr : found->second;
}

bool BackwardWatch::InLastPass(const at::Tensor& parameter) const {
  const Seen* const seen = Find(parameter);
  return seen != nullptr && seen->pass == passes_->last();
}

bool BackwardWatch::Plain(const at::Tensor& parameter) const {
  const Seen* const seen = Find(parameter);
  return seen != nullptr && seen->plain;
}

}  // namespace muster::internal
