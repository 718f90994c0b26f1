#ifndef MUSTER_AGENT_NEWCOMERS_H_
#define MUSTER_AGENT_NEWCOMERS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::agent {

// Decides for which of the machines that wait for a place in a running job its attempt ends, so
// that all meet again with it. Each end costs the job what it has done since its last checkpoint,
// so no machine may cause many: one that got no place after all causes no other, and a launch that
// keeps ending and starting again causes them less and less often. Not thread-safe; pure.
class Newcomers {
 public:
  // After a machine that joined has left again, the next one from its host ends the attempt only
  // after the first span, which doubles each time, up to the second.
  static constexpr absl::Duration kFirstPause = absl::Seconds(10);
  static constexpr absl::Duration kLongestPause = absl::Minutes(10);

  // Returns the machine for which the attempt ends now; nullopt: none. `machines`: those with a
  // place, and those that wait for one. `is_quarantined`: whether the machines of a host would get
  // no place; called at most once per host, and may block.
  std::optional<v1::Member> Choose(const std::vector<v1::Member>& machines, absl::Time now,
                                   const std::function<bool(const std::string&)>& is_quarantined);
  // The attempt was ended for `chosen`, which Choose has returned for these arguments.
  void Came(const v1::Member& chosen, const std::vector<v1::Member>& machines, absl::Time now);

 private:
  // The machines that waited when an attempt was ended for a newcomer.
  std::set<uint64_t> passed_over_;
  // By host: the last start of a machine for which an attempt was ended, and when an attempt may be
  // ended for the next start if that one has ended.
  struct Newcomer {
    uint64_t incarnation = 0;
    absl::Time again;
    absl::Duration pause = kFirstPause;
  };
  std::map<std::string, Newcomer> newcomers_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_NEWCOMERS_H_
