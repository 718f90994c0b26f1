#include "coordinator/service/callers.h"

#include <sys/stat.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/log.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/status_macros.h"
#include "coordinator/errors.h"
#include "rpc/status.h"
#include "rpc/token.h"

namespace muster::coordinator {
namespace {

constexpr size_t kMaxUsersFile = 4 << 20;
constexpr size_t kMaxUserName = 128;  // as an owner of jobs has it
constexpr size_t kDigestBytes = 32;
constexpr absl::string_view kDigest = "sha256:";
constexpr absl::string_view kAttempt = "attempt.";

// Returns nullopt if these are not 64 hexadecimal digits.
std::optional<std::string> ParseDigest(absl::string_view hex) {
  if (hex.size() != 2 * kDigestBytes) return std::nullopt;
  for (const char c : hex) {
    if (!absl::ascii_isxdigit(static_cast<unsigned char>(c))) return std::nullopt;
  }
  return absl::HexStringToBytes(hex);
}

bool IsUserName(absl::string_view name) {
  if (name.empty() || name.size() > kMaxUserName) return false;
  for (const char c : name) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<Users> Users::Parse(absl::string_view text, absl::string_view what) {
  Users users;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const auto bad = [&](absl::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat(what, ": line ", number, ": ", why));
    };
    line = line.substr(0, line.find('#'));
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    if (words.size() != 3) {
      return bad("three words are needed: NAME ROLE CREDENTIAL");
    }
    if (!IsUserName(words[0])) {
      return bad(absl::StrCat("a name has at most ", kMaxUserName, " printable characters"));
    }
    const std::optional<Role> role = ParseRole(words[1]);
    if (!role.has_value()) {
      return bad(absl::StrCat("role ", Quoted(words[1]),
                              " does not exist: use view, submit, node or admin"));
    }
    const auto identity =
        std::make_shared<const Identity>(Identity{.name = std::string(words[0]), .role = *role});
    const auto known = users.by_name_.find(identity->name);
    if (known != users.by_name_.end() && known->second->role != *role) {
      return bad(absl::StrCat("user ", Quoted(words[0]), " has two roles"));
    }
    users.by_name_.insert_or_assign(identity->name, identity);
    if (words[2] == "cert") {
      users.by_certificate_.insert_or_assign(identity->name, identity);
      continue;
    }
    absl::string_view hex = words[2];
    const std::optional<std::string> digest =
        absl::ConsumePrefix(&hex, kDigest) ? ParseDigest(hex) : std::nullopt;
    if (!digest.has_value()) {
      return bad("the credential is neither sha256: with 64 hexadecimal digits nor cert");
    }
    if (!users.by_digest_.emplace(*digest, identity).second) {
      return bad("another line has the same token");
    }
  }
  return users;
}

std::shared_ptr<const Identity> Users::OfToken(absl::string_view token) const {
  // Looked up by its digest, so that how long the lookup takes says nothing about the token.
  const auto it = by_digest_.find(Sha256(token));
  return it == by_digest_.end() ? nullptr : it->second;
}

std::shared_ptr<const Identity> Users::OfCertificate(absl::string_view name) const {
  const auto it = by_certificate_.find(name);
  return it == by_certificate_.end() ? nullptr : it->second;
}

absl::StatusOr<AttemptTokens> AttemptTokens::Open(const std::string& path) {
  if (path.empty()) return AttemptTokens(*ParseDigest(rpc::NewToken()));
  const auto read = [&] { return ReadSecretFile(path, "the key of attempts", "key", 1024); };
  absl::StatusOr<std::string> hex = read();
  if (absl::IsNotFound(hex.status())) {
    MUSTER_RETURN_IF_ERROR(WriteSecretFile(path, rpc::NewToken()));
    hex = read();
  }
  // Copies and mounts change modes; the folder is closed anyway.
  if (absl::IsPermissionDenied(hex.status()) && chmod(path.c_str(), 0600) == 0) {
    MUSTER_LOG(Warning) << hex.status().message() << ": its mode is 0600 again";
    hex = read();
  }
  MUSTER_RETURN_IF_ERROR(hex.status());
  const std::optional<std::string> key = ParseDigest(absl::StripAsciiWhitespace(*hex));
  if (!key.has_value()) {
    return absl::DataLossError(
        absl::StrCat("'", path,
                     "' holds no key of 64 hexadecimal digits: remove it, and a new one is "
                     "created; running attempts lose their access and restart"));
  }
  return AttemptTokens(*key);
}

std::string AttemptTokens::Of(absl::string_view group) const {
  return absl::StrCat(kAttempt, group, ".", absl::BytesToHexString(HmacSha256(key_, group)));
}

bool AttemptTokens::LooksLikeOne(absl::string_view token) {
  return absl::StartsWith(token, kAttempt);
}

std::string AttemptTokens::GroupOf(absl::string_view token) const {
  const absl::string_view all = token;
  if (!absl::ConsumePrefix(&token, kAttempt)) return "";
  const size_t dot = token.rfind('.');
  if (dot == absl::string_view::npos) return "";
  const absl::string_view group = token.substr(0, dot);
  return !group.empty() && rpc::SameSecret(all, Of(group)) ? std::string(group) : "";
}

bool Callers::Version::operator==(const Version& other) const {
  return inode == other.inode && size == other.size && modified.tv_sec == other.modified.tv_sec &&
         modified.tv_nsec == other.modified.tv_nsec;
}

Callers::Version Callers::VersionOfFile() const {
  struct stat info;
  if (stat(options_.users_file.c_str(), &info) != 0) return {};
  return {.inode = info.st_ino, .size = info.st_size, .modified = info.st_mtim};
}

absl::StatusOr<std::unique_ptr<Callers>> Callers::Create(Options options) {
  std::unique_ptr<Callers> callers(new Callers(std::move(options)));
  MutexLock lock(&callers->mu_);
  MUSTER_RETURN_IF_ERROR(callers->ReadUsers());
  return callers;
}

absl::Status Callers::ReadUsers() {
  if (options_.users_file.empty()) return absl::OkStatus();
  const Version version = VersionOfFile();  // before it is read: a later change is seen
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadSecretFile(options_.users_file, "users_file",
                                                                 "users", kMaxUsersFile + 1));
  version_ = version;
  if (text.size() > kMaxUsersFile) {
    return absl::InvalidArgumentError(absl::StrCat("users_file: '", options_.users_file,
                                                   "' has more than ", kMaxUsersFile, " bytes"));
  }
  MUSTER_ASSIGN_OR_RETURN(
      users_, Users::Parse(text, absl::StrCat("users_file: '", options_.users_file, "'")));
  return absl::OkStatus();
}

