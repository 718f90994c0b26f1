#ifndef MUSTER_COORDINATOR_SERVICE_SERVICES_H_
#define MUSTER_COORDINATOR_SERVICE_SERVICES_H_

#include <grpcpp/impl/codegen/service_type.h>

#include <memory>
#include <vector>

#include "coordinator/service/engine.h"
#include "coordinator/service/rpc_metrics.h"

namespace muster::coordinator {

// The gRPC services of muster.v1 in front of `engine`: Rendezvous, Barrier, KeyValueStore,
// Triggers, Membership, Watch, Session and Admin. No policy: they turn messages into operations and
// answers into messages. Everything passed in must outlive them.
std::vector<std::unique_ptr<grpc::Service>> MakeServices(Engine* engine, RpcMetrics* metrics,
                                                         absl::Time started);

// The value of AdminStatus.version and Welcome.version.
inline constexpr char kVersion[] = "0.1.0";

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_SERVICES_H_
