#ifndef MUSTER_WORKER_CHECKPOINT_SAVE_PROGRESS_H_
#define MUSTER_WORKER_CHECKPOINT_SAVE_PROGRESS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/mutex.h"

namespace muster {

class Clock;

// How far a save of a checkpoint is, on this process.
struct RunningSave {
  std::string path;
  int64_t step = 0;           // of the state that is saved
  bool asynchronous = false;  // beside training
  // Bytes that are in the files, and that this process writes in all, as far as it knows.
  uint64_t written = 0;
  uint64_t bytes = 0;
  absl::Duration elapsed;  // since the save began
};

// "1.20 GiB of 4.00 GiB, 410 MiB/s, for 3.0 s".
std::string DescribeSave(uint64_t written, uint64_t bytes, absl::Duration elapsed);

// The saves that this process is writing, for whom it reports to. Thread-safe; does not block.
class SaveProgress {
 public:
  // One save, for as long as it lives. Thread-safe. Must not outlive what it came from.
  class Save {
   public:
    ~Save();
    Save(const Save&) = delete;
    Save& operator=(const Save&) = delete;

    // So many bytes will be written at least.
    void Expect(uint64_t bytes);
    // A file of so many bytes is about to be written.
    void Begin(uint64_t bytes) { begun_.fetch_add(bytes, std::memory_order_relaxed); }
    // So many bytes are in a file. Now and then the log says how far a long save is, if rank 0
    // does.
    void Wrote(uint64_t bytes);

   private:
    friend class SaveProgress;
    Save(SaveProgress& all, RunningSave facts, bool logs);
    RunningSave Read() const;

    SaveProgress& all_;
    const RunningSave facts_;
    const absl::Time start_;
    std::atomic<uint64_t> expected_{0}, begun_{0}, written_{0};
    std::atomic<int64_t> next_log_;  // Unix nanoseconds
  };

  SaveProgress();
  explicit SaveProgress(const Clock& clock);

  // `logs`: a save that takes long says so in the log: one that training waits for after 5 s and
  // each 10 s, others each minute.
  std::unique_ptr<Save> Begin(std::string path, int64_t step, bool asynchronous, bool logs);
  // The one that began first of those that live.
  std::optional<RunningSave> Read() const;
  // How often a save that training waits for has written something: a sign of progress.
  uint64_t signs() const { return signs_.load(std::memory_order_relaxed); }

 private:
  const Clock& clock_;
  std::atomic<uint64_t> signs_{0};
  mutable Mutex mu_;
  std::vector<const Save*> saves_ ABSL_GUARDED_BY(mu_);  // in the order of their begin
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SAVE_PROGRESS_H_
