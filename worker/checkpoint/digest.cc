#include "worker/checkpoint/digest.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __x86_64__
// Computes the same digests with the widest instructions of the processor: twice as fast as with
// those that all processors have.
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "worker/checkpoint/read_error.h"

namespace muster {

namespace {

// The library chooses its functions for all threads at the first text of this length.
[[maybe_unused]] const uint64_t kChosen = [] {
  const char text[4096] = {};
  return XXH3_64bits(text, sizeof(text));
}();

}  // namespace

struct Digester::State {
  State() : xxh(XXH3_createState()) { XXH3_128bits_reset(xxh); }
  ~State() { XXH3_freeState(xxh); }
  XXH3_state_t* const xxh;
};

Digester::Digester() : state_(std::make_unique<State>()) {}
Digester::~Digester() = default;

void Digester::Update(absl::string_view bytes) {
  XXH3_128bits_update(state_->xxh, bytes.data(), bytes.size());
  bytes_ += bytes.size();
}

FileDigest Digester::Finish() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_->xxh);
  return {.bytes = bytes_, .xxh3 = absl::StrFormat("%016x%016x", hash.high64, hash.low64)};
}

FileDigest DigestBytes(absl::string_view bytes) {
  Digester digester;
  digester.Update(bytes);
  return digester.Finish();
}

uint64_t DigestBlock(absl::string_view block) { return XXH3_64bits(block.data(), block.size()); }

struct BlockDigester::State {
  State() : xxh(XXH3_createState()) { XXH3_64bits_reset(xxh); }
  ~State() { XXH3_freeState(xxh); }
  XXH3_state_t* const xxh;
};

BlockDigester::BlockDigester() : state_(std::make_unique<State>()) {}
BlockDigester::~BlockDigester() = default;

void BlockDigester::Update(absl::string_view bytes) {
  XXH3_64bits_update(state_->xxh, bytes.data(), bytes.size());
}

uint64_t BlockDigester::Finish() {
  const uint64_t digest = XXH3_64bits_digest(state_->xxh);
  XXH3_64bits_reset(state_->xxh);
  return digest;
}

absl::StatusOr<FileDigest> DigestFile(const std::string& path) {
  // Refuse a pipe that has the name of a file, rather than wait for it.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ReadError(errno, absl::StrCat("cannot open ", path));
  struct stat info;
  if (fstat(fd, &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) {
    close(fd);
    return absl::DataLossError(absl::StrCat(path, ": is not a file"));
  }
  Digester digester;
  std::vector<char> buffer(size_t{1} << 20);
  while (true) {
    const ssize_t n = read(fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = errno;
      close(fd);
      if (n < 0) return ReadError(error, absl::StrCat("cannot read ", path));
      return digester.Finish();
    }
    digester.Update(absl::string_view(buffer.data(), n));
  }
}

}  // namespace muster
