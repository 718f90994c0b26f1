#ifndef MUSTER_TESTS_SUPPORT_BF16_INSTRUCTIONS_H_
#define MUSTER_TESTS_SUPPORT_BF16_INSTRUCTIONS_H_

#include <fstream>
#include <string>

namespace muster::testing_support {

// Returns whether the CPU has bf16 instructions of its own: recorded cases allow other differences
// there.
inline bool HasBf16Instructions() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) {
      return line.find("avx512_bf16") != std::string::npos ||
             line.find("amx_bf16") != std::string::npos;
    }
  }
  return false;
}

}  // namespace muster::testing_support

#endif  // MUSTER_TESTS_SUPPORT_BF16_INSTRUCTIONS_H_
