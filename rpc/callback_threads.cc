#include "rpc/callback_threads.h"

namespace muster::rpc {

void KeepCallbackThreads(const std::shared_ptr<grpc::Channel>& channel) {
  // `used`: else the compiler removes the pointer, and the leak checker reports the channel.
  [[gnu::used]] static const auto* const kept = new std::shared_ptr<grpc::Channel>(channel);
}

}  // namespace muster::rpc
