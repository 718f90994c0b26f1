#include "bench/coordinator/server_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace muster::bench {

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(
    const std::vector<std::string>& argv, bool reads_line) {
  int out[2];
  if (pipe2(out, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe");
  std::vector<char*> args;
  for (const std::string& arg : argv) args.push_back(const_cast<char*>(arg.c_str()));
  args.push_back(nullptr);
  const pid_t pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (reads_line) {
      dup2(out[1], STDOUT_FILENO);
    } else {
      const int null = open("/dev/null", O_WRONLY);
      dup2(null, STDOUT_FILENO);
      dup2(null, STDERR_FILENO);
    }
    execv(args[0], args.data());
    _exit(127);
  }
  close(out[1]);
  std::unique_ptr<ServerProcess> process(new ServerProcess());
  process->pid_ = pid;
  if (reads_line) {
    char c;
    while (read(out[0], &c, 1) == 1 && c != '\n') process->line_.push_back(c);
  }
  close(out[0]);
  if (reads_line && process->line_.empty())
    return absl::UnavailableError(absl::StrCat(argv[0], " did not start"));
  return process;
}

ServerProcess::~ServerProcess() { Kill(); }

void ServerProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

double ServerProcess::RssMb() const {
  long pages = 0, resident = 0;
  if (FILE* file = std::fopen(absl::StrCat("/proc/", pid_, "/statm").c_str(), "r")) {
    if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e6;
}

absl::Duration ServerProcess::CpuTime() const {
  unsigned long user = 0, system = 0;
  if (FILE* file = std::fopen(absl::StrCat("/proc/", pid_, "/stat").c_str(), "r")) {
    if (std::fscanf(file, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
                    &system) != 2) {
      user = system = 0;
    }
    std::fclose(file);
  }
  return absl::Seconds(static_cast<double>(user + system) /
                       static_cast<double>(sysconf(_SC_CLK_TCK)));
}

}  // namespace muster::bench
