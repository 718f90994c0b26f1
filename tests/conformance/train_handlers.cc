#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/Tensor.h"
#include "tests/conformance/handlers.h"
#include "tests/conformance/schedules.h"
#include "tests/conformance/tensor_json.h"
#include "worker/train/accumulation.h"
#include "worker/train/clip.h"
#include "worker/train/lr_scheduler.h"
#include "worker/train/prepared_scheduler.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

class OneRate : public LrTarget {
 public:
  explicit OneRate(double lr) : lr_(lr) {}
  int64_t num_groups() const override { return 1; }
  double lr(int64_t) const override { return lr_; }
  void set_lr(int64_t, double lr) override { lr_ = lr; }

 private:
  double lr_;
};

Json LrSchedulerCase(const Json& in) {
  OneRate rate(in.at("base_lr"));
  LrScheduler inner(rate, ScheduleFromJson(in.at("scheduler")));
  PreparedScheduler scheduler(inner, {.step_with_optimizer = in.at("step_scheduler_with_optimizer"),
                                      .units = SchedulerUnits::kProcesses,
                                      .num_processes = in.at("num_processes"),
                                      .split_batches = in.at("split_batches")});
  Accumulation accumulation({.num_steps = in.at("gradient_accumulation_steps")});
  const std::set<int64_t> overflow = in.at("overflow_steps").get<std::set<int64_t>>();

  Json out = {{"initial_lr", rate.lr(0)}};
  for (const char* list : {"lr", "sync", "scheduler_steps", "skipped"}) out[list] = Json::array();
  const int64_t num_batches = in.at("num_batches"), epochs = in.at("epochs");
  bool overflow_in_window = false;
  for (int64_t micro_step = 0; micro_step < num_batches * epochs; ++micro_step) {
    const int64_t left = num_batches - 1 - micro_step % num_batches;
    const MicroStep step =
        accumulation.Begin(BatchFacts{.is_last = left == 0, .batches_left = left});
    overflow_in_window |= overflow.count(micro_step) > 0;
    const bool skipped = step.sync && overflow_in_window;
    scheduler.Step(step, skipped);
    if (step.sync) overflow_in_window = false;
    out["lr"].push_back(rate.lr(0));
    out["sync"].push_back(step.sync);
    out["scheduler_steps"].push_back(inner.step_count());
    out["skipped"].push_back(skipped);
  }
  return out;
}

// Plays a grad_accumulation script, with the facts of the innermost live loop as an Accelerator
// feeds them.
class ScriptPlayer {
 public:
  explicit ScriptPlayer(const Json& in)
      : loaders_(in.at("dataloaders").get<std::vector<int64_t>>()),
        ranks_(in.at("num_processes")),
        accumulation_({.num_steps = in.at("gradient_accumulation_steps"),
                       .sync_with_dataloader = in.at("sync_with_dataloader"),
                       .sync_each_batch = in.at("sync_each_batch")}) {}

  Json Play(const Json& script) {
    for (const Json& op : script) {
      if (op.at("op") == "free") {
        for (int64_t i = 0; i < op.at("n").get<int64_t>(); ++i) Step(nullptr, i, std::nullopt);
      } else if (op.at("op") == "train") {
        Train(op);
      } else {
        throw std::invalid_argument("script: unknown op " + op.at("op").dump());
      }
    }
    return {{"steps", steps_}};
  }

 private:
  BatchFacts Facts(int64_t loader, int64_t batch) const {
    const int64_t left = loaders_.at(loader) - 1 - batch;
    return {.is_last = left == 0, .batches_left = left};
  }

  void Train(const Json& op) {
    const int64_t loader = op.at("dl");
    const int64_t stop_after = op.value("stop_after", int64_t{-1});
    for (int64_t epoch = 0; epoch < op.value("epochs", int64_t{1}); ++epoch) {
      for (int64_t batch = 0; batch < loaders_.at(loader) && batch != stop_after; ++batch) {
        Step(loader, batch, Facts(loader, batch));
        if (!op.contains("inner")) continue;
        const Json& inner = op.at("inner");
        const std::vector<int64_t> after = inner.at("after");
        if (std::find(after.begin(), after.end(), batch) == after.end()) continue;
        if (!inner.at("train").get<bool>()) continue;
        const int64_t inner_loader = inner.at("dl");
        for (int64_t i = 0; i < loaders_.at(inner_loader); ++i) {
          Step(inner_loader, i, Facts(inner_loader, i));
        }
      }
    }
  }

  void Step(const Json& loader, int64_t batch, const std::optional<BatchFacts>& facts) {
    const MicroStep step = accumulation_.Begin(facts);
    steps_.push_back({{"dl", loader},
                      {"batch", batch},
                      {"sync", step.sync},
                      {"stepped", step.sync},
                      {"comm", ranks_ == 1 ? Json() : Json(step.communicate)}});
  }

  const std::vector<int64_t> loaders_;
  const int64_t ranks_;
  Accumulation accumulation_;
  Json steps_ = Json::array();
};

Json GradAccumulationCase(const Json& in) { return ScriptPlayer(in).Play(in.at("script")); }

Json ClipGradCase(const Json& in) {
  const at::ScalarType dtype = DtypeFromName(in.at("dtype"));
  std::vector<at::Tensor> parameters;
  for (const Json& grad : in.at("grads")) {
    const std::vector<int64_t> shape =
        grad.is_null() ? std::vector<int64_t>{1} : grad.at("shape").get<std::vector<int64_t>>();
    at::Tensor parameter = at::zeros(shape, dtype).requires_grad_();
    if (!grad.is_null()) parameter.mutable_grad() = TensorFromJson(grad.at("values"), dtype, shape);
    parameters.push_back(parameter);
  }
  Json out = {{"total_norm", nullptr}, {"grads", Json::array()}};
  if (in.contains("clip_value") && !in.at("clip_value").is_null()) {
    ClipGradValue(parameters, NumberFromJson(in.at("clip_value")));
  } else {
    const at::Tensor norm = ClipGradNorm(parameters, NumberFromJson(in.at("max_norm")),
                                         NumberFromJson(in.at("norm_type")));
    out["total_norm"] = NumberToJson(norm.item<double>());
  }
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) {
      out["grads"].push_back(nullptr);
      continue;
    }
    out["grads"].push_back(TensorToJson(parameter.grad()));
  }
  return out;
}

}  // namespace

std::map<std::string, Handler> TrainHandlers() {
  return {{"lr_scheduler", LrSchedulerCase},
          {"grad_accumulation", GradAccumulationCase},
          {"clip_grad", ClipGradCase}};
}

}  // namespace muster::conformance
