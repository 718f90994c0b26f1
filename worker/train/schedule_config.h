#ifndef MUSTER_WORKER_TRAIN_SCHEDULE_CONFIG_H_
#define MUSTER_WORKER_TRAIN_SCHEDULE_CONFIG_H_

#include "nlohmann/json_fwd.hpp"
#include "worker/train/lr_scheduler.h"

namespace muster {

// Returns a schedule from its description {"type": ..., arguments by torch's names}. Types:
// lambda_linear and lambda_cosine (warmup, total), constant_with_warmup, inverse_sqrt (warmup),
// StepLR, MultiStepLR, ExponentialLR, ConstantLR, LinearLR, PolynomialLR, CosineAnnealingLR,
// CosineAnnealingWarmRestarts, OneCycleLR. Arguments that have defaults in torch may be missing.
// Throws c10::Error for an unknown type or a bad value, nlohmann's exceptions for a missing or
// mistyped one.
LrSchedulePtr MakeLrSchedule(const nlohmann::json& description);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_SCHEDULE_CONFIG_H_
