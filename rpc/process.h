#ifndef MUSTER_RPC_PROCESS_H_
#define MUSTER_RPC_PROCESS_H_

namespace muster::rpc {

// Applies the process-wide settings that all users of gRPC need. Thread-safe, repeatable.
void PrepareProcess();

}  // namespace muster::rpc

#endif  // MUSTER_RPC_PROCESS_H_
