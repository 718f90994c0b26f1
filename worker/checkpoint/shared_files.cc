#include "worker/checkpoint/shared_files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory_file.h"
#include "base/peer_file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/direct_pieces.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/write_at.h"
#include "worker/collective/shm_segment.h"

namespace muster {
namespace {

using Json = nlohmann::json;

// A file in memory, to read.
class Mapping {
 public:
  static absl::StatusOr<Mapping> Of(int fd, uint64_t bytes) {
    void* const address = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) return absl::ErrnoToStatus(errno, "cannot map shared memory");
    return Mapping(static_cast<char*>(address), bytes);
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  ~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  char* data() const { return data_; }

 private:
  Mapping(char* data, uint64_t bytes) : data_(data), bytes_(bytes) {}

  char* data_;
  const uint64_t bytes_;
};

}  // namespace

// One rank's part of Read().
struct SharedFiles::Reading {
  // Opens the files, if all of them are to be used where they are.
  bool OpenInPlace() {
    in_place = !files.empty() && std::all_of(files.begin(), files.end(), [&](const auto& file) {
      OwnedFd& fd = shared.files_[file.name];
      fd = OwnedFd(open(JoinPath(dir, file.name).c_str(), O_RDONLY | O_CLOEXEC));
      struct stat info;
      // Of another size: ReadDirectFile says so.
      return fd.open() && (options.in_place || IsInMemory(fd.get(), options.read)) &&
             fstat(fd.get(), &info) == 0 &&
             static_cast<uint64_t>(info.st_size) == file.digest.bytes;
    });
    if (!in_place) shared.files_.clear();
    return in_place;
  }

  // The leader's files in memory, for the others to open.
  absl::StatusOr<std::string> Create() {
    Json entries = Json::array();
    if (in_place) {
      for (const ManifestFile& file : files) {
        MUSTER_ASSIGN_OR_RETURN(std::string identity,
                                FileIdentity(shared.files_.at(file.name).get()));
        entries.push_back(std::move(identity));
      }
      return entries.dump();
    }
    for (const ManifestFile& file : files) {
      OwnedFd& fd = shared.files_[file.name];
      fd = OwnedFd(options.create != nullptr ? options.create(file.name.c_str())
                                             : memfd_create(file.name.c_str(), MFD_CLOEXEC));
      if (!fd.open()) return absl::ErrnoToStatus(errno, "cannot create shared memory");
      MUSTER_RETURN_IF_ERROR(ResizeMemoryFile(fd.get(), file.digest.bytes));
      MUSTER_ASSIGN_OR_RETURN(std::string place, PlaceOfFile(fd.get()));
      entries.push_back(std::move(place));
    }
    return entries.dump();
  }

  absl::Status Open(const std::string& created, int leader) {
    if (created.empty()) return absl::UnavailableError("the first rank has no shared memory");
    const Json entries = Json::parse(created);
    for (size_t i = 0; i < files.size(); ++i) {
      if (in_place) {
        MUSTER_ASSIGN_OR_RETURN(const std::string identity,
                                FileIdentity(shared.files_.at(files[i].name).get()));
        if (identity == entries[i].get<std::string>()) continue;
        return absl::UnavailableError(
            absl::StrCat(JoinPath(dir, files[i].name), " is another file than the first rank's"));
      }
      MUSTER_RETURN_IF_ERROR(CheckMemoryFileSize(files[i].digest.bytes));
      const std::string place = entries[i].get<std::string>();
      absl::StatusOr<OwnedFd> opened = OpenPeerFile(place, O_RDWR);
      if (!opened.ok()) {
        return Renamed(opened.status(), place.substr(0, place.find(' ')),
                       absl::StrCat("copy in memory of ", JoinPath(dir, files[i].name), " (rank ",
                                    leader, "'s)"));
      }
      shared.files_[files[i].name] = *std::move(opened);
    }
    return absl::OkStatus();
  }

  // Which blocks of all files, in their order, this rank needs: a bit each.
  std::string Needed() const {
    std::string bits;
    uint64_t first = 0;  // block of the file
    for (const ManifestFile& file : files) {
      const uint64_t blocks = file.blocks.xxh3.size(), size = file.blocks.block_bytes;
      bits.resize((first + blocks + 7) / 8);
      const auto set = [&](uint64_t from, uint64_t to) {
        for (uint64_t i = first + from; i < first + to; ++i) {
          bits[i / 8] = static_cast<char>(bits[i / 8] | 1 << i % 8);
        }
      };
      const auto ranges = options.ranges.find(file.name);
      if (ranges == options.ranges.end()) {
        set(0, blocks);
      } else {
        for (const FileRange& range : ranges->second) {
          const uint64_t end = std::min(range.end, file.digest.bytes);
          if (range.begin < end) set(range.begin / size, (end - 1) / size + 1);
        }
      }
      first += blocks;
    }
    return bits;
  }

