#ifndef MUSTER_WORKER_CHECKPOINT_SHAPE_TEXT_H_
#define MUSTER_WORKER_CHECKPOINT_SHAPE_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

// Returns "[2, 3]", for messages. A file may give a tensor any number of dimensions: for more than
// LibTorch can have, the text has the first ones and their number.
std::string ShapeText(const std::vector<uint64_t>& shape);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SHAPE_TEXT_H_
