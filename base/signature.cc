#include "base/signature.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/pem.h>

#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/pem.h"

namespace muster {
namespace {

constexpr size_t kSignatureBytes = 64;

const unsigned char* Bytes(absl::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

using Reader = EVP_PKEY* (*)(BIO*, EVP_PKEY**, pem_password_cb*, void*);

// Null if there is no Ed25519 key that `read` finds.
std::shared_ptr<EVP_PKEY> ReadKey(absl::string_view pem, Reader read) {
  std::shared_ptr<EVP_PKEY> key = ReadFromPem<EVP_PKEY>(pem, read, &EVP_PKEY_free);
  return key != nullptr && EVP_PKEY_id(key.get()) == EVP_PKEY_ED25519 ? key : nullptr;
}

std::shared_ptr<EVP_MD_CTX> NewContext() {
  std::shared_ptr<EVP_MD_CTX> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  MUSTER_CHECK(context != nullptr);
  return context;
}

}  // namespace

std::string Sha256(absl::string_view bytes) {
  std::string digest(32, '\0');
  unsigned int size = 0;
  MUSTER_CHECK(EVP_Digest(bytes.data(), bytes.size(),
                          reinterpret_cast<unsigned char*>(digest.data()), &size, EVP_sha256(),
                          nullptr) == 1);
  return digest;
}

std::string HmacSha256(absl::string_view key, absl::string_view message) {
  std::string mac(32, '\0');
  unsigned int size = 0;
  MUSTER_CHECK(key.size() <= std::numeric_limits<int>::max() &&
               HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), Bytes(message),
                    message.size(), reinterpret_cast<unsigned char*>(mac.data()),
                    &size) != nullptr);
  return mac;
}

absl::StatusOr<SigningKey> SigningKey::Parse(absl::string_view pem, absl::string_view what) {
  std::shared_ptr<EVP_PKEY> key = ReadKey(pem, &PEM_read_bio_PrivateKey);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(what,
                     " holds no private Ed25519 key in PEM without a password: make one with "
                     "openssl genpkey -algorithm ed25519"));
  }
  return SigningKey(std::move(key));
}

std::string SigningKey::Sign(absl::string_view message) const {
  const std::shared_ptr<EVP_MD_CTX> context = NewContext();
  std::string signature(kSignatureBytes, '\0');
  size_t size = signature.size();
  MUSTER_CHECK(EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key_.get()) == 1);
  MUSTER_CHECK(EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(signature.data()),
                              &size, Bytes(message), message.size()) == 1 &&
               size == kSignatureBytes);
  return signature;
}

absl::StatusOr<VerifyingKey> VerifyingKey::Parse(absl::string_view pem, absl::string_view what) {
  std::shared_ptr<EVP_PKEY> key = ReadKey(pem, &PEM_read_bio_PUBKEY);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        ReadKey(pem, &PEM_read_bio_PrivateKey) != nullptr
            ? absl::StrCat(what,
                           " holds the private key, which only the coordinator needs: write "
                           "the public one with openssl pkey -in KEY -pubout")
            : absl::StrCat(what,
                           " holds no public Ed25519 key in PEM: write it with openssl pkey "
                           "-in KEY -pubout"));
  }
  return VerifyingKey(std::move(key));
}

bool VerifyingKey::Verifies(absl::string_view message, absl::string_view signature) const {
  if (signature.size() != kSignatureBytes) return false;
  const std::shared_ptr<EVP_MD_CTX> context = NewContext();
  MUSTER_CHECK(EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key_.get()) == 1);
  const bool good = EVP_DigestVerify(context.get(), Bytes(signature), signature.size(),
                                     Bytes(message), message.size()) == 1;
  ERR_clear_error();
  return good;
}

}  // namespace muster
