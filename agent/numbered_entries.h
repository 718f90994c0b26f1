#ifndef MUSTER_AGENT_NUMBERED_ENTRIES_H_
#define MUSTER_AGENT_NUMBERED_ENTRIES_H_

#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

// Reads folders of /proc whose entries are numbers: of processes, of descriptors. For the child
// between fork and exec, the keeper and the guard: nothing here allocates or does what a signal
// handler must not do.
namespace muster::agent {

// Returns the number that `digits` is; -1: it is not a number.
inline int NumberOf(const char* digits) {
  constexpr ptrdiff_t kMostDigits = 9;
  const char* at = digits;
  int number = 0;
  while (*at >= '0' && *at <= '9' && at - digits < kMostDigits)
    number = number * 10 + (*at++ - '0');
  return at == digits || *at != '\0' ? -1 : number;
}

// Calls apply(number, name) for each entry of the open folder `folder` that is a number. Returns
// false if the kernel did not list them all.
template <typename Apply>
bool ForEachNumber(int folder, Apply apply) {
  struct Entry {  // linux_dirent64
    uint64_t ino;
    int64_t off;
    unsigned short reclen;  // NOLINT: the kernel's types
    unsigned char type;
    char name[1];
  };
  alignas(Entry) char entries[4096];
  long size;  // NOLINT: what syscall returns
  while ((size = syscall(SYS_getdents64, folder, entries, sizeof(entries))) > 0) {
    for (long at = 0; at < size;) {  // NOLINT
      const auto* entry = reinterpret_cast<const Entry*>(entries + at);
      at += entry->reclen;
      const int number = NumberOf(entry->name);
      if (number >= 0) apply(number, entry->name);
    }
  }
  return size == 0;
}

// Returns whether `proc`, an open /proc, belongs to the caller's own pid namespace: in that of
// another one, the numbers name other processes than here.
inline bool IsOwnProc(int proc, pid_t self) {
  char name[16] = "";
  return readlinkat(proc, "self", name, sizeof(name) - 1) > 0 && NumberOf(name) == self;
}

}  // namespace muster::agent

#endif  // MUSTER_AGENT_NUMBERED_ENTRIES_H_
