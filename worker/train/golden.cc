#include "worker/train/golden.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "c10/util/Exception.h"
#include "nlohmann/json.hpp"
#include "worker/train/accumulation.h"
#include "worker/train/clip.h"
#include "worker/train/grad_scaler.h"
#include "worker/train/optimizer.h"
#include "worker/train/prepared_scheduler.h"
#include "worker/train/schedule_config.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr double kInf = std::numeric_limits<double>::infinity();

double ToDouble(const Json& value) {
  if (value.is_number()) return value.get<double>();
  const std::string text = value.get<std::string>();
  if (text == "inf") return kInf;
  if (text == "-inf") return -kInf;
  TORCH_CHECK(text == "nan", "'", text, "' is no number");
  return std::numeric_limits<double>::quiet_NaN();
}

Json FromDouble(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

void Flatten(const Json& value, std::vector<double>& out) {
  if (value.is_array()) {
    for (const Json& item : value) Flatten(item, out);
  } else {
    out.push_back(ToDouble(value));
  }
}

Json Nested(const at::Tensor& tensor) {
  if (tensor.dim() == 0) return FromDouble(tensor.item<double>());
  Json list = Json::array();
  for (int64_t i = 0; i < tensor.size(0); ++i) list.push_back(Nested(tensor.select(0, i)));
  return list;
}

// What Accelerator::accumulate() is given: the facts of a loader's batch.
BatchFacts Facts(int64_t batch, int64_t num_batches) {
  return {.is_last = batch + 1 == num_batches, .batches_left = num_batches - batch - 1};
}

}  // namespace

Json RunLrSchedulerCase(const Json& in) {
  at::Tensor weight = at::zeros({1}).requires_grad_(true);
  FusedSGD optimizer({weight}, {.lr = in.at("base_lr").get<double>()});
  LrScheduler scheduler(optimizer, MakeLrSchedule(in.at("scheduler")));
  PreparedScheduler prepared(
      scheduler, {.step_with_optimizer = in.at("step_scheduler_with_optimizer").get<bool>(),
                  .units = SchedulerUnits::kProcesses,
                  .num_processes = in.at("num_processes").get<int>(),
                  .split_batches = in.at("split_batches").get<bool>()});
  Accumulation accumulation({.num_steps = in.at("gradient_accumulation_steps").get<int64_t>()});
  const auto overflow = in.at("overflow_steps").get<std::set<int64_t>>();
  GradScaler scaler({.enabled = !overflow.empty()});

  Json out = {{"initial_lr", optimizer.lr(0)},
              {"lr", Json::array()},
              {"sync", Json::array()},
              {"scheduler_steps", Json::array()},
              {"skipped", Json::array()}};
  const int64_t num_batches = in.at("num_batches").get<int64_t>();
  int64_t micro_step = 0;
  for (int64_t epoch = 0; epoch < in.at("epochs").get<int64_t>(); ++epoch) {
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

namespace {

// The micro-steps of a grad_accumulation case, each with a real gradient and optimizer step.
class AccumulationScript {
 public:
  explicit AccumulationScript(const Json& in)
      : in_(in),
        accumulation_({.num_steps = in.at("gradient_accumulation_steps").get<int64_t>(),
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
    if (in_.at("num_processes").get<int>() > 1) comm = step.communicate;
    steps_.push_back({{"dl", dl},
                      {"batch", batch},
                      {"sync", step.sync},
                      {"stepped", weight_.item<double>() != before},
                      {"comm", std::move(comm)}});
  }
};

}  // namespace

Json RunGradAccumulationCase(const Json& in) { return AccumulationScript(in).Run(); }

Json RunClipGradCase(const Json& in) {
  const std::string dtype = in.at("dtype").get<std::string>();
  TORCH_CHECK(dtype == "F32" || dtype == "F64", "dtype '", dtype, "' is neither F32 nor F64");
  const at::ScalarType type = dtype == "F32" ? at::kFloat : at::kDouble;
  std::vector<at::Tensor> parameters;
  for (const Json& grad : in.at("grads")) {
    at::Tensor parameter = at::zeros({0}, type);
    if (!grad.is_null()) {
      std::vector<double> values;
      Flatten(grad.at("values"), values);
      at::Tensor flat = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
      for (size_t i = 0; i < values.size(); ++i) flat.data_ptr<double>()[i] = values[i];
      const at::Tensor value = flat.to(type).view(grad.at("shape").get<std::vector<int64_t>>());
      parameter = at::zeros_like(value);
      parameter.mutable_grad() = value;
    }
    parameters.push_back(parameter);
  }
  Json out = {{"total_norm", nullptr}, {"grads", Json::array()}};
  if (in.contains("clip_value") && !in["clip_value"].is_null()) {
    ClipGradValue(parameters, ToDouble(in["clip_value"]));
  } else {
    const at::Tensor norm =
        ClipGradNorm(parameters, ToDouble(in.at("max_norm")), ToDouble(in.at("norm_type")));
    out["total_norm"] = FromDouble(norm.item<double>());
  }
  for (const at::Tensor& parameter : parameters) {
    out["grads"].push_back(parameter.grad().defined() ? Nested(parameter.grad()) : Json());
  }
  return out;
}

}  // namespace muster
