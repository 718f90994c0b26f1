#ifndef MUSTER_WORKER_COLLECTIVE_SHARED_PARTS_H_
#define MUSTER_WORKER_COLLECTIVE_SHARED_PARTS_H_

#include <cstdint>
#include <optional>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"

namespace muster {

// Memory of which each rank of a host writes its own part, and which all of them read in place. It
// is freed with the last tensor of the last rank, so a rank that has gone leaves its values to the
// others. The caller must order writes and reads.
struct SharedParts {
  // comm.size() parts, writable: this rank's part is visible to the others; the rest is private to
  // this rank, all zero. Defined only by ShareParts(whole).
  at::Tensor whole;
  at::Tensor mine;  // this rank's part, writable
  // All parts, one after the other. Read-only: a write to it is a segmentation fault.
  at::Tensor all;
};

// Whether ShareParts() and AllocateReachable() have such memory between the ranks of `comm`,
// because they are on one host. The same on every rank.
bool RanksShareMemory(Comm& comm);

// Elements of a part must fill whole pages of this many bytes.
inline constexpr int64_t kSharedPartPage = 4096;

// (collective) Returns parts of `part` elements each, all zero; `options`: dense, on the CPU.
// Nothing, on every rank alike, if the ranks do not share memory or one of them cannot allocate it.
// Throws as collectives do.
std::optional<SharedParts> ShareParts(Comm& comm, int64_t part, const at::TensorOptions& options,
                                      bool whole);

// Returns a tensor of one dimension, all zero, on which collectives of `comm` work without copies
// if every rank passes such a tensor. Undefined if there is no such memory. Not a collective.
at::Tensor AllocateReachable(Comm& comm, int64_t numel, const at::TensorOptions& options);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_SHARED_PARTS_H_
