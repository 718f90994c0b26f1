#ifndef MUSTER_WORKER_COLLECTIVE_CALL_SITE_H_
#define MUSTER_WORKER_COLLECTIVE_CALL_SITE_H_

#include <source_location>
#include <string>

namespace muster {

// A CallSite for another thread.
struct SavedCallSite {
  const char* file = nullptr;  // null: there is none
  unsigned line = 0;
};

// While it lives, collectives of this thread are attributed to `where`: the user's line, not ours.
// Functions that users call take a std::source_location with the default current() and open a
// CallSite. The outermost wins, so a library function that calls another one keeps the user's line.
class CallSite {
 public:
  explicit CallSite(std::source_location where);
  // Restores the CallSite of another thread, for which this one runs collectives.
  explicit CallSite(const SavedCallSite& saved);
  ~CallSite();
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

 private:
  const bool outermost_;
};

// Returns this thread's open CallSite, such as "train.cc:41"; empty if there is none.
std::string CurrentCallSite();
SavedCallSite SaveCallSite();

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_CALL_SITE_H_
