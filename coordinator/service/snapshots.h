#ifndef MUSTER_COORDINATOR_SERVICE_SNAPSHOTS_H_
#define MUSTER_COORDINATOR_SERVICE_SNAPSHOTS_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "coordinator/core.h"
#include "coordinator/journal/journal.h"

namespace muster::coordinator {

// Decides when a snapshot is due, has the journal write it, and answers the requester. One at a
// time. Not thread-safe, except for the numbers; CoreRunner uses it in its turn.
class Snapshots {
 public:
  struct Options {
    // After this many records, or bytes of them, a snapshot is due, and later if the last one had
    // more bytes than that.
    uint64_t records = 0;
    uint64_t bytes = 0;
    CoreOptions core;  // options of the core that a snapshot is built with
    const Clock* clock = &Clock::Real();
  };
  using Done = std::function<void(absl::StatusOr<uint64_t>)>;

  // `journal` outlives it.
  Snapshots(const Options& options, Journal* journal) : options_(options), journal_(*journal) {}

  bool Due() const;
  // Makes a snapshot due; `done` gets its revision once it is durable. Returns false, and does not
  // keep `done`, if one is being written or another caller waits for one.
  bool Request(Done done);
  // Answers the requester, if any.
  void Answer(const absl::StatusOr<uint64_t>& result);
  // Begins to write the state of `core`. `written` is called on a thread of the journal's; call
  // Ended with its argument, in the turn.
  struct Written {
    uint64_t revision = 0;
    absl::Status status;
    bool damaged = false;  // what the journal holds cannot be read
  };
  void Take(const Core& core, std::function<void(const Written&)> written);
  void Ended(const Written& written);

  // May be called by any thread. False: the last one could not be written. The journal grows until
  // one can.
  bool ok() const { return ok_.load(std::memory_order_relaxed); }
  uint64_t written() const { return written_.load(std::memory_order_relaxed); }
  uint64_t failed() const { return failed_.load(std::memory_order_relaxed); }
  // How long the last snapshot that was written took; zero: none was.
  absl::Duration took() const {
    return absl::Nanoseconds(nanoseconds_.load(std::memory_order_relaxed));
  }

 private:
  const Options options_;
  Journal& journal_;
  bool running_ = false;
  bool of_core_ = false;  // the next one is taken from the core: the journal has damage
  absl::Time begun_ = absl::InfinitePast();
  Done done_;                // the requester of the next one, or of the one being written
  uint64_t not_before_ = 0;  // records since the last one; set when one has failed
  std::atomic<bool> ok_{true};
  std::atomic<uint64_t> written_{0};
  std::atomic<uint64_t> failed_{0};
  std::atomic<int64_t> nanoseconds_{0};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_SNAPSHOTS_H_
