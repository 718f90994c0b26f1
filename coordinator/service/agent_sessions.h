#ifndef MUSTER_COORDINATOR_SERVICE_AGENT_SESSIONS_H_
#define MUSTER_COORDINATOR_SERVICE_AGENT_SESSIONS_H_

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/service/agent_stream.h"
#include "coordinator/service/attached_agent.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// The table of agents with a session: by node, by stream, by when a session without a stream
// expires, and which of them are to be written to or read from at the end of the turn. CoreRunner
// decides what the end of a session means for its calls. Not thread-safe, except for size();
// CoreRunner uses it in its turn.
class AgentSessions {
 public:
  // Beyond `unsent_bytes` of answers no frame of an agent is read. A session survives for
  // `resume_window` without a stream.
  AgentSessions(size_t unsent_bytes, absl::Duration resume_window)
      : unsent_bytes_(unsent_bytes), resume_window_(resume_window) {}

  // Return null if there is none.
  std::shared_ptr<AttachedAgent> OfNode(absl::string_view node) const;
  std::shared_ptr<AttachedAgent> OfStream(const std::shared_ptr<AgentStream>& stream) const;
  // May be called by any thread.
  size_t size() const { return size_.load(std::memory_order_relaxed); }

  // The session that the node of `hello` has so far, without its stream. If `hello` does not resume
  // it, it has to be ended, and Begin makes another one.
  struct Former {
    std::shared_ptr<AttachedAgent> session;  // null: there is none
    std::shared_ptr<AgentStream> stream;     // which another one takes over from; null: it had none
    bool resumes = false;
  };
  Former Resume(const v1::Hello& hello);
  std::shared_ptr<AttachedAgent> Begin(const v1::Hello& hello,
                                       std::shared_ptr<const Identity> identity = nullptr);
  // Makes `session` the receiver of the frames of `stream` from now on.
  void Attach(const std::shared_ptr<AgentStream>& stream,
              const std::shared_ptr<AttachedAgent>& session);
  // Notes that the stream has closed: its session expires unless a stream resumes it.
  void Detach(const std::shared_ptr<AgentStream>& stream, absl::Time now);
  // Forgets a stream that is closed from here, for good.
  void Forget(const std::shared_ptr<AgentStream>& stream) { by_stream_.erase(stream.get()); }
  // Removes a session that has ended.
  void Remove(const std::shared_ptr<AttachedAgent>& session);
  // Removes all sessions. Returns the streams that were open, to be closed.
  std::vector<std::shared_ptr<AgentStream>> RemoveAll();

  absl::Time NextExpiry() const {
    return expiring_.empty() ? absl::InfiniteFuture() : expiring_.begin()->first;
  }
  // Returns the next session whose time is up by `now`; null: there is none.
  std::shared_ptr<AttachedAgent> TakeExpired(absl::Time now);

  // Notes that the session is to be written to.
  void MarkDirty(const std::shared_ptr<AttachedAgent>& session);
  std::vector<std::shared_ptr<AttachedAgent>> TakeDirty();
  // Notes that a frame of the stream has been applied: the next one is read when ReadNext is
  // called.
  void ReadLater(const std::shared_ptr<AgentStream>& stream);
  void ReadNext();

 private:
  const size_t unsent_bytes_;
  const absl::Duration resume_window_;
  absl::flat_hash_map<std::string, std::shared_ptr<AttachedAgent>> by_node_;
  absl::flat_hash_map<AgentStream*, std::shared_ptr<AttachedAgent>> by_stream_;
  std::multimap<absl::Time, std::weak_ptr<AttachedAgent>> expiring_;
  std::vector<std::shared_ptr<AttachedAgent>> dirty_;
  // The session is null if the stream has none (any longer).
  std::vector<std::pair<std::shared_ptr<AttachedAgent>, std::shared_ptr<AgentStream>>> read_next_;
  std::atomic<size_t> size_{0};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_AGENT_SESSIONS_H_
