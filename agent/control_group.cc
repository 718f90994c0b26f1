#include "agent/control_group.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/units.h"

namespace muster::agent {
namespace {

constexpr int64_t kMostBytes = 1 << 20;
constexpr size_t kMostProcesses = 5;  // in a message

// Returns the number after `key` in the lines "KEY NUMBER"; 0 if there is none.
int64_t NumberOf(absl::string_view text, absl::string_view key) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::pair<absl::string_view, absl::string_view> words =
        absl::StrSplit(line, absl::MaxSplits(' ', 1));
    int64_t number = 0;
    if (words.first == key && absl::SimpleAtoi(words.second, &number)) return number;
  }
  return 0;
}

// Returns -1 for "max" and for a text that is not a number.
int64_t Amount(const absl::StatusOr<std::string>& text) {
  int64_t number = -1;
  return text.ok() && absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &number) ? number : -1;
}

}  // namespace

std::string DescribeMemoryKill(const MemoryUse& use) {
  if (use.kills == 0) return "";
  const std::string peak =
      use.peak >= 0 ? absl::StrCat("; it had ", HumanBytes(use.peak), " at most") : "";
  if (use.limit_hits > 0 && use.limit >= 0) {
    return absl::StrCat("for memory, because it reached its limit of ", HumanBytes(use.limit), peak,
                        ": give it a larger memory_per_process");
  }
  return absl::StrCat(
      "for memory, which had run out on this machine", peak,
      use.limit >= 0 ? absl::StrCat(" of its limit of ", HumanBytes(use.limit)) : std::string());
}

ControlGroup::ControlGroup(std::string folder, ControlGroupCalls calls)
    : folder_(std::move(folder)), calls_(calls) {}

ControlGroup ControlGroup::Below(absl::string_view name) const {
  return ControlGroup(JoinPath(folder_, name), calls_);
}

std::string ControlGroup::PathOf(absl::string_view file) const { return JoinPath(folder_, file); }

absl::Status ControlGroup::Make() const {
  if (calls_.mkdir(folder_.c_str(), 0755) == 0 || errno == EEXIST) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot make the control group ", folder_));
}

bool ControlGroup::Exists() const { return Has("cgroup.procs"); }

bool ControlGroup::Has(absl::string_view file) const { return PathExists(PathOf(file)); }

absl::Status ControlGroup::Write(absl::string_view file, absl::string_view text) const {
  const std::string path = PathOf(file);
  const OwnedFd fd(open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
  ssize_t put = -1;
  do {
    put = fd.open() ? write(fd.get(), text.data(), text.size()) : -1;
  } while (put < 0 && fd.open() && errno == EINTR);
  if (put == static_cast<ssize_t>(text.size())) return absl::OkStatus();
  return absl::ErrnoToStatus(put < 0 ? errno : EIO,
                             absl::StrCat("cannot write ", text, " to ", path));
}

absl::StatusOr<std::string> ControlGroup::Read(absl::string_view file) const {
  return ReadFile(PathOf(file), kMostBytes);
}

std::vector<std::string> ControlGroup::Controllers() const {
  const absl::StatusOr<std::string> text = Read("cgroup.controllers");
  if (!text.ok()) return {};
  return absl::StrSplit(absl::StripAsciiWhitespace(*text), ' ', absl::SkipEmpty());
}

absl::Status ControlGroup::Enable(const std::vector<std::string>& controllers) const {
  const std::vector<std::string> available = Controllers();
  std::vector<std::string> words;
  for (const std::string& controller : controllers) {
    if (std::count(available.begin(), available.end(), controller) > 0) {
      words.push_back("+" + controller);
    }
  }
  if (words.empty()) return absl::OkStatus();
  const absl::Status status = Write("cgroup.subtree_control", absl::StrJoin(words, " "));
  const std::vector<int64_t> processes = Processes();
  if (status.ok() || processes.empty()) return status;
  return absl::FailedPreconditionError(
      absl::StrCat(status.message(), "; processes ", absl::StrJoin(processes, ", "),
                   " are in it, and only a group without processes can have groups with limits"));
}

absl::Status ControlGroup::Enter() const { return Write("cgroup.procs", "0"); }

absl::StatusOr<OwnedFd> ControlGroup::Open() const {
  OwnedFd fd(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.open()) return fd;
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot open the control group ", folder_));
}

std::vector<ControlGroup> ControlGroup::Children() const {
  std::vector<ControlGroup> children;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder_);
  if (!names.ok()) return children;
  for (const std::string& name : *names) {
    struct stat info;
    if (lstat(PathOf(name).c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
      children.push_back(Below(name));
    }
  }
  return children;
}

std::vector<int64_t> ControlGroup::Processes() const {
  std::vector<int64_t> processes;
  const std::string text = Read("cgroup.procs").value_or("");
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    int64_t pid = 0;
    if (absl::SimpleAtoi(line, &pid)) processes.push_back(pid);
  }
  for (const ControlGroup& child : Children()) {
    if (processes.size() >= kMostProcesses) break;
    const std::vector<int64_t> below = child.Processes();
    processes.insert(processes.end(), below.begin(), below.end());
  }
  if (processes.size() > kMostProcesses) processes.resize(kMostProcesses);
  return processes;
}

bool ControlGroup::IsPopulated() const {
  return NumberOf(Read("cgroup.events").value_or(""), "populated") != 0;
}

void ControlGroup::Kill() const {
  if (Has("cgroup.kill")) Write("cgroup.kill", "1").IgnoreError();
}

absl::Status ControlGroup::AwaitEmpty(absl::Duration timeout) const {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  const OwnedFd events(open(PathOf("cgroup.events").c_str(), O_RDONLY | O_CLOEXEC));
  if (!events.open()) return absl::OkStatus();
  for (;;) {
    char text[256];
    const ssize_t size = pread(events.get(), text, sizeof(text), 0);
    // The group may have been removed meanwhile.
    if (size <= 0 || NumberOf(absl::string_view(text, size), "populated") == 0) {
      return absl::OkStatus();
    }
    const int64_t left = absl::ToInt64Milliseconds(deadline - Clock::Real().Now());
    if (left <= 0) break;
    pollfd change = {events.get(), POLLPRI, 0};
    poll(&change, 1, static_cast<int>(std::min<int64_t>(left, 1'000'000)));
  }
  return absl::DeadlineExceededError(absl::StrCat("processes ", absl::StrJoin(Processes(), ", "),
                                                  " of the control group ", folder_,
                                                  " do not end"));
}

absl::Status ControlGroup::Remove() const {
  for (const ControlGroup& child : Children()) MUSTER_RETURN_IF_ERROR(child.Remove());
  if (calls_.rmdir(folder_.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  const int error = errno;
  const std::vector<int64_t> processes = Processes();
  if (error != EBUSY || processes.empty()) {
    return absl::ErrnoToStatus(error, absl::StrCat("cannot remove the control group ", folder_));
  }
  return absl::FailedPreconditionError(absl::StrCat("cannot remove the control group ", folder_,
                                                    ": processes ", absl::StrJoin(processes, ", "),
                                                    " are in it"));
}

MemoryUse ControlGroup::Memory() const {
  MemoryUse use;
  use.limit = Amount(Read("memory.max"));
  use.peak = Amount(Read("memory.peak"));
  const std::string events = Read("memory.events").value_or("");
  use.limit_hits = NumberOf(events, "oom");
  use.kills = NumberOf(events, "oom_kill");
  return use;
}

}  // namespace muster::agent
