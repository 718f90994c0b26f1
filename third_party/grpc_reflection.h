#ifndef MUSTER_THIRD_PARTY_GRPC_REFLECTION_H_
#define MUSTER_THIRD_PARTY_GRPC_REFLECTION_H_

namespace muster {

// Debian's libgrpc++1.51. A program that has it loaded adds reflection to each gRPC server that it
// builds; there is no call to leave it out.
inline constexpr char kGrpcReflectionLibrary[] = "libgrpc++_reflection.so.1.51";

}  // namespace muster

#endif  // MUSTER_THIRD_PARTY_GRPC_REFLECTION_H_
