#ifndef MUSTER_COORDINATOR_SERVICE_CALLERS_H_
#define MUSTER_COORDINATOR_SERVICE_CALLERS_H_

#include <grpcpp/support/string_ref.h>
#include <sys/types.h>

#include <ctime>
#include <map>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "coordinator/access.h"

namespace muster::coordinator {

// The users of a coordinator and their roles: a file with a line for each,
//
//   # NAME   ROLE     CREDENTIAL
//   ann      submit   sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
//   nodes    node     sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752
//   bob      view     cert
//
// where the credential is the SHA-256 of the user's token, or "cert": the name in a certificate
// that the coordinator's CA has signed. Roles: view, submit, node, admin (coordinator/access.h).
class Users {
 public:
  // Errors: INVALID_ARGUMENT that names `what` and the line.
  static absl::StatusOr<Users> Parse(absl::string_view text, absl::string_view what);

  // Returns null if the token is not known.
  std::shared_ptr<const Identity> OfToken(absl::string_view token) const;
  std::shared_ptr<const Identity> OfCertificate(absl::string_view name) const;
  size_t size() const { return by_name_.size(); }

 private:
  absl::flat_hash_map<std::string, std::shared_ptr<const Identity>> by_digest_;  // binary
  absl::flat_hash_map<std::string, std::shared_ptr<const Identity>> by_name_;
  absl::flat_hash_map<std::string, std::shared_ptr<const Identity>> by_certificate_;
};

// Makes the tokens of attempts, and recognises them. Such a token names its rendezvous job and
// proves with a MAC that this coordinator made it, so none is kept. Immutable.
class AttemptTokens {
 public:
  // `key`: 32 random bytes that only coordinators of this journal have.
  explicit AttemptTokens(std::string key) : key_(std::move(key)) {}
  // Reads the key in `path`, which is made if it is missing, and readable by this user only; empty:
  // a key that ends with the process. Errors: those of the file.
  static absl::StatusOr<AttemptTokens> Open(const std::string& path);

  std::string Of(absl::string_view group) const;
  // Returns the rendezvous job; empty: `token` is none of these.
  std::string GroupOf(absl::string_view token) const;
  static bool LooksLikeOne(absl::string_view token);

 private:
  std::string key_;
};

// Establishes who calls. Thread-safe.
class Callers {
 public:
  struct Options {
    std::string token = {};                   // its holders are admins; empty: there is none
    std::string users_file = {};              // empty: there are no users
    const AttemptTokens* attempts = nullptr;  // outlives it
    const Clock* clock = &Clock::Real();
  };
  // Errors: as ReadSecretFile and Users::Parse.
  static absl::StatusOr<std::unique_ptr<Callers>> Create(Options options);

  // `certificate`: the name in the verified certificate of the connection; empty: none. Without a
  // shared token and users, every caller that the transport lets in, by its certificate or as the
  // owner of the socket, is an admin. Reads the users file again when it has changed, at most once
  // in kLook: blocks on its disk. Errors: UNAUTHENTICATED / BAD_TOKEN; PERMISSION_DENIED / SCOPE
  // for a certificate that is not listed.
  absl::StatusOr<std::shared_ptr<const Identity>> Identify(
      const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
      const std::string& certificate);

  static constexpr absl::Duration kLook = absl::Seconds(2);

 private:
  explicit Callers(Options options) : options_(std::move(options)) {}
  absl::Status ReadUsers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LookForChanges() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The file's state as stat reports it, by which a change is seen.
  struct Version {
    ino_t inode = 0;
    off_t size = -1;
    timespec modified = {};
    bool operator==(const Version& other) const;
  };
  Version VersionOfFile() const;

  const Options options_;
  Mutex mu_;
  Users users_ ABSL_GUARDED_BY(mu_);
  Version version_ ABSL_GUARDED_BY(mu_);
  absl::Time looked_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  const std::shared_ptr<const Identity> shared_ =
      std::make_shared<Identity>(Identity{.role = Role::kAdmin});
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_CALLERS_H_
