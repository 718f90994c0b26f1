#include "worker/checkpoint/safetensors_format.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/shape_text.h"

namespace muster {
namespace {

struct TypeFacts {
  absl::string_view name;
  int bits;
};

// Indexed by SafetensorsType.
constexpr std::array<TypeFacts, 22> kTypes = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

constexpr absl::string_view kMetadataName = "__metadata__";

std::string Shown(absl::string_view text) { return absl::StrCat("\"", Printable(text), "\""); }

// Follows the parser's events through the few states that a header may have. Every method returns
// whether to continue; after false, why() has the error.
class HeaderHandler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderHandler(SafetensorsHeader* header) : header_(header) {}

  const std::string& why() const { return why_; }

  bool null() override {
    // The reference library accepts null for no metadata.
    if (state_ == State::kMetadataValue) {
      state_ = State::kTop;
      return true;
    }
    return Unexpected("null");
  }
  bool boolean(bool value) override { return Unexpected(value ? "true" : "false"); }
  bool number_integer(int64_t value) override { return Number(absl::StrCat(value), "is negative"); }
  bool number_unsigned(uint64_t value) override {
    if (state_ == State::kShape) {
      entry_.shape.push_back(value);
      return true;
    }
    if (state_ == State::kOffsets) {
      if (offsets_ == 2) return Fail("data_offsets: has more than two numbers");
      (offsets_ == 0 ? entry_.begin : entry_.end) = value;
      ++offsets_;
      return true;
    }
    return Unexpected(absl::StrCat("the number ", value));
  }
  bool number_float(double, const std::string& text) override {
    return Number(Printable(text, 50), "is not an unsigned 64-bit integer");
  }
  bool string(std::string& text) override {
    if (state_ == State::kMetadata) {
      (*header_->metadata)[key_] = std::move(text);
      return true;
    }
    if (state_ == State::kFieldValue && key_ == "dtype") {
      const std::optional<SafetensorsType> type = ParseSafetensorsType(text);
      if (!type.has_value()) return Fail(absl::StrCat("dtype: ", Shown(text), " is unknown"));
      entry_.type = *type;
      state_ = State::kTensor;
      return true;
    }
    return Unexpected(absl::StrCat("the text ", Shown(text)));
  }
  bool binary(nlohmann::json::binary_t&) override { return Unexpected("binary data"); }

  bool start_object(size_t) override {
    switch (state_) {
      case State::kRoot:
        state_ = State::kTop;
        return true;
      case State::kMetadataValue:
        header_->metadata.emplace();
        state_ = State::kMetadata;
        return true;
      case State::kTensorValue:
        seen_dtype_ = seen_shape_ = seen_offsets_ = false;
        state_ = State::kTensor;
        return true;
      default:
        return Unexpected("an object");
    }
  }
  bool key(std::string& name) override {
    key_ = std::move(name);
    if (state_ == State::kTop) {
      if (key_ == kMetadataName) {
        if (std::exchange(seen_metadata_, true)) return Fail("occurs twice");
        state_ = State::kMetadataValue;
      } else {
        entry_ = SafetensorsEntry();
        entry_.name = key_;
        offsets_ = 0;
        state_ = State::kTensorValue;
      }
      return true;
    }
    if (state_ == State::kMetadata) {
      if (header_->metadata->count(key_) > 0) {
        return Fail(absl::StrCat("the key ", Shown(key_), " occurs twice"));
      }
      return true;
    }
    bool* const seen = key_ == "dtype"          ? &seen_dtype_
                       : key_ == "shape"        ? &seen_shape_
                       : key_ == "data_offsets" ? &seen_offsets_
                                                : nullptr;
    if (seen == nullptr) return Fail(absl::StrCat("the field ", Shown(key_), " is unknown"));
    if (std::exchange(*seen, true)) return Fail(absl::StrCat(key_, ": occurs twice"));
    state_ = State::kFieldValue;
    return true;
  }
  bool end_object() override {
    if (state_ == State::kTensor) {
      for (const auto& [seen, field] : {std::pair(seen_dtype_, "dtype"),
                                        {seen_shape_, "shape"},
                                        {seen_offsets_, "data_offsets"}}) {
        if (!seen) return Fail(absl::StrCat("the field ", field, " is missing"));
      }
      header_->tensors.push_back(std::move(entry_));
      state_ = State::kTop;
    } else if (state_ == State::kMetadata) {
      state_ = State::kTop;
    } else {
      state_ = State::kDone;
    }
    return true;
  }
  bool start_array(size_t) override {
    if (state_ == State::kFieldValue && key_ == "shape") {
      state_ = State::kShape;
      return true;
    }
    if (state_ == State::kFieldValue && key_ == "data_offsets") {
      state_ = State::kOffsets;
      return true;
    }
    return Unexpected("a list");
  }
  bool end_array() override {
    if (state_ == State::kOffsets && offsets_ != 2) {
      return Fail(absl::StrCat("data_offsets: has ", offsets_, " numbers, not two"));
    }
    state_ = State::kTensor;
    return true;
  }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    absl::string_view what = error.what();
    if (const size_t dash = what.find(" - "); dash != absl::string_view::npos) {
      what.remove_prefix(dash + 3);
    } else if (const size_t bracket = what.find("] "); bracket != absl::string_view::npos) {
      what.remove_prefix(bracket + 2);
    }
    why_ =
        absl::StrCat("the header is not strict JSON: byte ", position, ": ", Printable(what, 300));
    return false;
  }

