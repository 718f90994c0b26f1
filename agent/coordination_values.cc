#include "agent/coordination_values.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "proto/end_class.h"
#include "proto/failure_policy.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {
namespace {

using nlohmann::json;

constexpr int kMaxCount = 1'000'000'000;
constexpr size_t kMostOfWhy = 4096;
constexpr size_t kMostOfLaunch = 64;
constexpr size_t kMostOfLine = 1024;  // of a program's output

// Programs may write text that is not UTF-8.
std::string Dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

json Parse(const std::string& value) {
  return json::parse(value, nullptr, /*allow_exceptions=*/false);
}

std::string TextOf(const json& value, const char* name) {
  const auto it = value.find(name);
  return it != value.end() && it->is_string() ? it->get<std::string>() : "";
}

// Returns 0 if the value is not a count.
int CountOf(const json& value, const char* name) {
  const auto it = value.find(name);
  if (it == value.end() || !it->is_number_integer() || *it < 0 || *it > kMaxCount) return 0;
  return it->get<int>();
}

json JsonOf(const AttemptEnd& end) {
  json value = {{"why", end.why}, {"last_lines", end.last_lines}};
  if (end.cause != AttemptEnd::Cause::kFailed) value["cause"] = static_cast<int>(end.cause);
  if (end.restarts) value["restarts"] = true;
  if (end.end_class != v1::END_CLASS_UNSPECIFIED) value["class"] = EndClassName(end.end_class);
  return value;
}

AttemptEnd EndOf(const json& value) {
  AttemptEnd end;
  end.why = TextOf(value, "why");
  if (const int cause = CountOf(value, "cause");
      cause <= static_cast<int>(AttemptEnd::Cause::kMachineCame)) {
    end.cause = static_cast<AttemptEnd::Cause>(cause);
  }
  end.end_class = EndClassOfName(TextOf(value, "class"));
  if (const auto restarts = value.find("restarts"); restarts != value.end()) {
    end.restarts = restarts->is_boolean() && restarts->get<bool>();
  }
  if (const auto lines = value.find("last_lines"); lines != value.end() && lines->is_array()) {
    for (const json& line : *lines) {
      if (line.is_string()) end.last_lines.push_back(line.get<std::string>());
    }
  }
  return end;
}

// Returns the newest of `lines`, cut, that fit 4 KiB, because the counts of many machines come in
// one answer.
std::vector<std::string> NewestLines(const std::vector<std::string>& lines) {
  size_t left = 4096;
  std::vector<std::string> newest;
  for (auto line = lines.rbegin(); line != lines.rend() && left > 0; ++line) {
    newest.push_back(line->substr(0, std::min(left, kMostOfLine)));
    left -= std::min(left, newest.back().size() + 1);
  }
  std::reverse(newest.begin(), newest.end());
  return newest;
}

void AddCounts(const RestartCounts& counts, json* value) {
  (*value)["counted"] = counts.total;
  json classes = json::object();
  for (const v1::ClassCount& one : counts.by_class) {
    classes[EndClassName(one.end_class())] = one.count();
  }
  if (!classes.empty()) (*value)["classes"] = std::move(classes);
  if (counts.last.why.empty()) return;
  AttemptEnd last = counts.last;
  last.why.resize(std::min(last.why.size(), kMostOfWhy));
  last.last_lines = NewestLines(last.last_lines);
  (*value)["last"] = JsonOf(last);
}
RestartCounts CountsOf(const json& value) {
  RestartCounts counts;
  counts.total = CountOf(value, "counted");
  if (const auto last = value.find("last"); last != value.end() && last->is_object()) {
    counts.last = EndOf(*last);
  }
  const auto classes = value.find("classes");
  if (classes == value.end() || !classes->is_object()) return counts;
  for (const auto& [name, end_class] : kLimitedClasses) {
    const int count = CountOf(*classes, EndClassName(end_class).c_str());
    if (count == 0) continue;
    v1::ClassCount* const one = counts.by_class.Add();
    one->set_end_class(end_class);
    one->set_count(count);
  }
  return counts;
}

std::string LaunchOf(const json& value) { return TextOf(value, "launch").substr(0, kMostOfLaunch); }

}  // namespace

std::string EndToValue(const AttemptEnd& end) { return Dump(JsonOf(end)); }

AttemptEnd EndFromValue(const std::string& value) {
  const json object = Parse(value);
  return object.is_object() ? EndOf(object) : AttemptEnd{value, {}};
}

std::string CountedToValue(const CountedValue& counted) {
  json value = {{"attempt", counted.attempt}};
  if (!counted.launch.empty()) value["launch"] = counted.launch;
  AddCounts(counted.counted, &value);
  return Dump(value);
}

std::optional<CountedValue> CountedFromValue(const std::string& value) {
  const json object = Parse(value);
  if (!object.is_object()) return std::nullopt;
  return CountedValue{CountOf(object, "attempt"), CountsOf(object), LaunchOf(object)};
}

std::string SettingsToValue(const SettingsValue& settings, bool with_counts) {
  json value = {{"settings", settings.settings},
                {"debug", settings.debug},
                {"master_addr", settings.master_addr},
                {"master_port", settings.master_port},
                {"launch", settings.launch}};
  if (with_counts) {
    value["attempt"] = settings.attempt;
    AddCounts(settings.counted, &value);
  }
  return Dump(value);
}

std::optional<SettingsValue> SettingsFromValue(const std::string& value) {
  const json object = Parse(value);
  if (!object.is_object()) return std::nullopt;
  const auto port = object.find("master_port");
  return SettingsValue{
      .settings = TextOf(object, "settings"),
      .debug = TextOf(object, "debug"),
      .master_addr = TextOf(object, "master_addr"),
      .master_port = port != object.end() && port->is_number_integer() ? port->get<int>() : 0,
      .launch = LaunchOf(object),
      .attempt = CountOf(object, "attempt"),
      .counted = CountsOf(object),
  };
}

}  // namespace muster::agent
