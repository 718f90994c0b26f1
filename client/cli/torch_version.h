#ifndef MUSTER_CLIENT_CLI_TORCH_VERSION_H_
#define MUSTER_CLIENT_CLI_TORCH_VERSION_H_

namespace muster::client {

// The version of LibTorch with which workers are linked (third_party/torch).
inline constexpr char kTorchVersion[] = "2.11.0";

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_TORCH_VERSION_H_
