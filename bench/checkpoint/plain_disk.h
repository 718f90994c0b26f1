#ifndef MUSTER_BENCH_CHECKPOINT_PLAIN_DISK_H_
#define MUSTER_BENCH_CHECKPOINT_PLAIN_DISK_H_

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/file.h"

// Plain transfers to and from the disk, which are the measure of the checkpoints. Shares no code
// with the saver; an error ends the program.
namespace muster::bench {

constexpr size_t kBlock = size_t{8} << 20;

[[noreturn]] inline void Die(const std::string& what) {
  std::perror(what.c_str());
  std::exit(1);
}

inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

inline double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Runs `block` for all blocks of `bytes` (whole blocks) from two threads.
inline void InTwoThreads(size_t bytes, const std::function<void(size_t at, int thread)>& block) {
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      for (size_t at = next.fetch_add(kBlock); at < bytes; at = next.fetch_add(kBlock)) {
        block(at, i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A block of memory for each thread.
struct PlainBlocks {
  char* at[2];
};

// Returns blocks in pages of 2 MiB, if `huge` and the kernel has them: a transfer from pages of 4
// KiB consists of so many pieces that some disks give it half of their rate.
inline PlainBlocks Blocks(bool huge) {
  constexpr size_t kHugePage = size_t{2} << 20;
  PlainBlocks blocks;
  for (char*& block : blocks.at) {
    block = static_cast<char*>(std::aligned_alloc(kHugePage, kBlock));
    if (block == nullptr) Die("memory");
    (void)madvise(block, kBlock, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::fill_n(block, kBlock, 'x');
  }
  return blocks;
}

// Whether the last plain transfer went past the page cache. Some file systems of containers do not
// allow that: there the plain transfers are what these allow instead.
inline bool& PlainIsDirect() {
  static bool direct = true;
  return direct;
}

inline int OpenPlain(const std::string& path, int flags) {
  int fd = open(path.c_str(), flags | O_DIRECT, 0666);
  PlainIsDirect() = fd >= 0;
  if (fd < 0) fd = open(path.c_str(), flags, 0666);
  if (fd < 0) Die("cannot open " + path);
  return fd;
}

inline void PlainWrite(const std::string& path, const PlainBlocks& from, size_t bytes) {
  const int fd = OpenPlain(path, O_WRONLY | O_CREAT | O_TRUNC);
  if (fallocate(fd, 0, 0, bytes) != 0 && errno != EOPNOTSUPP) Die("cannot write " + path);
  InTwoThreads(bytes, [&](size_t at, int thread) {
    if (pwrite(fd, from.at[thread], kBlock, at) != static_cast<ssize_t>(kBlock)) Die("pwrite");
  });
  if (fsync(fd) != 0 || close(fd) != 0) Die("fsync");
}

inline void PlainRead(const std::string& path, const PlainBlocks& to, size_t bytes) {
  const int fd = OpenPlain(path, O_RDONLY);
  (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);  // where direct reads are not possible
  InTwoThreads(bytes, [&](size_t at, int thread) {
    if (pread(fd, to.at[thread], kBlock, at) != static_cast<ssize_t>(kBlock)) Die("pread");
  });
  close(fd);
}

// Takes a checkpoint's files out of the page cache; returns their bytes.
inline size_t DropFromCache(const std::string& dir) {
  size_t bytes = 0;
  const auto names = ListDirectory(dir);
  Check(names.status());
  for (const std::string& name : *names) {
    const int fd = open(JoinPath(dir, name).c_str(), O_RDONLY);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) Die("cannot open " + name);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    bytes += info.st_size;
  }
  return bytes;
}

}  // namespace muster::bench

#endif  // MUSTER_BENCH_CHECKPOINT_PLAIN_DISK_H_
