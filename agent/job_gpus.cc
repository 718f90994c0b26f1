#include "agent/job_gpus.h"

#include <limits>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster::agent {
namespace {

absl::StatusOr<JobGpu> Find(const std::string& entry, const std::vector<Gpu>& machine) {
  int index = -1;
  if (absl::SimpleAtoi(entry, &index)) return JobGpu{absl::StrCat(index), index};
  JobGpu gpu = {entry, -1};
  for (const Gpu& one : machine) {
    if (!absl::StartsWith(one.uuid, entry)) continue;
    if (gpu.index >= 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "CUDA_VISIBLE_DEVICES of this agent: ", Printable(entry), " is the start of ",
          machine[gpu.index].uuid, " and of ", one.uuid, ": write more of it"));
    }
    gpu.index = one.index;
  }
  return gpu;
}

bool IsNumber(const JobGpu& gpu) { return gpu.device == absl::StrCat(gpu.index); }

// Returns OK if they are two different GPUs.
absl::Status CheckDiffer(const JobGpu& a, const JobGpu& b) {
  const bool known = a.index >= 0 && b.index >= 0;
  if (known ? a.index == b.index
            : absl::StartsWith(a.device, b.device) || absl::StartsWith(b.device, a.device)) {
    return absl::InvalidArgumentError(
        absl::StrCat("CUDA_VISIBLE_DEVICES of this agent names ", Printable(a.device), " twice",
                     a.device == b.device ? "" : absl::StrCat(" (as ", Printable(b.device), ")"),
                     ", and jobs do not share GPUs: name it once"));
  }
  if (!known && IsNumber(a) != IsNumber(b)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "CUDA_VISIBLE_DEVICES of this agent: ", Printable(a.device), " and ", Printable(b.device),
        " may be the same GPU, as the driver does not say which "
        "one the name is: write numbers only, or names only"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<JobGpu>> ChooseJobGpus(const std::optional<std::string>& visible,
                                                  const std::vector<Gpu>& machine, int wanted) {
  const int found = static_cast<int>(machine.size());
  std::vector<JobGpu> gpus;
  std::vector<std::string> named;
  if (visible.has_value() && (found > 0 || wanted > 0)) {
    named = VisibleDevices(*visible, found > 0 ? found : std::numeric_limits<int>::max());
  }
  if (named.empty()) {
    const int count = wanted >= 0 ? wanted : visible.has_value() ? 0 : found;
    for (int i = 0; i < count; ++i) gpus.push_back({absl::StrCat(i), i});
    return gpus;
  }
  const int count = static_cast<int>(named.size());
  if (wanted > count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--gpus ", wanted, ": this agent's CUDA_VISIBLE_DEVICES names only ", count, ": ",
        Printable(*visible), ": give at most ", count, ", or name more GPUs there"));
  }
  for (int i = 0; i < (wanted >= 0 ? wanted : count); ++i) {
    MUSTER_ASSIGN_OR_RETURN(JobGpu gpu, Find(named[i], machine));
    for (const JobGpu& other : gpus) MUSTER_RETURN_IF_ERROR(CheckDiffer(other, gpu));
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

std::vector<int64_t> MemoryOfJobGpus(const std::vector<JobGpu>& gpus,
                                     const std::vector<int64_t>& machine) {
  std::vector<int64_t> memory;
  for (const JobGpu& gpu : gpus) {
    const bool known = gpu.index >= 0 && gpu.index < static_cast<int>(machine.size());
    memory.push_back(known ? machine[gpu.index] : 0);
  }
  return memory;
}

}  // namespace muster::agent
