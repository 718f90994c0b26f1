#ifndef MUSTER_RPC_TLS_FILES_H_
#define MUSTER_RPC_TLS_FILES_H_

#include <string>

namespace muster::rpc {

// Paths of PEM files, of a client or a server; empty: none. `cert` and `key` go together.
struct TlsFiles {
  std::string ca = {};    // the certificates from which the peer's must descend
  std::string cert = {};  // this side's certificate
  std::string key = {};   // its private key
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_TLS_FILES_H_
