#ifndef MUSTER_BASE_SIGNATURE_H_
#define MUSTER_BASE_SIGNATURE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

struct evp_pkey_st;  // EVP_PKEY of OpenSSL

namespace muster {

// SHA-256, HMAC and Ed25519 signatures. Pure; everything here is immutable and thread-safe.

// SHA-256 of `bytes`: 32 bytes.
std::string Sha256(absl::string_view bytes);

// HMAC-SHA-256 (RFC 2104) of `message`: 32 bytes that only holders of `key` can make.
std::string HmacSha256(absl::string_view key, absl::string_view message);

// A private key, which signs.
class SigningKey {
 public:
  // From PEM, as `openssl genpkey -algorithm ed25519` writes it. `what` names the file in errors.
  // Errors: INVALID_ARGUMENT for anything else, also a key that is encrypted.
  static absl::StatusOr<SigningKey> Parse(absl::string_view pem, absl::string_view what);

  // 64 bytes, the same for the same message.
  std::string Sign(absl::string_view message) const;

 private:
  explicit SigningKey(std::shared_ptr<evp_pkey_st> key) : key_(std::move(key)) {}
  std::shared_ptr<evp_pkey_st> key_;
};

// The public key of a SigningKey, which verifies its signatures.
class VerifyingKey {
 public:
  // From PEM, as `openssl pkey -in PRIVATE -pubout` writes it. Errors: as SigningKey::Parse.
  static absl::StatusOr<VerifyingKey> Parse(absl::string_view pem, absl::string_view what);

  // False for a signature of another key or of another message, or one that is malformed.
  bool Verifies(absl::string_view message, absl::string_view signature) const;

 private:
  explicit VerifyingKey(std::shared_ptr<evp_pkey_st> key) : key_(std::move(key)) {}
  std::shared_ptr<evp_pkey_st> key_;
};

}  // namespace muster

#endif  // MUSTER_BASE_SIGNATURE_H_
