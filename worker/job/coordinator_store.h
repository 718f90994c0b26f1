#ifndef MUSTER_WORKER_JOB_COORDINATOR_STORE_H_
#define MUSTER_WORKER_JOB_COORDINATOR_STORE_H_

#include <memory>
#include <string>

#include "torch/csrc/distributed/c10d/Store.hpp"

namespace muster {

class CoordinatorClient;

// The coordinator's key-value namespace of a job as a c10d::Store: process groups rendezvous
// through it without a separate port and server, and the coordinator sees the rendezvous.
//
// `prefix` is put before every key; with the seat's key_prefix, the keys are deleted with the
// generation. Thread-safe, and so are clones. Blocking calls wait at most getTimeout() (300 s
// unless set) and throw c10::DistStoreError naming the missing key; other failures throw
// c10::DistStoreError with the coordinator's words. compareSet, append, multiGet and multiSet
// (atomic) are supported. Queues are not: a pop that times out could lose the element that it had
// claimed.
c10::intrusive_ptr<c10d::Store> MakeCoordinatorStore(std::shared_ptr<CoordinatorClient> client,
                                                     std::string prefix);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_COORDINATOR_STORE_H_
