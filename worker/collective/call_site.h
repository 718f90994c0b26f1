#ifndef MUSTER_WORKER_COLLECTIVE_CALL_SITE_H_
#define MUSTER_WORKER_COLLECTIVE_CALL_SITE_H_

#include <source_location>
#include <string>

namespace muster {

// While it lives, collectives of this thread are said to come from `where`: the user's line, not
// ours. Functions that users call take a std::source_location with the default current() and open
// one. The outermost wins, so a function of ours that calls another one keeps the user's line.
class CallSite {
 public:
  explicit CallSite(std::source_location where);
  ~CallSite();
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

 private:
  const bool outermost_;
};

// "train.cc:41" of the open CallSite of this thread; empty if there is none.
std::string CurrentCallSite();

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_CALL_SITE_H_
