#ifndef MUSTER_BASE_PEM_H_
#define MUSTER_BASE_PEM_H_

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>

#include <limits>
#include <memory>

#include "absl/strings/string_view.h"
#include "base/log.h"

namespace muster {

// Returns the first object in a PEM text that `read` (PEM_read_bio_X509 and the like) finds, to be
// freed by `free`. Null: there is none, or it needs a password, which OpenSSL would ask for at the
// terminal.
template <typename T>
std::shared_ptr<T> ReadFromPem(absl::string_view pem,
                               T* (*read)(BIO*, T**, pem_password_cb*, void*), void (*free)(T*)) {
  if (pem.empty() || pem.size() > std::numeric_limits<int>::max()) return nullptr;
  BIO* const bio = BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()));
  MUSTER_CHECK(bio != nullptr);
  const auto no_password = [](char*, int, int, void*) { return -1; };
  std::shared_ptr<T> object(read(bio, nullptr, no_password, nullptr), free);
  BIO_free(bio);
  // The errors of failed reads stay in the thread's queue, where gRPC's TLS would find them.
  ERR_clear_error();
  return object;
}

}  // namespace muster

#endif  // MUSTER_BASE_PEM_H_
