#ifndef MUSTER_PROTO_FAILURE_POLICY_H_
#define MUSTER_PROTO_FAILURE_POLICY_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "proto/muster/v1/job.pb.h"

namespace muster {

// What follows the end of an attempt, for submitted jobs and for launches. Pure.

using ClassCounts = google::protobuf::RepeatedPtrField<v1::ClassCount>;

// The classes whose restarts may be limited, as people write them.
inline constexpr std::pair<absl::string_view, v1::EndClass> kLimitedClasses[] = {
    {"failed", v1::END_CLASS_PROCESS_FAILED},
    {"oom", v1::END_CLASS_OUT_OF_MEMORY},
    {"hang", v1::END_CLASS_HANG},
    {"node_lost", v1::END_CLASS_NODE_LOST},
    {"preempted", v1::END_CLASS_PREEMPTED},
};

// The most restarts that can be requested, in total or for one class.
inline constexpr int kMaxRestarts = 1'000'000;

// Returns the limited class to which ends of this class count; UNSPECIFIED: none.
v1::EndClass LimitedClass(v1::EndClass end_class);
// Returns whether another start after such an end counts against max_restarts.
bool CountsAsRestart(v1::EndClass end_class);
// Returns whether another start can help.
bool MayRetry(v1::EndClass end_class);

// Returns why its class has no other start left, as a text that follows "; "; empty if it has one,
// or no limit.
std::string WhyOverLimit(const ClassCounts& limits, const ClassCounts& counts,
                         v1::EndClass end_class);
// Counts another start after such an end, if its class has a limit.
void CountStart(const ClassCounts& limits, v1::EndClass end_class, ClassCounts* counts);

// The value of the setting failure_policy.
struct FailurePolicy {
  std::optional<int> max_restarts;          // in total; nullopt: not given
  std::map<std::string, int> class_limits;  // by names of kLimitedClasses
};
// `name`: one of kLimitedClasses, or "max_restarts". Returns false if it is neither, or if the
// number is out of range.
bool AddToPolicy(absl::string_view name, int64_t count, FailurePolicy* policy);
// Parses "max_restarts=3,oom=1"; returns nullopt for an invalid text.
std::optional<FailurePolicy> ParseFailurePolicy(absl::string_view text);
// If max_restarts is not given, but classes that count against it have limits: sets it to the sum
// of these limits, and the limits of the other such classes to 0.
void CompletePolicy(FailurePolicy* policy);
ClassCounts ToClassCounts(const std::map<std::string, int>& class_limits);

}  // namespace muster

#endif  // MUSTER_PROTO_FAILURE_POLICY_H_
