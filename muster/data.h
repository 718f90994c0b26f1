#ifndef MUSTER_DATA_H_
#define MUSTER_DATA_H_

// Data sets, batches and loaders: `muster::batches(dataset, 32).shuffle(true)`.
#include "worker/data/batch.h"
#include "worker/data/dataset.h"
#include "worker/data/loader.h"
#include "worker/data/token_dataset.h"
#include "worker/nested/nested.h"

#endif  // MUSTER_DATA_H_
