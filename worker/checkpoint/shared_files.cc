#include "worker/checkpoint/shared_files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
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
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/node_exchange.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/write_at.h"
#include "worker/collective/shm_segment.h"

namespace muster {
namespace {

using Json = nlohmann::json;

// A read-only mapping of a file in memory.
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

// The state of Read() on one rank.
struct SharedFiles::Reading {
  // Whether this rank's node has the file.
  bool Has(const ManifestFile& file) const {
    return options.nodes == nullptr || options.nodes->Has(comm.rank(), file.name);
  }
  bool HasAll() const {
    return std::all_of(files.begin(), files.end(), [&](const auto& file) { return Has(file); });
  }
  bool IsInPlace(const ManifestFile& file) const { return in_place && Has(file); }

  // Opens the files that the node has, if all of them are to be used in place.
  bool OpenInPlace() {
    bool any = false;
    in_place = std::all_of(files.begin(), files.end(), [&](const auto& file) {
      if (!Has(file)) return true;
      any = true;
      OwnedFd& fd = shared.files_[file.name];
      fd = OwnedFd(open(JoinPath(dir, file.name).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
      struct stat info;
      // A file of another size is reported by ReadDirectFile.
      return fd.open() && fstat(fd.get(), &info) == 0 && S_ISREG(info.st_mode) &&
             static_cast<uint64_t>(info.st_size) == file.digest.bytes &&
             (options.in_place || IsInMemory(fd.get(), options.read));
    });
    in_place = in_place && any;
    if (!in_place) shared.files_.clear();
    return in_place;
  }

  // Creates the leader's files, for the others to open.
  absl::StatusOr<std::string> Create() {
    Json entries = Json::array();
    for (const ManifestFile& file : files) {
      OwnedFd& fd = shared.files_[file.name];
      if (IsInPlace(file)) {
        MUSTER_ASSIGN_OR_RETURN(std::string identity, FileIdentity(fd.get()));
        entries.push_back(std::move(identity));
        continue;
      }
      MUSTER_ASSIGN_OR_RETURN(fd, NewFile(file.name));
      MUSTER_RETURN_IF_ERROR(ResizeMemoryFile(fd.get(), file.digest.bytes));
      const std::string* const header = HeaderOf(file);
      if (header != nullptr) {
        MUSTER_RETURN_IF_ERROR(WriteAt(fd.get(), 0, *header, NoRoomFor(header->size(), file)));
      }
      MUSTER_ASSIGN_OR_RETURN(std::string place, PlaceOfFile(fd.get()));
      entries.push_back(std::move(place));
    }
    return entries.dump();
  }

  // Creates a file in memory, or on the disk if files are used in place because memory is scarce.
  absl::StatusOr<OwnedFd> NewFile(const std::string& name) {
    if (UsesScratch()) {
      MUSTER_RETURN_IF_ERROR(MakeDirectories(options.scratch));
      OwnedFd fd(open(options.scratch.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
      if (!fd.open() && errno == EOPNOTSUPP) {
        const std::string path =
            JoinPath(options.scratch, absl::StrCat(".muster-state-", RandomHex()));
        fd = OwnedFd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
        if (fd.open()) unlink(path.c_str());
      }
      if (fd.open()) return fd;
      return ReadError(errno, absl::StrCat("cannot create a file for what comes from other nodes "
                                           "in ",
                                           options.scratch));
    }
    OwnedFd fd(options.create != nullptr ? options.create(name.c_str())
                                         : memfd_create(name.c_str(), MFD_CLOEXEC));
    if (!fd.open()) return absl::ErrnoToStatus(errno, "cannot create shared memory");
    return fd;
  }

  const std::string* HeaderOf(const ManifestFile& file) const {
    if (options.headers == nullptr) return nullptr;
    const auto found = options.headers->find(file.name);
    return found == options.headers->end() ? nullptr : &found->second;
  }

  bool UsesScratch() const { return options.in_place && !options.scratch.empty(); }

  std::string NoRoomFor(size_t bytes, const ManifestFile& file) const {
    return absl::StrCat(UsesScratch() ? absl::StrCat("no room in ", options.scratch) : "no memory",
                        " for ", bytes, " bytes of ", file.name,
                        ", which the ranks of this host read together");
  }

  absl::Status Open(const std::string& created, int leader) {
    if (created.empty()) return absl::UnavailableError("the first rank has no shared memory");
    const Json entries = Json::parse(created);
    for (size_t i = 0; i < files.size(); ++i) {
      if (IsInPlace(files[i])) {
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

  // Returns which blocks of all files this rank needs.
  BlockSet Needed() const {
    BlockSet needed(files);
    for (size_t i = 0; i < files.size(); ++i) {
      const auto ranges = options.ranges.find(files[i].name);
      if (ranges == options.ranges.end()) {
        needed.AddRange(files, i, {.begin = 0, .end = files[i].digest.bytes});
      } else {
        for (const FileRange& range : ranges->second) needed.AddRange(files, i, range);
      }
    }
    return needed;
  }

  // Reads the share of the `index`-th of `count` ranks, a consecutive part of those of the `needed`
  // blocks that the node has, and counts the bytes of all of these.
  absl::Status ReadShare(uint64_t index, uint64_t count, const BlockSet& needed) {
    struct Block {
      const ManifestFile* file;
      uint64_t begin, end;
    };
    std::vector<Block> blocks;
    for (size_t i = 0; i < files.size(); ++i) {
      if (!Has(files[i])) continue;
      for (uint64_t block = 0; block < CountBlocks(files[i]); ++block) {
        if (!needed.Has(i, block)) continue;
        const FileRange range = RangeOfBlock(files[i], block);
        blocks.push_back({&files[i], range.begin, range.end});
        shared.bytes_read_ += range.end - range.begin;
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
    if (file.blocks.empty()) {
      MUSTER_ASSIGN_OR_RETURN(const std::string whole,
                              ReadRecordFile(path, static_cast<int64_t>(file.digest.bytes)));
      MUSTER_RETURN_IF_ERROR(CheckBlockOf(file, 0, whole, path));
      return IsInPlace(file) ? absl::OkStatus() : Put(file, 0, whole);
    }
    if (in_place && IsInMemory(fd, options.read)) {
      MUSTER_ASSIGN_OR_RETURN(const Mapping mapping, Mapping::Of(fd, file.digest.bytes));
      return CheckBlocks(path, absl::string_view(mapping.data(), file.digest.bytes), file.blocks,
                         range, options.read.in_flight);
    }
    if (in_place) {
      const auto checked = [](uint64_t, absl::string_view) { return absl::OkStatus(); };
      return ReadDirectFile(path, file.digest.bytes, file.blocks, range, checked, options.read);
    }
    // Do not read directly into that memory: its pages are of 4 KiB, so a transfer has so many
    // pieces that a fast disk reaches only half of its rate. Write to the file rather than to a
    // mapping: a lack of memory is an error here, but a signal when a mapping is touched.
    return ReadDirectFile(
        path, file.digest.bytes, file.blocks, range,
        [&](uint64_t offset, absl::string_view block) { return Put(file, offset, block); },
        options.read);
  }

  absl::Status Put(const ManifestFile& file, uint64_t offset, absl::string_view block) {
    return WriteAt(shared.files_.at(file.name).get(), offset, block, NoRoomFor(block.size(), file));
  }

  // Returns a text; ranks with the same text read together.
  std::string Group(int rank) const {
    const std::string host = options.host.empty() ? HostIdentity() : options.host;
    if (host.empty() || files.empty()) return absl::StrCat("rank ", rank);
    // Ranks of one host may belong to nodes with different disks.
    const int node = options.nodes == nullptr ? 0 : options.nodes->leader_of[rank];
    return DigestBytes(absl::StrCat(host, "\n", dir, "\n", in_place ? "in place" : "", "\n", node,
                                    "\n", TextOfFiles()))
        .xxh3;
  }

  // Checks that all ranks name the same files (collective, if nodes have files of their own).
  absl::Status CheckSameFiles() const {
    if (options.nodes == nullptr) return absl::OkStatus();
    const std::vector<std::string> all = comm.AllGatherBytes(DigestBytes(TextOfFiles()).xxh3);
    for (size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank] == all[0]) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(dir, ": rank ", rank,
                       " reads other files of it than rank 0: all ranks have to prepare "
                       "the same models and optimizers, in the same order"));
    }
    return absl::OkStatus();
  }

  std::string TextOfFiles() const {
    std::string text;
    for (const ManifestFile& file : files) {
      absl::StrAppend(&text, file.name, " ", file.digest.bytes, " ", file.digest.xxh3, "\n");
    }
    return text;
  }

  Comm& comm;
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
  Reading reading{comm, *shared, dir, files, options};
  const bool in_place = reading.OpenInPlace();
  if (comm.size() == 1 && !in_place) return shared;
  MUSTER_RETURN_IF_ERROR(reading.CheckSameFiles());
  const std::vector<std::string> groups = comm.AllGatherBytes(reading.Group(comm.rank()));
  std::vector<int> host_of;  // by rank: the lowest of the ranks that read together
  for (const std::string& group : groups) {
    host_of.push_back(
        static_cast<int>(std::find(groups.begin(), groups.end(), group) - groups.begin()));
  }
  const int leader = host_of[comm.rank()];
  const auto index = std::count(host_of.begin(), host_of.begin() + comm.rank(), leader);
  const auto count = std::count(host_of.begin(), host_of.end(), leader);
  const std::vector<std::string> of_all = comm.AllGatherBytes(reading.Needed().text());
  bool together =
      count > 1 || in_place || (!options.ranges.empty() && !files.empty()) || !reading.HasAll();

  absl::Status ready;
  std::string created;
  if (together && comm.rank() == leader) {
    ready = GuardRank([&]() -> absl::Status {
      MUSTER_ASSIGN_OR_RETURN(created, reading.Create());
      return absl::OkStatus();
    });
  }
  const std::vector<std::string> all_created = comm.AllGatherBytes(created);
  if (together && comm.rank() != leader) {
    ready = GuardRank([&] { return reading.Open(all_created[leader], leader); });
  }
  // The leader's files may be closed from here on: the others have opened them.
  const std::vector<std::string> why =
      comm.AllGatherBytes(ready.ok() ? "" : std::string(ready.message()));
  std::set<int> apart;  // hosts whose ranks cannot share memory
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (why[rank].empty()) continue;
    if (apart.insert(host_of[rank]).second && together && comm.rank() == leader &&
        host_of[rank] == leader) {
      MUSTER_LOG(Info) << "the ranks of this host each read all of " << dir << ": rank " << rank
                       << ": " << why[rank];
    }
  }
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (apart.count(host_of[rank]) > 0) host_of[rank] = rank;
  }
  const bool alone = apart.count(leader) > 0;
  if (alone) {
    // Each rank gets the blocks that its node lacks for itself.
    together = !reading.HasAll();
    ready = GuardRank([&]() -> absl::Status {
      shared->files_.clear();
      reading.OpenInPlace();
      return together ? reading.Create().status() : absl::OkStatus();
    });
  }
  if (!together) shared->files_.clear();
  absl::Status read = together ? ready : absl::OkStatus();
  if (together && read.ok()) {
    BlockSet needed(files);
    for (int rank = 0; rank < comm.size(); ++rank) {
      if (host_of[rank] == host_of[comm.rank()]) needed.AddAll(BlockSet(files, of_all[rank]));
    }
    read = GuardRank([&] {
      return alone ? reading.ReadShare(0, 1, needed) : reading.ReadShare(index, count, needed);
    });
  }
  if (options.nodes != nullptr) {
    MUSTER_ASSIGN_OR_RETURN(
        shared->bytes_received_,
        MoveBlocks(
            comm, dir, files, *options.nodes, {.host_of = host_of, .needed = of_all}, options.read,
            [&](size_t file, uint64_t offset, absl::string_view block) {
              return reading.Put(files[file], offset, block);
            },
            &read));
  }
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
