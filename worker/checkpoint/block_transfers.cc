#include "worker/checkpoint/block_transfers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/checkpoint/digest.h"

namespace muster {
namespace {

// The bytes that one rank sends, or receives, in each round.
class Rounds {
 public:
  uint64_t In(size_t round) const { return round < bytes_.size() ? bytes_[round] : 0; }
  bool TakesIn(size_t round, uint64_t bytes, uint64_t most) const {
    return In(round) == 0 || In(round) + bytes <= most;
  }
  void Add(size_t round, uint64_t bytes) {
    if (bytes_.size() <= round) bytes_.resize(round + 1);
    bytes_[round] += bytes;
  }
  // Returns the first round with room for so many bytes, except rounds that lacked room for an
  // earlier request: nearly all blocks have one size.
  size_t FirstOpen(uint64_t bytes, uint64_t most) {
    while (!TakesIn(open_, bytes, most)) ++open_;
    return open_;
  }

 private:
  std::vector<uint64_t> bytes_;
  size_t open_ = 0;
};

struct Block {
  size_t file;
  uint64_t block;
};

// Ranks that share memory, and the blocks that their node lacks.
struct Host {
  std::vector<int> ranks;
  std::vector<Block> lacks;
};

std::vector<Host> HostsThatLack(const std::vector<ManifestFile>& files, const FilesOnNodes& nodes,
                                const std::vector<int>& host_of,
                                const std::vector<std::string>& needed) {
  std::map<int, Host> hosts;  // by the lowest rank
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    hosts[host_of[rank]].ranks.push_back(static_cast<int>(rank));
  }
  std::vector<Host> lacking;
  for (auto& [lowest, host] : hosts) {
    BlockSet all(files);
    for (const int rank : host.ranks) all.AddAll(BlockSet(files, needed[rank]));
    for (size_t file = 0; file < files.size(); ++file) {
      if (nodes.Has(lowest, files[file].name)) continue;
      for (uint64_t block = 0; block < CountBlocks(files[file]); ++block) {
        if (all.Has(file, block)) host.lacks.push_back({file, block});
      }
    }
    if (!host.lacks.empty()) lacking.push_back(std::move(host));
  }
  return lacking;
}

}  // namespace

bool FilesOnNodes::Has(int rank, absl::string_view file) const {
  const auto found = holders.find(file);
  return found != holders.end() &&
         std::binary_search(found->second.begin(), found->second.end(), leader_of[rank]);
}

bool FilesOnNodes::HasAny(int rank) const {
  return std::any_of(holders.begin(), holders.end(), [&](const auto& file) {
    return std::binary_search(file.second.begin(), file.second.end(), leader_of[rank]);
  });
}

uint64_t CountBlocks(const ManifestFile& file) {
  if (!file.blocks.empty()) return file.blocks.xxh3.size();
  return file.digest.bytes == 0 ? 0 : 1;
}

FileRange RangeOfBlock(const ManifestFile& file, uint64_t block) {
  if (file.blocks.empty()) return {.begin = 0, .end = file.digest.bytes};
  const uint64_t begin = block * file.blocks.block_bytes;
  return {.begin = begin, .end = std::min(begin + file.blocks.block_bytes, file.digest.bytes)};
}

absl::Status CheckBlockOf(const ManifestFile& file, uint64_t block, absl::string_view bytes,
                          absl::string_view path) {
  const FileRange range = RangeOfBlock(file, block);
  const bool same = file.blocks.empty() ? DigestBytes(bytes) == file.digest
                                        : bytes.size() == range.end - range.begin &&
                                              DigestBlock(bytes) == file.blocks.xxh3[block];
  if (same) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(path, ": bytes ", range.begin, " to ", range.end, " do not match the manifest"));
}

BlockSet::BlockSet(const std::vector<ManifestFile>& files) {
  uint64_t blocks = 0;
  for (const ManifestFile& file : files) {
    first_.push_back(blocks);
    blocks += CountBlocks(file);
  }
  bits_.resize((blocks + 7) / 8);
}

