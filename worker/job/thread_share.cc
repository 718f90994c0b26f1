#include "worker/job/thread_share.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/file.h"

namespace muster {
namespace {

// Returns the text of a kernel file (whose size is reported as 0); empty if it cannot be read.
std::string Line(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path, 1 << 16);
  return text.ok() ? std::string(absl::StripAsciiWhitespace(*text)) : "";
}

}  // namespace

int CountCpuList(absl::string_view list) {
  int count = 0;
  for (const absl::string_view part : absl::StrSplit(list, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first) {
      return 0;
    }
    count += last - first + 1;
  }
  return count;
}

Cores ReadCores(const std::map<std::string, std::string>& variables, const std::string& root) {
  Cores cores;
  cores.of_node = static_cast<int>(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L));
  const auto at_most = [&](int64_t count) {
    if (count > 0 && count < cores.of_node) cores.of_node = static_cast<int>(count);
  };
  at_most(CountCpuList(Line(root + "/sys/fs/cgroup/cpuset.cpus.effective")));
  const std::vector<std::string> quota = absl::StrSplit(Line(root + "/sys/fs/cgroup/cpu.max"), ' ');
  int64_t limit = 0, period = 0;
  if (quota.size() == 2 && absl::SimpleAtoi(quota[0], &limit) &&
      absl::SimpleAtoi(quota[1], &period) && limit > 0 && period > 0) {
    at_most((limit + period - 1) / period);
  }
  const auto slurm = variables.find("SLURM_CPUS_ON_NODE");
  int of_step = 0;
  if (slurm != variables.end() && absl::SimpleAtoi(slurm->second, &of_step)) at_most(of_step);
  cores.threads_per_core = std::max(
      1, CountCpuList(Line(root + "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")));
  cores.of_process = cores.of_node;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores.of_process = CPU_COUNT(&set);
  return cores;
}

int ThreadShare(const Cores& cores, int processes, int alone) {
  if (alone != cores.of_process && alone * cores.threads_per_core != cores.of_process) return alone;
  const int share = std::min(cores.of_process, cores.of_node / std::max(processes, 1));
  return std::max(1, std::min(alone, alone * share / std::max(cores.of_process, 1)));
}

}  // namespace muster
