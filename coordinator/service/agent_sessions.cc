#include "coordinator/service/agent_sessions.h"

namespace muster::coordinator {

std::shared_ptr<AttachedAgent> AgentSessions::OfNode(absl::string_view node) const {
  const auto it = by_node_.find(node);
  return it == by_node_.end() ? nullptr : it->second;
}

std::shared_ptr<AttachedAgent> AgentSessions::OfStream(
    const std::shared_ptr<AgentStream>& stream) const {
  const auto it = by_stream_.find(stream.get());
  return it == by_stream_.end() ? nullptr : it->second;
}

AgentSessions::Former AgentSessions::Resume(const v1::Hello& hello) {
  Former former;
  former.session = OfNode(hello.node());
  if (former.session == nullptr) return former;
  {
    MutexLock lock(&former.session->mu);
    former.stream = std::move(former.session->stream);
    former.session->stream = nullptr;
    former.resumes = former.session->agent.Resume(hello);
  }
  if (former.stream != nullptr) Forget(former.stream);
  return former;
}

std::shared_ptr<AttachedAgent> AgentSessions::Begin(const v1::Hello& hello,
                                                    std::shared_ptr<const Identity> identity) {
  auto session = std::make_shared<AttachedAgent>(hello, std::move(identity), unsent_bytes_);
  by_node_[hello.node()] = session;
  size_.store(by_node_.size(), std::memory_order_relaxed);
  return session;
}

void AgentSessions::Attach(const std::shared_ptr<AgentStream>& stream,
                           const std::shared_ptr<AttachedAgent>& session) {
  by_stream_[stream.get()] = session;
  session->expires = absl::InfiniteFuture();
}

void AgentSessions::Detach(const std::shared_ptr<AgentStream>& stream, absl::Time now) {
  const std::shared_ptr<AttachedAgent> session = OfStream(stream);
  if (session == nullptr) return;
  Forget(stream);
  {
    MutexLock lock(&session->mu);
    if (session->stream == stream) session->stream = nullptr;
  }
  if (session->ended) return;
  session->expires = now + resume_window_;
  expiring_.emplace(session->expires, session);
}

void AgentSessions::Remove(const std::shared_ptr<AttachedAgent>& session) {
  const auto it = by_node_.find(session->node);
  if (it == by_node_.end() || it->second != session) return;
  by_node_.erase(it);
  size_.store(by_node_.size(), std::memory_order_relaxed);
}

std::vector<std::shared_ptr<AgentStream>> AgentSessions::RemoveAll() {
  std::vector<std::shared_ptr<AgentStream>> open;
  for (const auto& [node, session] : by_node_) {
    MutexLock lock(&session->mu);
    if (session->stream == nullptr) continue;
    open.push_back(std::move(session->stream));
    session->stream = nullptr;
  }
  by_stream_.clear();
  by_node_.clear();
  dirty_.clear();
  size_.store(0, std::memory_order_relaxed);
  return open;
}

std::shared_ptr<AttachedAgent> AgentSessions::TakeExpired(absl::Time now) {
  while (NextExpiry() <= now && !expiring_.empty()) {
    std::shared_ptr<AttachedAgent> session = expiring_.begin()->second.lock();
    expiring_.erase(expiring_.begin());
    if (session != nullptr && !session->ended && session->expires <= now) return session;
  }
  return nullptr;
}

void AgentSessions::MarkDirty(const std::shared_ptr<AttachedAgent>& session) {
  if (session->dirty) return;
  session->dirty = true;
  dirty_.push_back(session);
}

std::vector<std::shared_ptr<AttachedAgent>> AgentSessions::TakeDirty() {
  for (const auto& session : dirty_) session->dirty = false;
  return std::exchange(dirty_, {});
}

void AgentSessions::ReadLater(const std::shared_ptr<AgentStream>& stream) {
  read_next_.emplace_back(OfStream(stream), stream);
}

void AgentSessions::ReadNext() {
  for (auto& [session, stream] : read_next_) {
    if (session != nullptr) {
      session->ReadNext(stream);
    } else {
      stream->ReadNext(/*answer_follows=*/false);
    }
  }
  read_next_.clear();
}

}  // namespace muster::coordinator
