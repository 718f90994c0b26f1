#ifndef MUSTER_WORKER_BIGMODEL_WEIGHT_READERS_H_
#define MUSTER_WORKER_BIGMODEL_WEIGHT_READERS_H_

#include <pthread.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "c10/core/Stream.h"
#include "worker/bigmodel/weight_source.h"

namespace muster {

// A part of a tensor that is to be read from its source to memory.
struct WeightPiece {
  const WeightSource* source = nullptr;
  size_t index = 0;                  // of the tensor in the source
  int64_t first = 0;                 // number of the first element
  int64_t count = 0;                 // number of elements
  char* to = nullptr;                // where `first` goes
  at::ScalarType type = at::kFloat;  // type at `to`
  at::Device device = at::kCPU;      // device of `to`
  // Whether a copy to a device may end later than FillPiece(): then the code that uses it follows
  // on the same stream.
  bool may_end_later = false;
};

// Returns the pieces of a whole tensor: of a few MiB each, or of 64 MiB if a device copies them
// without the host's threads from host memory.
std::vector<WeightPiece> PiecesOf(const WeightSource& source, size_t index, char* to,
                                  at::ScalarType type, at::Device device);

// Reads the piece, and converts it if its type at the destination differs. On a device that is not
// the CPU, copies on the current stream, and waits for the copy unless it may end later and the
// source is in memory. Blocks. Errors: the source's; those that it throws, such as a lack of
// memory. Throws nothing.
absl::Status FillPiece(const WeightPiece& piece, ReadScratch& scratch);

// Threads that read weights. Thread-safe.
class WeightReaders {
 public:
  using Task = std::function<void(ReadScratch& scratch)>;

  // Starts up to `threads` threads, as many as the system gives, with stacks of 1 MiB. Throws
  // StatusError RESOURCE_EXHAUSTED if it gives none.
  explicit WeightReaders(int threads);
  // Drops tasks that have not begun, and waits for the others.
  ~WeightReaders();
  WeightReaders(const WeightReaders&) = delete;
  WeightReaders& operator=(const WeightReaders&) = delete;

  // Queues tasks in order; urgent ones before all others that have not begun.
  void Submit(std::vector<Task> tasks, bool urgent);

  // Fills all pieces and waits. Returns the first error, after which no further piece is begun.
  absl::Status Fill(const std::vector<WeightPiece>& pieces);

 private:
  void Run();

  Mutex mu_;
  CondVar changed_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<pthread_t> threads_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_WEIGHT_READERS_H_
