#ifndef MUSTER_WORKER_JOB_TRIGGER_H_
#define MUSTER_WORKER_JOB_TRIGGER_H_

#include <string>

namespace muster {

// An action that a process or an operator requests of all processes of the job at the same step.
struct Trigger {
  std::string name = "";
  std::string payload = "";
  int raised_by = -1;  // a rank; -1: an operator
};

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_TRIGGER_H_
