#ifndef MUSTER_RPC_CALLBACK_THREADS_H_
#define MUSTER_RPC_CALLBACK_THREADS_H_

#include <grpcpp/channel.h>

#include <memory>

namespace muster::rpc {

// Keeps gRPC's callback threads until the process ends. Call it for a channel on which gRPC's
// callback API is used, before the first such call. From then on, the first channel of the process
// is never released, nor its idle connection closed.
// gRPC 1.51 ends its callback threads with the last channel that has used them. If that channel's
// last reference is dropped on one of those threads, for example by a ClientContext that a callback
// keeps alive, the thread waits for itself and the process aborts ("ref_counted.h: assertion
// failed: prior > 0"). Thread-safe.
void KeepCallbackThreads(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_CALLBACK_THREADS_H_
