#ifndef MUSTER_WORKER_PARALLEL_MEMORY_PARTS_H_
#define MUSTER_WORKER_PARALLEL_MEMORY_PARTS_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "c10/util/Exception.h"
#include "worker/parallel/part_store.h"

namespace muster {

// For tests: parts in memory of another owner, which LibTorch's allocator does not know.
class MemoryParts : public PartStore {
 public:
  explicit MemoryParts(uint64_t room = 1 << 30) : room_(room) {}

  uint64_t Reserve(uint64_t bytes) override {
    const uint64_t place = bytes_.size();
    TORCH_CHECK(place + bytes <= room_, "the disk has no room");
    bytes_.resize(place + bytes);
    return place;
  }
  void Take() override { TORCH_CHECK(!taken, "the disk is taken"); }
  void Read(uint64_t place, void* to, uint64_t bytes) override {
    TORCH_CHECK(!broken, "the disk is broken");
    std::memcpy(to, bytes_.data() + place, bytes);
  }
  void Write(uint64_t place, const void* from, uint64_t bytes) override {
    TORCH_CHECK(!full, "the disk is full");
    std::memcpy(bytes_.data() + place, from, bytes);
  }

  bool broken = false, full = false, taken = false;

 private:
  const uint64_t room_;
  std::vector<char> bytes_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_MEMORY_PARTS_H_
