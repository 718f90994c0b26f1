#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "c10/util/Exception.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"
#include "tests/conformance/tensor_json.h"
#include "worker/train/accumulation.h"
#include "worker/train/clip.h"
#include "worker/train/grad_scaler.h"
#include "worker/train/optimizer.h"
#include "worker/train/prepared_scheduler.h"
#include "worker/train/schedule_config.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Returns what Accelerator::accumulate() gets: the facts of a loader's batch.
BatchFacts Facts(int64_t batch, int64_t num_batches) {
  return {.is_last = batch + 1 == num_batches, .batches_left = num_batches - batch - 1};
}

// Ignores `adjust_scheduler`, as Accelerate does (the cases record that); Muster's own is opt-in.
Json LrSchedulerCase(const Json& in) {
  at::Tensor weight = at::zeros({1}).requires_grad_(true);
  FusedSGD optimizer({weight}, {.lr = in.at("base_lr").get<double>()});
  LrScheduler scheduler(optimizer, MakeLrSchedule(in.at("scheduler")));
  PreparedScheduler prepared(
      scheduler, {.step_with_optimizer = in.at("step_scheduler_with_optimizer").get<bool>(),
                  .units = SchedulerUnits::kProcesses,
                  .num_processes = RanksOf(in),
                  .split_batches = in.at("split_batches").get<bool>()});
  Accumulation accumulation({.num_steps = IntOf(in, "gradient_accumulation_steps", 1)});
  const auto overflow = in.at("overflow_steps").get<std::set<int64_t>>();
  GradScaler scaler({.enabled = !overflow.empty()});

  Json out = {{"initial_lr", optimizer.lr(0)},
              {"lr", Json::array()},
              {"sync", Json::array()},
              {"scheduler_steps", Json::array()},
              {"skipped", Json::array()}};
  const int64_t num_batches = IntOf(in, "num_batches");
  const int64_t epochs = IntOf(in, "epochs");
  int64_t micro_step = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    for (int64_t batch = 0; batch < num_batches; ++batch, ++micro_step) {
      const MicroStep step = accumulation.Begin(Facts(batch, num_batches));
      const at::Tensor loss = weight.mul(overflow.count(micro_step) ? kInf : 1.0).sum();
      scaler.Scale(loss.div(step.divisor)).backward();
      bool skipped = false;
      if (step.sync) {
        scaler.Step(optimizer);
        scaler.Update();
        skipped = scaler.step_was_skipped(optimizer);
      }
      prepared.Step(step, skipped);
      if (step.sync) optimizer.ZeroGrad();
      out["lr"].push_back(optimizer.lr(0));
      out["sync"].push_back(step.sync);
      out["scheduler_steps"].push_back(scheduler.step_count());
      out["skipped"].push_back(skipped);
    }
  }
  return out;
}

// The micro-steps of a grad_accumulation case, each with a real gradient and optimizer step.
class AccumulationScript {
 public:
  explicit AccumulationScript(const Json& in)
      : in_(in),
        num_processes_(RanksOf(in)),
        accumulation_({.num_steps = IntOf(in, "gradient_accumulation_steps", 1),
                       .sync_with_dataloader = in.at("sync_with_dataloader").get<bool>(),
                       .sync_each_batch = in.at("sync_each_batch").get<bool>()}),
        weight_(at::zeros({1}).requires_grad_(true)),
        optimizer_({weight_}, {.lr = 1}) {}

  Json Run() {
    for (const Json& op : in_.at("script")) {
      const std::string name = op.at("op").get<std::string>();
      if (name == "free") {
        for (int64_t i = 0; i < op.at("n").get<int64_t>(); ++i) Step(nullptr, i, std::nullopt);
      } else {
        TORCH_CHECK(name == "train", "unknown op '", name, "'");
        Train(op);
      }
    }
    return {{"steps", std::move(steps_)}};
  }

 private:
  const Json& in_;
  const int num_processes_;
  Accumulation accumulation_;
  at::Tensor weight_;
  FusedSGD optimizer_;
  Json steps_ = Json::array();

  void Train(const Json& op) {
    const int64_t dl = op.at("dl").get<int64_t>();
    const int64_t length = in_.at("dataloaders").at(dl).get<int64_t>();
    const int64_t end =
        op.contains("stop_after") ? std::min(length, op["stop_after"].get<int64_t>()) : length;
    std::set<int64_t> inner_after;
    if (op.contains("inner")) inner_after = op["inner"].at("after").get<std::set<int64_t>>();
    for (int64_t epoch = 0; epoch < op.value("epochs", int64_t{1}); ++epoch) {
      for (int64_t batch = 0; batch < end; ++batch) {
        Step(dl, batch, Facts(batch, length));
        if (inner_after.count(batch) && op["inner"].at("train").get<bool>()) {
          const int64_t inner = op["inner"].at("dl").get<int64_t>();
          const int64_t inner_length = in_.at("dataloaders").at(inner).get<int64_t>();
          for (int64_t i = 0; i < inner_length; ++i) Step(inner, i, Facts(i, inner_length));
        }
      }
    }
  }

  void Step(const Json& dl, int64_t batch, const std::optional<BatchFacts>& facts) {
    const MicroStep step = accumulation_.Begin(facts);
    weight_.sum().div(step.divisor).backward();
    const double before = weight_.item<double>();
    if (step.sync) {
      ScaleGradients({weight_}, step.gradient_factor);
      optimizer_.Step();
      optimizer_.ZeroGrad();
    }
    Json comm;
    if (num_processes_ > 1) comm = step.communicate;
    steps_.push_back({{"dl", dl},
                      {"batch", batch},
                      {"sync", step.sync},
                      {"stepped", weight_.item<double>() != before},
                      {"comm", std::move(comm)}});
  }
};

Json GradAccumulationCase(const Json& in) { return AccumulationScript(in).Run(); }

Json ClipGradCase(const Json& in) {
  const at::ScalarType dtype = DtypeFromName(in.at("dtype"));
  std::vector<at::Tensor> parameters;
  for (const Json& grad : in.at("grads")) {
    at::Tensor parameter = at::zeros({0}, dtype);
    if (!grad.is_null()) {
      const at::Tensor value = TensorFromJson(grad.at("values"), dtype, grad.at("shape"));
      parameter = at::zeros_like(value);
      parameter.mutable_grad() = value;
    }
    parameters.push_back(parameter);
  }
  Json out = {{"total_norm", nullptr}, {"grads", Json::array()}};
  if (in.contains("clip_value") && !in["clip_value"].is_null()) {
    ClipGradValue(parameters, NumberFromJson(in["clip_value"]));
  } else {
    const at::Tensor norm = ClipGradNorm(parameters, NumberFromJson(in.at("max_norm")),
                                         NumberFromJson(in.at("norm_type")));
    out["total_norm"] = NumberToJson(norm.item<double>());
  }
  for (const at::Tensor& parameter : parameters) {
    out["grads"].push_back(parameter.grad().defined() ? TensorToJson(parameter.grad()) : Json());
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
