#ifndef MUSTER_NN_H_
#define MUSTER_NN_H_

// Modules in addition to LibTorch's: SyncBatchNorm, which prepare() binds to the processes of the
// job. And activation_checkpoint(), which runs a module without keeping its activations.
#include "worker/parallel/sync_batch_norm.h"
#include "worker/train/activation_checkpoint.h"

#endif  // MUSTER_NN_H_
