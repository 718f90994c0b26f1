#ifndef MUSTER_WORKER_COLLECTIVE_NCCL_PLUGIN_NCCL_PLUGIN_H_
#define MUSTER_WORKER_COLLECTIVE_NCCL_PLUGIN_NCCL_PLUGIN_H_

#include <stddef.h>
#include <stdint.h>

// The C boundary of libmuster_nccl.so, the only part of Muster that names CUDA or NCCL. The library
// is opened at run time, after libtorch_cuda.so, and only if there is a GPU. No exception crosses
// it: functions that can fail return 0 and write one line, cut to `error_size` bytes and ended by a
// zero, to `error`.
#ifdef __cplusplus
extern "C" {
#endif

#define MUSTER_NCCL_ABI 2

// Returns MUSTER_NCCL_ABI of the library.
typedef int (*MusterNcclAbi)(void);
// Returns the version of the LibTorch that it was compiled against ("2.11.0"). C++ objects cross as
// pointers, so it must be exactly ours.
typedef const char* (*MusterNcclTorchVersion)(void);
// Writes NCCL's version at run time ("2.28.9") to `version`.
typedef void (*MusterNcclVersion)(char* version, size_t version_size);

// The arguments for a backend.
typedef struct MusterNcclOptions {
  void* store;  // c10d::Store*, borrowed; the backend takes its own reference
  int rank;
  int size;
  int device;          // index of the GPU
  int64_t timeout_ms;  // for every collective
  const char* name;    // the name of the group
} MusterNcclOptions;

// Returns a connected c10d::Backend*, whose one reference the caller owns; null on failure. Blocks
// until all ranks have joined.
typedef void* (*MusterNcclMakeBackend)(const MusterNcclOptions* options, char* error,
                                       size_t error_size);

// How backends that are released from here on end. 1: flushed, which waits for this rank's
// collectives and for what other ranks have yet to receive of them. 0, as at the start: aborted,
// which waits for no rank.
typedef void (*MusterNcclFlushAtEnd)(int flush);

int muster_nccl_abi(void);
const char* muster_nccl_torch_version(void);
void muster_nccl_version(char* version, size_t version_size);
void* muster_nccl_make_backend(const MusterNcclOptions* options, char* error, size_t error_size);
void muster_nccl_flush_at_end(int flush);

#ifdef __cplusplus
}
#endif

#endif  // MUSTER_WORKER_COLLECTIVE_NCCL_PLUGIN_NCCL_PLUGIN_H_
