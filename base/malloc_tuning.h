#ifndef MUSTER_BASE_MALLOC_TUNING_H_
#define MUSTER_BASE_MALLOC_TUNING_H_

namespace muster {

// Makes glibc keep freed memory of the size of batches and activations instead of returning it to
// the kernel, which would have to map it again, page by page, for the next batch: shuffled token
// batches come 3 times faster. Costs at most 256 MiB of idle memory. Leaves everything alone if a
// MALLOC_ variable of glibc is set. Once per process.
void KeepFreedBatchMemory();

// The opposite of KeepFreedBatchMemory(), over which it wins in either order of the calls: pieces
// of 1 MiB and more go back to the kernel when they are freed. For programs that are short of
// memory, such as those that drop activations: freed memory would otherwise stay with the process,
// up to several times what it uses. Costs system time (bench/README.md). Thread-safe.
void GiveBackFreedMemory();

// While an object lives, freed memory goes back to the kernel as after GiveBackFreedMemory(). Its
// destructor gives back all memory that is free and then restores the earlier choice (by default,
// to keep it). For code that allocates and frees far more than the program needs later, such as
// making a model parameter by parameter in order to divide it: small blocks in between would keep
// glibc from reusing that memory. Thread-safe.
class ScopedGiveBackFreedMemory {
 public:
  ScopedGiveBackFreedMemory();
  ~ScopedGiveBackFreedMemory();
  ScopedGiveBackFreedMemory(const ScopedGiveBackFreedMemory&) = delete;
  ScopedGiveBackFreedMemory& operator=(const ScopedGiveBackFreedMemory&) = delete;
};

}  // namespace muster

#endif  // MUSTER_BASE_MALLOC_TUNING_H_
