#ifndef MUSTER_WORKER_CHECKPOINT_SHAPE_TEXT_H_
#define MUSTER_WORKER_CHECKPOINT_SHAPE_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

// "[2, 3]", for messages. A file may give a tensor any number of dimensions: of more than LibTorch
// can have, the first ones and how many there are.
std::string ShapeText(const std::vector<uint64_t>& shape);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SHAPE_TEXT_H_
