#include "proto/random_message.h"

#include "google/protobuf/descriptor.h"

namespace muster {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

void RandomMessage::FillKind(Message* message, const std::string& name) {
  const auto* const kinds = message->GetDescriptor()->oneof_decl(0);
  const FieldDescriptor* const kind =
      name.empty() ? kinds->field(static_cast<int>(Draw(kinds->field_count())))
                   : message->GetDescriptor()->FindFieldByName(name);
  Fill(message->GetReflection()->MutableMessage(message, kind), 0);
}

void RandomMessage::Fill(Message* message, int depth) {
  const auto* const descriptor = message->GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* const field = descriptor->field(i);
    if (Never(field->name()) || field->real_containing_oneof() != nullptr) continue;
    if (!Always(field->name()) && Draw(4) == 0) continue;
    const int times = field->is_repeated() ? static_cast<int>(Draw(4)) : 1;
    for (int n = 0; n < times; ++n) Set(message, field, depth);
  }
  for (int i = 0; i < descriptor->real_oneof_decl_count(); ++i) {
    const auto* const one = descriptor->oneof_decl(i);
    if (Draw(16) == 0) continue;
    Set(message, one->field(static_cast<int>(Draw(one->field_count()))), depth);
  }
}

void RandomMessage::Set(Message* message, const FieldDescriptor* field, int depth) {
  const Reflection* const reflection = message->GetReflection();
  const bool many = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      if (depth > 4) return;
      Fill(many ? reflection->AddMessage(message, field)
                : reflection->MutableMessage(message, field),
           depth + 1);
      return;
    case FieldDescriptor::CPPTYPE_STRING: {
      const std::string value = Text(field->name());
      many ? reflection->AddString(message, field, value)
           : reflection->SetString(message, field, value);
      return;
    }
    case FieldDescriptor::CPPTYPE_ENUM: {
      const int value = static_cast<int>(Draw(9)) - 1;
      many ? reflection->AddEnumValue(message, field, value)
           : reflection->SetEnumValue(message, field, value);
      return;
    }
    case FieldDescriptor::CPPTYPE_BOOL: {
      const bool value = Draw(2) == 0;
      many ? reflection->AddBool(message, field, value)
           : reflection->SetBool(message, field, value);
      return;
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      const auto value = static_cast<int32_t>(Number(field->name()));
      many ? reflection->AddInt32(message, field, value)
           : reflection->SetInt32(message, field, value);
      return;
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const int64_t value = Number(field->name());
      many ? reflection->AddInt64(message, field, value)
           : reflection->SetInt64(message, field, value);
      return;
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      const auto value = static_cast<uint32_t>(Number(field->name()));
      many ? reflection->AddUInt32(message, field, value)
           : reflection->SetUInt32(message, field, value);
      return;
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      const auto value = static_cast<uint64_t>(Number(field->name()));
      many ? reflection->AddUInt64(message, field, value)
           : reflection->SetUInt64(message, field, value);
      return;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      const auto value = static_cast<double>(Number(field->name()));
      many ? reflection->AddDouble(message, field, value)
           : reflection->SetDouble(message, field, value);
      return;
    }
    default:
      return;
  }
}

std::string RandomMessage::Text(const std::string&) {
  if (Draw(50) == 0) return std::string(Draw(3000), 'x');
  std::string text(Draw(3) == 0 ? 0 : 1 + Draw(3), '\0');
  for (char& c : text) c = Draw(30) == 0 ? static_cast<char>(Draw(128)) : "abw012/"[Draw(7)];
  return text;
}

int64_t RandomMessage::Number(const std::string&) {
  if (Draw(12) == 0) {
    const int64_t odd[] = {-1, INT64_MAX, INT64_MIN, INT32_MAX, INT32_MIN, 1 << 20, 4096};
    return odd[Draw(7)];
  }
  return static_cast<int64_t>(Draw(4));
}

}  // namespace muster
