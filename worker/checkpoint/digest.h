#ifndef MUSTER_WORKER_CHECKPOINT_DIGEST_H_
#define MUSTER_WORKER_CHECKPOINT_DIGEST_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// What a manifest knows about a file: enough to tell that it is whole and unchanged. Not a defence
// against forgery.
struct FileDigest {
  uint64_t bytes = 0;
  // XXH3-128 of the contents: 32 hexadecimal digits, high half first.
  std::string xxh3;

  friend bool operator==(const FileDigest&, const FileDigest&) = default;
};

// Digests bytes as they come. Not thread-safe.
class Digester {
 public:
  Digester();
  ~Digester();
  Digester(const Digester&) = delete;
  Digester& operator=(const Digester&) = delete;

  void Update(absl::string_view bytes);
  FileDigest Finish() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
  uint64_t bytes_ = 0;
};

FileDigest DigestBytes(absl::string_view bytes);

// Reads the whole file. Errors: those of opening and reading, naming the path.
absl::StatusOr<FileDigest> DigestFile(const std::string& path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DIGEST_H_
