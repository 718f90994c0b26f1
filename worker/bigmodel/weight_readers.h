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

// A part of a tensor on its way from its source to memory.
struct WeightPiece {
  const WeightSource* source = nullptr;
  size_t index = 0;                  // of the tensor in the source
  int64_t first = 0;                 // element
  int64_t count = 0;                 // of elements
  char* to = nullptr;                // where `first` goes
  at::ScalarType type = at::kFloat;  // there
  at::Device device = at::kCPU;      // of `to`
  // A copy to a device may end later than FillPiece(): what uses it follows on the same stream.
  bool may_end_later = false;
};

// The pieces of a whole tensor: of a few MiB each, or of 64 MiB where a device copies them by
// itself from host memory.
std::vector<WeightPiece> PiecesOf(const WeightSource& source, size_t index, char* to,
                                  at::ScalarType type, at::Device device);

// Reads the piece, and converts it if its type is another one there. On a device that is not the
// CPU: copies on the current stream, and waits for the copy unless it may end later and the source
// is in memory. Blocks. Errors: the source's; also what it throws, as memory that is not there.
// Throws nothing.
absl::Status FillPiece(const WeightPiece& piece, ReadScratch& scratch);

// Threads that read weights. Thread-safe.
class WeightReaders {
 public:
  using Task = std::function<void(ReadScratch& scratch)>;

  // As many threads as the system gives, up to `threads`, with stacks of 1 MiB. Throws StatusError
  // RESOURCE_EXHAUSTED if it gives none.
  explicit WeightReaders(int threads);
  // Drops tasks that have not begun, and waits for the others.
  ~WeightReaders();
  WeightReaders(const WeightReaders&) = delete;
  WeightReaders& operator=(const WeightReaders&) = delete;

  // In order; urgent ones before all others that have not begun.
  void Submit(std::vector<Task> tasks, bool urgent);

  // Fills them all and waits. The first error, after which no further piece is begun.
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
