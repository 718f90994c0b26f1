#ifndef MUSTER_WORKER_DATA_DATA_RANDOM_H_
#define MUSTER_WORKER_DATA_DATA_RANDOM_H_

#include <cstdint>

#include "ATen/core/Generator.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

// Random numbers for reading data, with a separate sequence for each batch, so that they do not
// depend on the reading thread, on earlier reads, or on the training in between.
namespace muster {

// Returns the seed of the sample that this thread is reading for a loader, for the data set's own
// generators: std::mt19937_64 random(muster::data_seed()). Inside get(), next() and operator[] it
// is the seed of the sample; inside get_batch() and collate functions, that of the batch. It
// depends on the loader's seed, the epoch, the rank and the batch's index (for a stream: the
// sample's position), so it is the same for any number of workers and after a restart. Outside a
// loader's reading it is LibTorch's initial seed. Takes a few nanoseconds.
uint64_t data_seed();

// The random numbers of one reader. For one thread at a time.
class DataGenerator {
 public:
  // From here on, numbers are those of `seed`.
  void Reseed(uint64_t seed) {
    seed_ = seed;
    sample_ = 0;
    fresh_ = true;
  }
  // The sample being read.
  void set_sample(uint64_t number) { sample_ = number; }
  uint64_t SampleSeed() const;
  // The generator of LibTorch's random functions. Made or seeded on first use, since most data sets
  // need none.
  const at::Generator& generator();

 private:
  uint64_t seed_ = 0;
  uint64_t sample_ = 0;  // 0: the batch as a whole
  bool fresh_ = true;    // generator_ is not at the start of seed_
  at::Generator generator_;
};

// While it lives, this thread reads with `generator`, which data_seed() uses. If `for_torch`,
// LibTorch's random functions on CPU tensors also draw from it when called without a generator, and
// leave the default generator, which training draws from, unchanged. (They get the generator from
// our own kernel on a dispatch key that this thread includes; other functions fall through and are
// not slower.) Scopes nest. Error (c10::Error): the operators cannot be registered.
class DataRandomScope {
 public:
  DataRandomScope(DataGenerator* generator, bool for_torch);
  ~DataRandomScope();
  DataRandomScope(const DataRandomScope&) = delete;
  DataRandomScope& operator=(const DataRandomScope&) = delete;

 private:
  DataGenerator* const outer_;
  const bool included_;  // whether this thread included the key before this scope
  const bool for_torch_;
};

// Sets the sample of the batch, counted from 0, that data_seed() applies to. Does nothing outside
// scopes.
void SetDataSample(int64_t number);

// Prepares DataRandomScope. It changes the dispatcher's tables, so it is called when a loader is
// prepared, not from reading threads.
void RegisterDataRandom();

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_DATA_RANDOM_H_
