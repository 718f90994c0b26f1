#ifndef MUSTER_NN_H_
#define MUSTER_NN_H_

// Modules in addition to LibTorch's: SyncBatchNorm, which prepare() binds to the processes of the
// job.
#include "worker/parallel/sync_batch_norm.h"

#endif  // MUSTER_NN_H_
