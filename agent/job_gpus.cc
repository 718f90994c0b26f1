#include "agent/job_gpus.h"

#include <limits>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/machine.h"
#include "base/text.h"

namespace muster::agent {

absl::StatusOr<std::vector<JobGpu>> ChooseJobGpus(const std::optional<std::string>& visible,
                                                  int found, int wanted) {
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
  std::set<std::string> seen;
  for (int i = 0; i < (wanted >= 0 ? wanted : count); ++i) {
    int index = -1;
    const bool numbered = absl::SimpleAtoi(named[i], &index);
    JobGpu gpu = {numbered ? absl::StrCat(index) : named[i], numbered ? index : -1};
    if (!seen.insert(gpu.device).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("CUDA_VISIBLE_DEVICES of this agent names ", Printable(gpu.device),
                       " twice, and jobs do not share GPUs: name it once"));
    }
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

}  // namespace muster::agent
