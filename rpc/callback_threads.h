#ifndef MUSTER_RPC_CALLBACK_THREADS_H_
#define MUSTER_RPC_CALLBACK_THREADS_H_

#include <grpcpp/channel.h>

#include <memory>

namespace muster::rpc {

// For a channel on which gRPC's callback API is used; call it before the first such call. The first
// channel of the process is never released from then on, nor its idle connection closed before the
// process ends.
//
// gRPC 1.51 ends its callback threads with the last channel that has used them. When that channel's
// last reference is dropped on one of those threads, as a ClientContext that a callback keeps alive
// does, the thread waits for itself and the process aborts ("ref_counted.h: assertion failed: prior
// > 0"). Thread-safe.
void KeepCallbackThreads(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_CALLBACK_THREADS_H_
