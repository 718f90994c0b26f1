#include "agent/memory_reader.h"

#include <sys/uio.h>

namespace muster::agent {

bool ProcessMemory::Read(uint64_t address, void* to, size_t size) const {
  const iovec here = {.iov_base = to, .iov_len = size};
  const iovec there = {.iov_base = reinterpret_cast<void*>(address), .iov_len = size};
  return process_vm_readv(pid_, &here, 1, &there, 1, 0) == static_cast<ssize_t>(size);
}

}  // namespace muster::agent
