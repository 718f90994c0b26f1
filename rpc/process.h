#ifndef MUSTER_RPC_PROCESS_H_
#define MUSTER_RPC_PROCESS_H_

namespace muster::rpc {

// Settings of the whole process that gRPC's users want once. Thread-safe, repeatable.
void PrepareProcess();

}  // namespace muster::rpc

#endif  // MUSTER_RPC_PROCESS_H_
