#include "worker/collective/shm_backend.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/zeros.h"
#include "base/mutex.h"
#include "base/test_wait.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/process_group.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

c10d::Backend& Backend(Comm& comm) {
  return *comm.process_group()->getBackend(c10::DeviceType::CPU);
}

TEST(ShmBackend, ManyAsyncOperations_CompleteInOrder) {
  RunShmRanks(3, [](Comm& comm) {
    EXPECT_EQ(Backend(comm).getBackendName(), "muster-shm");
    std::vector<at::Tensor> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 60; ++i) {
      // Large and small tensors alternate: helper thread and at once.
      tensors.push_back(at::full({i % 3 == 0 ? 400000 : i + 1}, comm.rank() + i, at::kFloat));
      std::vector<at::Tensor> one = {tensors.back()};
      works.push_back(Backend(comm).allreduce(one));
    }
    for (int i = 0; i < 60; ++i) {
      works[i]->wait();
      EXPECT_TRUE(works[i]->isSuccess());
      EXPECT_TRUE(at::equal(tensors[i], at::full_like(tensors[i], 3 * i + 3)));
      EXPECT_EQ(works[i]->getFuture()->value().toTensorVector()[0].data_ptr(),
                tensors[i].data_ptr());
    }
  });
}

TEST(ShmBackend, Sum_SameBitsAsInRankOrder_HoweverItIsCut) {
  std::vector<at::Tensor> inputs;
  for (int r = 0; r < 4; ++r) inputs.push_back(at::rand({300001}));
  const at::Tensor want = inputs[0].add(inputs[1]).add(inputs[2]).add(inputs[3]);
  RunShmRanks(4, [&](Comm& comm) {
    at::Tensor whole = inputs[comm.rank()].clone();
    comm.AllReduce(whole, ReduceOp::kSum);
    EXPECT_TRUE(at::equal(whole, want));
    for (const int64_t piece : {1000, 5000, 200000}) {
      at::Tensor part = inputs[comm.rank()].narrow(0, 77, piece).clone();
      comm.AllReduce(part, ReduceOp::kSum);
      EXPECT_TRUE(at::equal(part, want.narrow(0, 77, piece)));
    }
  });
}

TEST(ShmBackend, ReduceScatterAndAllGather_AlsoInPlace) {
  RunShmRanks(3, [](Comm& comm) {
    for (const int64_t m : {1, 100, 200000}) {
      at::Tensor input = at::full({3 * m}, comm.rank() + 1.0F);
      // The output is inside the input, as in sharded training.
      at::Tensor output = input.narrow(0, comm.rank() * m, m);
      c10d::ReduceScatterOptions average;
      average.reduceOp = c10d::ReduceOp::AVG;
      Backend(comm)._reduce_scatter_base(output, input, average)->wait();
      EXPECT_TRUE(at::equal(output, at::full({m}, 2.0F)));
      output.fill_(comm.rank());
      Backend(comm)._allgather_base(input, output)->wait();
      for (int r = 0; r < 3; ++r) {
        EXPECT_TRUE(at::equal(input.narrow(0, r * m, m), at::full({m}, static_cast<float>(r))));
      }
      std::vector<std::vector<at::Tensor>> lists = {
          {at::zeros({m}), at::zeros({m}), at::zeros({m})}};
      std::vector<at::Tensor> mine = {at::full({m}, static_cast<float>(comm.rank()))};
      Backend(comm).allgather(lists, mine)->wait();
      EXPECT_EQ(lists[0][2][m - 1].item<float>(), 2);
    }
  });
}

// Returns a tensor in memory that the other ranks can access, with the values of `values`.
at::Tensor InPool(Comm& comm, const at::Tensor& values) {
  at::Tensor tensor = Backend(comm).allocateTensor(values.numel(), values.options());
  return tensor.copy_(values);
}

TEST(ShmBackend, TensorsThatAllReach_SameBitsInPlaceAsByCopies_AlsoWhereSomeAreNot) {
  constexpr int kRanks = 3;
  constexpr int64_t kPart = 70'001;
  std::vector<at::Tensor> inputs;
  for (int r = 0; r < kRanks; ++r) inputs.push_back(at::rand({kRanks * kPart}).sub(0.5));
  RunShmRanks(kRanks, [&](Comm& comm) {
    ASSERT_TRUE(Backend(comm).supportsTensorAlloc(-1));
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const at::Tensor values = inputs[comm.rank()].to(dtype);
      std::vector<at::Tensor> plain = {values.clone()};
      Backend(comm).allreduce(plain)->wait();
      at::Tensor plain_part = at::zeros({kPart}, dtype);
      Backend(comm)._reduce_scatter_base(plain_part, plain[0], {})->wait();
      // Bit r: rank r's tensor is in its pool.
      for (const int pools : {0b111, 0b101, 0b010}) {
        const bool mine = (pools >> comm.rank() & 1) != 0;
        const auto make = [&](const at::Tensor& of) {
          return mine ? InPool(comm, of) : of.clone();
        };
        std::vector<at::Tensor> x = {make(values)};
        Backend(comm).allreduce(x)->wait();
        EXPECT_TRUE(at::equal(x[0], plain[0])) << dtype << " " << pools;
        at::Tensor part = make(at::zeros({kPart}, dtype));
        Backend(comm)._reduce_scatter_base(part, x[0], {})->wait();
        EXPECT_TRUE(at::equal(part, plain_part));
        EXPECT_TRUE(at::equal(x[0], plain[0])) << "an input is as before";
        at::Tensor own = x[0].narrow(0, comm.rank() * kPart, kPart);
        own.fill_(comm.rank());
        Backend(comm)._allgather_base(x[0], own)->wait();
        for (int r = 0; r < kRanks; ++r) {
          EXPECT_TRUE(at::equal(x[0].narrow(0, r * kPart, kPart), at::full({kPart}, r, dtype)));
        }
        c10d::BroadcastOptions from;
        from.rootRank = 2;
        x[0].fill_(comm.rank());
        Backend(comm).broadcast(x, from)->wait();
        EXPECT_TRUE(at::equal(x[0], at::full({kRanks * kPart}, 2, dtype)));
      }
    }
  });
}

