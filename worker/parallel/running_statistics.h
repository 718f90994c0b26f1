#ifndef MUSTER_WORKER_PARALLEL_RUNNING_STATISTICS_H_
#define MUSTER_WORKER_PARALLEL_RUNNING_STATISTICS_H_

#include "ATen/core/function_schema.h"
#include "ATen/core/ivalue.h"

namespace muster {

// Operators of batch and instance normalization write running statistics in training, but most of
// their schemas do not say so, and no version counts the change. Pure.

// Whether an argument is a running statistic whose change the schema does not declare.
bool IsUndeclaredStatistic(const c10::Argument& argument);

// Whether an operator with this schema, called with `arguments`, writes such statistics: in
// training, and not in its backward pass.
bool WritesUndeclaredStatistics(const c10::FunctionSchema& schema, const c10::IValue* arguments);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_RUNNING_STATISTICS_H_
