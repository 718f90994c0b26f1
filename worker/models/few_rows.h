#ifndef MUSTER_WORKER_MODELS_FEW_ROWS_H_
#define MUSTER_WORKER_MODELS_FEW_ROWS_H_

#include <cstdint>

namespace muster::models {

// The most rows for which the kernel for few rows (few_rows_linear.h) is worth it.
inline constexpr int64_t kFewRows = 8;

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_FEW_ROWS_H_