TEST(ShmBackend, TensorsInPools_ComeAndGo_WhileOthersAreOnTheirWay) {
  RunShmRanks(2, [](Comm& comm) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> results;
    for (int i = 0; i < 50; ++i) {
      std::vector<at::Tensor> x = {
          InPool(comm, at::full({20'000 + i}, comm.rank() + i, at::kFloat))};
      works.push_back(Backend(comm).allreduce(x));
      // Every other one is destroyed with its work.
      if (i % 2 == 0) results.push_back(x[0]);
    }
    for (size_t i = 0; i < works.size(); ++i) works[i]->wait();
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(at::equal(results[i], at::full_like(results[i], 4.0 * i + 1)));
    }
  });
}

TEST(ShmBackend, RanksDisagree_AllThrow_GroupStaysUsable) {
  std::atomic<int> threw = 0;
  RunShmRanks(2, [&](Comm& comm) {
    std::vector<at::Tensor> x = {at::ones({comm.rank() == 0 ? 4 : 5})};
    try {
      Backend(comm).allreduce(x)->wait();
    } catch (const c10::Error& e) {
      ++threw;
      EXPECT_THAT(e.what(), HasSubstr("rank 1 called all_reduce #1 of 20 bytes of Float"));
    }
    std::vector<at::Tensor> y = {at::ones({4})};
    Backend(comm).allreduce(y)->wait();
    EXPECT_EQ(y[0][0].item<float>(), 2);
  });
  EXPECT_EQ(threw, 2);
}

TEST(ShmBackend, ComplexAndPointToPoint_GoToGloo) {
  RunShmRanks(2, [](Comm& comm) {
    std::vector<at::Tensor> x = {at::full({2}, comm.rank(), at::kFloat)};
    if (comm.rank() == 0) {
      Backend(comm).send(x, 1, 7)->wait();
    } else {
      Backend(comm).recv(x, 0, 7)->wait();
    }
    EXPECT_EQ(x[0][1].item<float>(), 0);
  });
}

constexpr int kRounds = 3;

// The second process: takes part in kRounds collectives, then waits to be killed.
int Child(int port) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(port);
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
  GlooOptions gloo;
  gloo.rank = 1;
  gloo.size = 2;
  gloo.single_host = true;
  auto group = MakeGlooGroup(store, gloo);
  if (!AddShmBackend(group, store, std::chrono::minutes(5))) return 3;
  auto comm = MakeC10dComm(group);
  for (int i = 0; i < kRounds; ++i) {
    at::Tensor x = at::ones({100000});
    comm->AllReduce(x, ReduceOp::kSum);
  }
  static_cast<c10d::Store&>(*store).set("pid", std::to_string(getpid()));
  pause();
  return 0;
}

TEST(ShmBackend, TwoProcesses_TheDeadOneIsNamed) {
  c10d::TCPStoreOptions tcp;
  tcp.port = 0;
  tcp.isServer = true;
  tcp.waitWorkers = false;
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
  std::string program = "/proc/self/exe", flag = "--child", port = std::to_string(store->getPort());
  char* argv[] = {program.data(), flag.data(), port.data(), nullptr};
  pid_t child = 0;
  ASSERT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, argv, environ), 0);
  GlooOptions gloo;
  gloo.size = 2;
  gloo.single_host = true;
  auto group = MakeGlooGroup(store, gloo);
  std::string why;
  ASSERT_TRUE(AddShmBackend(group, store, std::chrono::minutes(5), &why)) << why;
  auto comm = MakeC10dComm(group);
  for (int i = 0; i < kRounds; ++i) {
    at::Tensor x = at::ones({100000});
    comm->AllReduce(x, ReduceOp::kSum);
    EXPECT_EQ(x[99999].item<float>(), 2);
  }
  EXPECT_EQ(store->get_to_str("pid"), std::to_string(child));
  kill(child, SIGKILL);
  try {
    comm->Barrier();
    ADD_FAILURE() << "must throw";
  } catch (const c10::DistBackendError& e) {
    EXPECT_THAT(e.what(), HasSubstr("rank 1 (pid " + std::to_string(child) + ") has died"));
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
}

TEST(ShmBackend, PeerThatDoesNotCome_IsNamedAtTheDeadline) {
  std::atomic<bool> named = false;
  Notification given_up;
  try {
    RunShmRanks(2,
                [&](Comm& comm) {
                  if (comm.rank() == 1) {
                    // Alive, but elsewhere, until the other rank has given up.
                    WaitUntil([&] { return named.load(); });
                    return;
                  }
                  try {
                    comm.Barrier();
                  } catch (const c10::DistBackendError& e) {
                    EXPECT_THAT(e.what(),
                                AllOf(HasSubstr("rank 1"), HasSubstr("did not arrive in time")));
                    named = true;
                  }
                  named = true;
                },
                {.timeout = std::chrono::milliseconds(200)});
  } catch (const std::exception& e) {
    ADD_FAILURE() << e.what();
  }
  EXPECT_TRUE(named);
}

}  // namespace

int ShmTestChild(int port) { return Child(port); }

}  // namespace muster

int main(int argc, char** argv) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  if (argc == 3 && std::string(argv[1]) == "--child") {
    return muster::ShmTestChild(std::atoi(argv[2]));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
