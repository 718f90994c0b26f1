#include "worker/track/tensorboard.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/crc32c.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/json.h"
#include "base/status_macros.h"

namespace muster {
namespace {

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

// protobuf strings must be UTF-8.
std::string Utf8(const std::string& text) {
  return IsValidUtf8(text) ? text : Printable(text, text.size());
}

// SummaryMetadata for a plug-in.
Message Plugin(absl::string_view name, absl::string_view content) {
  return Message().Nested(1, Message().Bytes(1, name).Bytes(2, content));
}

Message ScalarValue(const std::string& tag, float number) {
  return Message().Bytes(1, Utf8(tag)).Float(2, number);
}

Message TextValue(const std::string& tag, const std::string& text) {
  constexpr int kString = 7;
  const Message shape = Message().Nested(2, Message().Varint(1, 1));
  const Message tensor = Message().Varint(1, kString).Nested(2, shape).Bytes(8, Utf8(text));
  return Message()
      .Bytes(1, absl::StrCat(Utf8(tag), "/text_summary"))
      .Nested(8, tensor)
      .Nested(9, Plugin("text", ""));
}

// A google.protobuf.Value.
Message ProtoValue(const TrackerValue& value) {
  if (value.is_text()) return Message().Bytes(3, Utf8(value.text()));
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
  return absl::StrFormat("events.out.tfevents.%010d.%s.%d.%d",
                         absl::ToUnixSeconds(context.start_time), Host(), getpid(), count++);
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
  for (const auto& [name, value] : config) {
    const int type = value.is_text()                             ? kString
                     : std::holds_alternative<bool>(value.get()) ? kBool
                                                                 : kFloat64;
    experiment.Nested(4, Message().Bytes(1, Utf8(name)).Varint(4, type));
    session.Nested(1, Message().Bytes(1, Utf8(name)).Nested(2, ProtoValue(value)));
    absl::StrAppend(&yaml, JsonQuote(Utf8(name)), ": ", value.json(), "\n");
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
  next_step_ = step + 1;
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
