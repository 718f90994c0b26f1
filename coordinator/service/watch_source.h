#ifndef MUSTER_COORDINATOR_SERVICE_WATCH_SOURCE_H_
#define MUSTER_COORDINATOR_SERVICE_WATCH_SOURCE_H_

#include <google/protobuf/message_lite.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "absl/status/statusor.h"
#include "coordinator/access.h"
#include "coordinator/core.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/watch.pb.h"

namespace muster::coordinator {

// The subject of a watch: what wakes it.
struct WatchTopic {
  enum Kind { kGroup, kSubmitted };
  Kind kind = kGroup;
  std::string id;  // a job's id; empty, for kSubmitted: all jobs

  friend bool operator==(const WatchTopic& a, const WatchTopic& b) {
    return a.kind == b.kind && a.id == b.id;
  }
  friend bool operator<(const WatchTopic& a, const WatchTopic& b) {
    return std::tie(a.kind, a.id) < std::tie(b.kind, b.id);
  }
  template <typename H>
  friend H AbslHashValue(H h, const WatchTopic& topic) {
    return H::combine(std::move(h), topic.kind, topic.id);
  }
};

// The messages of one watch, and how far it is. Not thread-safe.
class WatchSource {
 public:
  virtual ~WatchSource() = default;

  virtual const WatchTopic& topic() const = 0;
  // Returns the next message with what is durable, of at most `max_bytes`; null: there is nothing
  // to tell yet. Errors: those that end the watch.
  virtual absl::StatusOr<std::unique_ptr<google::protobuf::MessageLite>> Next(
      const Core& core, uint64_t durable_revision, size_t max_bytes) = 0;
};

// Events of a rendezvous job, see proto/muster/v1/watch.proto.
std::unique_ptr<WatchSource> WatchEvents(v1::WatchRequest request);

// Submitted jobs, see proto/muster/v1/job.proto. `who`: as in Caller.
std::unique_ptr<WatchSource> WatchJobs(v1::WatchJobsRequest request,
                                       std::shared_ptr<const Identity> who);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_WATCH_SOURCE_H_
