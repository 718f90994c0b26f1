#ifndef MUSTER_WORKER_PROCESS_STOP_SIGNAL_H_
#define MUSTER_WORKER_PROCESS_STOP_SIGNAL_H_

namespace muster {

// SIGTERM as a wish to end well: the first one is noted, the second one kills as ever. For the
// whole process, as signals are.
class StopSignal {
 public:
  // Takes effect once. False: the program handles or ignores SIGTERM itself, which stands.
  static bool Install();
  // Whether the signal has come since. Async-signal-safe.
  static bool Received();
};

}  // namespace muster

#endif  // MUSTER_WORKER_PROCESS_STOP_SIGNAL_H_
