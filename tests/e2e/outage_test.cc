// kill -9 of the coordinator in the middle of a job of two agents with two workers each.
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "rpc/channel.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

class OutageTest : public ClusterFixture {
 protected:
  std::unique_ptr<Command> Node(int rank, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--machine_rank", absl::StrCat(rank)});
    return Agent("outage", 2, 4, {Runfile("tests/e2e/outage_worker")}, std::move(more));
  }
  // Waits until the barrier "meet" has `count` arrivals.
  void WaitForArrivals(int count) {
    auto stub = v1::Barrier::NewStub(*rpc::Connect(address_));
    v1::DescribeBarrierReply reply;
    while (reply.report().arrived() < count) {
      grpc::ClientContext context;
      rpc::SetTimeout(context, absl::Minutes(1));
      v1::DescribeBarrierRequest request;
      request.set_job_id("outage");
      request.set_barrier_id("meet");
      stub->Describe(&context, request, &reply);
    }
  }
};

TEST_F(OutageTest, CoordinatorKilledWithABarrierOpen_NothingFailsAndNothingHappensTwice) {
  auto coordinator = StartCoordinator();
  auto first = Node(0);
  auto second = Node(1);
  first->WaitForLine("[0]: arriving");
  second->WaitForLine("[2]: arriving");
  first->WaitForLine("[1]: adding");
  second->WaitForLine("[3]: adding");
  WaitForArrivals(2);
  // Two ranks wait in the barrier, two have a request on the way.
  coordinator->Signal(SIGKILL);
  EXPECT_EQ(coordinator->Wait(), -SIGKILL);
  coordinator = StartCoordinator();
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  for (int rank : {0, 1, 2, 3}) {
    const Command& agent = rank < 2 ? *first : *second;
    EXPECT_THAT(agent.out(), AllOf(Contains(absl::StrCat("[", rank, "]: met 4")),
                                   Contains(absl::StrCat("[", rank, "]: count 200"))));
  }
  coordinator->Signal(SIGTERM);
  EXPECT_EQ(coordinator->Wait(), 0) << coordinator->err_text();
}

TEST_F(OutageTest, CoordinatorDoesNotComeBack_OneLineNamesItAndHowLongItWasAway) {
  auto coordinator = StartCoordinator();
  auto first = Node(0, {"--outage_tolerance", "300ms"});
  auto second = Node(1, {"--outage_tolerance", "300ms"});
  first->WaitForLine("[1]: adding");
  second->WaitForLine("[3]: adding");
  coordinator->Signal(SIGKILL);
  coordinator->Wait();
  for (Command* agent : {first.get(), second.get()}) {
    EXPECT_EQ(agent->Wait(), 1);
    EXPECT_THAT(
        agent->err_text(),
        AllOf(HasSubstr(absl::StrCat("the coordinator at ", address_, " has been away for ")),
              HasSubstr("longer than the 300ms that are tolerated")));
  }
}

}  // namespace
}  // namespace muster