  // Reads the share of the `index`-th of `count` ranks, a run of the blocks that `needed` names,
  // and counts all of these.
  absl::Status ReadShare(uint64_t index, uint64_t count, const std::string& needed) {
    struct Block {
      const ManifestFile* file;
      uint64_t begin, end;
    };
    std::vector<Block> blocks;
    uint64_t i = 0;
    for (const ManifestFile& file : files) {
      for (uint64_t begin = 0; begin < file.digest.bytes; begin += file.blocks.block_bytes, ++i) {
        if ((needed[i / 8] >> i % 8 & 1) == 0) continue;
        const uint64_t end = std::min(begin + file.blocks.block_bytes, file.digest.bytes);
        blocks.push_back({&file, begin, end});
        shared.bytes_read_ += end - begin;
      }
    }
    const uint64_t last = blocks.size() * (index + 1) / count;
    for (uint64_t from = blocks.size() * index / count; from < last;) {
      uint64_t to = from + 1;
      while (to < last && blocks[to].file == blocks[from].file &&
             blocks[to].begin == blocks[to - 1].end) {
        ++to;
      }
      MUSTER_RETURN_IF_ERROR(
          ReadRange(*blocks[from].file, {.begin = blocks[from].begin, .end = blocks[to - 1].end}));
      from = to;
    }
    return absl::OkStatus();
  }

  absl::Status ReadRange(const ManifestFile& file, const FileRange& range) {
    const int fd = shared.files_.at(file.name).get();
    const std::string path = JoinPath(dir, file.name);
    if (in_place && IsInMemory(fd, options.read)) {
      MUSTER_ASSIGN_OR_RETURN(const Mapping mapping, Mapping::Of(fd, file.digest.bytes));
      return CheckBlocks(path, absl::string_view(mapping.data(), file.digest.bytes), file.blocks,
                         range, options.read.in_flight);
    }
    if (in_place) {
      const auto checked = [](uint64_t, absl::string_view) { return absl::OkStatus(); };
      return ReadDirectFile(path, file.digest.bytes, file.blocks, range, checked, options.read);
    }
    // Not into that memory directly: its pages are of 4 KiB, in which a transfer is of so many
    // pieces that a fast disk gives half of its rate. Written and not mapped: no memory is an error
    // here, and a signal where it is touched.
    return ReadDirectFile(
        path, file.digest.bytes, file.blocks, range,
        [&](uint64_t offset, absl::string_view block) {
          return WriteAt(fd, offset, block,
                         absl::StrCat("no memory for ", block.size(), " bytes of ", file.name,
                                      ", which the ranks of this host read together"));
        },
        options.read);
  }

  // Ranks with the same text read together.
  std::string Group(int rank) const {
    const std::string host = options.host.empty() ? HostIdentity() : options.host;
    if (host.empty() || files.empty()) return absl::StrCat("rank ", rank);
    std::string text = absl::StrCat(host, "\n", dir, "\n", in_place ? "in place" : "", "\n");
    for (const ManifestFile& file : files) {
      absl::StrAppend(&text, file.name, " ", file.digest.bytes, " ", file.digest.xxh3, "\n");
    }
    return DigestBytes(text).xxh3;
  }

  SharedFiles& shared;
  const std::string& dir;
  const std::vector<ManifestFile>& files;
  const Options& options;
  bool in_place = false;
};

absl::StatusOr<std::unique_ptr<SharedFiles>> SharedFiles::Read(
    Comm& comm, const std::string& dir, const std::vector<ManifestFile>& files,
    const Options& options) {
  std::unique_ptr<SharedFiles> shared(new SharedFiles);
  Reading reading{*shared, dir, files, options};
  const bool in_place = reading.OpenInPlace();
  if (comm.size() == 1 && !in_place) return shared;
  const std::vector<std::string> groups = comm.AllGatherBytes(reading.Group(comm.rank()));
  const std::string& mine = groups[comm.rank()];
  const auto begin = groups.begin();
  const int leader = static_cast<int>(std::find(begin, groups.end(), mine) - begin);
  const auto index = std::count(begin, begin + comm.rank(), mine);
  const auto count = std::count(begin, groups.end(), mine);
  std::string needed = reading.Needed();
  const std::vector<std::string> of_all = comm.AllGatherBytes(needed);
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (groups[rank] != mine) continue;
    for (size_t i = 0; i < std::min(needed.size(), of_all[rank].size()); ++i) {
      needed[i] = static_cast<char>(needed[i] | of_all[rank][i]);
    }
  }
  bool together = count > 1 || in_place || (!options.ranges.empty() && !files.empty());

  absl::Status ready;
  std::string created;
  if (together && comm.rank() == leader) {
    absl::StatusOr<std::string> entries = reading.Create();
    ready = entries.status();
    if (entries.ok()) created = *std::move(entries);
  }
  const std::vector<std::string> all_created = comm.AllGatherBytes(created);
  if (together && comm.rank() != leader) {
    ready = GuardRank([&] { return reading.Open(all_created[leader], leader); });
  }
  // The leader's files may be closed from here on: the others have opened them.
  const std::vector<std::string> why =
      comm.AllGatherBytes(ready.ok() ? "" : std::string(ready.message()));
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (groups[rank] != mine || why[rank].empty()) continue;
    if (together && comm.rank() == leader) {
      MUSTER_LOG(Info) << "the ranks of this host each read all of " << dir << ": rank " << rank
                       << ": " << why[rank];
    }
    together = false;
  }
  if (!together) shared->files_.clear();
  absl::Status read;
  if (together) read = GuardRank([&] { return reading.ReadShare(index, count, needed); });
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, read, {}, nullptr));
  return shared;
}

std::string NameOfShared(const std::string& path) {
  return absl::StrCat(path, " (the copy in memory that the ranks of this host share)");
}

std::string SharedFiles::PathOf(absl::string_view name) const {
  const auto found = files_.find(name);
  return found == files_.end() ? "" : absl::StrCat("/proc/self/fd/", found->second.get());
}

}  // namespace muster
