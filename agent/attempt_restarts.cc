#include "agent/attempt_restarts.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <tuple>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "agent/attempt_end.h"
#include "agent/end_class.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace muster::agent {
namespace {

constexpr char kRequestPrefix[] = "restart_";
constexpr char kRequestSuffix[] = ".json";
constexpr char kAllowed[] = "restarts_allowed";
// If the system does not report new files.
constexpr absl::Duration kRetryPeriod = absl::Milliseconds(500);
constexpr absl::Duration kLongestPoll = absl::Hours(1);

struct Allowed {
  int restarts = 0;
  absl::Duration delay;
};

Allowed ReadAllowed(const std::string& folder) {
  Allowed allowed;
  int64_t delay_ms = 0;
  const absl::StatusOr<std::string> text = ReadFile(JoinPath(folder, kAllowed), 100);
  if (!text.ok()) return allowed;
  const std::vector<std::string> words = absl::StrSplit(*text, ' ');
  if (words.size() != 2 || !absl::SimpleAtoi(words[0], &allowed.restarts) ||
      !absl::SimpleAtoi(words[1], &delay_ms)) {
    return {};
  }
  allowed.delay = absl::Milliseconds(delay_ms);
  return allowed;
}

}  // namespace

AttemptRestarts::AttemptRestarts(Options options)
    : options_(std::move(options)),
      memory_kills_(CountMemoryKills()),
      cancelled_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

v1::AttemptEnd AttemptRestarts::Describe(const JobResult& result, const HangReport* hang) const {
  return DescribeEnd(result, options_.user_error_codes, CountMemoryKills() > memory_kills_,
                     options_.num_nodes, hang);
}

bool AttemptRestarts::MayAsk(int restart, const WorkerEnd& cause) const {
  if (restart > options_.left) return false;
  JobResult result;
  result.outcome = JobResult::Outcome::kFailed;
  result.failure.why = cause.ToString();
  result.failed_here = cause;
  const v1::EndClass end_class = Describe(result, nullptr).end_class();
  return end_class == v1::END_CLASS_PROCESS_FAILED || end_class == v1::END_CLASS_OUT_OF_MEMORY;
}

absl::Status AttemptRestarts::Await(int restart, const JobResult& result) {
  OwnedFd events = WatchFolders();
  if (events.open() && !WatchFolder(events.get(), options_.folder).ok()) events = OwnedFd();
  MUSTER_RETURN_IF_ERROR(
      WriteEnd(JoinPath(options_.folder, absl::StrCat(kRequestPrefix, restart, kRequestSuffix)),
               Describe(result, nullptr)));
  Allowed allowed = ReadAllowed(options_.folder);
  const absl::Time give_up = Clock::Real().Now() + options_.patience;
  while (allowed.restarts < restart) {
    const absl::Duration left = give_up - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("no answer within ", absl::FormatDuration(options_.patience)));
    }
    const bool cancelled = !Wait(events.get(), left);
    // Read it even then: the answer may have come together with the request to stop.
    allowed = ReadAllowed(options_.folder);
    if (cancelled && allowed.restarts < restart) return absl::CancelledError("stopped");
    if (cancelled) break;
  }
  const absl::Time begin = Clock::Real().Now() + allowed.delay;
  for (absl::Duration left = allowed.delay; left > absl::ZeroDuration();
       left = begin - Clock::Real().Now()) {
    if (!Wait(-1, left)) return absl::AbortedError("stopped");
  }
  if (IsCancelled()) return absl::AbortedError("stopped");
  memory_kills_ = CountMemoryKills();
  return absl::OkStatus();
}

bool AttemptRestarts::Wait(int folder_events, absl::Duration time) const {
  time = std::min(time, folder_events < 0 ? kRetryPeriod : kLongestPoll);
  pollfd fds[] = {{cancelled_.get(), POLLIN, 0}, {folder_events, POLLIN, 0}};
  poll(fds, 2, static_cast<int>(absl::ToInt64Milliseconds(time)) + 1);
  if ((fds[1].revents & POLLIN) != 0) TakeFolderEvents(folder_events);
  return (fds[0].revents & POLLIN) == 0;
}

bool AttemptRestarts::IsCancelled() const {
  pollfd cancelled = {cancelled_.get(), POLLIN, 0};
  return poll(&cancelled, 1, 0) == 1;
}

void AttemptRestarts::Cancel() {
  const uint64_t one = 1;
  ssize_t ignored = write(cancelled_.get(), &one, sizeof(one));
  (void)ignored;
}

absl::StatusOr<RestartRequest> ReadRestartRequest(const std::string& folder) {
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(folder));
  RestartRequest request;
  std::string path;
  for (const std::string& name : names) {
    absl::string_view number = name;
    int restart = 0;
    if (absl::ConsumePrefix(&number, kRequestPrefix) &&
        absl::ConsumeSuffix(&number, kRequestSuffix) && absl::SimpleAtoi(number, &restart) &&
        restart > request.restart) {
      request.restart = restart;
      path = JoinPath(folder, name);
    }
  }
  if (request.restart == 0) return request;
  MUSTER_ASSIGN_OR_RETURN(request.end, ReadEnd(path));
  struct stat info;
  request.at = stat(path.c_str(), &info) == 0 ? absl::TimeFromTimespec(info.st_mtim)
                                              : Clock::Real().WallNow();
  return request;
}

absl::StatusOr<int> AskedFor(const std::string& folder, const v1::AttemptEnd& end) {
  if (end.end_class() == v1::END_CLASS_SUCCEEDED || end.end_class() == v1::END_CLASS_CANCELLED) {
    return 0;
  }
  // Without its own failure, one end cannot be distinguished from another.
  if (end.failed_unix_ms() == 0 || end.end_class() == v1::END_CLASS_PEER_FAILED ||
      end.end_class() == v1::END_CLASS_NODE_FAILED) {
    return 0;
  }
  MUSTER_ASSIGN_OR_RETURN(const RestartRequest asked, ReadRestartRequest(folder));
  const auto key = [](const v1::AttemptEnd& one) {
    return std::make_tuple(one.rank(), one.exit_code(), one.signal(), one.failed_unix_ms());
  };
  return key(asked.end) == key(end) ? asked.restart : 0;
}

absl::Status AllowRestart(const std::string& folder, int restart, absl::Duration delay) {
  return WriteFileAtomically(JoinPath(folder, kAllowed),
                             absl::StrCat(restart, " ", absl::ToInt64Milliseconds(delay)));
}

OwnedFd WatchFolders() { return OwnedFd(inotify_init1(IN_CLOEXEC | IN_NONBLOCK)); }

absl::StatusOr<int> WatchFolder(int folder_events, const std::string& folder) {
  // Files appear whole, by a rename.
  const int watch = inotify_add_watch(folder_events, folder.c_str(), IN_MOVED_TO);
  if (watch >= 0) return watch;
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot watch ", folder));
}

void UnwatchFolder(int folder_events, int watch) { inotify_rm_watch(folder_events, watch); }

bool TakeFolderEvents(int folder_events) {
  char events[4096];
  bool any = false;
  while (read(folder_events, events, sizeof(events)) > 0) any = true;
  return any;
}

}  // namespace muster::agent
