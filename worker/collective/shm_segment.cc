#include "worker/collective/shm_segment.h"

#include <fcntl.h>
#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <new>
#include <thread>

#include "absl/status/status.h"
#include "base/identity.h"
#include "base/memory_file.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

constexpr uint64_t kMagic = 0x316d68732d6d75ULL;
// How often a sleeping rank checks whether those it waits for are alive.
constexpr long kSliceNanos = 50'000'000;

long Futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                 0);
}

std::string ReadLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

size_t RoundUp(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

std::string HostIdentity() {
  char pid_namespace[128] = {};
  if (readlink("/proc/self/ns/pid", pid_namespace, sizeof(pid_namespace) - 1) < 0) return "";
  return ReadLine("/proc/sys/kernel/random/boot_id") + " " + pid_namespace;
}

struct ShmSegment::Header {
  uint64_t magic;
  uint64_t nonce;
  std::atomic<uint32_t> broken;  // 0: no; 1: `why` is being written; 2: `why` is complete
  char why[512];
};

struct alignas(64) ShmSegment::Cell {
  std::atomic<uint32_t> phase;    // how many times the rank has arrived
  std::atomic<uint32_t> waiters;  // asleep on `phase`
  std::atomic<uint32_t> left;
  int32_t pid;
  int32_t pool_fd;  // in that process; -1: it has no pool
  uint64_t pool_nonce;
  std::atomic<uint32_t> reaches_pools;
  ShmCall calls[kBuffers];
  ShmPlace places[kBuffers];
};

ShmSegment::Cell& ShmSegment::cell(int r) const {
  return reinterpret_cast<Cell*>(base_ + RoundUp(sizeof(Header), 64))[r];
}

bool ShmSegment::Map(int fd, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return false;
  base_ = static_cast<char*>(memory);
  bytes_ = bytes;
  return true;
}

std::unique_ptr<ShmSegment> ShmSegment::Open(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                             int size, const ShmPool* pool, std::string* why,
                                             std::vector<int> names) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  std::unique_ptr<ShmSegment> segment(new ShmSegment(rank, size, std::move(names)));
  segment->data_offset_ =
      RoundUp(RoundUp(sizeof(Header), 64) + size * sizeof(Cell), static_cast<size_t>(4096));
  const size_t bytes =
      segment->data_offset_ + static_cast<size_t>(size + 1) * kBuffers * kSlotBytes;
  std::string problem;
  int fd = -1;
  if (rank == 0) {
    const uint64_t nonce = RandomId();
    fd = static_cast<int>(syscall(SYS_memfd_create, "muster", 1u /* MFD_CLOEXEC */));
    if (const absl::Status sized = fd < 0 ? absl::OkStatus() : ResizeMemoryFile(fd, bytes);
        !sized.ok()) {
      problem = std::string(sized.message());
    } else if (fd < 0 || !segment->Map(fd, bytes)) {
      problem = c10::str("no shared memory: ", std::strerror(errno));
    }
    if (!problem.empty()) {
      store->set("shm/where", "");
    } else {
      // The pages are zero, the initial value of all counters.
      auto* header = reinterpret_cast<Header*>(segment->base_);
      header->nonce = nonce;
      header->magic = kMagic;
      store->set("shm/where",
                 c10::str(HostIdentity(), "\n/proc/", getpid(), "/fd/", fd, "\n", nonce));
    }
  } else {
    const std::string where = store->get_to_str("shm/where");
    const size_t first = where.find('\n');
    const size_t second = where.rfind('\n');
    if (first == std::string::npos) {
      problem = "rank 0 has no shared memory";
    } else if (where.substr(0, first) != HostIdentity() || HostIdentity().empty()) {
      problem = "another host or pid namespace than rank 0's";
    } else {
      const std::string path = where.substr(first + 1, second - first - 1);
      fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
      struct stat status = {};
      if (fd < 0 || fstat(fd, &status) != 0) {
        problem = c10::str(path, " of rank 0 cannot be opened: ", std::strerror(errno));
      } else if (static_cast<size_t>(status.st_size) != bytes || !segment->Map(fd, bytes)) {
        problem = c10::str(path, " of rank 0 cannot be mapped");
      } else {
        const auto* header = reinterpret_cast<const Header*>(segment->base_);
        if (header->magic != kMagic || std::to_string(header->nonce) != where.substr(second + 1)) {
          problem = c10::str(path, " is not rank 0's memory");
        }
      }
    }
  }
  if (problem.empty()) {
    Cell& mine = segment->cell(rank);
    mine.pid = getpid();
    mine.pool_fd = pool != nullptr ? pool->fd() : -1;
    mine.pool_nonce = pool != nullptr ? pool->nonce() : 0;
  }
  store->set(c10::str("shm/state/", rank), problem.empty() ? "ok" : problem);
  for (int r = 0; r < size; ++r) {
    const std::string state = store->get_to_str(c10::str("shm/state/", r));
    if (state != "ok" && problem.empty())
      problem = c10::str("rank ", segment->NameOf(r), ": ", state);
  }
  // All have mapped the file or given up: it is no longer needed.
  if (fd >= 0) close(fd);
  if (!problem.empty()) {
    if (why != nullptr) *why = problem;
    return nullptr;
  }
  for (int r = 0; r < size; ++r) {
    const pid_t pid = segment->cell(r).pid;
    segment->pidfds_.push_back(pid == getpid() ? -1
                                               : static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  }
  segment->OpenPools();
  // Spinning only pays if the others run at the same time. About a tenth of a millisecond: the
  // ranks of a small step are apart by less, and a sleeper needs half as long to wake up.
  segment->spins_ = std::thread::hardware_concurrency() >= static_cast<unsigned>(size) ? 5000 : 20;
  return segment;
}

void ShmSegment::OpenPools() {
  reaches_pools_ = true;
  for (int r = 0; r < size_; ++r) {
    const Cell& other = cell(r);
    peers_.push_back(nullptr);
    if (r == rank_) {
      reaches_pools_ &= other.pool_fd >= 0;
      continue;
    }
    if (other.pool_fd >= 0) {
      const std::string path = c10::str("/proc/", other.pid, "/fd/", other.pool_fd);
      peers_[r] = ShmPeerPool::Open(open(path.c_str(), O_RDWR | O_CLOEXEC), other.pool_nonce);
    }
    reaches_pools_ &= peers_[r] != nullptr;
  }
  cell(rank_).reaches_pools.store(reaches_pools_ ? 1 : 0);
}

bool ShmSegment::all_reach_pools() {
  for (int r = 0; r < size_ && !all_reach_pools_; ++r) {
    if (cell(r).reaches_pools.load() == 0) return false;
  }
  all_reach_pools_ = true;
  return true;
}

ShmSegment::~ShmSegment() {
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
  if (base_ == nullptr) return;
  // Peers that sleep on our phase wake up, find no new phase, and then see `left`.
  cell(rank_).left.store(1);
  Futex(&cell(rank_).phase, FUTEX_WAKE, INT_MAX, nullptr);
  munmap(base_, bytes_);
}

char* ShmSegment::slot(int r) {
  return base_ + data_offset_ + (static_cast<size_t>(r) * kBuffers + step_ % kBuffers) * kSlotBytes;
}
char* ShmSegment::result() { return slot(size_); }
const ShmCall& ShmSegment::call(int r) const { return cell(r).calls[step_ % kBuffers]; }
const ShmPlace& ShmSegment::place(int r) const { return cell(r).places[step_ % kBuffers]; }

char* ShmSegment::At(int r) {
  try {
    return peers_[r]->At(place(r));
  } catch (const c10::Error& e) {
    Fail(c10::str("rank ", NameOf(rank_), ", data of rank ", NameOf(r), ": ",
                  e.what_without_backtrace()));
  } catch (const std::exception& e) {
    Fail(c10::str("rank ", NameOf(rank_), ", data of rank ", NameOf(r), ": ", e.what()));
  }
}

void ShmSegment::Begin(const ShmCall& call, const ShmPlace& place) {
  ++step_;
  cell(rank_).calls[step_ % kBuffers] = call;
  cell(rank_).places[step_ % kBuffers] = place;
}

void ShmSegment::Meet(std::chrono::steady_clock::time_point deadline, const std::string& what) {
  // Not after a collective that failed: the others would take this arrival for that of the failed
  // one.
  ThrowIfBroken(what);
  ++phase_;
  Cell& mine = cell(rank_);
  // Publishes the slot and the call that this rank wrote before. The default (sequentially
  // consistent) order matters: we store `phase` and then load `waiters`, a waiter increments
  // `waiters` and then loads `phase`. At least one of the two sees the other's store, so either we
  // wake the waiter or it does not go to sleep.
  mine.phase.store(phase_);
  if (mine.waiters.load() > 0) Futex(&mine.phase, FUTEX_WAKE, INT_MAX, nullptr);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) WaitFor(peer, phase_, deadline, what);
  }
  ThrowIfBroken(what);
}

