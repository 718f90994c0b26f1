#include "proto/failure_policy.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/end_class.h"

namespace muster {
namespace {

int CountOf(const ClassCounts& counts, v1::EndClass end_class) {
  for (const v1::ClassCount& count : counts) {
    if (count.end_class() == end_class) return count.count();
  }
  return -1;
}

}  // namespace

v1::EndClass LimitedClass(v1::EndClass end_class) {
  if (end_class == v1::END_CLASS_PEER_FAILED) return v1::END_CLASS_PROCESS_FAILED;
  for (const auto& [name, limited] : kLimitedClasses) {
    if (limited == end_class) return end_class;
  }
  return v1::END_CLASS_UNSPECIFIED;
}

bool CountsAsRestart(v1::EndClass end_class) {
  return end_class == v1::END_CLASS_PROCESS_FAILED || end_class == v1::END_CLASS_OUT_OF_MEMORY ||
         end_class == v1::END_CLASS_HANG ||
         end_class == v1::END_CLASS_PEER_FAILED;  // no node has reported the cause
}

bool MayRetry(v1::EndClass end_class) {
  return end_class != v1::END_CLASS_USER_ERROR && end_class != v1::END_CLASS_TIME_LIMIT;
}

std::string WhyOverLimit(const ClassCounts& limits, const ClassCounts& counts,
                         v1::EndClass end_class) {
  end_class = LimitedClass(end_class);
  const int limit = CountOf(limits, end_class);
  if (limit < 0 || std::max(0, CountOf(counts, end_class)) < limit) return "";
  return absl::StrCat("its failure policy allows ", limit, limit == 1 ? " restart" : " restarts",
                      " after ", EndClassName(end_class));
}

void CountStart(const ClassCounts& limits, v1::EndClass end_class, ClassCounts* counts) {
  end_class = LimitedClass(end_class);
  if (CountOf(limits, end_class) < 0) return;
  for (v1::ClassCount& count : *counts) {
    if (count.end_class() != end_class) continue;
    count.set_count(count.count() + 1);
    return;
  }
  v1::ClassCount* const count = counts->Add();
  count->set_end_class(end_class);
  count->set_count(1);
}

bool AddToPolicy(absl::string_view name, int64_t count, FailurePolicy* policy) {
  if (count < 0 || count > kMaxRestarts) return false;
  if (name == "max_restarts") {
    policy->max_restarts = static_cast<int>(count);
    return true;
  }
  for (const auto& [known, end_class] : kLimitedClasses) {
    if (known != name) continue;
    policy->class_limits[std::string(name)] = static_cast<int>(count);
    return true;
  }
  return false;
}

std::optional<FailurePolicy> ParseFailurePolicy(absl::string_view text) {
  FailurePolicy policy;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> entry =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    int64_t count = 0;
    if (!absl::SimpleAtoi(entry.second, &count) || !AddToPolicy(entry.first, count, &policy)) {
      return std::nullopt;
    }
  }
  return policy;
}

void CompletePolicy(FailurePolicy* policy) {
  if (policy->max_restarts.has_value()) return;
  int64_t sum = 0;
  for (const auto& [name, end_class] : kLimitedClasses) {
    const auto limit = policy->class_limits.find(std::string(name));
    if (limit != policy->class_limits.end() && CountsAsRestart(end_class)) sum += limit->second;
  }
  if (sum == 0) return;
  policy->max_restarts = static_cast<int>(sum);
  for (const auto& [name, end_class] : kLimitedClasses) {
    if (CountsAsRestart(end_class)) policy->class_limits.try_emplace(std::string(name), 0);
  }
}

ClassCounts ToClassCounts(const std::map<std::string, int>& class_limits) {
  ClassCounts counts;
  for (const auto& [name, end_class] : kLimitedClasses) {
    const auto limit = class_limits.find(std::string(name));
    if (limit == class_limits.end()) continue;
    v1::ClassCount* const count = counts.Add();
    count->set_end_class(end_class);
    count->set_count(limit->second);
  }
  return counts;
}

}  // namespace muster
