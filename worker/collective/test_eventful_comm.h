#ifndef MUSTER_WORKER_COLLECTIVE_TEST_EVENTFUL_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_TEST_EVENTFUL_COMM_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "worker/collective/borrowed_comm.h"

namespace muster {

// For tests: runs `event` before this rank's exchange of bytes number `moment`, from 0; never if
// `moment` is negative.
class EventfulComm : public BorrowedComm {
 public:
  EventfulComm(Comm& comm, int moment, std::function<void()> event)
      : BorrowedComm(comm), left_(moment), event_(std::move(event)) {}
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    Count();
    return BorrowedComm::AllGatherBytes(bytes);
  }
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    Count();
    return BorrowedComm::BroadcastBytes(bytes, root);
  }
  bool happened() const { return left_ < 0; }

 private:
  void Count() {
    if (left_-- == 0) event_();
  }
  int left_;
  const std::function<void()> event_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_TEST_EVENTFUL_COMM_H_
