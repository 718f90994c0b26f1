#ifndef MUSTER_BASE_MUTATE_H_
#define MUSTER_BASE_MUTATE_H_

#include <cstddef>
#include <random>
#include <string>

namespace muster {

// Returns `bytes` with one to four small changes (a byte replaced, a bit flipped, a byte inserted,
// the end cut off, a part repeated), for tests of code that reads bytes that others wrote. The same
// generator in the same state gives the same bytes.
template <typename Generator>
std::string Mutate(std::string bytes, Generator& random) {
  const int changes = 1 + static_cast<int>(random() % 4);
  for (int c = 0; c < changes; ++c) {
    const size_t at = bytes.empty() ? 0 : random() % bytes.size();
    switch (random() % 5) {
      case 0:
        if (!bytes.empty()) bytes[at] = static_cast<char>(random());
        break;
      case 1:
        if (!bytes.empty()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
        break;
      case 2:
        bytes.insert(at, 1, static_cast<char>(random()));
        break;
      case 3:
        bytes.resize(at);
        break;
      default:
        bytes += bytes.substr(at);
    }
  }
  return bytes;
}

}  // namespace muster

#endif  // MUSTER_BASE_MUTATE_H_