void ShmSegment::ThrowIfBroken(const std::string& what) const {
  const auto* header = reinterpret_cast<const Header*>(base_);
  if (header->broken.load() != 2) return;
  C10_THROW_ERROR(DistBackendError,
                  c10::str(what, " on rank ", NameOf(rank_), ": ",
                           std::string(header->why, strnlen(header->why, sizeof(header->why)))));
}

void ShmSegment::WaitFor(int peer, uint32_t phase, std::chrono::steady_clock::time_point deadline,
                         const std::string& what) {
  Cell& other = cell(peer);
  const auto arrived = [&] {
    // The signed difference stays right when the counter wraps. Acquire: after this, the peer's
    // slot and call are visible.
    return static_cast<int32_t>(other.phase.load(std::memory_order_acquire) - phase) >= 0;
  };
  for (int i = 0; i < spins_; ++i) {
    if (arrived()) return;
    _mm_pause();
  }
  const timespec slice = {0, kSliceNanos};
  while (true) {
    other.waiters.fetch_add(1);
    const uint32_t seen = other.phase.load();
    // The kernel compares `phase` with `seen` again before it sleeps. A peer that dies wakes no
    // one, so the sleep is cut into slices, and each slice checks for the ways in which a peer
    // fails.
    if (static_cast<int32_t>(seen - phase) < 0 && other.left.load() == 0) {
      Futex(&other.phase, FUTEX_WAIT, seen, &slice);
    }
    other.waiters.fetch_sub(1);
    if (arrived()) return;

    ThrowIfBroken(what);
    const std::string who = c10::str("rank ", NameOf(peer), " (pid ", other.pid, ")");
    if (other.left.load() != 0) {
      // It may have arrived just before it left.
      if (arrived()) return;
      Fail(c10::str(what, " on rank ", NameOf(rank_), ": ", who, " has left the group"));
    }
    if (pidfds_[peer] >= 0) {
      pollfd poll_fd = {pidfds_[peer], POLLIN, 0};
      if (poll(&poll_fd, 1, 0) == 1) {
        if (arrived()) return;
        Fail(c10::str(what, " on rank ", NameOf(rank_), ": ", who, " has died"));
      }
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      Fail(c10::str(what, " on rank ", NameOf(rank_), ": ", who, " did not arrive in time"));
    }
  }
}

void ShmSegment::Break(const std::string& why) {
  auto* header = reinterpret_cast<Header*>(base_);
  // 0: intact; 1: one rank writes `why`; 2: `why` is complete. Readers act only on 2, and later
  // callers leave the first reason in place.
  uint32_t expected = 0;
  if (!header->broken.compare_exchange_strong(expected, 1)) return;
  const size_t length = std::min(why.size(), sizeof(header->why) - 1);
  std::memcpy(header->why, why.data(), length);
  header->why[length] = '\0';
  header->broken.store(2);
  // Sleepers check when their time slice ends.
}

void ShmSegment::Fail(const std::string& why) {
  Break(why);
  C10_THROW_ERROR(DistBackendError, why);
}

}  // namespace muster
