#ifndef MUSTER_COORDINATOR_SERVICE_WATCHERS_H_
#define MUSTER_COORDINATOR_SERVICE_WATCHERS_H_

#include <google/protobuf/message_lite.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "coordinator/core.h"
#include "coordinator/service/watch_source.h"

namespace muster::coordinator {

// A watch stream, as the runner sees it. Thread-safe.
class WatchStream {
 public:
  virtual ~WatchStream() = default;
  // Writes `message`, which may be destroyed after the call; WatchWritable() is called when it has
  // been written. Never called while a write is in flight.
  virtual void Write(const google::protobuf::MessageLite& message) = 0;
  virtual void Close(const absl::Status& status) = 0;
};

// The open watches, and when each is sent something: when its topic has changed, once that is
// durable, and its last message was taken. Not thread-safe, except for the numbers; CoreRunner uses
// it in its turn.
class Watchers {
 public:
  // `core` outlives it. A batch has at most `batch_bytes`.
  Watchers(const Core& core, size_t batch_bytes) : core_(core), batch_bytes_(batch_bytes) {}

  // Opens a watch. All that the core has put out must be in its history by then.
  void Open(std::shared_ptr<WatchStream> stream, std::unique_ptr<WatchSource> source);
  // Notes that the stream's write has ended.
  void Writable(const std::shared_ptr<WatchStream>& stream);
  void Forget(WatchStream* stream);
  void CloseAll(const absl::Status& status);

  // Notes that a topic has changed: serves its watchers in the next Serve(), and again when the
  // change is durable.
  void Changed(const WatchTopic& topic);
  void Durable(uint64_t revision);
  // Sends what there is to the watchers of the topics that have changed.
  void Serve();

  // May be called by any thread.
  size_t size() const { return count_.load(std::memory_order_relaxed); }
  // Watches looked at because something of their topic had changed.
  uint64_t visited() const { return visited_.load(std::memory_order_relaxed); }

 private:
  struct Watcher {
    std::shared_ptr<WatchStream> stream;
    std::unique_ptr<WatchSource> source;
    bool writing = false;
  };
  void Send(Watcher& watcher);

  const Core& core_;
  const size_t batch_bytes_;
  uint64_t durable_revision_ = 0;
  absl::flat_hash_map<WatchStream*, Watcher> watchers_;
  absl::flat_hash_map<WatchTopic, absl::flat_hash_set<WatchStream*>> of_topic_;
  std::vector<WatchTopic> changed_;  // since the last Serve()
  // Topics with changes that were not durable, and the revision up to which the journal must be.
  absl::btree_set<std::pair<uint64_t, WatchTopic>> undurable_;
  std::atomic<size_t> count_{0};
  std::atomic<uint64_t> visited_{0};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_WATCHERS_H_
