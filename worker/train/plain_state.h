#ifndef MUSTER_WORKER_TRAIN_PLAIN_STATE_H_
#define MUSTER_WORKER_TRAIN_PLAIN_STATE_H_

#include <map>
#include <string>
#include <vector>

namespace muster {

// The state of a small object as named rows of numbers, for the manifest of a checkpoint. Integers
// are exact up to 2^53. It contains no tensors, so it can be written as JSON with 17 digits and
// read back to the same bits.
using PlainState = std::map<std::string, std::vector<double>>;

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_PLAIN_STATE_H_
