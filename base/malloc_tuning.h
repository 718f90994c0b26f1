#ifndef MUSTER_BASE_MALLOC_TUNING_H_
#define MUSTER_BASE_MALLOC_TUNING_H_

namespace muster {

// Makes glibc keep freed memory of the size of batches and activations instead of returning it to
// the kernel, which would have to map it again, page by page, for the next batch: shuffled token
// batches come 3 times faster. Costs at most 256 MiB of idle memory. Leaves everything alone if a
// MALLOC_ variable of glibc is set. Once per process.
void KeepFreedBatchMemory();

// The opposite, which wins whatever comes first: pieces of 1 MiB and more go back to the kernel
// when they are freed. For programs that are bounded by memory, as those that drop activations:
// what they have freed would stay the process's, up to several times of what they use. Costs system
// time (bench/README.md). Thread-safe, as the other.
void GiveBackFreedMemory();

// While one lives, freed memory goes back to the kernel as after GiveBackFreedMemory(), and at its
// end all that is free does; then what was chosen before counts again, by default to keep it. For
// what takes and frees far more memory than the program needs later, as a model that is made
// parameter by parameter to be divided: small pieces between keep glibc from using it again.
// Thread-safe.
class FreedMemoryGoesBack {
 public:
  FreedMemoryGoesBack();
  ~FreedMemoryGoesBack();
  FreedMemoryGoesBack(const FreedMemoryGoesBack&) = delete;
  FreedMemoryGoesBack& operator=(const FreedMemoryGoesBack&) = delete;
};

}  // namespace muster

#endif  // MUSTER_BASE_MALLOC_TUNING_H_
