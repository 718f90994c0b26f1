#include "agent/node_service.h"

#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/node.grpc.pb.h"
#include "rpc/server.h"
#include "rpc/test_listener.h"

namespace muster::agent {
namespace {

// Refuses the node at its first call, which ends its service.
class RefusingNodes final : public v1::Nodes::Service {
 public:
  grpc::Status Sync(grpc::ServerContext*, const v1::SyncNodeRequest* request,
                    v1::SyncNodeReply*) override {
    MutexLock lock(&mu_);
    request_ = *request;
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "not this node");
  }
  v1::SyncNodeRequest request() {
    MutexLock lock(&mu_);
    return request_;
  }

 private:
  Mutex mu_;
  v1::SyncNodeRequest request_ ABSL_GUARDED_BY(mu_);
};

// A request says how long attempts have run: one that was made while the coordinator was away would
// give them that time again.
TEST(NodeServiceTest, CoordinatorWasAway_TheRequestIsMadeWhenItIsThere) {
  const TestFolder folder;
  auto before = std::make_unique<rpc::TestListener>();
  NodeServiceOptions options;
  options.coordinator = absl::StrCat("127.0.0.1:", before->port());
  options.state_dir = folder.Path("state");
  options.node = "n";
  options.info.set_cpus(1);
  options.control_groups = "off";
  absl::Status ended;
  std::thread service([&] { ended = RunNodeService(options); });
  // The first call fails with the first connection, and after these the next call has begun.
  constexpr int kConnections = 6;
  for (int i = 0; i < kConnections; ++i) close(accept(before->fd(), nullptr, nullptr));
  before.reset();
  const int64_t back = absl::ToUnixMicros(absl::Now());
  RefusingNodes nodes;
  const auto server =
      rpc::Server::Start({.listen = options.coordinator, .insecure = true}, {&nodes});
  EXPECT_TRUE(server.ok()) << server.status();
  service.join();
  EXPECT_EQ(ended.code(), absl::StatusCode::kPermissionDenied) << ended;
  EXPECT_EQ(nodes.request().node(), "n");
  // The number of a request is the time when it is made, in microseconds.
  EXPECT_GE(nodes.request().sequence(), static_cast<uint64_t>(back));
}

}  // namespace
}  // namespace muster::agent
