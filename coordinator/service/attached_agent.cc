#include "coordinator/service/attached_agent.h"

#include <utility>

#include "base/file.h"
#include "rpc/frame_bytes.h"

namespace muster::coordinator {
AttachedAgent::AttachedAgent(const v1::Hello& hello, std::shared_ptr<const Identity> opened_by,
                             size_t unsent_bytes)
    : node(hello.node()),
      identity(std::move(opened_by)),
      pause_bytes(unsent_bytes),
      agent(hello.node(), hello.agent_incarnation(), RandomHex()) {}

void AttachedAgent::Writable() {
  std::shared_ptr<AgentStream> resumed;
  {
    MutexLock lock(&mu);
    if (stream == nullptr) return;
    if (agent.outbox().HasWork()) {
      stream->TryWrite([this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return rpc::ToByteBuffer(agent.outbox().Next());
      });
    }
    if (paused != nullptr && agent.outbox().unsent_bytes() <= pause_bytes / 2)
      resumed = std::move(paused);
  }
  if (resumed != nullptr) resumed->ReadNext(/*answer_follows=*/false);
}

void AttachedAgent::ReadNext(const std::shared_ptr<AgentStream>& from) {
  {
    MutexLock lock(&mu);
    if (from == stream && agent.outbox().unsent_bytes() > pause_bytes) {
      paused = from;
      return;
    }
  }
  from->ReadNext(/*answer_follows=*/!calls.empty());
}

}  // namespace muster::coordinator
