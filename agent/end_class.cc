#include "agent/end_class.h"

#include <signal.h>

#include <algorithm>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/exit_code.h"
#include "base/file.h"

namespace muster::agent {

bool IsUserError(const WorkerEnd& end, const std::vector<int>& user_error_codes) {
  const int code = end.exit.exit_code;
  if (end.exit.signal != 0 || !end.killed_because.empty() || !end.memory_kill.empty()) return false;
  return code == kExitUsage || code == kExitNotExecutable || code == kExitProgramMissing ||
         std::find(user_error_codes.begin(), user_error_codes.end(), code) !=
             user_error_codes.end();
}

v1::EndClass ClassOf(const WorkerEnd& end, const std::vector<int>& user_error_codes,
                     bool out_of_memory) {
  if (end.killed_as != v1::END_CLASS_UNSPECIFIED) return end.killed_as;
  if (!end.memory_kill.empty()) return v1::END_CLASS_OUT_OF_MEMORY;
  if (IsUserError(end, user_error_codes)) return v1::END_CLASS_USER_ERROR;
  if (end.exit.signal == SIGKILL && out_of_memory && !end.counts_memory_kills) {
    return v1::END_CLASS_OUT_OF_MEMORY;
  }
  return v1::END_CLASS_PROCESS_FAILED;
}

int64_t CountMemoryKills() {
  constexpr int64_t kMaxBytes = 1 << 20;
  const absl::StatusOr<std::string> text = ReadFile("/proc/vmstat", kMaxBytes);
  if (!text.ok()) return -1;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    int64_t count = 0;
    if (absl::ConsumePrefix(&line, "oom_kill ") && absl::SimpleAtoi(line, &count)) return count;
  }
  return -1;
}

}  // namespace muster::agent
