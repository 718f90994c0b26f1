// Agents that reach the coordinator through another agent, their hub, as real processes.
#include <grpcpp/client_context.h>
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "rpc/channel.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

class HubTest : public ClusterFixture {
 protected:
  void SetUp() override {
    ClusterFixture::SetUp();
    coordinator_ = StartCoordinator({"--direct_agents", "0"});
    channel_ = *rpc::Connect(address_);
  }
  // Starts one machine of job "j", with two workers that pass barriers, wait for the key "shown"
  // and meet.
  void StartNode(int rank, int num_machines) {
    nodes_.push_back(Agent("j", num_machines, 2 * num_machines,
                           {Runfile("tests/e2e/barrier_worker"), "slow"},
                           {"--machine_rank", absl::StrCat(rank), "--hub_listen", "127.0.0.1:0"}));
  }
  v1::StatusReply Status() {
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(1));
    v1::StatusReply reply;
    v1::Admin::NewStub(channel_)->Status(&context, {}, &reply);
    return reply;
  }
  // Waits until there are `agents` agents, `behind` of them behind a hub.
  void WaitForAgents(int agents, int behind) {
    v1::StatusReply reply;
    while (reply.agents() != agents || reply.agents_behind_hubs() != behind) reply = Status();
  }
  void Put(const std::string& key) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(1));
    v1::TxnRequest request;
    request.mutable_fence()->set_job_id("j");
    request.add_then()->mutable_put()->set_key(key);
    v1::TxnReply reply;
    EXPECT_TRUE(v1::KeyValueStore::NewStub(channel_)->Txn(&context, request, &reply).ok());
  }
  void ExpectSuccess() {
    for (const auto& node : nodes_) EXPECT_EQ(node->Wait(), 0) << node->err_text();
  }

  std::unique_ptr<Command> coordinator_;
  std::vector<std::unique_ptr<Command>> nodes_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(HubTest, TwoAgentsBehindAThird_PassBarriersAndStatusShowsThem) {
  StartNode(0, 3);
  WaitForAgents(1, 0);
  StartNode(1, 3);
  StartNode(2, 3);
  nodes_[1]->WaitForLine("[2]: stepped");
  WaitForAgents(3, 2);
  EXPECT_EQ(Status().hubs(), 1);
  for (int rank = 0; rank < 6; ++rank) {
    nodes_[rank / 2]->WaitForLine(absl::StrCat("[", rank, "]: stepped"));
  }
  Put("shown");
  ExpectSuccess();
  for (const int node : {1, 2}) {
    EXPECT_THAT(nodes_[node]->err(), Contains(HasSubstr("this node uses hub ")));
  }
}

TEST_F(HubTest, HubKilled_TheJobBehindItGoesOn) {
  // The hub is an agent of another job.
  const auto hub = Agent("other", 1, 1, {"/bin/sh", "-c", "echo up; exec tail -f /dev/null"},
                         {"--hub_listen", "127.0.0.1:0"});
  hub->WaitForLine("up");
  StartNode(0, 2);
  StartNode(1, 2);
  nodes_[0]->WaitForLine("[0]: stepped");
  WaitForAgents(3, 2);
  hub->Signal(SIGKILL);
  EXPECT_EQ(hub->Wait(), -SIGKILL);
  Put("shown");
  ExpectSuccess();
  for (const auto& node : nodes_) {
    EXPECT_THAT(node->err(),
                Contains(AllOf(HasSubstr("returns to the coordinator at"), HasSubstr("refused"))));
  }
}

TEST_F(HubTest, CoordinatorKilled_AgentsBehindAHubComeBackThroughIt) {
  StartNode(0, 2);
  WaitForAgents(1, 0);
  StartNode(1, 2);
  nodes_[0]->WaitForLine("[0]: stepped");
  WaitForAgents(2, 1);
  coordinator_->Signal(SIGKILL);
  EXPECT_EQ(coordinator_->Wait(), -SIGKILL);
  coordinator_ = StartCoordinator({"--direct_agents", "0"});
  WaitForAgents(2, 1);
  Put("shown");
  ExpectSuccess();
}

TEST_F(HubTest, PortThatIsTaken_IsSaid) {
  const auto refused = Agent("j", 1, 1, {"/bin/true"}, {"--hub_listen", address_});
  EXPECT_EQ(refused->Wait(), 4);
  EXPECT_THAT(refused->err_text(), HasSubstr(address_));
  const auto anywhere = Agent("j", 1, 1, {"/bin/true"}, {"--hub_listen", "0.0.0.0:0"});
  EXPECT_EQ(anywhere->Wait(), 2);
  EXPECT_THAT(anywhere->err_text(), HasSubstr("hub_listen 0.0.0.0:0: other agents connect to"));
}

}  // namespace
}  // namespace muster
