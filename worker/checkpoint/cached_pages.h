#ifndef MUSTER_WORKER_CHECKPOINT_CACHED_PAGES_H_
#define MUSTER_WORKER_CHECKPOINT_CACHED_PAGES_H_

#include <cstddef>
#include <cstdint>

namespace muster {

// The size of the pages that mincore() reports.
uint64_t PageBytes();

// Whether the kernel reports which pages of an open file are in the page cache. For a file that
// this process neither owns nor may write, it reports (since Linux 5.2) all of them as cached.
bool MayAskForCachedPages(int fd);

// Whether all pages of a range of mapped memory are in memory. Does not touch them.
bool PagesAreInMemory(const char* begin, uint64_t bytes);

// Tells which parts of a file are in the page cache, from which they are read faster than from the
// disk. Does not touch them: a read with RWF_NOWAIT that finds a page missing would start to read
// ahead the whole range (since Linux 5.9). Thread-safe.
class CachedPages {
 public:
  // The file may be closed afterwards. 0 bytes: nothing is cached. For a file that this process
  // neither owns nor may write, the kernel reports every page as cached, which means nothing.
  CachedPages(int fd, uint64_t bytes);
  ~CachedPages();
  CachedPages(const CachedPages&) = delete;
  CachedPages& operator=(const CachedPages&) = delete;

  // Whether all of the range is cached; if it extends beyond the end of the file, the part inside
  // the file. False if that cannot be determined.
  bool Has(uint64_t begin, uint64_t bytes) const;

 private:
  // Mapped once rather than for each range, because making a mapping waits for threads that
  // allocate memory.
  char* base_ = nullptr;
  const uint64_t bytes_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_CACHED_PAGES_H_
