#ifndef MUSTER_RPC_DEAD_SOCKET_H_
#define MUSTER_RPC_DEAD_SOCKET_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "rpc/address.h"

namespace muster::rpc {

// Removes a socket that a dead process has left at the path of `address`, a unix socket, before a
// server binds it. A socket that refuses connections may belong to a server that has bound it and
// does not listen yet, so `wait` is called and then the connection is tried again. If another
// server puts its socket there meanwhile, that one is left alone, and the path cannot be bound
// then. (A server that is stopped for longer between the two steps loses its socket: the kernel
// does not distinguish it from a dead one.) Errors: ALREADY_EXISTS if a process listens there, or
// the path is a file that is not a socket; those of the folder, or of a socket that cannot be
// connected to, by their errno. Thread-safe.
absl::Status RemoveDeadSocket(const Address& address, absl::FunctionRef<void()> wait);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_DEAD_SOCKET_H_