 private:
  enum class State {
    kRoot,           // before the opening brace
    kTop,            // among the names of tensors
    kMetadataValue,  // after "__metadata__":
    kMetadata,       // inside its object
    kTensorValue,    // after "name":
    kTensor,         // among the fields of a tensor
    kFieldValue,     // after "field":
    kShape,
    kOffsets,
    kDone,
  };

  bool Fail(absl::string_view why) {
    switch (state_) {
      case State::kRoot:
      case State::kDone:
        why_ = std::string(why);
        break;
      case State::kTop:
      case State::kMetadataValue:
      case State::kMetadata:
        why_ = absl::StrCat(kMetadataName, ": ", why);
        break;
      default:
        why_ = absl::StrCat("tensor ", Shown(entry_.name), ": ", why);
    }
    return false;
  }

  bool Number(absl::string_view text, absl::string_view why) {
    if (state_ == State::kShape) return Fail(absl::StrCat("shape: ", text, " ", why));
    if (state_ == State::kOffsets) return Fail(absl::StrCat("data_offsets: ", text, " ", why));
    return Unexpected(absl::StrCat("the number ", text));
  }

  bool Unexpected(absl::string_view what) {
    switch (state_) {
      case State::kRoot:
        return Fail(absl::StrCat("the header is ", what, ", not an object"));
      case State::kMetadataValue:
        return Fail(absl::StrCat("is ", what, ", not an object"));
      case State::kMetadata:
        return Fail(absl::StrCat("the value of ", Shown(key_), " is ", what, ", not text"));
      case State::kTensorValue:
        return Fail(absl::StrCat("is ", what, ", not an object"));
      case State::kShape:
        return Fail(absl::StrCat("shape: holds ", what, ", not an integer"));
      case State::kOffsets:
        return Fail(absl::StrCat("data_offsets: holds ", what, ", not an integer"));
      default:
        return Fail(absl::StrCat(key_, ": is ", what,
                                 key_ == "dtype" ? ", not text" : ", not a list of integers"));
    }
  }

  SafetensorsHeader* const header_;
  State state_ = State::kRoot;
  std::string key_;
  SafetensorsEntry entry_;
  int offsets_ = 0;
  bool seen_metadata_ = false;
  bool seen_dtype_ = false;
  bool seen_shape_ = false;
  bool seen_offsets_ = false;
  std::string why_;
};

absl::Status Bad(absl::string_view source, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(source, ": ", why));
}

// Checks sizes, and that the ranges cover the data block exactly once.
absl::Status CheckRanges(const SafetensorsHeader& header, absl::string_view source) {
  std::vector<const SafetensorsEntry*> order;
  order.reserve(header.tensors.size());
  for (const SafetensorsEntry& entry : header.tensors) {
    const absl::StatusOr<uint64_t> bytes = SafetensorsBytes(entry.type, entry.shape);
    if (!bytes.ok()) {
      return Bad(source,
                 absl::StrCat("tensor ", Shown(entry.name), ": shape: ", bytes.status().message()));
    }
    if (entry.begin > entry.end) {
      return Bad(source, absl::StrCat("tensor ", Shown(entry.name), ": data_offsets: begin ",
                                      entry.begin, " is after end ", entry.end));
    }
    if (entry.end - entry.begin != *bytes) {
      return Bad(source, absl::StrCat("tensor ", Shown(entry.name),
                                      ": data_offsets: ", entry.end - entry.begin,
                                      " bytes, but shape ", ShapeText(entry.shape), " of ",
                                      SafetensorsTypeName(entry.type), " needs ", *bytes));
    }
    order.push_back(&entry);
  }
  std::sort(order.begin(), order.end(), [](const SafetensorsEntry* a, const SafetensorsEntry* b) {
    return std::tie(a->begin, a->end) < std::tie(b->begin, b->end);
  });
  uint64_t covered = 0;
  for (const SafetensorsEntry* const entry : order) {
    if (entry->begin != covered) {
      return Bad(
          source,
          absl::StrCat("tensor ", Shown(entry->name), ": data_offsets: begins at ", entry->begin,
                       entry->begin < covered ? ", inside another tensor that ends at "
                                              : ", after a hole that begins at ",
                       covered));
    }
    covered = entry->end;
  }
  if (covered != header.data_bytes) {
    return Bad(source, absl::StrCat("the tensors need ", covered,
                                    " bytes of data, but the file has ", header.data_bytes,
                                    covered > header.data_bytes ? ": it was cut short" : ""));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view SafetensorsTypeName(SafetensorsType type) {
  return kTypes[static_cast<size_t>(type)].name;
}

std::optional<SafetensorsType> ParseSafetensorsType(absl::string_view name) {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].name == name) return static_cast<SafetensorsType>(i);
  }
  return std::nullopt;
}

