#include "worker/job/join_job.h"

#include <signal.h>

#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/full.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rpc/test_listener.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "worker/job/fake_coordinator.h"
#include "worker/job/thread_share.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Environment Env(Variables variables) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  variables["MUSTER_CPU"] = "1";
  const auto env = ReadEnvironment(variables);
  EXPECT_TRUE(env.ok()) << env.status();
  return env.ok() ? *env : Environment{};
}

// Lets every rank join with variables(rank) and add up the ranks.
void ExpectWorldOf(int n, const std::function<Variables(int)>& variables,
                   const std::function<void(JoinedProcess&, int)>& check = nullptr,
                   const JoinJobOptions& options = {}) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) {
    threads.emplace_back([&, i] {
      auto joined = JoinJob(Env(variables(i)), options);
      ASSERT_TRUE(joined.ok()) << joined.status();
      EXPECT_EQ(joined->comm->size(), n);
      EXPECT_EQ(joined->comm->rank(), joined->environment.rank.value);
      at::Tensor x = at::full({1}, joined->comm->rank());
      joined->comm->AllReduce(x, ReduceOp::kSum);
      EXPECT_EQ(x.item<int64_t>(), n * (n - 1) / 2);
      if (check) check(*joined, i);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Makes the store of torchrun's agent, on a free port.
c10::intrusive_ptr<c10d::TCPStore> AgentStore() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

TEST(JoinJob, Alone_LocalCommAndNothingElse) {
  auto joined = JoinJob(Env({}));
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->comm->size(), 1);
  EXPECT_EQ(joined->comm->process_group(), nullptr);
  EXPECT_EQ(joined->coordinator, nullptr);
  EXPECT_EQ(joined->store, nullptr);
  EXPECT_TRUE(joined->device.is_cpu());
}

// SIGPIPE determines what a write to a peer that is gone does.
TEST(JoinJob, WithPeers_SurvivesThatTheyVanishAndAloneKeepsTheDefault) {
  signal(SIGPIPE, SIG_DFL);
  const auto action = [] {
    struct sigaction now = {};
    sigaction(SIGPIPE, nullptr, &now);
    return now.sa_handler;
  };
  ASSERT_TRUE(JoinJob(Env({})).ok());
  EXPECT_EQ(action(), SIG_DFL);
  FakeCoordinator fake;
  ExpectWorldOf(
      2,
      [&](int i) -> Variables {
        return {{"MUSTER_COORDINATOR", fake.address()},
                {"MUSTER_JOB", "job"},
                {"MUSTER_WORKER_ID", "w" + std::to_string(i)}};
      },
      [&](const JoinedProcess&, int) {
        EXPECT_NE(action(), SIG_DFL);
        EXPECT_NE(action(), SIG_IGN);
      },
      {.min_workers = 2});
}

// mpirun and srun set no OMP_NUM_THREADS.
TEST(JoinJob, ThreadsUnset_AreDividedAmongTheProcessesOfTheNode) {
  unsetenv("OMP_NUM_THREADS");
  const Cores cores = ReadCores({});
  const int before = at::get_num_threads();
  FakeCoordinator fake;
  const auto variables = [&](int i) -> Variables {
    return {{"MUSTER_COORDINATOR", fake.address()},
            {"MUSTER_JOB", "job" + std::to_string(i / 2)},
            {"OMPI_COMM_WORLD_RANK", std::to_string(i % 2)},
            {"OMPI_COMM_WORLD_SIZE", "2"},
            {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(i % 2)},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  };
  const auto join = [&](int job) {
    at::set_num_threads(cores.of_process);
    std::vector<int> threads(2);
    ExpectWorldOf(
        2, [&](int i) { return variables(2 * job + i); },
        [&](const JoinedProcess& joined, int) {
          threads[joined.environment.rank.value] = at::get_num_threads();
        });
    return threads;
  };
  const int share = ThreadShare(cores, 2, cores.of_process);
  EXPECT_THAT(join(0), Each(share));
  ASSERT_EQ(setenv("OMP_NUM_THREADS", "7", 1), 0);
  EXPECT_THAT(join(1), Each(cores.of_process));
  unsetenv("OMP_NUM_THREADS");
  at::set_num_threads(before);
}

TEST(JoinJob, AloneWithGroup_HasAProcessGroup) {
  auto joined = JoinJob(Env({}), {.always_group = true});
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_NE(joined->comm->process_group(), nullptr);
}

TEST(JoinJob, ThroughTheCoordinator_SeatDecides) {
  FakeCoordinator fake;
  ExpectWorldOf(
      3,
      [&](int i) -> Variables {
        return {{"MUSTER_COORDINATOR", fake.address()},
                {"MUSTER_JOB", "job"},
                {"MUSTER_RANK", std::to_string(i)},
                {"MUSTER_WORLD_SIZE", "3"},
                {"MUSTER_LOCAL_RANK", std::to_string(i)},
                {"MUSTER_LOCAL_WORLD_SIZE", "3"},
                {"MUSTER_SHM", "1"}};
      },
      [](const JoinedProcess& joined, int i) {
        EXPECT_EQ(joined.comm->rank(), i);
        EXPECT_EQ(joined.environment.rank.source, "rendezvous");
        EXPECT_EQ(joined.environment.generation.value, 1);
        ASSERT_NE(joined.coordinator, nullptr);
        EXPECT_TRUE(joined.coordinator->Barrier("end", absl::Seconds(60)).ok());
      });
}

// Nodes are hosts, even if they are on one machine; MUSTER_SHM=no keeps Gloo.
TEST(JoinJob, SeveralNodes_SharedMemoryInsideAndARingBetween) {
  for (const bool shared_memory : {true, false}) {
    const auto server = AgentStore();
    ExpectWorldOf(
        4,
        [&](int i) -> Variables {
          return {{"RANK", std::to_string(i)},
                  {"WORLD_SIZE", "4"},
                  {"LOCAL_RANK", std::to_string(i % 2)},
                  {"LOCAL_WORLD_SIZE", "2"},
                  {"GROUP_RANK", std::to_string(i / 2)},
                  {"GROUP_WORLD_SIZE", "2"},
                  {"MASTER_ADDR", "127.0.0.1"},
                  {"MASTER_PORT", std::to_string(server->getPort())},
                  {"MUSTER_SHM", shared_memory ? "yes" : "no"},
                  {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
        },
        [&](JoinedProcess& joined, int i) {
          const auto backend = [](Comm& comm) {
            return comm.process_group()->getBackend(c10::DeviceType::CPU)->getBackendName();
          };
          EXPECT_EQ(backend(*joined.comm), shared_memory ? "muster-hosts" : "gloo");
          auto inside = MakeSubgroup(joined, {0, 1});
          auto between = MakeSubgroup(joined, {1, 3});
          ASSERT_TRUE(inside.ok() && between.ok());
          if (i < 2) {
            EXPECT_EQ(backend(**inside), shared_memory ? "muster-shm" : "gloo");
          }
          if (i % 2 == 1) {
            EXPECT_EQ(backend(**between), shared_memory ? "muster-hosts" : "gloo");
            at::Tensor x = at::full({100'000}, i);
            (*between)->AllReduce(x, ReduceOp::kSum);
            EXPECT_EQ(x[99'999].item<int64_t>(), 4);
          }
          joined.comm->Barrier();
        });
  }
}

TEST(JoinJob, WithoutRanks_TheRendezvousGivesThem) {
  FakeCoordinator fake;
  const auto variables = [&](int i) -> Variables {
    return {{"MUSTER_COORDINATOR", fake.address()},
            {"MUSTER_JOB", "job"},
            {"MUSTER_WORKER_ID", "w" + std::to_string(i)}};
  };
  // They may be on several hosts: the route towards the coordinator is loopback.
  ExpectWorldOf(2, variables, nullptr, {.min_workers = 2});
  const auto refused = JoinJob(Env(variables(0)));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("no rank is"));
}

TEST(JoinJob, TorchrunsAgentStore_EveryRankIsAClient) {
  const auto server = AgentStore();
  ExpectWorldOf(
      2,
      [&](int i) -> Variables {
        return {{"RANK", std::to_string(i)},
                {"WORLD_SIZE", "2"},
                {"LOCAL_RANK", std::to_string(i)},
                {"LOCAL_WORLD_SIZE", "2"},
                {"MASTER_ADDR", "127.0.0.1"},
                {"MASTER_PORT", std::to_string(server->getPort())},
                {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                {"TORCHELASTIC_RESTART_COUNT", "1"},
                {"MUSTER_DEBUG", "1"}};
      },
      [](const JoinedProcess& joined, int) {
        EXPECT_EQ(joined.coordinator, nullptr);
        EXPECT_NE(joined.comm->process_group(), nullptr);
      });
}

TEST(JoinJob, TwiceAtOnceWithoutACoordinator_KeysAreApart) {
  const auto server = AgentStore();
  const auto variables = [&](int i) -> Variables {
    return {{"RANK", std::to_string(i)},
            {"WORLD_SIZE", "2"},
            {"LOCAL_RANK", std::to_string(i)},
            {"LOCAL_WORLD_SIZE", "2"},
            {"MASTER_ADDR", "127.0.0.1"},
            {"MASTER_PORT", std::to_string(server->getPort())},
            {"MUSTER_SHM", "1"},
            {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  };
  ExpectWorldOf(2, variables, [&](const JoinedProcess& first, int i) {
    // The first is still alive, with keys of the same names.
    auto second = JoinJob(Env(variables(i)));
    ASSERT_TRUE(second.ok()) << second.status();
    for (int round = 0; round < 3; ++round) {
      at::Tensor x = at::full({1000}, i + 1), y = at::full({1000}, 10 * (i + 1));
      first.comm->AllReduce(x, ReduceOp::kSum);
      second->comm->AllReduce(y, ReduceOp::kSum);
      EXPECT_EQ(x[999].item<int64_t>(), 3);
      EXPECT_EQ(y[999].item<int64_t>(), 30);
    }
  });
}

TEST(JoinJob, TwiceAtOnceUnderACoordinator_IsRefused) {
  FakeCoordinator fake;
  const Variables variables = {{"MUSTER_COORDINATOR", fake.address()},
                               {"MUSTER_JOB", "job"},
                               {"MUSTER_RANK", "0"},
                               {"MUSTER_WORLD_SIZE", "1"}};
  {
    const auto first = JoinJob(Env(variables));
    ASSERT_TRUE(first.ok()) << first.status();
    const auto second = JoinJob(Env(variables));
    EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(second.status().message()),
                HasSubstr("this process has its place in job 'job' already"));
  }
  const auto third = JoinJob(Env(variables));
  EXPECT_TRUE(third.ok()) << third.status();
}

TEST(MakeBackgroundComm, ThreadBesideTheJob_HasASequenceOfItsOwn) {
  FakeCoordinator fake;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      auto joined = JoinJob(Env({{"MUSTER_COORDINATOR", fake.address()},
                                 {"MUSTER_JOB", "job"},
                                 {"MUSTER_RANK", std::to_string(i)},
                                 {"MUSTER_WORLD_SIZE", "2"},
                                 {"MUSTER_LOCAL_RANK", std::to_string(i)},
                                 {"MUSTER_LOCAL_WORLD_SIZE", "2"}}));
      ASSERT_TRUE(joined.ok()) << joined.status();
      auto beside = MakeBackgroundComm(*joined);
      ASSERT_TRUE(beside.ok()) << beside.status();
      const auto gather = [i](Comm& comm, const std::string& what) {
        for (int round = 0; round < 50; ++round) {
          const auto all = comm.AllGatherBytes(what + std::to_string(i));
          ASSERT_EQ(all.size(), 2u);
          EXPECT_EQ(all[0], what + "0");
          EXPECT_EQ(all[1], what + "1");
        }
      };
      std::thread thread([&] { gather(**beside, "beside"); });
      gather(*joined->comm, "job");
      thread.join();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(MakeSubgroup, ListedRanks_ReduceAmongThemselves) {
  for (const char* const shared_memory : {"0", "1"}) {
    FakeCoordinator fake;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        auto joined = JoinJob(Env({{"MUSTER_COORDINATOR", fake.address()},
                                   {"MUSTER_JOB", "job"},
                                   {"MUSTER_RANK", std::to_string(i)},
                                   {"MUSTER_WORLD_SIZE", "3"},
                                   {"MUSTER_LOCAL_RANK", std::to_string(i)},
                                   {"MUSTER_LOCAL_WORLD_SIZE", "3"},
                                   {"MUSTER_SHM", shared_memory}}));
        ASSERT_TRUE(joined.ok()) << joined.status();
        auto outer = MakeSubgroup(*joined, {2, 0});
        auto late = MakeSubgroup(*joined, {1, 2});
        auto alone = MakeSubgroup(*joined, {1});
        ASSERT_TRUE(outer.ok() && late.ok() && alone.ok());
        EXPECT_EQ(*outer == nullptr, i == 1);
        EXPECT_EQ(*late == nullptr, i == 0);
        EXPECT_EQ(*alone == nullptr, i != 1);
        const auto sum = [&](Comm& comm) {
          at::Tensor x = at::full({100}, i + 1);
          comm.AllReduce(x, ReduceOp::kSum);
          return x[99].item<int64_t>();
        };
        if (*outer != nullptr) {
          EXPECT_EQ((*outer)->rank(), i == 0 ? 0 : 1);
          EXPECT_EQ(sum(**outer), 4);
        }
        EXPECT_EQ(sum(*joined->comm), 6);
        if (*late != nullptr) {
          EXPECT_EQ(sum(**late), 5);
        }
        const absl::Status differ = MakeSubgroup(*joined, {0, i}).status();
        EXPECT_EQ(differ.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(differ.message()), HasSubstr("every rank of the job makes"));
        EXPECT_THAT(std::string(MakeSubgroup(*joined, {0, 3}).status().message()),
                    HasSubstr("there is no rank 3 among 3"));
        EXPECT_THAT(std::string(MakeSubgroup(*joined, {1, 1}).status().message()),
                    HasSubstr("rank 1 is listed twice"));
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(JoinJob, PortTaken_ErrorNamesItAndWhereItCameFrom) {
  const rpc::TestListener taken;
  const std::string port = std::to_string(taken.port());
  const auto joined = JoinJob(Env({{"RANK", "0"},
                                   {"WORLD_SIZE", "2"},
                                   {"MASTER_ADDR", "127.0.0.1"},
                                   {"MASTER_PORT", port},
                                   {"MUSTER_TIMEOUT", "5s"}}));
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(joined.status().message()),
              AllOf(HasSubstr("rank 0 of 2 cannot open a store"), HasSubstr(port),
                    HasSubstr("MASTER_PORT")));
}

TEST(JoinJob, NoCoordinatorAtTheAddress_Unavailable) {
  const auto joined = JoinJob(Env({{"MUSTER_COORDINATOR", "127.0.0.1:1"},
                                   {"MUSTER_JOB", "job"},
                                   {"MUSTER_RANK", "0"},
                                   {"MUSTER_WORLD_SIZE", "1"},
                                   {"MUSTER_TIMEOUT", "50ms"}}));
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(joined.status().message()), HasSubstr("127.0.0.1:1"));
}

}  // namespace
}  // namespace muster
