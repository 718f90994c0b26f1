#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/text.h"

namespace muster {
namespace {

LogLevel LevelFromEnvironment() {
  LogLevel level = LogLevel::kInfo;
  if (const char* text = std::getenv("MUSTER_LOG_LEVEL")) ParseLogLevel(text, &level);
  return level;
}

std::atomic<LogLevel>& Level() {
  static std::atomic<LogLevel> level{LevelFromEnvironment()};
  return level;
}

std::atomic<bool>& Json() {
  static std::atomic<bool> json{[] {
    const char* text = std::getenv("MUSTER_LOG_FORMAT");
    return text != nullptr && absl::string_view(text) == "json";
  }()};
  return json;
}

struct Identity {
  Mutex mu;
  std::string text ABSL_GUARDED_BY(mu);
};

Identity& TheIdentity() {
  static Identity* const identity = new Identity;
  return *identity;
}

const char* Name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "?";
}

// JSON is UTF-8; bytes that are not become the replacement character.
std::string JsonString(absl::string_view text) {
  std::string repaired;
  for (size_t i = 0; i < text.size();) {
    const size_t size = Utf8CharacterBytes(text.substr(i));
    repaired += size == 0 ? "\xEF\xBF\xBD" : std::string(text.substr(i, size));
    i += size == 0 ? 1 : size;
  }
  return JsonQuote(repaired);
}

void WriteAll(absl::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(STDERR_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // Nothing sensible is left to do when standard error is gone.
    text.remove_prefix(n);
  }
}

absl::string_view BaseName(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos ? path : path.substr(slash + 1);
}

}  // namespace

std::string OneLine(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const size_t size = Utf8CharacterBytes(text.substr(i));
    const auto at = [&](size_t k) { return static_cast<unsigned char>(text[i + k]); };
    const bool control = size == 1 && (at(0) < 0x20 || at(0) == 0x7f);
    // U+0080 to U+009F, which some terminals obey; U+2028 and U+2029 end lines.
    const bool hidden = (size == 2 && at(0) == 0xc2 && at(1) < 0xa0) ||
                        (size == 3 && at(0) == 0xe2 && at(1) == 0x80 && (at(2) & 0xfe) == 0xa8);
    if (size != 0 && !control && !hidden) {
      out.append(text.data() + i, size);
      i += size;
      continue;
    }
    for (size_t k = 0; k < std::max<size_t>(size, 1); ++k) {
      switch (at(k)) {
        case '\n':
          out += "\\n";
          break;
        case '\r':
          out += "\\r";
          break;
        case '\t':
          out += "\\t";
          break;
        default:
          absl::StrAppendFormat(&out, "\\x%02x", at(k));
      }
    }
    i += std::max<size_t>(size, 1);
  }
  return out;
}

void SetLogLevel(LogLevel level) { Level().store(level, std::memory_order_relaxed); }
LogLevel GetLogLevel() { return Level().load(std::memory_order_relaxed); }

bool ParseLogLevel(absl::string_view text, LogLevel* level) {
  const std::string name = absl::AsciiStrToLower(text);
  for (LogLevel candidate :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (name == Name(candidate)) {
      *level = candidate;
      return true;
    }
  }
  if (name == "warn") {
    *level = LogLevel::kWarning;
    return true;
  }
  return false;
}

void SetLogIdentity(absl::string_view identity) {
  MutexLock lock(&TheIdentity().mu);
  TheIdentity().text = std::string(identity);
}

void SetLogJson(bool json) { Json().store(json, std::memory_order_relaxed); }

namespace log_internal {

Line::Line(LogLevel level, const char* file, int line) : level_(level), file_(file), line_(line) {}

Line::~Line() {
  std::string who;
  {
    MutexLock lock(&TheIdentity().mu);
    who = TheIdentity().text;
  }
  const absl::Time now = absl::Now();
  if (Json().load(std::memory_order_relaxed)) {
    WriteAll(absl::StrFormat(
        "{\"time\":%s,\"level\":\"%s\",\"who\":%s,\"file\":%s,\"line\":%d,\"message\":%s}\n",
        JsonString(absl::FormatTime(absl::RFC3339_full, now, absl::UTCTimeZone())), Name(level_),
        JsonString(who), JsonString(BaseName(file_)), line_, JsonString(stream_.str())));
    return;
  }
  WriteAll(absl::StrFormat("%c %s %s%s] %s\n", absl::ascii_toupper(Name(level_)[0]),
                           absl::FormatTime("%m-%d %H:%M:%E3S", now, absl::LocalTimeZone()),
                           who.empty() ? "" : absl::StrCat("[", OneLine(who), "] "),
                           absl::StrCat(BaseName(file_), ":", line_), OneLine(stream_.str())));
}

void CheckFailed(const char* file, int line, const char* condition, const std::string& text) {
  WriteAll(
      absl::StrFormat("E %s:%d] broken invariant: %s %s\n", file, line, condition, OneLine(text)));
  std::abort();
}

}  // namespace log_internal
}  // namespace muster
