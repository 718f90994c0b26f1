#include "worker/train/schedule_config.h"

#include <string>

#include "c10/util/Exception.h"
#include "nlohmann/json.hpp"

namespace muster {

LrSchedulePtr MakeLrSchedule(const nlohmann::json& d) {
  const std::string type = d.at("type").get<std::string>();
  const auto integer = [&d](const char* name) { return d.at(name).get<int64_t>(); };
  const auto number = [&d](const char* name) { return d.at(name).get<double>(); };
  if (type == "lambda_linear") return LinearWithWarmup(integer("warmup"), integer("total"));
  if (type == "lambda_cosine") return CosineWithWarmup(integer("warmup"), integer("total"));
  if (type == "constant_with_warmup") return ConstantWithWarmup(integer("warmup"));
  if (type == "inverse_sqrt") return InverseSqrtWithWarmup(integer("warmup"));
  if (type == "StepLR") return StepLR(integer("step_size"), d.value("gamma", 0.1));
  if (type == "MultiStepLR") {
    return MultiStepLR(d.at("milestones").get<std::vector<int64_t>>(), d.value("gamma", 0.1));
  }
  if (type == "ExponentialLR") return ExponentialLR(number("gamma"));
  if (type == "ConstantLR") {
    return ConstantLR(d.value("factor", 1.0 / 3), d.value("total_iters", int64_t{5}));
  }
  if (type == "LinearLR") {
    return LinearLR(d.value("start_factor", 1.0 / 3), d.value("end_factor", 1.0),
                    d.value("total_iters", int64_t{5}));
  }
  if (type == "PolynomialLR") {
    return PolynomialLR(d.value("total_iters", int64_t{5}), d.value("power", 1.0));
  }
  if (type == "CosineAnnealingLR")
    return CosineAnnealingLR(integer("T_max"), d.value("eta_min", 0.0));
  if (type == "CosineAnnealingWarmRestarts") {
    return CosineAnnealingWarmRestarts(integer("T_0"), d.value("T_mult", int64_t{1}),
                                       d.value("eta_min", 0.0));
  }
  if (type == "OneCycleLR") {
    const std::string strategy = d.value("anneal_strategy", std::string("cos"));
    TORCH_CHECK(strategy == "cos" || strategy == "linear", "OneCycleLR's anneal_strategy '",
                strategy, "' is neither cos nor linear");
    return OneCycleLR({.max_lr = number("max_lr"),
                       .total_steps = integer("total_steps"),
                       .pct_start = d.value("pct_start", 0.3),
                       .cosine = strategy == "cos",
                       .cycle_momentum = d.value("cycle_momentum", true),
                       .base_momentum = d.value("base_momentum", 0.85),
                       .max_momentum = d.value("max_momentum", 0.95),
                       .div_factor = d.value("div_factor", 25.0),
                       .final_div_factor = d.value("final_div_factor", 1e4),
                       .three_phase = d.value("three_phase", false)});
  }
  TORCH_CHECK(false, "unknown learning rate schedule '", type, "'");
}

}  // namespace muster
