#ifndef MUSTER_OPTIM_H_
#define MUSTER_OPTIM_H_

// Optimizers on LibTorch's fused kernels, their groups of parameters, and learning-rate schedules.
#include "worker/train/lr_scheduler.h"
#include "worker/train/optimizer.h"
#include "worker/train/param_groups.h"
#include "worker/train/warmup_schedules.h"

#endif  // MUSTER_OPTIM_H_
