#ifndef MUSTER_BASE_STATUS_MACROS_H_
#define MUSTER_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns the status of `expr` from the function unless it is OK. Not for public headers.
#define MUSTER_RETURN_IF_ERROR(expr)                                                         \
  do {                                                                                       \
    if (::absl::Status muster_status_ = (expr); !muster_status_.ok()) return muster_status_; \
  } while (false)

#define MUSTER_STATUS_CONCAT_INNER_(a, b) a##b
#define MUSTER_STATUS_CONCAT_(a, b) MUSTER_STATUS_CONCAT_INNER_(a, b)

// `MUSTER_ASSIGN_OR_RETURN(auto x, F())`: x is the value of the StatusOr, or the function returns
// its status.
#define MUSTER_ASSIGN_OR_RETURN(lhs, expr) \
  MUSTER_ASSIGN_OR_RETURN_IMPL_(MUSTER_STATUS_CONCAT_(muster_statusor_, __LINE__), lhs, expr)
#define MUSTER_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                                  \
  if (!result.ok()) return std::move(result).status();   \
  lhs = *std::move(result)

#endif  // MUSTER_BASE_STATUS_MACROS_H_
