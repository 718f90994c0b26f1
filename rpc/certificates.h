#ifndef MUSTER_RPC_CERTIFICATES_H_
#define MUSTER_RPC_CERTIFICATES_H_

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "rpc/tls_files.h"

namespace muster::rpc {

// TLS with certificates that are read again, within `look` (whole seconds, at least one), when
// their files change: connections that are made from then on use the new ones, and open connections
// continue. A certificate and its key must be replaced at once, such as by renaming a folder or a
// link; if files cannot be read, the old ones stay in use. `files` are relative to the current
// folder.
//
// Errors, each naming its file and the way out: NOT_FOUND and others of the files; INVALID_ARGUMENT
// the content is not PEM, the key belongs to another certificate, or the certificate has expired.

// `files.ca`: clients must show a certificate that descends from it; with `optional`, they may show
// none. Empty: clients are not asked for a certificate.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ServerTls(const TlsFiles& files,
                                                                   bool optional,
                                                                   absl::Duration look);
// `files.ca` is the CA from which the server's certificate must descend; `files.cert` may be empty.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelTls(const TlsFiles& files,
                                                                     absl::Duration look);

// Returns OK if both would take these files. Blocks on the disk.
absl::Status CheckTlsFiles(const TlsFiles& files);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_CERTIFICATES_H_
