#include "client/cli/running_launch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "client/cli/command.h"
#include "rpc/token.h"

namespace muster::client {
namespace {

using nlohmann::json;

constexpr char kNote[] = ".json";
constexpr char kSocket[] = ".sock";
constexpr char kToken[] = ".token";
// Other files are not touched, because the named folder may be one of the user's own.
constexpr char kPrefix[] = "muster-";
constexpr size_t kHexSize = 8;  // as in RandomHex
constexpr size_t kNameSize = sizeof(kPrefix) - 1 + kHexSize;
constexpr int kTries = 100;
constexpr int64_t kLongestNote = 64 << 10;

// A folder that may be used.
struct Place {
  std::string folder;
  std::string parent = {};  // must belong to this user, too; empty: any
};

// Removes a slash at the end, which would follow a link.
std::string Plain(const std::filesystem::path& path) {
  std::string folder = path.lexically_normal().string();
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder;
}

// Returns the folders, the best one first.
std::vector<Place> Places(const std::map<std::string, std::string>& variables,
                          const LaunchSystem& system) {
  if (const std::string own = Variable(variables, "MUSTER_RUNTIME_DIR"); !own.empty()) {
    // The address is given to processes with other working directories, so it must be absolute.
    std::error_code error;
    return {{.folder = Plain(std::filesystem::absolute(own, error))}};
  }
  const std::string name = absl::StrCat("muster-", geteuid());
  std::vector<Place> places = {{.folder = JoinPath(system.tmp, name)}};
  // After /tmp, because it is removed when the user logs out, and jobs continue. Not the one that
  // `sudo -E` took over from another user.
  if (const std::string run = Variable(variables, "XDG_RUNTIME_DIR"); absl::StartsWith(run, "/")) {
    places.push_back({.folder = JoinPath(Plain(run), "muster"), .parent = Plain(run)});
  }
  // Last, because not all shells of a user have the same one.
  if (const std::string temp = Variable(variables, "TMPDIR");
      absl::StartsWith(temp, "/") && Plain(temp) != system.tmp) {
    places.push_back({.folder = JoinPath(Plain(temp), name)});
  }
  return places;
}

// Returns OK if `folder` belongs to this user and no other user can enter it (or, for a `parent`,
// change it).
absl::Status CheckPrivate(const std::string& folder, mode_t closed = 077) {
  struct stat info {};
  // Not through a symbolic link, which another user may have created.
  if (lstat(folder.c_str(), &info) != 0) return absl::ErrnoToStatus(errno, folder);
  if (!S_ISDIR(info.st_mode)) {
    return absl::PermissionDeniedError(absl::StrCat(folder, " is not a folder"));
  }
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(folder, " belongs to user ", info.st_uid));
  }
  if ((info.st_mode & closed) != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "other users can enter %s (mode %03o, not 700)", folder, info.st_mode & 0777));
  }
  return absl::OkStatus();
}

absl::Status MakePrivate(const Place& place) {
  // Includes the longest name and the NUL at the end.
  if (place.folder.size() + 1 + kNameSize + sizeof(kSocket) > sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat(place.folder, ": the path is too long for a socket"));
  }
  if (!place.parent.empty()) MUSTER_RETURN_IF_ERROR(CheckPrivate(place.parent, 022));
  if (mkdir(place.folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::ErrnoToStatus(errno, place.folder);
  }
  return CheckPrivate(place.folder);
}

