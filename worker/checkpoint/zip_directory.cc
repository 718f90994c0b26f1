#include "worker/checkpoint/zip_directory.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster {
namespace {

constexpr absl::string_view kLocalMark = "PK\x03\x04";
constexpr absl::string_view kMemberMark = "PK\x01\x02";
constexpr absl::string_view kEndMark = "PK\x05\x06";
constexpr absl::string_view kEnd64Mark = "PK\x06\x06";
constexpr absl::string_view kLocator64Mark = "PK\x06\x07";

constexpr uint64_t kLocalBytes = 30;
constexpr uint64_t kMemberBytes = 46;
constexpr uint64_t kEndBytes = 22;
constexpr uint64_t kEnd64Bytes = 56;
constexpr uint64_t kLocator64Bytes = 20;
constexpr uint64_t kMaxCommentBytes = 0xffff;

// The value of a field of 16 or 32 bits that is too small for its number.
constexpr uint64_t kElsewhere16 = 0xffff;
constexpr uint64_t kElsewhere32 = 0xffffffff;
constexpr int kZip64Extra = 1;

// Reads a little-endian number. The caller has checked the length.
uint64_t Number(absl::string_view bytes, size_t at, int width) {
  uint64_t value = 0;
  for (int i = width - 1; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

absl::Status Bad(const ByteSource& file, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(file.name(), ": ", why));
}

absl::Status Load(const ByteSource& file, uint64_t offset, uint64_t bytes, std::string* text) {
  text->assign(bytes, '\0');
  return file.Read(offset, text->data(), text->size());
}

struct Directory {
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint64_t members = 0;
};

absl::StatusOr<Directory> FindDirectory(const ByteSource& file) {
  const uint64_t tail_bytes = std::min(file.size(), kEndBytes + kMaxCommentBytes);
  std::string tail, locator, record;
  MUSTER_RETURN_IF_ERROR(Load(file, file.size() - tail_bytes, tail_bytes, &tail));
  size_t at = tail_bytes < kEndBytes ? std::string::npos : tail_bytes - kEndBytes;
  while (at != std::string::npos) {
    at = tail.rfind(kEndMark.data(), at, kEndMark.size());
    if (at == std::string::npos) break;
    if (at + kEndBytes + Number(tail, at + 20, 2) == tail.size()) break;
    at = at == 0 ? std::string::npos : at - 1;
  }
  if (at == std::string::npos) {
    return Bad(file, "the archive has no directory at its end: it was cut short");
  }
  uint64_t end = file.size() - tail_bytes + at;
  Directory directory{.begin = Number(tail, at + 16, 4),
                      .bytes = Number(tail, at + 12, 4),
                      .members = Number(tail, at + 10, 2)};
  uint64_t disks = Number(tail, at + 4, 2) | Number(tail, at + 6, 2);
  if (end >= kLocator64Bytes) {
    MUSTER_RETURN_IF_ERROR(Load(file, end - kLocator64Bytes, kLocator64Bytes, &locator));
    if (absl::StartsWith(locator, kLocator64Mark)) {
      const uint64_t end64 = Number(locator, 8, 8);
      if (end64 > end || end - end64 < kEnd64Bytes + kLocator64Bytes) {
        return Bad(file, "the 64-bit end of the archive's directory lies outside of the file");
      }
      MUSTER_RETURN_IF_ERROR(Load(file, end64, kEnd64Bytes, &record));
      if (!absl::StartsWith(record, kEnd64Mark)) {
        return Bad(file, "the 64-bit end of the archive's directory is damaged");
      }
      directory = {.begin = Number(record, 48, 8),
                   .bytes = Number(record, 40, 8),
                   .members = Number(record, 32, 8)};
      disks = Number(record, 16, 4) | Number(record, 20, 4);
      end = end64;
    }
  }
  if (disks != 0 && disks != kElsewhere16) return Bad(file, "the archive has several parts");
  if (directory.begin > end || directory.bytes > end - directory.begin) {
    return Bad(file, "the archive's directory lies outside of the file");
  }
  if (directory.bytes > kMaxZipDirectoryBytes) {
    return Bad(file, absl::StrCat("the archive's directory has ", directory.bytes,
                                  " bytes, more than the ", kMaxZipDirectoryBytes, " allowed"));
  }
  if (directory.members > directory.bytes / kMemberBytes) {
    return Bad(file, absl::StrCat("the archive says it has ", directory.members,
                                  " members, more than its directory can hold"));
  }
  return directory;
}

// Reads from the extra fields those values of a member that do not fit into its own.
bool TakeZip64(absl::string_view extra, uint64_t* bytes, uint64_t* stored, uint64_t* local) {
  std::vector<uint64_t*> wanted;
  for (uint64_t* const value : {bytes, stored, local}) {
    if (*value == kElsewhere32) wanted.push_back(value);
  }
  if (wanted.empty()) return true;
  while (extra.size() >= 4) {
    const uint64_t kind = Number(extra, 0, 2);
    const uint64_t length = Number(extra, 2, 2);
    extra.remove_prefix(4);
    if (length > extra.size()) return false;
    if (kind == kZip64Extra) {
      if (length < wanted.size() * 8) return false;
      for (size_t i = 0; i < wanted.size(); ++i) *wanted[i] = Number(extra, i * 8, 8);
      return true;
    }
    extra.remove_prefix(length);
  }
  return false;
}

}  // namespace

absl::StatusOr<std::vector<ZipMember>> ReadZipDirectory(const ByteSource& file) {
  MUSTER_ASSIGN_OR_RETURN(const Directory directory, FindDirectory(file));
  std::string text, header;
  MUSTER_RETURN_IF_ERROR(Load(file, directory.begin, directory.bytes, &text));
  absl::string_view rest = text;
  std::vector<ZipMember> members;
  members.reserve(directory.members);
  absl::flat_hash_set<std::string> names;
  for (uint64_t i = 0; i < directory.members; ++i) {
    if (rest.size() < kMemberBytes || !absl::StartsWith(rest, kMemberMark)) {
      return Bad(file, absl::StrCat("entry ", i, " of the archive's directory is damaged"));
    }
    const uint64_t flags = Number(rest, 8, 2);
    const uint64_t method = Number(rest, 10, 2);
    uint64_t stored = Number(rest, 20, 4);
    uint64_t bytes = Number(rest, 24, 4);
    const uint64_t name_bytes = Number(rest, 28, 2);
    const uint64_t extra_bytes = Number(rest, 30, 2);
    const uint64_t comment_bytes = Number(rest, 32, 2);
    uint64_t local = Number(rest, 42, 4);
    if (rest.size() - kMemberBytes < name_bytes + extra_bytes + comment_bytes) {
      return Bad(file, absl::StrCat("entry ", i, " of the archive's directory is damaged"));
    }
    const std::string name(rest.substr(kMemberBytes, name_bytes));
    const std::string shown = absl::StrCat("member \"", Printable(name), "\" of the archive ");
    if (!TakeZip64(rest.substr(kMemberBytes + name_bytes, extra_bytes), &bytes, &stored, &local)) {
      return Bad(file, absl::StrCat(shown, "lacks its 64-bit size"));
    }
    rest.remove_prefix(kMemberBytes + name_bytes + extra_bytes + comment_bytes);
    if ((flags & 1) != 0) return Bad(file, absl::StrCat(shown, "is encrypted"));
    const bool compressed = method != 0;
    if (!compressed && stored != bytes) {
      return Bad(file, absl::StrCat(shown, "has two sizes: the archive is damaged"));
    }
    if (!names.insert(name).second) return Bad(file, absl::StrCat(shown, "occurs twice"));
    if (local > directory.begin || directory.begin - local < kLocalBytes) {
      return Bad(file, absl::StrCat(shown, "begins outside of the file"));
    }
    MUSTER_RETURN_IF_ERROR(Load(file, local, kLocalBytes, &header));
    const uint64_t before = kLocalBytes + Number(header, 26, 2) + Number(header, 28, 2);
    if (!absl::StartsWith(header, kLocalMark) || directory.begin - local < before ||
        directory.begin - local - before < stored) {
      return Bad(file, absl::StrCat(shown, "is damaged or lies outside of the file"));
    }
    members.push_back(
        {.name = name, .begin = local + before, .bytes = stored, .compressed = compressed});
  }
  if (absl::StartsWith(rest, kMemberMark)) {
    return Bad(file, absl::StrCat("the archive's directory has more than the ", directory.members,
                                  " members that it says it has: it is damaged"));
  }
  std::vector<const ZipMember*> order;
  for (const ZipMember& member : members) {
    if (member.bytes > 0) order.push_back(&member);
  }
  std::sort(order.begin(), order.end(),
            [](const ZipMember* a, const ZipMember* b) { return a->begin < b->begin; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i - 1]->begin + order[i - 1]->bytes > order[i]->begin) {
      return Bad(file, absl::StrCat("member \"", Printable(order[i]->name),
                                    "\" of the archive lies inside another one"));
    }
  }
  return members;
}

}  // namespace muster
