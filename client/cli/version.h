#ifndef MUSTER_CLIENT_CLI_VERSION_H_
#define MUSTER_CLIENT_CLI_VERSION_H_

namespace muster::client {

inline constexpr char kVersion[] = "0.1.0";
// The LibTorch that workers are linked with (third_party/torch).
inline constexpr char kTorchVersion[] = "2.11.0";

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_VERSION_H_
