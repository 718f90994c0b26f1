#include "muster/internal/stray_gradients.h"

#include <algorithm>
#include <limits>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "c10/util/Exception.h"
#include "muster/internal/slots.h"

namespace muster::internal {
namespace {

// The distance from 1 to the next number of the tensor's type.
double Rounding(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return std::numeric_limits<at::Half>::epsilon();
    case at::kBFloat16:
      return std::numeric_limits<at::BFloat16>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

}  // namespace

void StrayGradients::Visit(const std::function<void(BackwardWatch::Seen&)>& visit) const {
  std::unordered_set<const void*> prepared;
  for (const auto& optimizer : registry_.optimizers()) {
    for (const at::Tensor& parameter : optimizer->handle().parameters()) {
      prepared.insert(parameter.unsafeGetTensorImpl());
    }
  }
  for (const auto& model : registry_.models()) {
    // Only prepared optimizers have the gradients of sharded models.
    if (model->watch() == nullptr || model->sharded() != nullptr) continue;
    for (const auto& seen : model->watch()->all()) {
      if (prepared.count(seen->parameter.unsafeGetTensorImpl()) == 0) visit(*seen);
    }
  }
}

void StrayGradients::Check(bool scaled) const {
  const bool clips = process_.gradient_clipping() > 0;
  const auto wrong = [&](const BackwardWatch::Seen& seen) -> const char* {
    if (scaled) return "which hold the loss scale of fp16";
    if (seen.partial) return "which were those of a part of the accumulation window";
    if (!clips || seen.clipped) return nullptr;
    return "which options.gradient_clipping (gradient_clipping of a DeepSpeed config) does not "
           "clip";
  };
  std::vector<const BackwardWatch::Seen*> strays;
  std::vector<at::Tensor> changed;
  Visit([&](BackwardWatch::Seen& seen) {
    // If another backward pass has added gradients, the step may have used only those.
    if (seen.plain || wrong(seen) == nullptr) return;
    at::Tensor one = seen.Changed();
    if (!one.defined()) return;
    strays.push_back(&seen);
    changed.push_back(std::move(one));
  });
  // The code from here on waits for a GPU, once.
  if (strays.empty()) return;
  if (std::any_of(changed.begin(), changed.end(),
                  [&](const at::Tensor& one) { return one.device() != changed[0].device(); })) {
    for (at::Tensor& one : changed) one = one.cpu();
  }
  if (!at::stack(changed).any().item<bool>()) return;
  std::vector<const BackwardWatch::Seen*> stepped;
  for (size_t i = 0; i < strays.size(); ++i) {
    if (changed[i].item<bool>() && !IsCopyOfStepped(*strays[i])) stepped.push_back(strays[i]);
  }
  // Each model may be the average of another model.
  for (const auto& model : registry_.models()) {
    std::vector<const BackwardWatch::Seen*> own, others;
    for (const BackwardWatch::Seen* const one : stepped) {
      const bool belongs = model->watch() != nullptr && model->watch()->Find(one->parameter) == one;
      (belongs ? own : others).push_back(one);
    }
    if (AreAverages(own)) stepped = std::move(others);
  }
  if (stepped.empty()) return;
  const BackwardWatch::Seen& stray = *stepped[0];
  TORCH_CHECK(
      false, "backward(): parameter '", stray.name,
      "' of a prepared model has changed since the last backward pass, and no prepared optimizer "
      "has it: an optimizer that was not given to prepare() has stepped on its gradients, ",
      wrong(stray), "; prepare() that optimizer",
      clips && !scaled && !stray.partial ? ", or call clip_grad_norm_()" : "");
}

bool StrayGradients::IsCopyOfStepped(const BackwardWatch::Seen& changed) const {
  const at::NoGradGuard no_grad;
  const at::Tensor& now = changed.parameter;
  for (const auto& optimizer : registry_.optimizers()) {
    for (const at::Tensor& master : optimizer->handle().parameters()) {
      if (master.sizes() != now.sizes()) continue;
      // Compare a few elements first: many layers have equal shapes.
      if (changed.Before().defined() && !at::equal(changed.At(master).to(now.scalar_type()),
                                                   changed.At(now).to(now.scalar_type()))) {
        continue;
      }
      if (at::equal(master.to(now.options()), now)) return true;
    }
  }
  return false;
}

bool StrayGradients::AreAverages(const std::vector<const BackwardWatch::Seen*>& changed) const {
  // The test: new = old + weight * (other - old), with one weight from 0 to 1 for all elements. A
  // step along gradients is nowhere near that.
  const auto average_with = [&](ModelSlot& other) {
    std::unordered_map<std::string, at::Tensor> parameters;
    for (const auto& [name, parameter] : other.source().parameters()) {
      parameters.emplace(name, parameter);
    }
    std::vector<at::Tensor> ways, moves, sizes;
    for (const BackwardWatch::Seen* const seen : changed) {
      const auto same = parameters.find(seen->name);
      const at::Tensor before = seen->Before();
      if (same == parameters.end() || same->second.is_same(seen->parameter) ||
          same->second.sizes() != seen->parameter.sizes() || !before.defined()) {
        return false;
      }
      const at::Tensor target = seen->At(same->second);
      const double rounding = std::max(Rounding(seen->parameter), Rounding(same->second));
      ways.push_back(target - before);
      moves.push_back(seen->At(seen->parameter) - before);
      sizes.push_back((before.abs() + target.abs()) * rounding);
    }
    const at::Tensor way = at::cat(ways), move = at::cat(moves);
    const at::Tensor most = way.abs().argmax();
    const double weight = (move.take(most) / way.take(most)).item<double>();
    if (!(weight > 0 && weight <= 1)) return false;
    const at::Tensor tolerance = at::cat(sizes) * 4;
    // One element proves nothing, nor do differences that rounding hides.
    return (way * weight).abs().gt(tolerance).sum().item<int64_t>() >= 2 &&
           move.sub(way * weight).abs().le(tolerance).all().item<bool>();
  };
  return changed.empty() ||
         std::any_of(registry_.models().begin(), registry_.models().end(), [&](const auto& model) {
           return model->sharded() == nullptr && average_with(*model);
         });
}

void StrayGradients::Record(bool whole) const {
  Visit([&](BackwardWatch::Seen& seen) {
    // The gradient is complete, in whichever passes it came.
    if (whole) seen.partial = false;
    if (seen.pass != passes_.last()) return;
    seen.Record();
    seen.clipped = false;
    seen.partial = !whole;
  });
}

void StrayGradients::NoteClipped(const std::vector<at::Tensor>& parameters) const {
  for (const at::Tensor& parameter : parameters) {
    for (const auto& model : registry_.models()) {
      if (model->watch() == nullptr) continue;
      if (BackwardWatch::Seen* const seen = model->watch()->Find(parameter)) seen->clipped = true;
    }
  }
}

void StrayGradients::Forget() const {
  for (const auto& model : registry_.models()) {
    if (model->watch() == nullptr) continue;
    for (const auto& seen : model->watch()->all()) seen->version = -1;
  }
}

}  // namespace muster::internal
