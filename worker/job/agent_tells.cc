#include "worker/job/agent_tells.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

namespace muster {
namespace {

// Matches the coordinator's words for how a process ended: "was killed by signal 9", "exited with
// code 3".
bool NamesFailedProcess(absl::string_view text) {
  if (absl::StrContains(text, "was killed by signal ")) return true;
  constexpr absl::string_view kExited = "exited with code ";
  for (size_t at = text.find(kExited); at != absl::string_view::npos;
       at = text.find(kExited, at + 1)) {
    absl::string_view code = text.substr(at + kExited.size());
    size_t digits = 0;
    while (digits < code.size() && absl::ascii_isdigit(code[digits])) ++digits;
    int number = 0;
    if (absl::SimpleAtoi(code.substr(0, digits), &number) && number != 0) return true;
  }
  return false;
}

}  // namespace

bool AgentTells(const absl::Status& error, const std::map<std::string, std::string>& variables) {
  const auto tells = variables.find("MUSTER_AGENT_TELLS");
  if (tells == variables.end() || tells->second != "true") return false;
  // What the user's own code says about other programs does not count.
  const absl::string_view text = error.message();
  const bool of_the_job =
      absl::StartsWith(text, "lost another process at step ") ||
      absl::StrContains(text, ") did not take part in ") ||
      absl::StrContains(text, "the generation has ended: ") ||
      (absl::StrContains(text, "generation ") && absl::StrContains(text, " has ended: ")) ||
      absl::StrContains(text, ": end the generation and join the next one");
  return of_the_job && NamesFailedProcess(text);
}

}  // namespace muster
