#ifndef MUSTER_EXAMPLES_MNIST_IDX_H_
#define MUSTER_EXAMPLES_MNIST_IDX_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

// The unsigned-byte array of an IDX file, row by row: images are [count, height, width], labels
// [count].
struct IdxArray {
  std::vector<int64_t> sizes;
  std::vector<uint8_t> values;
};

// Reads an IDX file: two zero bytes, the element type (8: unsigned byte), the number of dimensions,
// each dimension as a big-endian 32-bit number, then the elements. Blocks on the disk. Errors name
// the file, what was expected and what was found, and how to get the right one: NOT_FOUND,
// INVALID_ARGUMENT (not IDX, another element type, other than `dimensions` dimensions), DATA_LOSS
// (too short or too long).
absl::StatusOr<IdxArray> ReadIdx(const std::string& path, int dimensions);

#endif  // MUSTER_EXAMPLES_MNIST_IDX_H_
