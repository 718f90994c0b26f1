#ifndef MUSTER_WORKER_CHECKPOINT_DIGEST_H_
#define MUSTER_WORKER_CHECKPOINT_DIGEST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// The facts about a file in a manifest, which show that it is complete and unchanged. Not a defence
// against forgery.
struct FileDigest {
  uint64_t bytes = 0;
  // XXH3-128 of the contents: 32 hexadecimal digits, high half first.
  std::string xxh3;

  friend bool operator==(const FileDigest&, const FileDigest&) = default;
};

// Digests a stream of bytes. Not thread-safe.
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

// Digests of the blocks of a file: they show which part is damaged, and let parts be checked
// without the rest.
struct BlockDigests {
  // The size of every block except the last, which may be shorter. 0: there are no block digests.
  uint64_t block_bytes = 0;
  // XXH3-64 of each block, in order.
  std::vector<uint64_t> xxh3;

  bool empty() const { return xxh3.empty(); }
  friend bool operator==(const BlockDigests&, const BlockDigests&) = default;
};

// Returns the XXH3-64 of a block.
uint64_t DigestBlock(absl::string_view block);

// Computes the same for a block that arrives in parts. Not thread-safe.
class BlockDigester {
 public:
  BlockDigester();
  ~BlockDigester();
  BlockDigester(const BlockDigester&) = delete;
  BlockDigester& operator=(const BlockDigester&) = delete;

  void Update(absl::string_view bytes);
  // Returns the digest of the bytes since the last call, and begins the next block.
  uint64_t Finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Digests a whole file. Errors: those of opening and reading, naming the path; DATA_LOSS for a pipe
// or a device.
absl::StatusOr<FileDigest> DigestFile(const std::string& path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DIGEST_H_
