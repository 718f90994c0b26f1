#ifndef MUSTER_PROTO_NAME_VALUE_H_
#define MUSTER_PROTO_NAME_VALUE_H_

#include <map>
#include <string>
#include <utility>

#include "google/protobuf/repeated_field.h"
#include "proto/muster/v1/job.pb.h"

namespace muster {

using NameValues = google::protobuf::RepeatedPtrField<v1::NameValue>;

inline void AddNameValue(std::string name, std::string value, NameValues* values) {
  v1::NameValue* const added = values->Add();
  added->set_name(std::move(name));
  added->set_value(std::move(value));
}

// Returns a map; the last value of a repeated name counts.
inline std::map<std::string, std::string> ToMap(const NameValues& values) {
  std::map<std::string, std::string> map;
  for (const v1::NameValue& one : values) map[one.name()] = one.value();
  return map;
}

}  // namespace muster

#endif  // MUSTER_PROTO_NAME_VALUE_H_
