#include "worker/track/jsonl.h"

#include <algorithm>
#include <fstream>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/track/step_after.h"

namespace muster {
namespace {

// The bytes at the end of a file in which its last step is searched for first.
constexpr int64_t kTail = 64 << 10;

std::string Quoted(const std::string& text) { return JsonQuote(Utf8Text(text)); }

std::string Object(const TrackerValues& values) {
  std::string out = "{";
  // Readers differ about a name that is twice in an object, and some refuse it.
  const TrackerValues each = LastOfEachName(values);
  for (const auto& [name, value] : each) {
    absl::StrAppend(&out, out.size() > 1 ? ", " : "", Quoted(name), ": ", value.json());
  }
  return out + "}";
}

// Returns the step of a line that this rank has logged; nothing if it is another line, or cut by a
// crash.
std::optional<int64_t> StepOf(absl::string_view line, int rank) {
  // Nothing before it can hold an unescaped quote.
  constexpr absl::string_view kRank = ", \"rank\": ";
  const size_t at = line.find(kRank);
  if (at == absl::string_view::npos) return std::nullopt;
  line.remove_prefix(at + kRank.size());
  if (!absl::ConsumePrefix(&line, absl::StrCat(rank, ", \"step\": "))) return std::nullopt;
  const size_t end = line.find(',');
  int64_t step = 0;
  if (end == absl::string_view::npos || !absl::SimpleAtoi(line.substr(0, end), &step)) {
    return std::nullopt;
  }
  return step;
}

// Returns the step after the last one that this rank has logged there; 0 if it has logged none.
int64_t NextStep(const std::string& path, int rank) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const int64_t size = file.good() ? static_cast<int64_t>(file.tellg()) : 0;
  for (int64_t window = kTail; size > 0; window *= 8) {
    const int64_t begin = std::max<int64_t>(0, size - window);
    std::string text(static_cast<size_t>(size - begin), '\0');
    file.seekg(begin);
    if (!file.read(text.data(), size - begin)) return 0;
    absl::string_view rest = text;
    while (!rest.empty()) {
      const size_t newline = rest.substr(0, rest.size() - 1).rfind('\n');
      // The first line may begin before the piece.
      if (newline == absl::string_view::npos && begin > 0) break;
      const size_t at = newline == absl::string_view::npos ? 0 : newline + 1;
      if (const std::optional<int64_t> step = StepOf(rest.substr(at), rank))
        return StepAfter(*step);
      rest = rest.substr(0, at);
    }
    if (begin == 0) return 0;
  }
  return 0;
}

}  // namespace

JsonlTracker::JsonlTracker(const TrackerContext& context)
    : context_(context),
      path_(JoinPath(JoinPath(context.logging_dir, context.project_name), "metrics.jsonl")) {}

absl::Status JsonlTracker::start() {
  MUSTER_RETURN_IF_ERROR(file_.Open(path_, /*lines=*/true));
  next_step_ = NextStep(path_, context_.rank);
  return absl::OkStatus();
}

absl::Status JsonlTracker::Write(absl::Time time, const std::string& rest) {
  return file_.Append(absl::StrFormat("{\"time\": %.3f, \"run\": %s, \"rank\": %d, %s}\n",
                                      absl::ToUnixMicros(time) / 1e6, Quoted(context_.project_name),
                                      context_.rank, rest));
}

absl::Status JsonlTracker::store_init_configuration(const TrackerValues& config) {
  return Write(context_.start_time, absl::StrCat("\"config\": ", Object(config)));
}

absl::Status JsonlTracker::log(const TrackerEntry& entry) {
  const int64_t step = entry.step.value_or(next_step_);
  next_step_ = StepAfter(step);
  return Write(entry.time,
               absl::StrCat("\"step\": ", step, ", \"values\": ", Object(entry.values)));
}

absl::Status JsonlTracker::finish() { return file_.Close(); }

}  // namespace muster
