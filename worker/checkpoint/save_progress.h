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

// The progress of a checkpoint save on this process.
struct RunningSave {
  std::string path;
  int64_t step = 0;           // step of the saved state
  bool asynchronous = false;  // during training
  // Bytes written to the files, and the total that this process will write, as far as it knows.
  uint64_t written = 0;
  uint64_t bytes = 0;
  absl::Duration elapsed;  // since the save began
};

// Returns the progress in words: "1.20 GiB of 4.00 GiB, 410 MiB/s, for 3.0 s".
std::string DescribeSave(uint64_t written, uint64_t bytes, absl::Duration elapsed);

// The saves that this process is writing, for progress reports. Thread-safe; does not block.
class SaveProgress {
 public:
  // One save, while this object lives. Thread-safe. Must not outlive its SaveProgress.
  class Save {
   public:
    ~Save();
    Save(const Save&) = delete;
    Save& operator=(const Save&) = delete;

    // Announces that at least so many bytes will be written.
    void Expect(uint64_t bytes);
    // Announces a file of so many bytes.
    void Begin(uint64_t bytes) { begun_.fetch_add(bytes, std::memory_order_relaxed); }
    // Counts bytes written to a file. With `logs`, occasionally logs the progress of a long save.
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

  // Begins a save. `logs`: whether a long save logs its progress: after 5 s and then every 10 s if
  // training waits for it, otherwise every minute.
  std::unique_ptr<Save> Begin(std::string path, int64_t step, bool asynchronous, bool logs);
  // Returns the earliest begun of the saves in progress.
  std::optional<RunningSave> Read() const;
  // Returns how often a save that training waits for has written something, as a sign of progress.
  uint64_t signs() const { return signs_.load(std::memory_order_relaxed); }

 private:
  const Clock& clock_;
  std::atomic<uint64_t> signs_{0};
  mutable Mutex mu_;
  std::vector<const Save*> saves_ ABSL_GUARDED_BY(mu_);  // in the order in which they began
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SAVE_PROGRESS_H_
