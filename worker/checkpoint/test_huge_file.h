#ifndef MUSTER_WORKER_CHECKPOINT_TEST_HUGE_FILE_H_
#define MUSTER_WORKER_CHECKPOINT_TEST_HUGE_FILE_H_

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/log.h"
#include "worker/checkpoint/safetensors_format.h"

namespace muster {

inline constexpr uint64_t kTebibyte = uint64_t{1} << 40;

// Writes a safetensors file with this one tensor, all zeros, of which only the header takes space
// on the disk.
inline void WriteHugeFile(const std::string& path, const std::string& name,
                          SafetensorsType type = SafetensorsType::kF32,
                          const std::vector<uint64_t>& shape = {kTebibyte}) {
  const uint64_t bytes = *SafetensorsBytes(type, shape);
  const auto layout =
      LayOutSafetensors({{.name = name, .type = type, .shape = shape}}, std::nullopt);
  MUSTER_CHECK(layout.ok()) << layout.status();
  const absl::Status written = WriteFileAtomically(path, layout->prefix);
  MUSTER_CHECK(written.ok()) << written;
  MUSTER_CHECK(truncate(path.c_str(), static_cast<off_t>(layout->prefix.size() + bytes)) == 0)
      << path;
}

// Limits this process to at most `bytes` more bytes of memory while it exists.
class AtMostMoreMemory {
 public:
  explicit AtMostMoreMemory(uint64_t bytes) {
    MUSTER_CHECK(getrlimit(RLIMIT_AS, &before_) == 0);
    const std::string pages = ReadFile("/proc/self/statm", 256).value_or("0");
    rlimit scarce = before_;
    scarce.rlim_cur = std::stoull(pages) * sysconf(_SC_PAGESIZE) + bytes;
    MUSTER_CHECK(setrlimit(RLIMIT_AS, &scarce) == 0);
  }
  ~AtMostMoreMemory() { MUSTER_CHECK(setrlimit(RLIMIT_AS, &before_) == 0); }
  AtMostMoreMemory(const AtMostMoreMemory&) = delete;
  AtMostMoreMemory& operator=(const AtMostMoreMemory&) = delete;

 private:
  rlimit before_{};
};

// Limits this process to one more TiB, because whether a machine grants more depends on its
// settings.
class AtMostOneMoreTebibyte : public AtMostMoreMemory {
 public:
  AtMostOneMoreTebibyte() : AtMostMoreMemory(kTebibyte) {}
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TEST_HUGE_FILE_H_
