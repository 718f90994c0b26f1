#include "agent/memory_terms.h"

#include <algorithm>
#include <utility>

namespace muster::agent {

std::vector<std::string> MemoryTerms::Expired(const std::vector<std::string>& held,
                                              const std::set<std::string>& running,
                                              absl::Time now) {
  std::vector<std::string> expired;
  std::map<std::string, Waiting> waiting;
  const std::set<std::string> ended = std::exchange(ended_, {});
  for (const std::string& job : held) {
    if (running.count(job) != 0) continue;
    const auto known = waiting_.find(job);
    Waiting one = known == waiting_.end() ? Waiting{.until = now + kKept, .beside = running}
                                          : std::move(known->second);
    if (one.until <= now || ended.count(job) != 0 ||
        !std::includes(one.beside.begin(), one.beside.end(), running.begin(), running.end())) {
      expired.push_back(job);
    } else {
      waiting.emplace(job, std::move(one));
    }
  }
  waiting_ = std::move(waiting);
  return expired;
}

}  // namespace muster::agent
