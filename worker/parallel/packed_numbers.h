#ifndef MUSTER_WORKER_PARALLEL_PACKED_NUMBERS_H_
#define MUSTER_WORKER_PARALLEL_PACKED_NUMBERS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace muster {

// Numbers in the form in which the ranks of a model exchange them: 32 bits each, in the machine's
// byte order. All ranks of a job run on machines of one kind.
inline std::string Pack(const std::vector<uint32_t>& numbers) {
  std::string bytes(numbers.size() * sizeof(uint32_t), '\0');
  if (!numbers.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

inline std::vector<uint32_t> Unpack(const std::string& bytes) {
  std::vector<uint32_t> numbers(bytes.size() / sizeof(uint32_t));
  if (!numbers.empty())
    std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(uint32_t));
  return numbers;
}

// Returns number `place` of `bytes`, which must have it.
inline uint32_t NumberIn(const std::string& bytes, size_t place) {
  uint32_t number = 0;
  std::memcpy(&number, bytes.data() + place * sizeof(uint32_t), sizeof(number));
  return number;
}

// FNV-1a over 32-bit numbers: equal sequences have equal digests on every rank.
class NumberDigest {
 public:
  void Add(uint32_t number) { value_ = (value_ ^ number) * 16777619; }
  uint32_t value() const { return value_; }

 private:
  uint32_t value_ = 2166136261;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_PACKED_NUMBERS_H_
