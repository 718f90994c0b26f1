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

// What follows the end of an attempt, of submitted jobs and of launches. Pure.

using ClassCounts = google::protobuf::RepeatedPtrField<v1::ClassCount>;

// The classes whose restarts may be limited, as people write them.
inline constexpr std::pair<absl::string_view, v1::EndClass> kLimitedClasses[] = {
    {"failed", v1::END_CLASS_PROCESS_FAILED},
    {"oom", v1::END_CLASS_OUT_OF_MEMORY},
    {"hang", v1::END_CLASS_HANG},
    {"node_lost", v1::END_CLASS_NODE_LOST},
    {"preempted", v1::END_CLASS_PREEMPTED},
};

// The most restarts that can be asked for, of all that counts or of one class.
inline constexpr int kMaxRestarts = 1'000'000;

// The one of them that ends of this class count to; UNSPECIFIED: none.
v1::EndClass LimitedClass(v1::EndClass end_class);
// Whether another start after it counts against max_restarts.
bool CountsAsRestart(v1::EndClass end_class);
// Whether another start can help.
bool MayRetry(v1::EndClass end_class);

// Why its class has no other start left, in words that follow "; "; empty: it has, or no limit.
std::string WhyOverLimit(const ClassCounts& limits, const ClassCounts& counts,
                         v1::EndClass end_class);
// Counts another start after it, if its class has a limit.
void CountStart(const ClassCounts& limits, v1::EndClass end_class, ClassCounts* counts);

// The setting failure_policy.
struct FailurePolicy {
  std::optional<int> max_restarts;          // of all that counts; nullopt: not said
  std::map<std::string, int> class_limits;  // by a name of kLimitedClasses
};
// `name`: one of kLimitedClasses, or "max_restarts". False: neither, or a number out of range.
bool AddToPolicy(absl::string_view name, int64_t count, FailurePolicy* policy);
// "max_restarts=3,oom=1"; nullopt: that is none.
std::optional<FailurePolicy> ParseFailurePolicy(absl::string_view text);
// Without max_restarts, the classes that are named have the restarts that there are.
void CompletePolicy(FailurePolicy* policy);
ClassCounts ToClassCounts(const std::map<std::string, int>& class_limits);

}  // namespace muster

#endif  // MUSTER_PROTO_FAILURE_POLICY_H_
