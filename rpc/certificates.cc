#include "rpc/certificates.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/pem.h"
#include "base/status_macros.h"
#include "rpc/files.h"

namespace muster::rpc {
namespace {

// The first certificate in a PEM file: that of its owner.
absl::StatusOr<std::shared_ptr<X509>> ReadCertificate(const std::string& path,
                                                      absl::string_view what) {
  MUSTER_ASSIGN_OR_RETURN(const std::string pem, ReadPem(path, what));
  std::shared_ptr<X509> certificate = ReadFromPem<X509>(pem, &PEM_read_bio_X509, &X509_free);
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": '", path, "' holds no certificate in PEM format"));
  }
  return certificate;
}

absl::Status CheckPair(const TlsFiles& files) {
  MUSTER_ASSIGN_OR_RETURN(const std::shared_ptr<X509> certificate,
                          ReadCertificate(files.cert, "tls_cert"));
  MUSTER_ASSIGN_OR_RETURN(const std::string pem, ReadPem(files.key, "tls_key"));
  const std::shared_ptr<EVP_PKEY> key =
      ReadFromPem<EVP_PKEY>(pem, &PEM_read_bio_PrivateKey, &EVP_PKEY_free);
  const bool fits = key != nullptr && X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (key == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tls_key: '", files.key, "' holds no private key in PEM format without a password"));
  }
  if (!fits) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tls_key: '", files.key, "' is not the key of the certificate in '", files.cert,
        "': give the two that belong "
        "together"));
  }
  const ASN1_TIME* const ends = X509_get0_notAfter(certificate.get());
  if (X509_cmp_current_time(ends) < 0) {
    std::tm when = {};
    ASN1_TIME_to_tm(ends, &when);
    return absl::InvalidArgumentError(
        absl::StrCat("tls_cert: the certificate in '", files.cert, "' has expired on ",
                     absl::FormatTime("%Y-%m-%d %H:%M UTC", absl::FromTM(when, absl::UTCTimeZone()),
                                      absl::UTCTimeZone()),
                     ": renew it"));
  }
  return absl::OkStatus();
}

std::shared_ptr<grpc::experimental::CertificateProviderInterface> Watch(const TlsFiles& files,
                                                                        absl::Duration look) {
  const auto seconds =
      static_cast<unsigned>(std::clamp<int64_t>(absl::ToInt64Seconds(look), 1, 24 * 3600));
  return std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(files.key, files.cert,
                                                                              files.ca, seconds);
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files) {
  if (!files.ca.empty()) MUSTER_RETURN_IF_ERROR(ReadCertificate(files.ca, "tls_ca").status());
  return files.cert.empty() ? absl::OkStatus() : CheckPair(files);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ServerTls(const TlsFiles& files,
                                                                   bool optional,
                                                                   absl::Duration look) {
  MUSTER_RETURN_IF_ERROR(CheckTlsFiles(files));
  grpc::experimental::TlsServerCredentialsOptions options(Watch(files, look));
  options.watch_identity_key_cert_pairs();
  if (!files.ca.empty()) options.watch_root_certs();
  options.set_cert_request_type(files.ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                : optional
                                    ? GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelTls(const TlsFiles& files,
                                                                     absl::Duration look) {
  MUSTER_RETURN_IF_ERROR(CheckTlsFiles(files));
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(Watch(files, look));
  options.watch_root_certs();
  if (!files.cert.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace muster::rpc
