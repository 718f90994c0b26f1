#ifndef MUSTER_TESTS_SUPPORT_MNIST_IMAGES_H_
#define MUSTER_TESTS_SUPPORT_MNIST_IMAGES_H_

#include <cstdint>
#include <fstream>
#include <random>
#include <string>

namespace muster::testing_support {

inline void WriteBigEndian(std::ofstream& file, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) file.put(static_cast<char>(value >> shift));
}

// Writes MNIST's files PART-images-idx3-ubyte and PART-labels-idx1-ubyte ("train", "t10k") with
// `count` images that a network can learn: each digit is a bright bar at its own height, plus
// noise.
inline void WriteMnistImages(const std::string& directory, const std::string& part,
                             uint32_t count) {
  std::mt19937 random(count);
  std::ofstream images(directory + "/" + part + "-images-idx3-ubyte", std::ios::binary);
  std::ofstream labels(directory + "/" + part + "-labels-idx1-ubyte", std::ios::binary);
  for (uint32_t word : {0x803u, count, 28u, 28u}) WriteBigEndian(images, word);
  for (uint32_t word : {0x801u, count}) WriteBigEndian(labels, word);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t label = random() % 10;
    labels.put(static_cast<char>(label));
    for (uint32_t row = 0; row < 28; ++row) {
      for (uint32_t column = 0; column < 28; ++column) {
        const uint32_t bar = row / 2 == label + 1 ? 180 : 0;
        images.put(static_cast<char>(bar + random() % 60));
      }
    }
  }
}

}  // namespace muster::testing_support

#endif  // MUSTER_TESTS_SUPPORT_MNIST_IMAGES_H_
