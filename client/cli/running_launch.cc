#include "client/cli/running_launch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "rpc/token.h"

namespace muster::client {
namespace {

using nlohmann::json;

constexpr char kNote[] = ".json";
constexpr char kSocket[] = ".sock";
constexpr char kToken[] = ".token";
constexpr size_t kNameSize = 8;  // of RandomHex
constexpr int64_t kLongestNote = 64 << 10;

// A folder that may be used, and whether it is the user's own choice: no other is tried then.
struct Place {
  std::string folder;
  std::string parent = {};  // must be this user's too; empty: any
  bool last = false;        // why it cannot be had is why there is none
};

std::string Variable(const std::map<std::string, std::string>& variables, const char* name) {
  const auto it = variables.find(name);
  return it == variables.end() ? "" : it->second;
}

std::vector<Place> Places(const std::map<std::string, std::string>& variables) {
  if (const std::string own = Variable(variables, "MUSTER_RUNTIME_DIR"); !own.empty()) {
    // The address is told to processes that stand elsewhere. A slash at the end would follow a link.
    std::error_code error;
    std::string folder = std::filesystem::absolute(own, error).lexically_normal().string();
    while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
    return {{.folder = folder, .last = true}};
  }
  std::vector<Place> places;
  // Not the one that `sudo -E` brought along from another user.
  if (const std::string run = Variable(variables, "XDG_RUNTIME_DIR"); absl::StartsWith(run, "/")) {
    places.push_back({.folder = JoinPath(run, "muster"), .parent = run});
  }
  places.push_back({.folder = absl::StrCat("/tmp/muster-", geteuid()), .last = true});
  return places;
}

// OK if `folder` is this user's and nobody else may enter it (or, for a `parent`, change it).
absl::Status CheckPrivate(const std::string& folder, mode_t closed = 077) {
  struct stat info {};
  // Not through a symbolic link, which somebody else may have put there.
  if (lstat(folder.c_str(), &info) != 0) return absl::ErrnoToStatus(errno, folder);
  if (!S_ISDIR(info.st_mode)) {
    return absl::PermissionDeniedError(absl::StrCat(folder, " is no folder"));
  }
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(folder, " belongs to user ", info.st_uid));
  }
  if ((info.st_mode & closed) != 0) {
    return absl::PermissionDeniedError(
        absl::StrFormat("others may enter %s (mode %03o, not 700)", folder, info.st_mode & 0777));
  }
  return absl::OkStatus();
}

absl::Status MakePrivate(const Place& place) {
  // With room for the longest name and the zero at the end.
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

// Of the note of a launch that has ended; false if it lives.
bool LockNote(int fd, int how) {
  int result;
  do {
    result = flock(fd, how);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

void RemoveFiles(const std::string& stem) {
  for (const char* ending : {kSocket, kToken, kNote}) unlink(absl::StrCat(stem, ending).c_str());
}

std::string Text(const json& note, const char* name) {
  const auto it = note.find(name);
  return it != note.end() && it->is_string() ? it->get<std::string>() : "";
}

// The launches that live, after removing what is left of the others.
std::vector<RunningLaunch> Read(const std::string& folder) {
  std::vector<RunningLaunch> launches;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
  if (!names.ok()) return launches;
  for (const std::string& name : *names) {
    absl::string_view stem = name;
    if (!absl::ConsumeSuffix(&stem, kNote) || stem.size() != kNameSize) continue;
    const std::string path = JoinPath(folder, name);
    const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) continue;
    if (LockNote(fd, LOCK_EX | LOCK_NB)) {
      RemoveFiles(JoinPath(folder, stem));
      close(fd);
      continue;
    }
    close(fd);
    const absl::StatusOr<std::string> text = ReadFile(path, kLongestNote);
    // Empty until the coordinator serves.
    if (!text.ok() || text->empty()) continue;
    const absl::StatusOr<json> note = ParseJson(*text, path);
    if (!note.ok() || !note->is_object()) continue;
    RunningLaunch launch;
    launch.job = Text(*note, "job");
    launch.address = Text(*note, "address");
    launch.token_file = Text(*note, "token_file");
    launch.tls_ca = Text(*note, "tls_ca");
    launch.tls_cert = Text(*note, "tls_cert");
    launch.tls_key = Text(*note, "tls_key");
    if (note->contains("pid") && (*note)["pid"].is_number_integer()) launch.pid = (*note)["pid"];
    absl::ParseTime(absl::RFC3339_full, Text(*note, "started"), &launch.started, nullptr);
    if (!launch.address.empty()) launches.push_back(std::move(launch));
  }
  return launches;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LaunchRecord>> LaunchRecord::Create(
    const std::map<std::string, std::string>& variables) {
  std::string folder;
  for (const Place& place : Places(variables)) {
    const absl::Status status = MakePrivate(place);
    if (status.ok()) {
      folder = place.folder;
      break;
    }
    if (place.last) {
      return absl::Status(
          status.code(),
          absl::StrCat("no folder for the socket of the coordinator: ", status.message(),
                       "; remove it, or set MUSTER_RUNTIME_DIR to a folder that is yours alone"));
    }
  }
  Read(folder);
  for (;;) {
    const std::string stem = JoinPath(folder, RandomHex().substr(0, kNameSize));
    const int note = open(absl::StrCat(stem, kNote).c_str(),
                          O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (note < 0) {
      if (errno == EEXIST) continue;
      return absl::ErrnoToStatus(errno, absl::StrCat("no room for a launch in ", folder));
    }
    struct stat info {};
    // Somebody who looks for dead launches may have held the lock first, and taken it for one.
    if (LockNote(note, LOCK_EX) && fstat(note, &info) == 0 && info.st_nlink > 0) {
      return std::unique_ptr<LaunchRecord>(new LaunchRecord(stem, note));
    }
    close(note);
  }
}

LaunchRecord::~LaunchRecord() {
  RemoveFiles(stem_);
  close(note_);
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
  const json note = {{"job", launch.job},
                     {"pid", launch.pid},
                     {"started", absl::FormatTime(launch.started, absl::UTCTimeZone())},
                     {"address", launch.address},
                     {"token_file", launch.token_file},
                     {"tls_ca", launch.tls_ca},
                     {"tls_cert", launch.tls_cert},
                     {"tls_key", launch.tls_key}};
  const std::string text = note.dump(-1, ' ', false, json::error_handler_t::replace);
  // In one piece: a reader sees nothing or all of it.
  const ssize_t written = pwrite(note_, text.data(), text.size(), 0);
  if (written == static_cast<ssize_t>(text.size())) return absl::OkStatus();
  return absl::ErrnoToStatus(written < 0 ? errno : ENOSPC, absl::StrCat(stem_, kNote));
}

std::vector<RunningLaunch> ListRunningLaunches(const std::map<std::string, std::string>& variables,
                                               std::vector<std::string>* looked_in) {
  std::vector<RunningLaunch> launches;
  for (const Place& place : Places(variables)) {
    if (looked_in != nullptr) looked_in->push_back(place.folder);
    if (!CheckPrivate(place.folder).ok()) continue;
    for (RunningLaunch& launch : Read(place.folder)) launches.push_back(std::move(launch));
  }
  std::stable_sort(
      launches.begin(), launches.end(),
      [](const RunningLaunch& a, const RunningLaunch& b) { return a.started < b.started; });
  return launches;
}

}  // namespace muster::client
