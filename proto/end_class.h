#ifndef MUSTER_PROTO_END_CLASS_H_
#define MUSTER_PROTO_END_CLASS_H_

#include <string>

#include "absl/strings/string_view.h"
#include "proto/muster/v1/job.pb.h"

namespace muster {

// Returns "PROCESS_FAILED", say: the class in the form that people and machines read; "UNKNOWN" for
// a class that only a newer version has. Pure.
std::string EndClassName(v1::EndClass end_class);
// Returns the class of a name; UNSPECIFIED if no class known here has it. Pure.
v1::EndClass EndClassOfName(absl::string_view name);

}  // namespace muster

#endif  // MUSTER_PROTO_END_CLASS_H_