int SafetensorsTypeBits(SafetensorsType type) { return kTypes[static_cast<size_t>(type)].bits; }

absl::StatusOr<uint64_t> SafetensorsBytes(SafetensorsType type,
                                          const std::vector<uint64_t>& shape) {
  // Zeros are applied at the end, so that whether a shape overflows does not depend on their
  // position.
  uint64_t elements = 1;
  bool overflow = false;
  bool empty = false;
  for (const uint64_t dimension : shape) {
    empty = empty || dimension == 0;
    overflow =
        overflow || (dimension != 0 && __builtin_mul_overflow(elements, dimension, &elements));
  }
  uint64_t bits = 0;
  overflow = overflow || __builtin_mul_overflow(elements, SafetensorsTypeBits(type), &bits);
  if (overflow) {
    return absl::InvalidArgumentError(absl::StrCat(ShapeText(shape), " is too large"));
  }
  if (empty) return 0;
  if (bits % 8 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        ShapeText(shape), " of ", SafetensorsTypeName(type), " does not end at a whole byte"));
  }
  return bits / 8;
}

const SafetensorsEntry* SafetensorsHeader::Find(absl::string_view name) const {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const SafetensorsEntry& entry, absl::string_view wanted) { return entry.name < wanted; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         uint64_t data_bytes,
                                                         absl::string_view source) {
  if (json.size() > kMaxSafetensorsHeaderBytes) {
    return Bad(source, absl::StrCat("a header of ", json.size(), " bytes is more than the ",
                                    kMaxSafetensorsHeaderBytes, " allowed"));
  }
  // Checked here, because the JSON parser skips a byte order mark and treats a zero byte as the
  // end.
  if (json.substr(0, 3) == "\xEF\xBB\xBF") {
    return Bad(source, "the header begins with a byte order mark, not with {");
  }
  if (json.find('\0') != absl::string_view::npos) {
    return Bad(source, "the header holds a zero byte");
  }
  SafetensorsHeader header;
  header.header_bytes = json.size();
  header.data_bytes = data_bytes;
  HeaderHandler handler(&header);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return Bad(source, handler.why());
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(
      header.tensors.begin(), header.tensors.end(),
      [](const SafetensorsEntry& a, const SafetensorsEntry& b) { return a.name == b.name; });
  if (twice != header.tensors.end()) {
    return Bad(source, absl::StrCat("tensor ", Shown(twice->name), ": the name occurs twice"));
  }
  MUSTER_RETURN_IF_ERROR(CheckRanges(header, source));
  return header;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::string& path) {
  // Refuse a pipe that has the name of a file, rather than wait for it.
  const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.open()) return ReadError(errno, absl::StrCat("cannot open ", path));
  return ReadSafetensorsHeader(file.get(), path);
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return ReadError(errno, absl::StrCat("cannot examine ", path));
  }
  if (!S_ISREG(info.st_mode)) return Bad(path, "is not a file");
  const auto read_all = [&](uint64_t at, char* to, size_t size) -> absl::Status {
    while (size > 0) {
      const ssize_t n = pread(fd, to, size, static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ReadError(errno, absl::StrCat("cannot read ", path));
      if (n == 0) return Bad(path, "the file became shorter while it was read");
      to += n;
      at += n;
      size -= n;
    }
    return absl::OkStatus();
  };
  return ReadSafetensorsHeader(info.st_size, read_all, path);
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(uint64_t file_bytes, const ReadBytes& read,
                                                        const std::string& path) {
  if (file_bytes < 8) {
    return Bad(path, absl::StrCat("has ", file_bytes,
                                  " bytes, fewer than the 8 that give a header's length: it is not "
                                  "a safetensors file, or was cut short"));
  }
  unsigned char length[8];
  MUSTER_RETURN_IF_ERROR(read(0, reinterpret_cast<char*>(length), 8));
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | length[i];
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    return Bad(path, absl::StrCat("says its header has ", header_bytes, " bytes, more than the ",
                                  kMaxSafetensorsHeaderBytes,
                                  " allowed: it is not a safetensors file, or is damaged"));
  }
  if (header_bytes > file_bytes - 8) {
    return Bad(path, absl::StrCat("says its header has ", header_bytes, " bytes, but only ",
                                  file_bytes - 8, " follow: it was cut short"));
  }
  std::string json(header_bytes, '\0');
  MUSTER_RETURN_IF_ERROR(read(8, json.data(), json.size()));
  return ParseSafetensorsHeader(json, file_bytes - 8 - header_bytes, path);
}

