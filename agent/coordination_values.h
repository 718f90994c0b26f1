#ifndef MUSTER_AGENT_COORDINATION_VALUES_H_
#define MUSTER_AGENT_COORDINATION_VALUES_H_

#include <optional>
#include <string>

#include "agent/job_coordination.h"

namespace muster::agent {

// The values of the keys through which the agents of a job agree, as JSON. Agents of other versions
// write them too, and any program that reaches the coordinator can: values need not have the
// expected types, and parts that do not count as absent. What programs printed need not be UTF-8,
// and is replaced where it is not. All functions are pure.

// The key "end": why the attempt ended.
std::string EndToValue(const AttemptEnd& end);
// A value that is no object is the reason itself.
AttemptEnd EndFromValue(const std::string& value);

// What an agent has counted, under the key "count/RANK" and in the settings.
struct CountedValue {
  int attempt = 0;
  RestartCounts counted = {};
  std::string launch = {};  // see Meeting; empty: not known
};
// Long texts of the last end are cut, so that those of kCountsAtATime machines fit an answer.
std::string CountedToValue(const CountedValue& counted);
// Returns nullopt for a value that is no object.
std::optional<CountedValue> CountedFromValue(const std::string& value);

// The machines whose counts come in one answer: even with their last ends, which JSON may make up
// to six times as long, it stays below the largest answer.
inline constexpr int kCountsAtATime = 64;

// The key "settings": what machine 0 decides, and what the others compare with.
struct SettingsValue {
  std::string settings;    // see GrpcJobCoordinationOptions
  std::string debug = {};  // likewise
  std::string master_addr = {};
  int master_port = 0;  // as it was written, perhaps no port
  std::string launch = {};
  int attempt = 0;
  RestartCounts counted = {};
};
// `with_counts`: whether `attempt` and `counted` are written, too.
std::string SettingsToValue(const SettingsValue& settings, bool with_counts);
// Returns nullopt for a value that is no object.
std::optional<SettingsValue> SettingsFromValue(const std::string& value);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_COORDINATION_VALUES_H_
