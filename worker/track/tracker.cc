#include "worker/track/tracker.h"

#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "worker/track/csv.h"
#include "worker/track/jsonl.h"
#include "worker/track/tensorboard.h"

namespace muster {
namespace {

std::string NumberText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  // Use the first precision that reads back as the same number.
  for (const int digits : {6, 9, 15, 16}) {
    const std::string text = absl::StrFormat("%.*g", digits, value);
    if (std::strtod(text.c_str(), nullptr) == value) return text;
  }
  return absl::StrFormat("%.17g", value);
}

struct Registry {
  Mutex mu;
  std::map<std::string, TrackerFactory> factories ABSL_GUARDED_BY(mu);
};

template <typename Tracker>
TrackerFactory FileTracker(const char* kind) {
  return [kind](const TrackerContext& context) -> absl::StatusOr<std::unique_ptr<GeneralTracker>> {
    if (context.logging_dir.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the tracker ", kind, " needs a logging_dir (or project_dir) to write to"));
    }
    return std::make_unique<Tracker>(context);
  };
}

Registry& TheRegistry() {
  static Registry* const registry = [] {
    auto* const made = new Registry;
    MutexLock lock(&made->mu);
    made->factories["tensorboard"] = FileTracker<TensorBoardTracker>("tensorboard");
    made->factories["jsonl"] = FileTracker<JsonlTracker>("jsonl");
    made->factories["csv"] = FileTracker<CsvTracker>("csv");
    return made;
  }();
  return *registry;
}

}  // namespace

double TrackerValue::number() const {
  if (const bool* truth = std::get_if<bool>(&value_)) return *truth ? 1 : 0;
  if (const int64_t* whole = std::get_if<int64_t>(&value_)) return static_cast<double>(*whole);
  if (const uint64_t* large = std::get_if<uint64_t>(&value_)) return static_cast<double>(*large);
  if (const double* real = std::get_if<double>(&value_)) return *real;
  return std::nan("");
}

std::string TrackerValue::text() const {
  if (const bool* truth = std::get_if<bool>(&value_)) return *truth ? "true" : "false";
  if (const int64_t* whole = std::get_if<int64_t>(&value_)) return absl::StrCat(*whole);
  if (const uint64_t* large = std::get_if<uint64_t>(&value_)) return absl::StrCat(*large);
  if (const double* real = std::get_if<double>(&value_)) return NumberText(*real);
  return std::get<std::string>(value_);
}

std::string TrackerValue::json() const {
  if (const std::string* text = std::get_if<std::string>(&value_)) {
    return JsonQuote(Utf8Text(*text));
  }
  const double* real = std::get_if<double>(&value_);
  return real != nullptr && !std::isfinite(*real) ? JsonQuote(text()) : text();
}

TrackerValues LastOfEachName(const TrackerValues& values) {
  TrackerValues last;
  std::map<absl::string_view, size_t> places;
  for (const auto& [name, value] : values) {
    const auto [place, is_new] = places.emplace(name, last.size());
    if (is_new) {
      last.emplace_back(name, value);
    } else {
      last[place->second].second = value;
    }
  }
  return last;
}

void RegisterTrackerClass(const std::string& name, TrackerFactory factory) {
  Registry& registry = TheRegistry();
  bool replaced = false;
  {
    MutexLock lock(&registry.mu);
    replaced = !registry.factories.insert_or_assign(name, std::move(factory)).second;
  }
  if (replaced) MUSTER_LOG(Warning) << "the tracker " << name << " replaces another of that name";
}

absl::StatusOr<std::unique_ptr<GeneralTracker>> MakeTracker(const std::string& kind,
                                                            const TrackerContext& context) {
  Registry& registry = TheRegistry();
  TrackerFactory factory;
  {
    MutexLock lock(&registry.mu);
    const auto found = registry.factories.find(kind);
    if (found == registry.factories.end()) {
      return absl::NotFoundError(absl::StrCat(
          "there is no tracker \"", Printable(kind), "\"; known are ",
          absl::StrJoin(registry.factories, ", ",
                        [](std::string* out, const auto& entry) { *out += entry.first; })));
    }
    factory = found->second;
  }
  absl::StatusOr<std::unique_ptr<GeneralTracker>> tracker = factory(context);
  if (tracker.ok() && *tracker == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the factory registered for the tracker \"", Printable(kind),
                     "\" returns null: it must return a tracker, or an error"));
  }
  return tracker;
}

}  // namespace muster
