#include "agent/output.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/columns.h"

namespace muster::agent {
namespace {

constexpr char kClearLine[] = "\r\x1b[K";

}  // namespace

OutputMux::OutputMux(OutputOptions options)
    : options_(std::move(options)),
      stdout_terminal_(isatty(options_.stdout_fd) != 0),
      stderr_terminal_(isatty(options_.stderr_fd) != 0),
      wake_fd_(eventfd(0, EFD_CLOEXEC)) {
  writer_ = std::thread([this] { WriteLoop(); });
}

OutputMux::~OutputMux() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  const uint64_t one = 1;
  ssize_t ignored = write(wake_fd_, &one, sizeof(one));
  static_cast<void>(ignored);
  writer_.join();
  close(wake_fd_);
}

absl::Status OutputMux::AddLog(int rank, const std::string& path) {
  absl::StatusOr<std::unique_ptr<LogFile>> log = LogFile::Open(path, options_.log_limits);
  if (!log.ok()) return log.status();
  MutexLock lock(&mu_);
  // Lines that already wait keep the previous log.
  logs_[rank] = *std::move(log);
  return absl::OkStatus();
}

void OutputMux::Line(int rank, OutputStream stream, absl::string_view line) {
  Push({Kind::kLine, rank, stream, std::string(line)});
}

void OutputMux::Partial(int rank, OutputStream stream, absl::string_view text) {
  if (rank != options_.progress_rank) return;
  if (!(stream == OutputStream::kStdout ? stdout_terminal_ : stderr_terminal_)) return;
  Push({Kind::kPartial, rank, stream, std::string(text)});
}

void OutputMux::Note(absl::string_view line) {
  Push({Kind::kNote, 0, OutputStream::kStderr, std::string(line)});
}

void OutputMux::Push(Item item) {
  MutexLock lock(&mu_);
  if (item.kind == Kind::kLine) {
    if (const auto it = logs_.find(item.rank); it != logs_.end()) item.log = it->second;
  }
  queued_bytes_ += item.text.size() + sizeof(Item);
  queue_.push_back(std::move(item));
  ++pushed_;
  changed_.SignalAll();
  if (!pressed_ && queued_bytes_ > options_.max_queued_bytes && options_.on_backpressure) {
    pressed_ = true;
    options_.on_backpressure(true);
  }
}

bool OutputMux::Flush(absl::Duration timeout) {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  MutexLock lock(&mu_);
  const uint64_t goal = pushed_;
  while (written_ < goal) {
    const absl::Duration left = std::min(deadline, flush_until_) - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) return false;
    changed_.WaitWithTimeout(&mu_, left);
  }
  return true;
}

void OutputMux::HurryFlush(absl::Duration timeout) {
  MutexLock lock(&mu_);
  flush_until_ = std::min(flush_until_, Clock::Real().Now() + timeout);
  changed_.SignalAll();
}

void OutputMux::WriteLoop() {
  // A reader that went away must be an error of write(), not the end of the job.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::vector<Item> batch;
  for (;;) {
    {
      MutexLock lock(&mu_);
      written_ += batch.size();
      for (const Item& item : batch) queued_bytes_ -= item.text.size() + sizeof(Item);
      if (pressed_ && queued_bytes_ <= options_.max_queued_bytes / 2) {
        pressed_ = false;
        options_.on_backpressure(false);
      }
      changed_.SignalAll();
      batch.clear();
      while (queue_.empty() && !stopping_) changed_.Wait(&mu_);
      if (stopping_) break;
      batch.swap(queue_);
    }
    for (const Item& item : batch) Show(item);
    DrawProgress();
  }
  // Lines that wait behind a stalled reader are also for logs and for other readers.
  {
    MutexLock lock(&mu_);
    batch.swap(queue_);
  }
  for (const Item& item : batch) Show(item);
  ClearProgress();
}

