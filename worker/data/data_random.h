#ifndef MUSTER_WORKER_DATA_DATA_RANDOM_H_
#define MUSTER_WORKER_DATA_DATA_RANDOM_H_

#include <cstdint>

#include "ATen/core/Generator.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

// Random numbers for reading data, with a separate sequence for each batch, so that they do not
// depend on the reading thread, on earlier reads, or on the training in between.
namespace muster {

// The seed of the sample that this thread is reading for a loader, for generators of the data set's
// own: std::mt19937_64 random(muster::data_seed()). Inside of get(), next() and operator[] of the
// sample, inside of get_batch() and collate functions of the batch. A function of the loader's
// seed, the epoch, the rank and the batch's index (of a stream: of the sample's position), so it is
// the same however many workers there are and after a restart. Outside of a loader's reading:
// LibTorch's initial seed. A few nanoseconds.
uint64_t data_seed();

// Random numbers of one reader. One thread at a time.
class DataGenerator {
 public:
  // From here on, numbers are those of `seed`.
  void Reseed(uint64_t seed) {
    seed_ = seed;
    sample_ = 0;
    fresh_ = true;
  }
  // The sample that is read now.
  void set_sample(uint64_t number) { sample_ = number; }
  uint64_t SampleSeed() const;
  // The generator of LibTorch's random functions. Made or seeded on first use, since most data sets
  // need none.
  const at::Generator& generator();

 private:
  uint64_t seed_ = 0;
  uint64_t sample_ = 0;  // 0: the batch as a whole
  bool fresh_ = true;    // generator_ is not at the beginning of seed_
  at::Generator generator_;
};

// While it lives, this thread reads with `generator`: data_seed() is its. If `for_torch`,
// LibTorch's random functions on CPU tensors draw from it too where they are given no generator,
// and leave the default generator, which training draws from, alone. (The functions get the
// generator from a kernel of our own on a dispatch key that this thread includes; other functions
// are not slower, as they fall through.) Scopes nest. Error (c10::Error): the operators cannot be
// registered.
class DataRandomScope {
 public:
  DataRandomScope(DataGenerator* generator, bool for_torch);
  ~DataRandomScope();
  DataRandomScope(const DataRandomScope&) = delete;
  DataRandomScope& operator=(const DataRandomScope&) = delete;

 private:
  DataGenerator* const outer_;
  const bool included_;  // the key, before this scope
  const bool for_torch_;
};

// Sets the sample of the batch, counted from 0, that data_seed() applies to. Nothing outside of
// scopes.
void SetDataSample(int64_t number);

// Makes DataRandomScope ready. It changes the dispatcher's tables, so it is called when a loader is
// prepared and not from reading threads.
void RegisterDataRandom();

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_DATA_RANDOM_H_
