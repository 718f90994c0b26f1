#include "agent/faulthandler.h"

#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/text.h"

namespace muster::agent {
namespace {

constexpr char kVariable[] = "MUSTER_STACK_SIGNAL";
constexpr size_t kMostBytes = 1 << 20;

// Returns the value with which the process was started.
std::string Variable(pid_t pid, absl::string_view name) {
  const absl::StatusOr<std::string> environment =
      ReadFile(absl::StrCat("/proc/", pid, "/environ"), kMostBytes);
  if (!environment.ok()) return "";
  for (absl::string_view entry : absl::StrSplit(*environment, '\0')) {
    if (absl::ConsumePrefix(&entry, name) && absl::ConsumePrefix(&entry, "=")) {
      return std::string(entry);
    }
  }
  return "";
}

// Returns 0 for any other signal. Python itself, and faulthandler.enable(), handle many others, by
// raising an exception or ending the process.
int SignalOf(absl::string_view name) {
  absl::ConsumePrefix(&name, "SIG");
  return name == "USR1" ? SIGUSR1 : name == "USR2" ? SIGUSR2 : 0;
}

bool Handles(pid_t pid, int signal) {
  const absl::StatusOr<std::string> status =
      ReadFile(absl::StrCat("/proc/", pid, "/status"), kMostBytes);
  if (!status.ok()) return false;
  for (absl::string_view line : absl::StrSplit(*status, '\n')) {
    uint64_t caught = 0;
    if (!absl::ConsumePrefix(&line, "SigCgt:") || !absl::SimpleHexAtoi(line, &caught)) continue;
    return (caught >> (signal - 1) & 1) != 0;
  }
  return false;
}

}  // namespace

std::string AskFaulthandler(pid_t pid) {
  // The pid may be given to another process meanwhile.
  const OwnedFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  const std::string name = Variable(pid, kVariable);
  if (name.empty()) {
    return absl::StrCat(
        "it could print its functions itself: faulthandler.register(signal.SIGUSR1) in the "
        "program, "
        "and ",
        kVariable, "=USR1 in its environment");
  }
  const int signal = SignalOf(name);
  if (signal == 0) return absl::StrCat(kVariable, "=", Printable(name), " is not USR1 or USR2");
  if (!Handles(pid, signal)) {
    return absl::StrCat(kVariable, " is ", sigabbrev_np(signal),
                        ", which the program does not handle: faulthandler.register(signal.SIG",
                        sigabbrev_np(signal), ")");
  }
  if (syscall(SYS_pidfd_send_signal, process.get(), signal, nullptr, 0) != 0) {
    return absl::StrCat("SIG", sigabbrev_np(signal), " cannot be sent: ", strerror(errno));
  }
  return absl::StrCat("faulthandler prints its functions (SIG", sigabbrev_np(signal),
                      "): they are among the last lines of its output");
}

}  // namespace muster::agent