void OutputMux::Show(const Item& item) {
  const bool out = item.stream == OutputStream::kStdout;
  const int fd = item.kind == Kind::kNote
                     ? (options_.stderr_fd >= 0 ? options_.stderr_fd : STDERR_FILENO)
                     : (out ? options_.stdout_fd : options_.stderr_fd);
  if (item.kind == Kind::kPartial) {
    if (progress_fd_ != fd) ClearProgress();
    progress_ = options_.prefix ? absl::StrCat("[", item.rank, "]: ", item.text) : item.text;
    progress_fd_ = fd;
    progress_drawn_ = false;
    return;
  }
  std::string text = item.kind == Kind::kLine && options_.prefix
                         ? absl::StrCat("[", item.rank, "]: ", item.text, "\n")
                         : absl::StrCat(item.text, "\n");
  if (progress_fd_ >= 0 && (fd == progress_fd_ || isatty(fd) != 0)) ClearProgress();
  // The line whose beginning the progress bar showed.
  if (item.kind == Kind::kLine && item.rank == options_.progress_rank && fd == progress_fd_) {
    progress_fd_ = -1;
  }
  if (item.log != nullptr) {
    if (const std::string note = item.log->Append(item.text); !note.empty()) {
      Note(absl::StrCat("muster: ", note));
    }
  }
  if (fd >= 0) Write(fd, text);
}

void OutputMux::ClearProgress() {
  if (progress_fd_ >= 0) Write(progress_fd_, kClearLine);
  progress_drawn_ = false;
}

void OutputMux::DrawProgress() {
  if (progress_fd_ < 0 || progress_drawn_) return;
  // One column stays free, so that no terminal wraps.
  Write(progress_fd_,
        absl::StrCat(kClearLine, FitColumns(progress_, TerminalColumns(progress_fd_) - 1)));
  progress_drawn_ = true;
}

void OutputMux::Write(int fd, absl::string_view text) {
  Target& target = targets_[fd];
  if (target.gone) return;
  std::string missing;
  if (target.lost > 0) {
    missing = absl::StrCat(target.torn ? "\n" : "", "muster: ", target.lost,
                           target.lost == 1 ? " line is" : " lines are",
                           " missing here: ", strerror(target.error), "\n", text);
    text = missing;
  }
  int error = 0;
  const size_t written = WriteSome(fd, text, &error);
  if (error == 0) {
    if (written == text.size()) target = Target();
    return;
  }
  // A full disk is cleaned up eventually, even if this output fills it.
  target.gone = error != ENOSPC && error != EDQUOT && error != EFBIG;
  target.error = error;
  ++target.lost;
  // A reader that has gone away needs no message; and if standard error is the same file, the
  // message is lost, too.
  if (fd == options_.stdout_fd && error != EPIPE && !std::exchange(told_lost_, true)) {
    Write(options_.stderr_fd >= 0 ? options_.stderr_fd : STDERR_FILENO,
          absl::StrCat("muster: standard output cannot be written (", strerror(error),
                       "): the output of the processes is lost\n"));
  }
  if (written > 0) target.torn = text[written - 1] != '\n';
}

size_t OutputMux::WriteSome(int fd, absl::string_view text, int* error) {
  size_t written = 0;
  while (written < text.size()) {
    // Checked before each piece so that a stalled reader cannot block the mux's destructor; a pipe
    // that is writable takes 4 KiB without blocking.
    pollfd fds[2] = {{fd, POLLOUT, 0}, {wake_fd_, POLLIN, 0}};
    if (poll(fds, 2, -1) < 0 && errno != EINTR) break;
    if (fds[1].revents != 0 && fds[0].revents == 0) {
      targets_[fd].gone = true;  // the next text would continue a torn line
      break;
    }
    if (fds[0].revents == 0) continue;
    const ssize_t n =
        write(fd, text.data() + written, std::min<size_t>(text.size() - written, 4096));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) {
      *error = errno;
      break;
    }
    written += static_cast<size_t>(n);
  }
  return written;
}

}  // namespace muster::agent