void Callers::LookForChanges() {
  const absl::Time now = options_.clock->Now();
  if (options_.users_file.empty() || now < looked_ + kLook) return;
  looked_ = now;
  if (VersionOfFile() == version_) return;
  if (const absl::Status status = ReadUsers(); status.ok()) {
    MUSTER_LOG(Info) << "users_file: read again, it has " << users_.size() << " users";
  } else {
    MUSTER_LOG(Error) << status.message() << ": the previous users stay in effect";
  }
}

absl::StatusOr<std::shared_ptr<const Identity>> Callers::Identify(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
    const std::string& certificate) {
  const std::optional<absl::string_view> token = rpc::BearerToken(metadata);
  if (token.has_value() && options_.attempts != nullptr && AttemptTokens::LooksLikeOne(*token)) {
    // A token of an attempt that this coordinator did not make must not count as no token.
    std::string group = options_.attempts->GroupOf(*token);
    if (group.empty()) return rpc::BadToken(/*has_token=*/true);
    return std::make_shared<const Identity>(
        Identity{.role = Role::kAttempt, .group = std::move(group)});
  }
  const bool users = !options_.users_file.empty();
  if (token.has_value() && !options_.token.empty() && rpc::SameSecret(*token, options_.token)) {
    return shared_;
  }
  MutexLock lock(&mu_);
  LookForChanges();
  if (token.has_value() && users) {
    if (auto user = users_.OfToken(*token)) return user;
  }
  if (token.has_value() ? users || !options_.token.empty()
      : users           ? certificate.empty()
                        : !options_.token.empty()) {
    return rpc::BadToken(token.has_value());
  }
  if (users) {
    if (auto user = users_.OfCertificate(certificate)) return user;
    return rpc::ErrorWithReason(
        absl::StatusCode::kPermissionDenied,
        absl::StrCat("the certificate of ", Quoted(certificate),
                     " is not in the coordinator's users file: have the line \"",
                     OneLine(certificate), " ROLE cert\" added to it"),
        v1::ERROR_REASON_SCOPE);
  }
  if (certificate.empty()) return shared_;
  // The name becomes the owner of jobs, in the journal, which takes only UTF-8.
  return std::make_shared<const Identity>(
      Identity{.name = OneLine(certificate), .role = Role::kAdmin});
}

}  // namespace muster::coordinator
