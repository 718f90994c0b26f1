#include "worker/track/jsonl.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/json.h"

namespace muster {
namespace {

std::string Quoted(const std::string& text) {
  return JsonQuote(IsValidUtf8(text) ? text : Printable(text, text.size()));
}

std::string Object(const TrackerValues& values) {
  std::string out = "{";
  for (const auto& [name, value] : values) {
    absl::StrAppend(&out, out.size() > 1 ? ", " : "", Quoted(name), ": ", value.json());
  }
  return out + "}";
}

}  // namespace

JsonlTracker::JsonlTracker(const TrackerContext& context)
    : context_(context),
      path_(JoinPath(JoinPath(context.logging_dir, context.project_name), "metrics.jsonl")) {}

absl::Status JsonlTracker::start() { return file_.Open(path_, /*lines=*/true); }

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
  next_step_ = step + 1;
  return Write(entry.time,
               absl::StrCat("\"step\": ", step, ", \"values\": ", Object(entry.values)));
}

absl::Status JsonlTracker::finish() { return file_.Close(); }

}  // namespace muster
