#ifndef MUSTER_WORKER_DATA_DATA_ERROR_H_
#define MUSTER_WORKER_DATA_DATA_ERROR_H_

#include <stdexcept>
#include <string>

namespace muster {

// Reading or collating data failed. The text names the batch and the samples, then what the data
// set said. Thrown in the thread that iterates, whatever thread did the reading.
class DataError : public std::runtime_error {
 public:
  explicit DataError(const std::string& what) : std::runtime_error(what) {}
};

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_DATA_ERROR_H_
