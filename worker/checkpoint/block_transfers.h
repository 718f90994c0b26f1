#ifndef MUSTER_WORKER_CHECKPOINT_BLOCK_TRANSFERS_H_
#define MUSTER_WORKER_CHECKPOINT_BLOCK_TRANSFERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/manifest.h"

namespace muster {

// Plans which rank sends which blocks of a checkpoint's files to which other rank, when every node
// has some of the files. Everything here is pure and thread-safe, and its results are the same on
// every rank.

// Records which nodes have which files. A node is identified by its leader (NodeGroups).
struct FilesOnNodes {
  // By rank: the leader of its node.
  std::vector<int> leader_of;
  // By file: the leaders of the nodes that have it, ascending; at least one.
  std::map<std::string, std::vector<int>, std::less<>> holders;

  // Whether the node of `rank` has the file.
  bool Has(int rank, absl::string_view file) const;
  // Whether the node of `rank` has any file.
  bool HasAny(int rank) const;
};

// Returns the number of blocks of a file: those of its digests, or one, the whole file, if it has
// none.
uint64_t CountBlocks(const ManifestFile& file);
FileRange RangeOfBlock(const ManifestFile& file, uint64_t block);
// Returns DATA_LOSS, with `path`, if `bytes` are not those of the block.
absl::Status CheckBlockOf(const ManifestFile& file, uint64_t block, absl::string_view bytes,
                          absl::string_view path);

// Blocks of several files, in the order of the files.
class BlockSet {
 public:
  explicit BlockSet(const std::vector<ManifestFile>& files);
  // Restores a set from its text(). A text of another length counts as empty.
  BlockSet(const std::vector<ManifestFile>& files, const std::string& text);

  bool Has(size_t file, uint64_t block) const;
  void Add(size_t file, uint64_t block);
  // Adds the blocks that `range` touches and that exist.
  void AddRange(const std::vector<ManifestFile>& files, size_t file, const FileRange& range);
  void AddAll(const BlockSet& other);
  // One bit for each block.
  const std::string& text() const { return bits_; }

 private:
  std::vector<uint64_t> first_;  // by file: its first block among those of all files
  std::string bits_;
};

struct BlockTransfer {
  size_t file = 0;  // the file's number
  uint64_t block = 0;
  int from = 0, to = 0;  // ranks
  int round = 0;         // from 0
};

// The most bytes that a rank sends, and receives, in a round, unless a single block is larger.
inline constexpr uint64_t kRoundBytes = uint64_t{16} << 20;

// Plans the transfers that bring the blocks that ranks need to nodes that lack the files. Ranks
// with the same host_of[rank] (the lowest rank of those that share memory) divide the blocks that
// any of them needs; each block is received once. `needed`: BlockSet::text() of each rank. All
// ranks of a node that has a file send, each of them different blocks; if several nodes have it,
// they take turns. Ascending by round; in each round, no rank sends or receives more than
// `round_bytes`.
std::vector<BlockTransfer> PlanTransfers(const std::vector<ManifestFile>& files,
                                         const FilesOnNodes& nodes, const std::vector<int>& host_of,
                                         const std::vector<std::string>& needed,
                                         uint64_t round_bytes = kRoundBytes);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_BLOCK_TRANSFERS_H_
