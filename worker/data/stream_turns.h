#ifndef MUSTER_WORKER_DATA_STREAM_TURNS_H_
#define MUSTER_WORKER_DATA_STREAM_TURNS_H_

#include <cstdint>

#include "base/mutex.h"
#include "worker/data/data_error.h"

namespace muster {

// Lets one pass at a time read a stream, which has one position: the pass that began last. An
// overtaken pass throws when it tries to read, because the stream is at another position by then.
// Thread-safe: passes may read ahead on their own threads.
class StreamTurns {
 public:
  // Begins a pass and returns its number. Blocks while an earlier one is reading a batch.
  int64_t Begin() {
    MutexLock lock(&mu_);
    const int64_t number = ++last_;
    while (reading_) done_.Wait(&mu_);
    return number;
  }

  // While it lives, pass `number` reads. The constructor throws DataError if another pass has
  // begun.
  class Turn {
   public:
    Turn(StreamTurns& turns, int64_t number) : turns_(turns) {
      MutexLock lock(&turns_.mu_);
      if (number != turns_.last_) {
        throw DataError(
            "another pass over this stream has begun before this one has ended (a loop inside of "
            "this one, or a second begin()), and the stream has one position: prepare a loader for "
            "each pass, from a stream of its own");
      }
      turns_.reading_ = true;
    }
    ~Turn() {
      MutexLock lock(&turns_.mu_);
      turns_.reading_ = false;
      turns_.done_.SignalAll();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    StreamTurns& turns_;
  };

 private:
  Mutex mu_;
  CondVar done_;
  int64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  bool reading_ ABSL_GUARDED_BY(mu_) = false;  // by one pass at most: Begin() waits for it
};

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_STREAM_TURNS_H_
