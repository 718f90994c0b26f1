#include "worker/checkpoint/sealing.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/json.h"
#include "base/owned_fd.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/manifest.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr char kFormat[] = "muster-sealing";
constexpr int64_t kMaxBytes = 1 << 20;

std::string PathIn(const std::string& dir) { return JoinPath(dir, kSealingName); }

absl::Status GiveName(const std::string& dir) {
  const std::string from = PathIn(dir), to = JoinPath(dir, kSealName);
  // Another process may have done it already.
  if (rename(from.c_str(), to.c_str()) != 0 && !(errno == ENOENT && PathExists(to))) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot rename ", from, " to ", to));
  }
  return SyncDirectory(dir);
}

}  // namespace

bool HasAskedForSeal(const std::string& dir) {
  return PathExists(PathIn(dir)) && !PathExists(JoinPath(dir, kSealName));
}

absl::Status BeginSealing(const std::string& dir, const Sealing& asked, size_t room) {
  std::string text = Json({{"format", kFormat},
                           {"version", 1},
                           {"job", absl::CHexEscape(asked.job)},
                           {"registry", absl::CHexEscape(asked.registry)},
                           {"id", asked.id}})
                         .dump(1);
  if (text.size() < room) text.append(room - text.size(), ' ');
  return WriteFileAtomically(PathIn(dir), text + "\n");
}

absl::StatusOr<Sealing> ReadSealing(const std::string& dir) {
  Sealing sealing;
  const std::string path = PathIn(dir);
  if (!PathExists(path)) return sealing;
  const absl::StatusOr<std::string> text = ReadRegularFile(path, kMaxBytes);
  if (absl::IsNotFound(text.status())) return sealing;
  MUSTER_RETURN_IF_ERROR(text.status());
  sealing.state = Sealing::State::kAsked;
  const absl::StatusOr<Json> json = ParseJson(*text, path);
  if (!json.ok() || !json->is_object()) return sealing;
  try {
    if (json->at("format") == kSealFormat) sealing.state = Sealing::State::kSealed;
    const auto unescape = [](const std::string& text, std::string* name) {
      if (!absl::CUnescape(text, name)) name->clear();
    };
    unescape(json->at("job").get<std::string>(), &sealing.job);
    // The first writers of this version did not write this field.
    unescape(json->value("registry", ""), &sealing.registry);
    json->at("id").get_to(sealing.id);
  } catch (const Json::exception&) {
    // Then neither job nor registry is known.
    sealing = Sealing();
    sealing.state = Sealing::State::kAsked;
  }
  return sealing;
}

absl::Status FinishSealing(const std::string& dir, absl::string_view record) {
  const std::string path = PathIn(dir);
  {
    const OwnedFd file(open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
    struct stat info;
    if (!file.open() || fstat(file.get(), &info) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
    }
    if (static_cast<size_t>(info.st_size) < record.size()) {
      return absl::NotFoundError(absl::StrCat(path, " has no room for the record"));
    }
    // Filled up to the length of the file: blanks may follow JSON.
    std::string text(record);
    text.append(static_cast<size_t>(info.st_size) - text.size(), ' ');
    for (size_t done = 0; done < text.size();) {
      const ssize_t wrote =
          pwrite(file.get(), text.data() + done, text.size() - done, static_cast<off_t>(done));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
      done += static_cast<size_t>(wrote);
    }
    if (fsync(file.get()) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot sync ", path));
    }
  }
  return GiveName(dir);
}

absl::Status NameSealing(const std::string& dir) {
  MUSTER_ASSIGN_OR_RETURN(const Sealing sealing, ReadSealing(dir));
  if (sealing.state != Sealing::State::kSealed) return absl::OkStatus();
  const std::string path = PathIn(dir);
  {
    // Sync, because its writer may have ended before it did.
    const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    if (!file.open() || fsync(file.get()) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot sync ", path));
    }
  }
  return GiveName(dir);
}

absl::Status ForgetSealing(const std::string& dir) {
  const std::string path = PathIn(dir);
  if (unlink(path.c_str()) == 0 || errno == ENOENT || errno == ENOTDIR) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove ", path));
}

}  // namespace muster
