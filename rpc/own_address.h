#ifndef MUSTER_RPC_OWN_ADDRESS_H_
#define MUSTER_RPC_OWN_ADDRESS_H_

#include <string>

#include "rpc/address.h"

namespace muster::rpc {

// Returns the address of this machine that packets from here to `peer` carry, without port and
// brackets; 127.0.0.1 for a unix socket. Empty: no route leads there now. Nothing is sent.
// Thread-safe.
std::string OwnAddressTowards(const Address& peer);

// Whether `ip` is an address of this machine.
bool IsOwnAddress(const std::string& ip);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_OWN_ADDRESS_H_
