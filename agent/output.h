#ifndef MUSTER_AGENT_OUTPUT_H_
#define MUSTER_AGENT_OUTPUT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "agent/log_file.h"
#include "agent/process.h"
#include "base/mutex.h"

namespace muster::agent {

struct OutputOptions {
  // The descriptors for the workers' standard output and standard error. Borrowed. -1: not written
  // (log files only).
  int stdout_fd = 1;
  int stderr_fd = 2;
  // "[3]: " before each line of rank 3.
  bool prefix = false;
  // The rank whose unfinished lines (progress bars) are shown, on a terminal.
  int progress_rank = 0;
  // If more text than this is queued, `on_backpressure(true)` is called, and at half of it
  // `on_backpressure(false)`. Called with a lock held: it must not block or call back.
  size_t max_queued_bytes = 4 << 20;
  LogLimits log_limits = {};  // see AddLog
  std::function<void(bool)> on_backpressure = nullptr;
};

// Writes the lines of many workers to one terminal or file: whole lines, in the order in which they
// arrived, each at once, and a progress bar below them. Thread-safe; only Flush blocks. If the
// reader goes away (`| head`), only the output ends, not the job; lines that do not fit on a full
// disk are lost, and the next line that does is preceded by one that says how many are.
class OutputMux {
 public:
  explicit OutputMux(OutputOptions options);
  // Logs get all queued lines, readers only what they accept without waiting: call Flush first.
  ~OutputMux();
  OutputMux(const OutputMux&) = delete;
  OutputMux& operator=(const OutputMux&) = delete;

  // Also writes the lines of `rank` that come from now on (both streams, without prefix) to a new
  // file in place of the previous one. Errors: the system's message and the path.
  absl::Status AddLog(int rank, const std::string& path);

  void Line(int rank, OutputStream stream, absl::string_view line);
  // Sets what the unfinished line of the rank shows now.
  void Partial(int rank, OutputStream stream, absl::string_view text);
  // Writes a line of the launcher's own to standard error (even if stderr_fd is -1).
  void Note(absl::string_view line);

  // Blocks until all lines that were queued before have been written, for at most `timeout`.
  // Returns whether they have.
  bool Flush(absl::Duration timeout);
  // From now on Flush waits for at most `timeout` from now, including a call that waits already.
  void HurryFlush(absl::Duration timeout);

 private:
  enum class Kind { kLine, kPartial, kNote };
  struct Item {
    Kind kind;
    int rank;
    OutputStream stream;
    std::string text;
    std::shared_ptr<LogFile> log = nullptr;  // the rank's log when the line came
  };
  // The state of standard output and standard error, which keep their descriptor numbers.
  struct Target {
    bool gone = false;  // its reader is gone
    int64_t lost = 0;   // lines that could not be written
    bool torn = false;  // the output ends within a line
    int error = 0;
  };

  void Push(Item item);
  void WriteLoop();
  void Show(const Item& item);
  void ClearProgress();
  void DrawProgress();
  void Write(int fd, absl::string_view text);
  // Returns how many bytes were written; less after an error (in `error`), or if the mux is being
  // destroyed.
  size_t WriteSome(int fd, absl::string_view text, int* error);

  const OutputOptions options_;
  const bool stdout_terminal_;
  const bool stderr_terminal_;
  int wake_fd_ = -1;  // readable once the mux is being destroyed

  // Used only by the writer's thread.
  std::string progress_;  // the text of the progress line
  int progress_fd_ = -1;  // the descriptor on which it is shown
  bool progress_drawn_ = false;
  std::map<int, Target> targets_;
  bool told_lost_ = false;  // noted that standard output cannot be written

  Mutex mu_;
  CondVar changed_;
  std::vector<Item> queue_ ABSL_GUARDED_BY(mu_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool pressed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time flush_until_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  uint64_t pushed_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t written_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::map<int, std::shared_ptr<LogFile>> logs_ ABSL_GUARDED_BY(mu_);  // by rank

  std::thread writer_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_OUTPUT_H_