BlockSet::BlockSet(const std::vector<ManifestFile>& files, const std::string& text)
    : BlockSet(files) {
  if (text.size() == bits_.size()) bits_ = text;
}

bool BlockSet::Has(size_t file, uint64_t block) const {
  const uint64_t i = first_[file] + block;
  return (bits_[i / 8] >> i % 8 & 1) != 0;
}

void BlockSet::Add(size_t file, uint64_t block) {
  const uint64_t i = first_[file] + block;
  bits_[i / 8] = static_cast<char>(bits_[i / 8] | 1 << i % 8);
}

void BlockSet::AddRange(const std::vector<ManifestFile>& files, size_t file,
                        const FileRange& range) {
  const ManifestFile& named = files[file];
  const uint64_t end = std::min(range.end, named.digest.bytes);
  if (range.begin >= end) return;
  const uint64_t size = named.blocks.empty() ? named.digest.bytes : named.blocks.block_bytes;
  for (uint64_t block = range.begin / size; block <= (end - 1) / size; ++block) Add(file, block);
}

void BlockSet::AddAll(const BlockSet& other) {
  for (size_t i = 0; i < std::min(bits_.size(), other.bits_.size()); ++i) {
    bits_[i] = static_cast<char>(bits_[i] | other.bits_[i]);
  }
}

std::vector<BlockTransfer> PlanTransfers(const std::vector<ManifestFile>& files,
                                         const FilesOnNodes& nodes, const std::vector<int>& host_of,
                                         const std::vector<std::string>& needed,
                                         uint64_t round_bytes) {
  const std::vector<Host> hosts = HostsThatLack(files, nodes, host_of, needed);
  std::map<int, std::vector<int>> ranks_of;  // by leader
  for (size_t rank = 0; rank < nodes.leader_of.size(); ++rank) {
    ranks_of[nodes.leader_of[rank]].push_back(static_cast<int>(rank));
  }
  std::map<int, Rounds> sent;  // by rank
  std::vector<BlockTransfer> plan;
  for (size_t h = 0; h < hosts.size(); ++h) {
    const Host& host = hosts[h];
    const uint64_t all = host.lacks.size(), count = host.ranks.size();
    for (uint64_t i = 0; i < count; ++i) {
      Rounds received;
      const uint64_t first = all * i / count, share = all * (i + 1) / count - first;
      for (uint64_t k = 0; k < share; ++k) {
        // Hosts begin at different blocks: if all began at the same block, all would wait for one
        // node, and then for the next.
        const Block& one = host.lacks[first + (k + share * h / hosts.size()) % share];
        const ManifestFile& file = files[one.file];
        const std::vector<int>& holders = nodes.holders.find(file.name)->second;
        const std::vector<int>& senders = ranks_of[holders[(one.block + h) % holders.size()]];
        const int from = senders[(one.file + one.block) % senders.size()];
        const FileRange range = RangeOfBlock(file, one.block);
        const uint64_t bytes = range.end - range.begin;
        Rounds& of_sender = sent[from];
        // Do not search from 0: there may be as many rounds as blocks.
        size_t round = std::max(received.FirstOpen(bytes, round_bytes),
                                of_sender.FirstOpen(bytes, round_bytes));
        while (!received.TakesIn(round, bytes, round_bytes) ||
               !of_sender.TakesIn(round, bytes, round_bytes)) {
          ++round;
        }
        received.Add(round, bytes);
        of_sender.Add(round, bytes);
        plan.push_back({.file = one.file,
                        .block = one.block,
                        .from = from,
                        .to = host.ranks[i],
                        .round = static_cast<int>(round)});
      }
    }
  }
  std::stable_sort(plan.begin(), plan.end(), [](const BlockTransfer& a, const BlockTransfer& b) {
    return a.round < b.round;
  });
  return plan;
}

}  // namespace muster
