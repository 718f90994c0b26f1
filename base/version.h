#ifndef MUSTER_BASE_VERSION_H_
#define MUSTER_BASE_VERSION_H_

namespace muster {

// The version of Muster. tools/install reads it from this line.
inline constexpr char kVersion[] = "0.1.0";

}  // namespace muster

#endif  // MUSTER_BASE_VERSION_H_
