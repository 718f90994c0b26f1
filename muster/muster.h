#ifndef MUSTER_MUSTER_H_
#define MUSTER_MUSTER_H_

// Everything a training program needs.
#include <torch/torch.h>

#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/data.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/track.h"
#include "muster/utils.h"
#include "muster/weights.h"

#endif  // MUSTER_MUSTER_H_