absl::StatusOr<std::string> SafetensorsPrefix(const std::optional<SafetensorsMetadata>& metadata,
                                              absl::string_view entries, uint64_t data_alignment) {
  std::string prefix(sizeof(uint64_t), '\0');
  prefix += '{';
  if (metadata.has_value()) {
    absl::StrAppend(&prefix, JsonQuote(kMetadataName), ":{");
    bool first = true;
    for (const auto& [key, value] : *metadata) {
      if (!IsValidUtf8(key) || !IsValidUtf8(value)) {
        return absl::InvalidArgumentError(absl::StrCat("metadata ", Shown(key), " is not UTF-8"));
      }
      absl::StrAppend(&prefix, first ? "" : ",", JsonQuote(key), ":", JsonQuote(value));
      first = false;
    }
    absl::StrAppend(&prefix, "}", entries.empty() ? "" : ",");
  }
  absl::StrAppend(&prefix, entries, "}");
  prefix.append((data_alignment - prefix.size() % data_alignment) % data_alignment, ' ');
  uint64_t length = prefix.size() - sizeof(uint64_t);
  if (length > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a header of ", length,
                                                   " bytes is more than the ",
                                                   kMaxSafetensorsHeaderBytes, " allowed"));
  }
  for (int i = 0; i < 8; ++i, length >>= 8) prefix[i] = static_cast<char>(length & 0xff);
  return prefix;
}

absl::StatusOr<SafetensorsLayout> LayOutSafetensors(
    std::vector<SafetensorsEntry> tensors, const std::optional<SafetensorsMetadata>& metadata,
    uint64_t data_alignment) {
  std::sort(tensors.begin(), tensors.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return a.type != b.type ? a.type > b.type : a.name < b.name;
            });
  SafetensorsLayout layout;
  std::string& json = layout.entries;
  absl::flat_hash_map<absl::string_view, int> names;
  for (SafetensorsEntry& entry : tensors) {
    if (++names[entry.name] > 1 || entry.name == kMetadataName) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", Shown(entry.name),
          entry.name == kMetadataName ? ": the name is reserved" : ": the name occurs twice"));
    }
    if (!IsValidUtf8(entry.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Shown(entry.name), ": the name is not UTF-8"));
    }
    const absl::StatusOr<uint64_t> bytes = SafetensorsBytes(entry.type, entry.shape);
    if (!bytes.ok() || __builtin_add_overflow(layout.data_bytes, *bytes, &entry.end)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", Shown(entry.name), ": shape: ",
                                                     bytes.ok()
                                                         ? "all tensors together are too large"
                                                         : std::string(bytes.status().message())));
    }
    entry.begin = layout.data_bytes;
    layout.data_bytes = entry.end;
    absl::StrAppend(&json, json.empty() ? "" : ",", JsonQuote(entry.name), ":{\"dtype\":\"",
                    SafetensorsTypeName(entry.type), "\",\"shape\":[",
                    absl::StrJoin(entry.shape, ","), "],\"data_offsets\":[", entry.begin, ",",
                    entry.end, "]}");
  }
  MUSTER_ASSIGN_OR_RETURN(layout.prefix, SafetensorsPrefix(metadata, json, data_alignment));
  layout.tensors = std::move(tensors);
  return layout;
}

absl::StatusOr<std::string> EncodeSafetensors(const std::vector<SafetensorsEntry>& tensors,
                                              const std::vector<std::string>& data,
                                              const std::optional<SafetensorsMetadata>& metadata) {
  if (tensors.size() != data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(tensors.size(), " tensors, but data for ", data.size()));
  }
  absl::flat_hash_map<absl::string_view, const std::string*> bytes;
  for (size_t i = 0; i < tensors.size(); ++i) bytes[tensors[i].name] = &data[i];
  MUSTER_ASSIGN_OR_RETURN(SafetensorsLayout layout, LayOutSafetensors(tensors, metadata));
  std::string file = std::move(layout.prefix);
  for (const SafetensorsEntry& entry : layout.tensors) {
    const std::string& part = *bytes[entry.name];
    if (part.size() != entry.end - entry.begin) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Shown(entry.name), ": ", part.size(),
                       " bytes of data, but shape ", ShapeText(entry.shape), " of ",
                       SafetensorsTypeName(entry.type), " needs ", entry.end - entry.begin));
    }
    file += part;
  }
  return file;
}

}  // namespace muster