// Returns false and sets errno if the lock is not free now.
bool LockNote(int fd, const LaunchSystem& system) {
  const auto lock = system.lock != nullptr ? system.lock : ::flock;
  int result;
  do {
    result = lock(fd, LOCK_EX | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

void RemoveFiles(const std::string& stem) {
  for (const char* ending : {kSocket, kToken, kNote}) unlink(absl::StrCat(stem, ending).c_str());
}

// Whether the file `stem`.json may be the note of a launch.
bool IsOurs(absl::string_view stem) {
  return stem.size() == kNameSize && absl::ConsumePrefix(&stem, kPrefix) &&
         std::all_of(stem.begin(), stem.end(),
                     [](unsigned char c) { return absl::ascii_isxdigit(c); });
}

std::string HostName(const LaunchSystem& system) {
  if (!system.host.empty()) return system.host;
  const std::string name = muster::HostName();
  // A note without a host is never taken for one of this machine, so write some name.
  return name.empty() ? "localhost" : name;
}

std::string Text(const json& note, const char* name) {
  const auto it = note.find(name);
  return it != note.end() && it->is_string() ? it->get<std::string>() : "";
}

// Returns the launches that live, after removing the files of the others.
std::vector<RunningLaunch> Read(const std::string& folder, const LaunchSystem& system) {
  std::vector<RunningLaunch> launches;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
  if (!names.ok()) return launches;
  for (const std::string& name : *names) {
    absl::string_view stem = name;
    if (!absl::ConsumeSuffix(&stem, kNote) || !IsOurs(stem)) continue;
    const std::string path = JoinPath(folder, name);
    // Open for writing, because NFS does not lock a file exclusively that is open for reading only.
    const int fd = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) continue;
    const bool dead = LockNote(fd, system);
    const bool alive = !dead && errno == EWOULDBLOCK;
    const auto unlock = absl::MakeCleanup([fd] { close(fd); });
    // Without file locks this is not known.
    if (!dead && !alive) continue;
    const absl::StatusOr<std::string> text = ReadFile(path, kLongestNote);
    if (!text.ok() || text->empty()) continue;
    const absl::StatusOr<json> note = ParseJson(*text, path);
    if (!note.ok() || !note->is_object()) continue;
    // Several machines may share the folder: the locks of some servers hold on one machine only,
    // and a process of another machine cannot be reached through its socket.
    if (Text(*note, "host") != HostName(system)) continue;
    if (dead) {
      RemoveFiles(JoinPath(folder, stem));
      continue;
    }
    RunningLaunch launch;
    launch.job = Text(*note, "job");
    launch.address = Text(*note, "address");
    launch.token_file = Text(*note, "token_file");
    launch.tls.ca = Text(*note, "tls_ca");
    launch.tls.cert = Text(*note, "tls_cert");
    launch.tls.key = Text(*note, "tls_key");
    if (note->contains("pid") && (*note)["pid"].is_number_integer()) launch.pid = (*note)["pid"];
    absl::ParseTime(absl::RFC3339_full, Text(*note, "started"), &launch.started, nullptr);
    // Empty until the coordinator serves.
    if (!launch.address.empty()) launches.push_back(std::move(launch));
  }
  return launches;
}

// Writes it in one piece: a reader sees nothing or all of it.
absl::Status WriteNote(int fd, const json& note, const std::string& path) {
  const std::string text = note.dump(-1, ' ', false, json::error_handler_t::replace);
  const ssize_t written = pwrite(fd, text.data(), text.size(), 0);
  if (written == static_cast<ssize_t>(text.size())) return absl::OkStatus();
  return absl::ErrnoToStatus(written < 0 ? errno : ENOSPC, path);
}

}  // namespace

absl::StatusOr<std::unique_ptr<LaunchRecord>> LaunchRecord::CreateIn(const std::string& folder,
                                                                     const LaunchSystem& system) {
  Read(folder, system);
  for (int i = 0; i < kTries; ++i) {
    const std::string stem =
        JoinPath(folder, absl::StrCat(kPrefix, RandomHex().substr(0, kHexSize)));
    const std::string path = absl::StrCat(stem, kNote);
    const int note = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (note < 0) {
      if (errno == EEXIST) continue;
      return absl::ErrnoToStatus(errno, absl::StrCat("no room for a launch in ", folder));
    }
    const std::string host = HostName(system);
    // Before the lock, because a launch of another machine must not take the note for a dead one of
    // its own.
    absl::Status status = WriteNote(note, {{"host", host}}, path);
    if (status.ok()) {
      struct stat info {};
      if (LockNote(note, system)) {
        // A process that looks for dead launches may have locked the note first, and taken it for
        // one.
        if (fstat(note, &info) == 0 && info.st_nlink > 0) {
          // systemd-tmpfiles, which removes old files from /tmp, skips a folder with a lock.
          const int lock = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
          if (lock >= 0) flock(lock, LOCK_SH | LOCK_NB);
          return std::unique_ptr<LaunchRecord>(new LaunchRecord(stem, host, note, lock));
        }
      } else if (errno != EWOULDBLOCK) {
        status = absl::FailedPreconditionError(
            absl::StrCat("files cannot be locked in ", folder, " (", strerror(errno), ")"));
      }
    }
    unlink(path.c_str());
    close(note);
    MUSTER_RETURN_IF_ERROR(status);
  }
  return absl::UnavailableError(
      absl::StrCat("other processes hold the lock of each new file in ", folder));
}

absl::StatusOr<std::unique_ptr<LaunchRecord>> LaunchRecord::Create(
    const std::map<std::string, std::string>& variables, const LaunchSystem& system) {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::vector<std::string> reasons;
  for (const Place& place : Places(variables, system)) {
    absl::Status status = MakePrivate(place);
    if (status.ok()) {
      absl::StatusOr<std::unique_ptr<LaunchRecord>> record = CreateIn(place.folder, system);
      if (record.ok()) return record;
      status = record.status();
    }
    if (reasons.empty()) code = status.code();
    reasons.emplace_back(status.message());
  }
  return absl::Status(code, absl::StrCat("no folder for the socket of the coordinator: ",
                                         absl::StrJoin(reasons, "; "),
                                         "; set MUSTER_RUNTIME_DIR to a local folder that is yours "
                                         "alone"));
}

LaunchRecord::~LaunchRecord() {
  RemoveFiles(stem_);
  close(note_);
  if (folder_ >= 0) close(folder_);
}

std::string LaunchRecord::socket_path() const { return absl::StrCat(stem_, kSocket); }

absl::StatusOr<std::string> LaunchRecord::MakeToken() {
  const std::string path = absl::StrCat(stem_, kToken);
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  const std::string token = absl::StrCat(rpc::NewToken(), "\n");
  const ssize_t written = write(fd, token.data(), token.size());
  const int error = errno;
  close(fd);
  if (written != static_cast<ssize_t>(token.size())) {
    return absl::ErrnoToStatus(written < 0 ? error : ENOSPC, path);
  }
  return path;
}

absl::Status LaunchRecord::Publish(const RunningLaunch& launch) {
  const json note = {{"host", host_},
                     {"job", launch.job},
                     {"pid", launch.pid},
                     {"started", absl::FormatTime(launch.started, absl::UTCTimeZone())},
                     {"address", launch.address},
                     {"token_file", launch.token_file},
                     {"tls_ca", launch.tls.ca},
                     {"tls_cert", launch.tls.cert},
                     {"tls_key", launch.tls.key}};
  return WriteNote(note_, note, absl::StrCat(stem_, kNote));
}

std::vector<RunningLaunch> ListRunningLaunches(const std::map<std::string, std::string>& variables,
                                               std::vector<std::string>* looked_in,
                                               const LaunchSystem& system) {
  std::vector<RunningLaunch> launches;
  for (const Place& place : Places(variables, system)) {
    if (looked_in != nullptr) looked_in->push_back(place.folder);
    if (!CheckPrivate(place.folder).ok()) continue;
    for (RunningLaunch& launch : Read(place.folder, system)) launches.push_back(std::move(launch));
  }
  std::stable_sort(
      launches.begin(), launches.end(),
      [](const RunningLaunch& a, const RunningLaunch& b) { return a.started < b.started; });
  return launches;
}

}  // namespace muster::client
