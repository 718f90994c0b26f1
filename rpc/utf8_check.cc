#include "rpc/utf8_check.h"

#include <google/protobuf/descriptor.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/text.h"
#include "proto/muster/v1/error.pb.h"
#include "rpc/status.h"

namespace muster::rpc {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Finds the first string in `message` that is not UTF-8, and its path. Returns false if there is
// none.
bool FindInvalidUtf8(const Message& message, std::string* path, std::string* text) {
  const Reflection& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* const field : fields) {
    const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (!is_message && field->type() != FieldDescriptor::TYPE_STRING) continue;
    const bool many = field->is_repeated();
    const int size = many ? reflection.FieldSize(message, field) : 1;
    for (int i = 0; i < size; ++i) {
      if (is_message) {
        const Message& inner = many ? reflection.GetRepeatedMessage(message, field, i)
                                    : reflection.GetMessage(message, field);
        if (!FindInvalidUtf8(inner, path, text)) continue;
      } else {
        std::string scratch;
        const std::string& value =
            many ? reflection.GetRepeatedStringReference(message, field, i, &scratch)
                 : reflection.GetStringReference(message, field, &scratch);
        if (IsValidUtf8(value)) continue;
        *text = value;
      }
      *path = absl::StrCat(field->name(), many ? absl::StrCat("[", i, "]") : "",
                           path->empty() ? "" : ".", *path);
      return true;
    }
  }
  return false;
}

}  // namespace

absl::Status CheckUtf8(const Message& message) {
  std::string path, text;
  if (!FindInvalidUtf8(message, &path, &text)) return absl::OkStatus();
  v1::ErrorDetail detail;
  detail.set_reason(v1::ERROR_REASON_BAD_FIELD);
  detail.set_field(path);
  return WithDetail(
      absl::InvalidArgumentError(absl::StrCat(path, " is not UTF-8: \"", Printable(text), "\"")),
      detail);
}

}  // namespace muster::rpc
