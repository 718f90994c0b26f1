#include "worker/track/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/crc32c.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/track/step_after.h"

namespace muster {
namespace {

constexpr absl::string_view kPrefix = "events.out.tfevents.";

// Just enough of the protobuf wire format. Field numbers below are those of TensorBoard's
// event.proto, summary.proto, tensor.proto and of its hparams and text plug-ins.
class Message {
 public:
  Message& Varint(int field, uint64_t value) {
    Key(field, 0);
    Raw(value);
    return *this;
  }
  Message& Double(int field, double value) {
    Key(field, 1);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    Fixed(bits, 8);
    return *this;
  }
  Message& Float(int field, float value) {
    Key(field, 5);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    Fixed(bits, 4);
    return *this;
  }
  Message& Bytes(int field, absl::string_view value) {
    Key(field, 2);
    Raw(value.size());
    absl::StrAppend(&bytes_, value);
    return *this;
  }
  Message& Nested(int field, const Message& message) { return Bytes(field, message.bytes_); }

  const std::string& bytes() const { return bytes_; }

 private:
  void Key(int field, int type) { Raw(static_cast<uint64_t>(field) << 3 | type); }
  void Raw(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }
  void Fixed(uint64_t bits, int size) {
    for (int i = 0; i < size; ++i, bits >>= 8) bytes_ += static_cast<char>(bits);
  }

  std::string bytes_;
};

std::string Little(uint64_t value, int size) {
  std::string bytes;
  for (int i = 0; i < size; ++i, value >>= 8) bytes += static_cast<char>(value);
  return bytes;
}

uint64_t FromLittle(absl::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

// Returns SummaryMetadata for a plug-in.
Message Plugin(absl::string_view name, absl::string_view content) {
  return Message().Nested(1, Message().Bytes(1, name).Bytes(2, content));
}

Message ScalarValue(const std::string& tag, float number) {
  return Message().Bytes(1, Utf8Text(tag)).Float(2, number);
}

Message TextValue(const std::string& tag, const std::string& text) {
  constexpr int kString = 7;
  const Message shape = Message().Nested(2, Message().Varint(1, 1));
  const Message tensor = Message().Varint(1, kString).Nested(2, shape).Bytes(8, Utf8Text(text));
  return Message()
      .Bytes(1, absl::StrCat(Utf8Text(tag), "/text_summary"))
      .Nested(8, tensor)
      .Nested(9, Plugin("text", ""));
}

// Returns a google.protobuf.Value.
Message ProtoValue(const TrackerValue& value) {
  if (value.is_text()) return Message().Bytes(3, Utf8Text(value.text()));
  if (std::holds_alternative<bool>(value.get())) return Message().Varint(4, value.number() != 0);
  return Message().Double(2, value.number());
}

std::string HParamsSummary(absl::string_view tag, const Message& data) {
  const Message value = Message().Bytes(1, tag).Nested(9, Plugin("hparams", data.bytes()));
  return Message().Nested(1, value).bytes();
}

double Seconds(absl::Time time) { return absl::ToUnixMicros(time) / 1e6; }

std::string Host() {
  const std::string name = HostName();
  return name.empty() ? "localhost" : name;
}

std::string FileName(const TrackerContext& context) {
  static std::atomic<int> count{0};
  return absl::StrFormat("%s%010d.%s.%d.%d", kPrefix, absl::ToUnixSeconds(context.start_time),
                         Host(), getpid(), count++);
}

// Returns `value` for PyYAML, which reads a number with an exponent but without a point as a text.
std::string Yaml(const TrackerValue& value) {
  const double* const real = std::get_if<double>(&value.get());
  if (real == nullptr) return value.json();
  if (std::isnan(*real)) return ".nan";
  if (std::isinf(*real)) return *real > 0 ? ".inf" : "-.inf";
  std::string text = value.text();
  if (text.find('.') == std::string::npos) text.insert(std::min(text.find('e'), text.size()), ".0");
  return text;
}

// A field of a message: its number, and its value or its bytes.
struct WireField {
  int number = 0;
  uint64_t value = 0;
  absl::string_view bytes;
};

// Removes the next field from `message`; returns nothing at its end, or if it is not a message.
std::optional<WireField> NextField(absl::string_view* message) {
  const auto varint = [message]() -> std::optional<uint64_t> {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !message->empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(message->front());
      message->remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  };
  const std::optional<uint64_t> key = varint();
  if (!key.has_value()) return std::nullopt;
  WireField field;
  field.number = static_cast<int>(*key >> 3);
  uint64_t size = 0;
  switch (*key & 7) {
    case 0: {
      const std::optional<uint64_t> value = varint();
      if (!value.has_value()) return std::nullopt;
      field.value = *value;
      return field;
    }
    case 1:
      size = 8;
      break;
    case 2: {
      const std::optional<uint64_t> length = varint();
      if (!length.has_value()) return std::nullopt;
      size = *length;
      break;
    }
    case 5:
      size = 4;
      break;
    default:
      return std::nullopt;
  }
  if (size > message->size()) return std::nullopt;
  field.bytes = message->substr(0, size);
  message->remove_prefix(size);
  return field;
}

// Returns the step of an event with values that a program has logged; nothing for others.
std::optional<int64_t> StepOf(absl::string_view event) {
  int64_t step = 0;
  bool has_values = false;
  while (const std::optional<WireField> field = NextField(&event)) {
    if (field->number == 2) step = static_cast<int64_t>(field->value);
    if (field->number != 5) continue;
    absl::string_view summary = field->bytes;
    const std::optional<WireField> value = NextField(&summary);
    absl::string_view first = value.has_value() ? value->bytes : "";
    const std::optional<WireField> tag = NextField(&first);
    has_values = tag.has_value() && !absl::StartsWith(tag->bytes, "_hparams_/");
  }
  return has_values ? std::optional(step) : std::nullopt;
}

// Returns the step of the last entry in a file of events; nothing if it has none. Reads all of it,
// because frames can be found only from the front.
std::optional<int64_t> LastStep(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  int64_t left = file.good() ? static_cast<int64_t>(file.tellg()) : 0;
  file.seekg(0);
  std::optional<int64_t> last;
  std::string head(12, '\0');
  std::string body;
  while (left >= 16 && file.read(head.data(), 12)) {
    const uint64_t size = FromLittle(absl::string_view(head).substr(0, 8));
    // It is cut by a crash, or not a file of events.
    if (size > static_cast<uint64_t>(left - 16) ||
        FromLittle(absl::string_view(head).substr(8)) != MaskedCrc32c(head.substr(0, 8))) {
      break;
    }
    body.resize(size + 4);
    if (!file.read(body.data(), static_cast<std::streamsize>(body.size()))) break;
    left -= static_cast<int64_t>(16 + size);
    if (const auto step = StepOf(absl::string_view(body).substr(0, size))) last = step;
  }
  return last;
}

// Returns the step after the last one in the newest file of events in `folder` that has an entry; 0
// if there is none.
int64_t NextStep(const std::string& folder) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
  if (!names.ok()) return 0;
  std::vector<std::pair<std::filesystem::file_time_type, std::string>> files;
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, kPrefix)) continue;
    const std::string path = JoinPath(folder, name);
    std::error_code error;
    const auto time = std::filesystem::last_write_time(path, error);
    if (!error) files.emplace_back(time, path);
  }
  std::sort(files.rbegin(), files.rend());
  for (const auto& [time, path] : files) {
    if (const std::optional<int64_t> step = LastStep(path)) return StepAfter(*step);
  }
  return 0;
}

}  // namespace

