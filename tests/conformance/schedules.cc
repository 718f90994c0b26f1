#include "tests/conformance/schedules.h"

#include <stdexcept>
#include <string>

namespace muster::conformance {

LrSchedulePtr ScheduleFromJson(const nlohmann::json& s) {
  const std::string type = s.at("type");
  if (type == "lambda_linear") return LinearWithWarmup(s.at("warmup"), s.at("total"));
  if (type == "lambda_cosine") return CosineWithWarmup(s.at("warmup"), s.at("total"));
  if (type == "StepLR") return StepLR(s.at("step_size"), s.value("gamma", 0.1));
  if (type == "MultiStepLR") return MultiStepLR(s.at("milestones"), s.value("gamma", 0.1));
  if (type == "ExponentialLR") return ExponentialLR(s.at("gamma"));
  if (type == "ConstantLR") {
    return ConstantLR(s.value("factor", 1.0 / 3), s.value("total_iters", int64_t{5}));
  }
  if (type == "LinearLR") {
    return LinearLR(s.value("start_factor", 1.0 / 3), s.value("end_factor", 1.0),
                    s.value("total_iters", int64_t{5}));
  }
  if (type == "PolynomialLR") {
    return PolynomialLR(s.value("total_iters", int64_t{5}), s.value("power", 1.0));
  }
  if (type == "CosineAnnealingLR") return CosineAnnealingLR(s.at("T_max"), s.value("eta_min", 0.0));
  if (type == "OneCycleLR") {
    return OneCycleLR({.max_lr = s.at("max_lr"),
                       .total_steps = s.at("total_steps"),
                       .pct_start = s.value("pct_start", 0.3),
                       .cycle_momentum = s.value("cycle_momentum", true)});
  }
  throw std::invalid_argument("scheduler: unknown type " + type);
}

}  // namespace muster::conformance
