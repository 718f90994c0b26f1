#ifndef MUSTER_COORDINATOR_WATCH_LOG_H_
#define MUSTER_COORDINATOR_WATCH_LOG_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "coordinator/kv_entry.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/watch.pb.h"

namespace muster::coordinator {

// The latest events of one job, by revision, for watchers that come back. Older ones are dropped
// whole revisions at a time; a watcher that needs those gets COMPACTED. Not thread-safe.
class WatchLog {
 public:
  // Events up to `compacted` (inclusive) are not held: they happened before this log began.
  WatchLog(size_t max_events, size_t max_bytes, uint64_t compacted);

  // Revisions must not decrease.
  void Put(uint64_t revision, KvEntry::Ptr entry);
  void Deleted(uint64_t revision, absl::string_view key);
  void Other(uint64_t revision, v1::WatchEvent event);
  // Lets the events of `revision` be shown only when the journal is durable up to it.
  void MarkDurable(uint64_t revision);

  // Drops all events. A watcher that has read all of them continues; the others have to read the
  // state again.
  void Compact();

  uint64_t compacted() const { return compacted_; }
  size_t size() const { return events_.size(); }

  // Appends to `batch` the events with revision >= from that match, as far as they are durable up
  // to `durable_revision`, in whole revisions, until about `max_bytes`. next_revision is where to
  // continue: it is past `last_revision` when nothing is left. Errors: OUT_OF_RANGE / COMPACTED.
  std::optional<v1::OpError> Read(const v1::WatchRequest& request, uint64_t from,
                                  uint64_t durable_revision, uint64_t last_revision,
                                  size_t max_bytes, v1::WatchBatch* batch) const;

 private:
  struct Event {
    uint64_t revision = 0;
    uint32_t bytes = 0;
    bool durable = false;
    bool deleted = false;
    KvEntry::Ptr entry;  // or
    std::unique_ptr<v1::WatchEvent> other;
  };
  void Add(Event event);

  const size_t max_events_;
  const size_t max_bytes_;
  std::deque<Event> events_;
  size_t bytes_ = 0;
  uint64_t compacted_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_WATCH_LOG_H_