TensorBoardTracker::TensorBoardTracker(const TrackerContext& context)
    : context_(context),
      folder_(JoinPath(context.logging_dir, context.project_name)),
      path_(JoinPath(folder_, FileName(context))),
      last_time_(context.start_time) {}

absl::Status TensorBoardTracker::WriteEvent(absl::Time time, int64_t step,
                                            absl::string_view summary) {
  Message event;
  event.Double(1, Seconds(time));
  if (step != 0) event.Varint(2, static_cast<uint64_t>(step));
  if (summary.empty()) {
    event.Bytes(3, "brain.Event:2");
  } else {
    event.Bytes(5, summary);
  }
  const std::string length = Little(event.bytes().size(), 8);
  return file_.Append(absl::StrCat(length, Little(MaskedCrc32c(length), 4), event.bytes(),
                                   Little(MaskedCrc32c(event.bytes()), 4)));
}

absl::Status TensorBoardTracker::start() {
  next_step_ = NextStep(folder_);
  MUSTER_RETURN_IF_ERROR(file_.Open(path_, /*lines=*/false));
  return WriteEvent(context_.start_time, 0, "");
}

absl::Status TensorBoardTracker::store_init_configuration(const TrackerValues& config) {
  constexpr int kString = 1;
  constexpr int kBool = 2;
  constexpr int kFloat64 = 3;
  Message experiment;
  Message session;
  std::string yaml;
  const TrackerValues each = LastOfEachName(config);
  for (const auto& [name, value] : each) {
    const int type = value.is_text()                             ? kString
                     : std::holds_alternative<bool>(value.get()) ? kBool
                                                                 : kFloat64;
    experiment.Nested(4, Message().Bytes(1, Utf8Text(name)).Varint(4, type));
    session.Nested(1, Message().Bytes(1, Utf8Text(name)).Nested(2, ProtoValue(value)));
    absl::StrAppend(&yaml, JsonQuote(Utf8Text(name)), ": ", Yaml(value), "\n");
  }
  session.Double(5, Seconds(context_.start_time));
  MUSTER_RETURN_IF_ERROR(WriteEvent(
      context_.start_time, 0,
      HParamsSummary("_hparams_/experiment", Message().Varint(1, 0).Nested(2, experiment))));
  MUSTER_RETURN_IF_ERROR(WriteEvent(
      context_.start_time, 0,
      HParamsSummary("_hparams_/session_start_info", Message().Varint(1, 0).Nested(3, session))));
  has_config_ = true;
  return WriteFileAtomically(JoinPath(folder_, "hparams.yml"), yaml);
}

absl::Status TensorBoardTracker::log(const TrackerEntry& entry) {
  const int64_t step = entry.step.value_or(next_step_);
  next_step_ = StepAfter(step);
  last_time_ = entry.time;
  Message summary;
  for (const auto& [name, value] : entry.values) {
    summary.Nested(1, value.is_text() ? TextValue(name, value.text())
                                      : ScalarValue(name, static_cast<float>(value.number())));
  }
  if (entry.values.empty()) return absl::OkStatus();
  return WriteEvent(entry.time, step, summary.bytes());
}

absl::Status TensorBoardTracker::finish() {
  constexpr int kSuccess = 1;
  if (has_config_) {
    const Message end = Message().Varint(1, kSuccess).Double(2, Seconds(last_time_));
    MUSTER_RETURN_IF_ERROR(WriteEvent(
        last_time_, 0,
        HParamsSummary("_hparams_/session_end_info", Message().Varint(1, 0).Nested(4, end))));
  }
  return file_.Close();
}

}  // namespace muster
