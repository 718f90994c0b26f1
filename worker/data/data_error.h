#ifndef MUSTER_WORKER_DATA_DATA_ERROR_H_
#define MUSTER_WORKER_DATA_DATA_ERROR_H_

#include <exception>
#include <stdexcept>
#include <string>

#include "c10/util/Exception.h"

namespace muster {

// Thrown when reading or collating data failed. The text names the batch and the samples, followed
// by the data set's own error. Thrown in the iterating thread, whichever thread read the data.
class DataError : public std::runtime_error {
 public:
  explicit DataError(const std::string& what) : std::runtime_error(what) {}
};

// Returns an exception's text without the stack trace that LibTorch's exceptions carry.
inline std::string ErrorText(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_DATA_ERROR_H_
