#ifndef MUSTER_PROTO_END_CLASS_H_
#define MUSTER_PROTO_END_CLASS_H_

#include <string>

#include "absl/strings/string_view.h"
#include "proto/muster/v1/job.pb.h"

namespace muster {

// "PROCESS_FAILED": the class in the form that people and machines read; "UNKNOWN" for a class that
// a newer version has. Pure.
std::string EndClassName(v1::EndClass end_class);
// UNSPECIFIED: it names none that is known here. Pure.
v1::EndClass EndClassOfName(absl::string_view name);

}  // namespace muster

#endif  // MUSTER_PROTO_END_CLASS_H_
