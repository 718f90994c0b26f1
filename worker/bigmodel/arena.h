#ifndef MUSTER_WORKER_BIGMODEL_ARENA_H_
#define MUSTER_WORKER_BIGMODEL_ARENA_H_

#include <cstdint>
#include <map>
#include <optional>

namespace muster {

// Allocates parts of a range of memory, each from the first gap that is large enough. Offsets and
// sizes are multiples of kUnit. Pure; not thread-safe.
class Arena {
 public:
  static constexpr uint64_t kUnit = 4096;

  explicit Arena(uint64_t bytes) : bytes_(bytes / kUnit * kUnit) {}

  uint64_t bytes() const { return bytes_; }
  uint64_t taken() const { return taken_; }

  // Returns the offset of the part; nullopt if there is no such gap.
  std::optional<uint64_t> Take(uint64_t bytes);
  // Frees what Take() returned.
  void Give(uint64_t offset);

 private:
  const uint64_t bytes_;
  uint64_t taken_ = 0;
  std::map<uint64_t, uint64_t> blocks_;  // taken: offset and size
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_ARENA_H_
