#include "rpc/callback_threads.h"

namespace muster::rpc {

void KeepCallbackThreads(const std::shared_ptr<grpc::Channel>& channel) {
  [[maybe_unused]] static const auto* const kept = new std::shared_ptr<grpc::Channel>(channel);
}

}  // namespace muster::rpc
