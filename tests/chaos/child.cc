#include "tests/chaos/child.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"

namespace muster::chaos {

std::string ProgramPath(const std::string& path) {
  const char* const root = std::getenv("TEST_SRCDIR");
  if (root != nullptr) return absl::StrCat(root, "/muster/", path);
  const char* const runfiles = std::getenv("RUNFILES_DIR");
  if (runfiles != nullptr) return absl::StrCat(runfiles, "/muster/", path);
  // The program was started by `bazel run`, wherever that begins: use the other programs next to
  // it.
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  return program.parent_path().parent_path().parent_path() / path;
}

int PickPort() {
  static std::mt19937 random{std::random_device()()};
  for (;;) {
    const int port = std::uniform_int_distribution<int>(20000, 31999)(random);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    if (free) return port;
  }
}

Child::Child(agent::ProcessHost& host, std::vector<std::string> argv,
             const std::map<std::string, std::string>& env, std::function<void()> changed) {
  agent::ProcessOptions options;
  options.argv = std::move(argv);
  for (const auto& [name, value] : env) options.env.push_back(absl::StrCat(name, "=", value));
  options.on_line = [this, changed](agent::OutputStream stream, absl::string_view line) {
    {
      MutexLock lock(&mu_);
      lines_.emplace_back(stream, std::string(line));
      changed_.SignalAll();
    }
    changed();
  };
  options.on_exit = [this, changed](const agent::ProcessExit& exit) {
    {
      MutexLock lock(&mu_);
      ended_ = true;
      result_ = exit.signal != 0 ? -exit.signal : exit.exit_code;
      changed_.SignalAll();
    }
    changed();
  };
  const std::string program = options.argv[0];
  auto process = host.Spawn(std::move(options));
  MUSTER_CHECK(process.ok()) << program << ": " << process.status().message();
  process_ = *std::move(process);
}

int Child::Wait() {
  const agent::ProcessExit exit = process_->Wait();
  return exit.signal != 0 ? -exit.signal : exit.exit_code;
}

std::optional<int> Child::ended() const {
  MutexLock lock(&mu_);
  if (!ended_) return std::nullopt;
  return result_;
}

std::string Child::text() const {
  MutexLock lock(&mu_);
  std::string text;
  for (const auto& [stream, line] : lines_) absl::StrAppend(&text, "  | ", line, "\n");
  return text;
}

bool Child::SaysLocked(absl::string_view part) const {
  for (const auto& [stream, line] : lines_) {
    if (absl::StrContains(line, part)) return true;
  }
  return false;
}

bool Child::Says(absl::string_view part) const {
  MutexLock lock(&mu_);
  return SaysLocked(part);
}

size_t Child::Count(absl::string_view part) const {
  MutexLock lock(&mu_);
  return static_cast<size_t>(std::count_if(lines_.begin(), lines_.end(), [&](const auto& line) {
    return absl::StrContains(line.second, part);
  }));
}

std::optional<std::string> Child::first_line() const {
  MutexLock lock(&mu_);
  for (const auto& [stream, line] : lines_) {
    if (stream == agent::OutputStream::kStdout) return line;
  }
  return std::nullopt;
}

std::optional<std::string> Child::Newest(absl::string_view prefix) const {
  MutexLock lock(&mu_);
  for (auto line = lines_.rbegin(); line != lines_.rend(); ++line) {
    if (line->first == agent::OutputStream::kStdout && absl::StartsWith(line->second, prefix)) {
      return line->second.substr(prefix.size());
    }
  }
  return std::nullopt;
}

bool Child::WaitFor(absl::string_view part, absl::Duration timeout) const {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  MutexLock lock(&mu_);
  while (!SaysLocked(part)) {
    const absl::Duration left = deadline - Clock::Real().Now();
    if (ended_ || left <= absl::ZeroDuration()) return false;
    changed_.WaitWithTimeout(&mu_, left);
  }
  return true;
}

}  // namespace muster::chaos
