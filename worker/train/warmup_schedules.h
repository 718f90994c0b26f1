#ifndef MUSTER_WORKER_TRAIN_WARMUP_SCHEDULES_H_
#define MUSTER_WORKER_TRAIN_WARMUP_SCHEDULES_H_

#include <cstdint>

#include "worker/train/lr_scheduler.h"

// DeepSpeed's schedules (deepspeed/runtime/lr_schedules.py). Their first step is step 0, and they
// have a separate rate before it, so the rate of update s, counted from 0, is that of step i = s -
// 1. `warmup_steps` below 2 counts as 2, as in DeepSpeed.
namespace muster {

struct WarmupOptions {
  double min_lr = 0;
  double max_lr = 1e-3;
  int64_t warmup_steps = 1000;
  bool logarithmic = true;  // warmup_type "log"; false: "linear"
};

// With w = warmup_steps and g(i) = ln(i + 1) / ln(w), or i / w if not logarithmic:
// min_lr for i < 0; min_lr + (max_lr - min_lr) * g(i) for i < w; then max_lr. It ignores the base
// rate.
LrSchedulePtr WarmupLR(const WarmupOptions& options);
// The same up to w; then min_lr + (max_lr - min_lr) * max(0, (total - i) / max(1, total - w)).
LrSchedulePtr WarmupDecayLR(const WarmupOptions& options, int64_t total_steps);

struct WarmupCosineOptions {
  double min_ratio = 0;  // warmup_min_ratio
  double cosine_min_ratio = 1e-4;
  int64_t warmup_steps = 1000;
  bool logarithmic = true;
};

// The base rate times a ratio: 0 for i < 0; min_ratio + (1 - min_ratio) * g(i) for i < w; then
// c + (1 - c) * (1 + cos(pi * min(1, (i - w + 1) / max(1, total - w)))) / 2 with
// c = cosine_min_ratio.
LrSchedulePtr WarmupCosineLR(const WarmupCosineOptions& options, int64_t total_steps);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_WARMUP_SCHEDULES_H_
