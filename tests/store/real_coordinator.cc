#include "tests/store/real_coordinator.h"

#include "base/log.h"
#include "coordinator/service/server.h"

namespace muster {

RealCoordinator::RealCoordinator() {
  auto server = coordinator::CoordinatorServer::Start({.rpc = {.insecure = true}});
  MUSTER_CHECK(server.ok()) << server.status();
  address_ = (*server)->address();
  server_ = std::shared_ptr<coordinator::CoordinatorServer>(*std::move(server));
}

RealCoordinator::~RealCoordinator() = default;

}  // namespace muster
