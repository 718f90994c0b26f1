#ifndef MUSTER_BASE_SIZE_PAIR_H_
#define MUSTER_BASE_SIZE_PAIR_H_

#include <cstdint>
#include <string>

namespace muster {

// Two sizes for a message that compares them. Pure and thread-safe.
struct SizePair {
  std::string first, second;
};

// Formats both as HumanBytes() does or, if these texts would be equal although the sizes differ, as
// exact numbers of bytes: "4000 B" and "3999 B", not "3.91 KiB" twice.
SizePair HumanBytesApart(int64_t first, int64_t second);

}  // namespace muster

#endif  // MUSTER_BASE_SIZE_PAIR_H_
