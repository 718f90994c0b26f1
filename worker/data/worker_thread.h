#ifndef MUSTER_WORKER_DATA_WORKER_THREAD_H_
#define MUSTER_WORKER_DATA_WORKER_THREAD_H_

namespace muster {

// Makes tensor operations called from this thread run only on this thread. Loader threads call it,
// so that k of them use k cores instead of each starting a team of threads. Other threads keep
// their setting.
void BeSingleThreaded();

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_WORKER_THREAD_H_
