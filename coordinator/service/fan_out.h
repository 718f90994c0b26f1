#ifndef MUSTER_COORDINATOR_SERVICE_FAN_OUT_H_
#define MUSTER_COORDINATOR_SERVICE_FAN_OUT_H_

#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "coordinator/service/attached_agent.h"

namespace muster::coordinator {

// Writes to agents: on the caller's thread, and for many agents on a second thread as well.
class FanOut {
 public:
  ~FanOut() { Stop(); }

  void Start();
  void Stop();  // blocks; repeatable
  // If there are many, the second thread may still write the last few when this returns. Called by
  // one thread at a time.
  void Write(std::vector<std::shared_ptr<AttachedAgent>> agents);

 private:
  struct Writes;
  void Run();

  Mutex mu_;
  CondVar wake_;
  std::shared_ptr<Writes> writes_ ABSL_GUARDED_BY(mu_);  // for the thread to help with
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_FAN_OUT_H_
