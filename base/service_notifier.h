#ifndef MUSTER_BASE_SERVICE_NOTIFIER_H_
#define MUSTER_BASE_SERVICE_NOTIFIER_H_

#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

// Tells a service manager what this process is doing, in the protocol of sd_notify(3): one datagram
// per message to the socket in $NOTIFY_SOCKET. Without a manager nothing is sent. Not thread-safe;
// never blocks, and messages that the manager does not take are dropped.
class ServiceNotifier {
 public:
  // The manager's socket, and how often to show that the process is alive. `watchdog`: the manager
  // ends a process that shows no sign of life for this long; zero: it does not watch.
  struct Options {
    std::string socket = {};  // a path, or "@NAME" in the abstract namespace; empty: no manager
    absl::Duration watchdog = absl::ZeroDuration();
  };
  // Reads $NOTIFY_SOCKET, and $WATCHDOG_USEC if $WATCHDOG_PID is this process or absent. Removes
  // them from the environment, because processes that this one starts must not speak for it. Call
  // it before threads start.
  static Options TakeFromEnvironment();

  explicit ServiceNotifier(Options options) : options_(std::move(options)) {}

  bool active() const { return !options_.socket.empty(); }
  // How often Alive has to be called; infinite: never.
  absl::Duration period() const;

  // Reports that the process serves now. `status` is one line for people.
  void Ready(absl::string_view status);
  // Sends the line unless it equals the last one.
  void Status(absl::string_view status);
  void Stopping(absl::string_view status);
  // Call it each time the loop that makes this process useful has completed a round, and from
  // nowhere else: otherwise a process that hangs would look alive.
  void Alive(absl::Time now);

 private:
  void Send(absl::string_view message);

  Options options_;
  std::string status_;
  absl::Time last_alive_ = absl::InfinitePast();
  bool warned_ = false;  // logged that no manager takes the messages
};

}  // namespace muster

#endif  // MUSTER_BASE_SERVICE_NOTIFIER_H_
