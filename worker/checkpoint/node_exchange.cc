#include "worker/checkpoint/node_exchange.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/for_each.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/collective/all_to_all.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr size_t kPieceBytes = 8 << 20;

absl::Status ArrivedOtherwise(const std::string& path, int from) {
  // Damaged in transit, or on the disk of the sender, whose verification finds out.
  return absl::UnavailableError(
      absl::StrCat(path, ": what rank ", from, " sent does not match the manifest"));
}

// Returns the rank that sends the `i`-th part of a file to all ranks: the holders take turns.
int SenderOf(const FilesOnNodes& nodes, const std::string& file, size_t i) {
  const std::vector<int>& holders = nodes.holders.find(file)->second;
  const int leader = holders[i % holders.size()];
  std::vector<int> ranks;
  for (size_t rank = 0; rank < nodes.leader_of.size(); ++rank) {
    if (nodes.leader_of[rank] == leader) ranks.push_back(static_cast<int>(rank));
  }
  return ranks[i % ranks.size()];
}

// Reads a block into `to`, and checks it.
absl::Status ReadBlock(const std::string& dir, const ManifestFile& file, uint64_t block, char* to,
                       const DirectFileOptions& options) {
  const std::string path = JoinPath(dir, file.name);
  const FileRange range = RangeOfBlock(file, block);
  if (file.blocks.empty()) {
    MUSTER_ASSIGN_OR_RETURN(const std::string bytes,
                            ReadRecordFile(path, static_cast<int64_t>(file.digest.bytes)));
    MUSTER_RETURN_IF_ERROR(CheckBlockOf(file, block, bytes, path));
    std::memcpy(to, bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  return ReadDirectFile(
      path, file.digest.bytes, file.blocks, range,
      [to](uint64_t, absl::string_view bytes) {
        std::memcpy(to, bytes.data(), bytes.size());
        return absl::OkStatus();
      },
      options);
}

// Files that are sent together: small ones up to the size of a piece, a larger one alone.
struct FileBatch {
  std::vector<const ManifestFile*> files;
  uint64_t bytes = 0;
};

std::vector<FileBatch> BatchesOf(const Manifest& manifest, const std::set<std::string>& names) {
  std::vector<FileBatch> batches;
  for (const std::string& name : names) {
    const ManifestFile* const file = manifest.Find(name);
    if (batches.empty() || batches.back().bytes + file->digest.bytes > kPieceBytes) {
      batches.emplace_back();
    }
    batches.back().files.push_back(file);
    batches.back().bytes += file->digest.bytes;
  }
  return batches;
}

absl::StatusOr<std::string> ReadBatch(const std::string& dir, const FileBatch& batch) {
  std::string all;
  for (const ManifestFile* file : batch.files) {
    const std::string path = JoinPath(dir, file->name);
    MUSTER_ASSIGN_OR_RETURN(const std::string contents,
                            ReadRecordFile(path, static_cast<int64_t>(file->digest.bytes)));
    if (contents.size() != file->digest.bytes) {
      return absl::DataLossError(absl::StrCat(path, ": the file is shorter"));
    }
    all += contents;
  }
  return all;
}

// Reads the beginning of a file, as for GatherHeaders().
absl::StatusOr<std::string> ReadHeader(const std::string& dir, const ManifestFile& file) {
  const std::string path = JoinPath(dir, file.name);
  const absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(path);
  if (absl::IsInvalidArgument(header.status())) {
    // A header that cannot be parsed is reported as damage if its digests say so.
    MUSTER_RETURN_IF_ERROR(VerifyCheckpointFile(dir, file, VerifyLevel::kContents));
  }
  MUSTER_RETURN_IF_ERROR(header.status());
  std::string bytes(8 + header->header_bytes, '\0');
  MUSTER_RETURN_IF_ERROR(ReadDirectFile(
      path, file.digest.bytes, file.blocks, FileRange{.begin = 0, .end = bytes.size()},
      [&](uint64_t offset, absl::string_view block) {
        std::memcpy(bytes.data() + offset, block.data(),
                    std::min<uint64_t>(block.size(), bytes.size() - offset));
        return absl::OkStatus();
      }));
  return bytes;
}

// The transfers, by number, that a rank sends to and receives from others in one round, in the
// order of the ranks.
struct RoundOf {
  std::vector<size_t> out, in;
};

std::vector<RoundOf> RoundsOf(const std::vector<BlockTransfer>& plan, int rank) {
  std::vector<RoundOf> rounds(plan.empty() ? 0 : plan.back().round + 1);
  for (size_t i = 0; i < plan.size(); ++i) {
    if (plan[i].from == rank) rounds[plan[i].round].out.push_back(i);
    if (plan[i].to == rank) rounds[plan[i].round].in.push_back(i);
  }
  for (RoundOf& round : rounds) {
    std::stable_sort(round.out.begin(), round.out.end(),
                     [&](size_t a, size_t b) { return plan[a].to < plan[b].to; });
    std::stable_sort(round.in.begin(), round.in.end(),
                     [&](size_t a, size_t b) { return plan[a].from < plan[b].from; });
  }
  return rounds;
}

// Sends and receives the blocks of some rounds, each followed by a byte that says whether the block
// is valid.
class Mover {
 public:
  Mover(Comm& comm, const std::string& dir, const std::vector<ManifestFile>& files,
        const DirectFileOptions& options)
      : comm_(comm), dir_(dir), files_(files), options_(options) {}

  // Allocates all memory.
  absl::Status Prepare(const FilesOnNodes& nodes, const BlockNeeds& needs) {
    return GuardRank([&]() -> absl::Status {
      plan_ = PlanTransfers(files_, nodes, needs.host_of, needs.needed);
      rounds_ = RoundsOf(plan_, comm_.rank());
      int64_t most_out = 0, most_in = 0;
      for (const RoundOf& round : rounds_) {
        most_out = std::max(most_out, SizeOf(round.out));
        most_in = std::max(most_in, SizeOf(round.in));
      }
      out_ = at::empty({most_out}, at::kByte);
      in_ = at::empty({most_in}, at::kByte);
      to_.resize(comm_.size());
      from_.resize(comm_.size());
      for (const BlockTransfer& one : plan_) {
        if (needs.host_of[one.to] == needs.host_of[comm_.rank()]) received_ += BytesOf(one);
      }
      return absl::OkStatus();
    });
  }
  uint64_t received() const { return received_; }
  size_t rounds() const { return rounds_.size(); }

  void Move(size_t round, absl::FunctionRef<absl::Status(size_t, uint64_t, absl::string_view)> take,
            absl::Status* mine) {
    const RoundOf& all = rounds_[round];
    std::fill(to_.begin(), to_.end(), 0);
    std::fill(from_.begin(), from_.end(), 0);
    for (const size_t i : all.out) to_[plan_[i].to] += BytesOf(plan_[i]) + 1;
    for (const size_t i : all.in) from_[plan_[i].from] += BytesOf(plan_[i]) + 1;
    if (mine->ok()) *mine = GuardRank([&] { return Load(all.out); });
    Mark(all.out, mine->ok());
    AllToAllBytes(comm_, out_, to_, in_, from_);
    if (mine->ok()) *mine = GuardRank([&] { return Take(all.in, take); });
  }

 private:
  int64_t BytesOf(const BlockTransfer& one) const {
    const FileRange range = RangeOfBlock(files_[one.file], one.block);
    return static_cast<int64_t>(range.end - range.begin);
  }
  int64_t SizeOf(const std::vector<size_t>& transfers) const {
    int64_t bytes = 0;
    for (const size_t i : transfers) bytes += BytesOf(plan_[i]) + 1;
    return bytes;
  }

  absl::Status Load(const std::vector<size_t>& transfers) {
    // Read each block once, even if several ranks get it.
    std::map<std::pair<size_t, uint64_t>, std::vector<char*>> places;
    char* at = static_cast<char*>(out_.data_ptr());
    for (const size_t i : transfers) {
      places[{plan_[i].file, plan_[i].block}].push_back(at);
      at += BytesOf(plan_[i]) + 1;
    }
    const std::vector<std::pair<std::pair<size_t, uint64_t>, std::vector<char*>>> blocks(
        places.begin(), places.end());
    return ForEach(blocks.size(), {.threads = options_.in_flight}, [&](uint64_t i) {
      const auto& [block, to] = blocks[i];
      const ManifestFile& file = files_[block.first];
      const absl::Status read =
          GuardRank([&] { return ReadBlock(dir_, file, block.second, to[0], options_); });
      const FileRange range = RangeOfBlock(file, block.second);
      for (size_t k = 1; read.ok() && k < to.size(); ++k) {
        std::memcpy(to[k], to[0], range.end - range.begin);
      }
      return read;
    });
  }

  void Mark(const std::vector<size_t>& transfers, bool read) {
    char* at = static_cast<char*>(out_.data_ptr());
    for (const size_t i : transfers) {
      at += BytesOf(plan_[i]);
      *at++ = read ? 'D' : 'E';
    }
  }

  absl::Status Take(const std::vector<size_t>& transfers,
                    absl::FunctionRef<absl::Status(size_t, uint64_t, absl::string_view)> take) {
    const char* at = static_cast<const char*>(in_.const_data_ptr());
    for (const size_t i : transfers) {
      const BlockTransfer& one = plan_[i];
      const ManifestFile& file = files_[one.file];
      const absl::string_view block(at, BytesOf(one));
      at += block.size();
      // There is no block; the sender reports why.
      if (*at++ != 'D') continue;
      const std::string path = JoinPath(dir_, file.name);
      if (!CheckBlockOf(file, one.block, block, path).ok()) return ArrivedOtherwise(path, one.from);
      MUSTER_RETURN_IF_ERROR(take(one.file, RangeOfBlock(file, one.block).begin, block));
    }
    return absl::OkStatus();
  }

  Comm& comm_;
  const std::string& dir_;
  const std::vector<ManifestFile>& files_;
  const DirectFileOptions& options_;
  std::vector<BlockTransfer> plan_;
  std::vector<RoundOf> rounds_;
  at::Tensor out_, in_;
  std::vector<int64_t> to_, from_;
  uint64_t received_ = 0;
};

}  // namespace

// Each piece has a first byte that says what it is: a holder that fails sends an error in place of
// a piece, so that the ranks stay in step.
absl::Status BroadcastPieces(Comm& comm, int root, uint64_t bytes,
                             absl::FunctionRef<absl::Status(char* to, size_t size)> read,
                             absl::FunctionRef<void(absl::string_view piece)> take) {
  for (uint64_t sent = 0; sent < bytes;) {
    const size_t wanted = std::min<uint64_t>(kPieceBytes, bytes - sent);
    std::string piece;
    const absl::Status done = GuardRank([&]() -> absl::Status {
      if (comm.rank() != root) return absl::OkStatus();
      piece.resize(wanted + 1, 'D');
      return read(piece.data() + 1, wanted);
    });
    if (!done.ok()) piece = absl::StrCat("E", done.message());
    piece = comm.BroadcastBytes(piece, root);
    const absl::string_view data = absl::string_view(piece).substr(1);
    // Like EIO, it may be readable later. Ranks that verify all of it report whether it is damaged.
    if (piece[0] == 'E') return absl::UnknownError(absl::StrCat("rank ", root, ": ", data));
    take(data);
    sent += wanted;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, std::string>> GatherFiles(
    Comm& comm, const std::string& dir, const Manifest& manifest, const FilesOnNodes& nodes,
    const std::vector<std::string>& wanted) {
  std::set<std::string> mine;
  for (const std::string& name : wanted) {
    if (manifest.Find(name) != nullptr && !nodes.Has(comm.rank(), name)) mine.insert(name);
  }
  std::map<int, std::set<std::string>> by_sender;
  for (const std::string& names : comm.AllGatherBytes(Json(mine).dump())) {
    for (const Json& name : Json::parse(names)) {
      by_sender[nodes.holders.find(name.get<std::string>())->second.front()].insert(name);
    }
  }
  std::map<std::string, std::string> files;
  absl::Status taken;
  for (const auto& [sender, names] : by_sender) {
    for (const FileBatch& batch : BatchesOf(manifest, names)) {
      const bool wants =
          std::any_of(batch.files.begin(), batch.files.end(),
                      [&](const ManifestFile* file) { return mine.count(file->name) > 0; });
      std::string contents;  // contents of all files; sent from here, or received into it
      size_t next = 0;
      MUSTER_RETURN_IF_ERROR(BroadcastPieces(
          comm, sender, batch.bytes,
          [&](char* to, size_t size) -> absl::Status {
            if (next == 0) {
              MUSTER_ASSIGN_OR_RETURN(contents, ReadBatch(dir, batch));
            }
            std::memcpy(to, contents.data() + next, size);
            next += size;
            return absl::OkStatus();
          },
          [&](absl::string_view piece) {
            if (!wants || !taken.ok()) return;
            taken = GuardRank([&] {
              contents.append(piece.data(), piece.size());
              return absl::OkStatus();
            });
          }));
      if (!wants || !taken.ok()) continue;
      taken = GuardRank([&]() -> absl::Status {
        size_t at = 0;
        for (const ManifestFile* file : batch.files) {
          std::string one = contents.substr(at, file->digest.bytes);
          at += file->digest.bytes;
          if (mine.count(file->name) == 0) continue;
          if (DigestBytes(one) != file->digest) {
            return ArrivedOtherwise(JoinPath(dir, file->name), sender);
          }
          files[file->name] = std::move(one);
        }
        return absl::OkStatus();
      });
    }
  }
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, taken, {}, nullptr));
  return files;
}

absl::StatusOr<std::map<std::string, std::string>> GatherHeaders(
    Comm& comm, const std::string& dir, const std::vector<ManifestFile>& files,
    const FilesOnNodes& nodes) {
  std::vector<int> senders;
  for (size_t i = 0; i < files.size(); ++i) senders.push_back(SenderOf(nodes, files[i].name, i));
  // The concatenated headers, and a digest of them, since the manifest has none.
  std::string mine;
  absl::Status read = GuardRank([&]() -> absl::Status {
    for (size_t i = 0; i < files.size(); ++i) {
      if (senders[i] != comm.rank()) continue;
      MUSTER_ASSIGN_OR_RETURN(const std::string header, ReadHeader(dir, files[i]));
      mine += header;
    }
    // The other ranks send nothing: AllGatherBytes() takes a round for each rank that has data.
    if (!mine.empty()) mine = absl::StrCat(absl::Hex(DigestBlock(mine), absl::kZeroPad16), mine);
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, read, {}, nullptr));
  const std::vector<std::string> all = comm.AllGatherBytes(mine);
  std::map<std::string, std::string> headers;
  read = GuardRank([&]() -> absl::Status {
    std::vector<absl::string_view> left(all.begin(), all.end());
    for (size_t i = 0; i < files.size(); ++i) {
      absl::string_view& sent = left[senders[i]];
      const std::string& whole = all[senders[i]];
      const absl::string_view headers_sent = absl::string_view(whole).substr(16);
      if (sent.size() == whole.size()) {
        if (whole.substr(0, 16) !=
            absl::StrCat(absl::Hex(DigestBlock(headers_sent), absl::kZeroPad16))) {
          return ArrivedOtherwise(JoinPath(dir, files[i].name), senders[i]);
        }
        sent = headers_sent;
      }
      uint64_t json = 0;
      if (sent.size() >= sizeof(json)) std::memcpy(&json, sent.data(), sizeof(json));
      if (json == 0 || json > sent.size() - sizeof(json)) {
        return ArrivedOtherwise(JoinPath(dir, files[i].name), senders[i]);
      }
      headers[files[i].name] = std::string(sent.substr(0, sizeof(json) + json));
      sent.remove_prefix(sizeof(json) + json);
    }
    return absl::OkStatus();
  });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, read, {}, nullptr));
  return headers;
}

absl::StatusOr<uint64_t> MoveBlocks(
    Comm& comm, const std::string& dir, const std::vector<ManifestFile>& files,
    const FilesOnNodes& nodes, const BlockNeeds& needs, const DirectFileOptions& options,
    absl::FunctionRef<absl::Status(size_t file, uint64_t offset, absl::string_view block)> take,
    absl::Status* mine) {
  Mover mover(comm, dir, files, options);
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, mover.Prepare(nodes, needs), {}, nullptr));
  for (size_t round = 0; round < mover.rounds(); ++round) mover.Move(round, take, mine);
  return mover.received();
}

}  // namespace muster
