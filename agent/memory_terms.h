#ifndef MUSTER_AGENT_MEMORY_TERMS_H_
#define MUSTER_AGENT_MEMORY_TERMS_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace muster::agent {

// Decides how long a node keeps the memory that the attempts of a job have left: while an attempt
// of the job runs here, and then until the job ends, another job starts here (which needs memory,
// too), or kKept has passed. Pure; not thread-safe.
class MemoryTerms {
 public:
  // Another attempt usually begins within seconds, and after its longest delay within 5 minutes.
  static constexpr absl::Duration kKept = absl::Minutes(15);

  // The coordinator says that no attempt of the job follows. Takes effect in the next call of
  // Expired, but a job with an attempt here keeps its memory.
  void Ended(const std::string& job) { ended_.insert(job); }

  // Returns the jobs in `held` whose time is over. `running`: jobs with an attempt here.
  std::vector<std::string> Expired(const std::vector<std::string>& held,
                                   const std::set<std::string>& running, absl::Time now);

 private:
  struct Waiting {
    absl::Time until;
    std::set<std::string> beside;  // the jobs that ran when its last attempt ended
  };
  std::map<std::string, Waiting> waiting_;  // jobs without an attempt here
  std::set<std::string> ended_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MEMORY_TERMS_H_
