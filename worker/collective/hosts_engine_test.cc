// Collectives over several hosts, by ranks that act as if they were on several hosts
// (AddShmBackend's `host`).
#include "worker/collective/hosts_engine.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <latch>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/mutex.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/host_lanes.h"
#include "worker/collective/process_group.h"
#include "worker/collective/shm_backend.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using Op = c10d::ReduceOp::RedOpType;

// hosts[r]: that of rank r. Two and two; unequal numbers; ranks of a host that are not consecutive;
// one rank for each host; lanes that cross each other (three and two).
const std::string kLayouts[] = {"aabb", "aab",  "abb",   "abab",  "aaba",
                                "ab",   "abcd", "aaabb", "abbcca"};

c10d::Backend& Backend(Comm& comm) {
  return *comm.process_group()->getBackend(c10::DeviceType::CPU);
}

at::ScalarType Wide(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

at::Tensor Combine(Op op, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == at::kBool) {
    return op == Op::MIN || op == Op::PRODUCT ? at::logical_and(a, b) : at::logical_or(a, b);
  }
  switch (op) {
    case Op::MAX:
      return at::maximum(a, b);
    case Op::MIN:
      return at::minimum(a, b);
    case Op::PRODUCT:
      return at::mul(a, b);
    default:
      return at::add(a, b);
  }
}

// Adds in the order of decision 62: the ranks of each host in their order, then the hosts in
// theirs.
at::Tensor Reference(const std::string& hosts, Op op, const Tensors& inputs) {
  std::vector<std::string> identities;
  for (const char host : hosts) identities.emplace_back(1, host);
  const at::ScalarType wide = Wide(inputs[0].scalar_type());
  at::Tensor all;
  for (const std::vector<int>& ranks : GroupIntoHosts(identities).hosts) {
    at::Tensor sum;
    for (const int r : ranks) {
      const at::Tensor input = inputs[r].to(wide);
      sum = sum.defined() ? Combine(op, sum, input) : input;
    }
    all = all.defined() ? Combine(op, all, sum) : sum;
  }
  if (op == Op::AVG) all = all.div(at::full_like(all, static_cast<double>(hosts.size())));
  return all.to(inputs[0].scalar_type());
}

at::Tensor RandomOf(at::ScalarType dtype, int64_t n) {
  if (dtype == at::kBool) return at::randint(0, 2, {n}, at::kByte).to(at::kBool);
  if (!at::isFloatingType(dtype)) return at::randint(0, 100, {n}, dtype);
  return at::rand({n}).sub(0.5).to(dtype);
}

Tensors RandomInputs(size_t ranks, at::ScalarType dtype, int64_t n) {
  Tensors inputs;
  for (size_t r = 0; r < ranks; ++r) inputs.push_back(RandomOf(dtype, n));
  return inputs;
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

// Makes a tensor with these values, with `pool` in memory that the other ranks of the host can
// access.
at::Tensor Make(Comm& comm, const at::Tensor& values, bool pool) {
  if (!pool) return values.clone();
  at::Tensor tensor = Backend(comm).allocateTensor(values.numel(), values.options());
  return tensor.copy_(values);
}

at::Tensor AllReduced(Comm& comm, at::Tensor tensor, Op op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  Tensors tensors = {std::move(tensor)};
  Backend(comm).allreduce(tensors, options)->wait();
  return tensors[0];
}

at::Tensor ReduceScattered(Comm& comm, at::Tensor input, at::Tensor output, Op op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  Backend(comm)._reduce_scatter_base(output, input, options)->wait();
  return output;
}

const int64_t kSizes[] = {0, 1, 7, 1000, 1025, 70'001, 300'001};

TEST(HostsEngine, AllReduce_EveryLayoutDtypeAndOp_BitsOfTheReference) {
  for (const std::string& hosts : kLayouts) {
    struct Case {
      Op op;
      Tensors inputs;
    };
    // All sizes for one operation, and all operations for two sizes.
    std::vector<Case> cases;
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte,
                             at::kChar, at::kShort, at::kInt, at::kLong, at::kBool}) {
      for (const int64_t n : kSizes) {
        cases.push_back({Op::SUM, RandomInputs(hosts.size(), dtype, n)});
      }
      for (const Op op : {Op::AVG, Op::MAX, Op::MIN, Op::PRODUCT}) {
        if (op == Op::AVG && !at::isFloatingType(dtype)) continue;
        for (const int64_t n : {11, 9'001}) {
          cases.push_back({op, RandomInputs(hosts.size(), dtype, n)});
        }
      }
    }
    RunHostRanks(hosts, [&](Comm& comm) {
      EXPECT_EQ(Backend(comm).getBackendName(), "muster-hosts");
      for (const auto& [op, inputs] : cases) {
        const at::Tensor got = AllReduced(comm, inputs[comm.rank()].clone(), op);
        EXPECT_TRUE(SameBits(got, Reference(hosts, op, inputs)))
            << hosts << " " << got.numel() << " " << got.scalar_type() << " op " << op;
      }
    });
  }
}

TEST(HostsEngine, ReduceScatterAndAllGather_EveryLayout_AlsoInPlaceAndInPools) {
  for (const std::string& hosts : kLayouts) {
    const auto ranks = static_cast<int64_t>(hosts.size());
    struct Case {
      at::ScalarType dtype;
      int64_t part;
      Tensors inputs;
    };
    std::vector<Case> cases;
    // The last size exceeds what is processed at a time.
    for (const auto& [dtype, part] :
         std::vector<std::pair<at::ScalarType, int64_t>>{{at::kFloat, 0},
                                                         {at::kFloat, 1},
                                                         {at::kFloat, 130},
                                                         {at::kFloat, 90'001},
                                                         {at::kBFloat16, 3},
                                                         {at::kBFloat16, 1025},
                                                         {at::kBFloat16, 90'001},
                                                         {at::kFloat, 500'003}}) {
      cases.push_back({dtype, part, RandomInputs(hosts.size(), dtype, ranks * part)});
    }
    RunHostRanks(hosts, [&](Comm& comm) {
      for (const Case& c : cases) {
        const auto part = [&](const at::Tensor& whole, int64_t r) {
          return whole.narrow(0, r * c.part, c.part);
        };
        const at::Tensor sum = Reference(hosts, Op::SUM, c.inputs);
        const at::Tensor mean = Reference(hosts, Op::AVG, c.inputs);
        const std::string where = c10::str(hosts, ", ", c.part, " of ", c.dtype);
        // Bit r: rank r's tensors are in its pool.
        for (const unsigned pools : {0u, ~0u, 0b010010u}) {
          const bool pool = (pools >> comm.rank() & 1) != 0;
          const at::Tensor input = Make(comm, c.inputs[comm.rank()], pool);
          const at::Tensor got =
              ReduceScattered(comm, input, at::zeros({c.part}, c.dtype), Op::SUM);
          EXPECT_TRUE(SameBits(got, part(sum, comm.rank()))) << where;
          EXPECT_TRUE(SameBits(input, c.inputs[comm.rank()])) << "an input is as before";
          // The output is inside the input, as in sharded training.
          at::Tensor own = part(input, comm.rank());
          ReduceScattered(comm, input, own, Op::AVG);
          EXPECT_TRUE(SameBits(own, part(mean, comm.rank()))) << where;
          at::Tensor whole = input;
          Backend(comm)._allgather_base(whole, own)->wait();
          EXPECT_TRUE(SameBits(whole, mean)) << where << ", pools " << pools;
        }
        std::vector<Tensors> lists(1);
        for (int64_t r = 0; r < ranks; ++r) lists[0].push_back(at::zeros({c.part}, c.dtype));
        Tensors mine = {part(c.inputs[comm.rank()], 0).clone()};
        Backend(comm).allgather(lists, mine)->wait();
        for (int64_t r = 0; r < ranks; ++r) {
          EXPECT_TRUE(SameBits(lists[0][r], part(c.inputs[r], 0))) << where;
        }
        std::vector<Tensors> parts(1);
        for (int64_t r = 0; r < ranks; ++r) parts[0].push_back(part(c.inputs[comm.rank()], r));
        Tensors out = {at::zeros({c.part}, c.dtype)};
        Backend(comm).reduce_scatter(out, parts, {})->wait();
        EXPECT_TRUE(SameBits(out[0], part(sum, comm.rank()))) << where;
      }
    });
  }
}

TEST(HostsEngine, AllReduceAndBroadcast_InPoolsOfSome_SameBitsAndEveryRoot) {
  for (const std::string& hosts : kLayouts) {
    for (const int64_t n : {5, 2'000, 1'500'001}) {
      const Tensors inputs = RandomInputs(hosts.size(), at::kFloat, n);
      const at::Tensor sum = Reference(hosts, Op::SUM, inputs);
      RunHostRanks(hosts, [&](Comm& comm) {
        for (const unsigned pools : {~0u, 0b101101u}) {
          const bool pool = (pools >> comm.rank() & 1) != 0;
          Tensors x = {AllReduced(comm, Make(comm, inputs[comm.rank()], pool), Op::SUM)};
          EXPECT_TRUE(SameBits(x[0], sum)) << hosts << " " << n;
          for (size_t root = 0; root < hosts.size(); ++root) {
            x[0].copy_(inputs[comm.rank()]);
            c10d::BroadcastOptions options;
            options.rootRank = static_cast<int64_t>(root);
            Backend(comm).broadcast(x, options)->wait();
            EXPECT_TRUE(SameBits(x[0], inputs[root])) << hosts << " " << n << " from " << root;
          }
          Backend(comm).barrier({})->wait();
        }
      });
    }
  }
}

TEST(HostsEngine, Sum_SameBits_HoweverItIsCut) {
  for (const std::string hosts : {"aab", "abcd", "abbcca"}) {
    const Tensors inputs = RandomInputs(hosts.size(), at::kFloat, 2'300'001);
    const at::Tensor want = Reference(hosts, Op::SUM, inputs);
    RunHostRanks(hosts, [&](Comm& comm) {
      EXPECT_TRUE(SameBits(AllReduced(comm, inputs[comm.rank()].clone(), Op::SUM), want));
      for (const int64_t piece : {100, 5'000, 200'000}) {
        const at::Tensor part = inputs[comm.rank()].narrow(0, 77, piece).clone();
        EXPECT_TRUE(SameBits(AllReduced(comm, part, Op::SUM), want.narrow(0, 77, piece)));
      }
    });
  }
}

TEST(HostsEngine, RandomOperations_AsynchronousAndBesideSendAndReceive_AreTheReference) {
  for (const std::string& hosts : kLayouts) {
    const auto ranks = static_cast<int64_t>(hosts.size());
    struct Step {
      int kind;
      int64_t n;
      int root;
      at::ScalarType dtype;
      bool pool;
      Tensors inputs;
    };
    std::mt19937_64 random(std::hash<std::string>()(hosts));
    std::vector<Step> steps;
    for (int i = 0; i < 40; ++i) {
      const int64_t most = std::array<int64_t, 3>{40, 3'000, 400'000}[random() % 3];
      Step step = {static_cast<int>(random() % 4),
                   static_cast<int64_t>(random() % most),
                   static_cast<int>(random() % hosts.size()),
                   std::array{at::kFloat, at::kHalf, at::kLong}[random() % 3],
                   random() % 2 == 0,
                   {}};
      if (step.kind == 2) step.n = step.n / ranks * ranks;
      step.inputs = RandomInputs(hosts.size(), step.dtype, step.n);
      steps.push_back(std::move(step));
    }
    RunHostRanks(hosts, [&](Comm& comm) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      Tensors results;
      const int next = (comm.rank() + 1) % comm.size();
      const int before = (comm.rank() + comm.size() - 1) % comm.size();
      Tensors sent = {at::full({1000}, comm.rank())}, received = {at::full({1000}, -1)};
      // A tag that a collective might use by mistake.
      works.push_back(Backend(comm).send(sent, next, 1));
      for (const Step& step : steps) {
        Tensors x = {Make(comm, step.inputs[comm.rank()], step.pool)};
        if (step.kind == 0) {
          works.push_back(Backend(comm).allreduce(x, {}));
        } else if (step.kind == 1) {
          c10d::BroadcastOptions options;
          options.rootRank = step.root;
          works.push_back(Backend(comm).broadcast(x, options));
        } else if (step.kind == 2) {
          at::Tensor out = at::zeros({step.n / ranks}, step.dtype);
          works.push_back(Backend(comm)._reduce_scatter_base(out, x[0], {}));
          x[0] = out;
        } else {
          at::Tensor out = at::zeros({step.n * ranks}, step.dtype);
          works.push_back(Backend(comm)._allgather_base(out, x[0], {}));
          x[0] = out;
        }
        results.push_back(x[0]);
      }
      works.push_back(Backend(comm).recv(received, before, 1));
      for (const auto& work : works) work->wait();
      EXPECT_TRUE(at::equal(received[0], at::full({1000}, before)));
      for (size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
        at::Tensor want;
        if (step.kind == 1) {
          want = step.inputs[step.root];
        } else if (step.kind == 3) {
          want = at::cat(step.inputs);
        } else {
          want = Reference(hosts, Op::SUM, step.inputs);
          if (step.kind == 2) {
            want = want.narrow(0, comm.rank() * step.n / ranks, step.n / ranks);
          }
        }
        EXPECT_TRUE(SameBits(results[i], want)) << hosts << " step " << i << " kind " << step.kind;
      }
    });
  }
}

// Sums of these numbers have the same bits in every order.
TEST(HostsEngine, WholeNumbers_EqualGloos) {
  Tensors inputs;
  for (int r = 0; r < 4; ++r) inputs.push_back(at::randint(-1000, 1000, {50'000}).to(at::kFloat));
  std::vector<Tensors> results(2);
  const auto collect = [&](Comm& comm, Tensors* to) {
    const Tensors mine = {AllReduced(comm, inputs[comm.rank()].clone(), Op::SUM),
                          AllReduced(comm, inputs[comm.rank()].clone(), Op::MAX),
                          ReduceScattered(comm, inputs[comm.rank()], at::zeros({12'500}), Op::SUM)};
    if (comm.rank() == 2) *to = mine;
  };
  RunGlooRanks(4, [&](Comm& comm) { collect(comm, &results[0]); });
  RunHostRanks("abab", [&](Comm& comm) { collect(comm, &results[1]); });
  for (size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(SameBits(results[0][i], results[1][i])) << i;
  }
}

TEST(HostsEngine, ComplexNumbersAndOwnTags_GoToGlooOrAreRefused) {
  RunHostRanks("aab", [](Comm& comm) {
    const at::Tensor x = at::full({2}, comm.rank(), at::kComplexFloat);
    Tensors list = {x.clone()};
    Backend(comm).broadcast(list, {})->wait();
    EXPECT_TRUE(at::equal(list[0], at::zeros({2}, at::kComplexFloat)));
    Tensors bytes = {at::zeros({1})};
    EXPECT_THROW(Backend(comm).send(bytes, (comm.rank() + 1) % 3, 0x7f000000), c10::Error);
  });
}

// On both sides of the border between hosts, and inside a host.
TEST(HostsEngine, RanksDisagree_AllThrow_GroupStaysUsable) {
  for (const std::string& hosts : kLayouts) {
    for (size_t odd = 0; odd < hosts.size(); ++odd) {
      std::atomic<size_t> threw = 0;
      RunHostRanks(hosts, [&](Comm& comm) {
        for (const int64_t n : {4, 100'000}) {
          Tensors x = {at::ones({static_cast<size_t>(comm.rank()) == odd ? n + 1 : n})};
          try {
            Backend(comm).allreduce(x)->wait();
          } catch (const c10::Error& e) {
            ++threw;
            EXPECT_THAT(e.what(), AllOf(HasSubstr("ranks disagree about a collective"),
                                        HasSubstr(c10::str("rank ", odd, " called all_reduce"))));
          }
          Tensors y = {at::ones({n})};
          Backend(comm).allreduce(y)->wait();
          EXPECT_EQ(y[0][0].item<float>(), static_cast<float>(comm.size()));
        }
      });
      EXPECT_EQ(threw, 2 * hosts.size()) << hosts << " " << odd;
    }
  }
}

TEST(HostsEngine, RankThatDoesNotCome_IsNamedByAll_ThenUnusable) {
  for (const std::string hosts : {"aabb", "abb", "abcd"}) {
    const int absent = static_cast<int>(hosts.size()) - 1;
    std::latch ready(absent), given_up(absent);
    std::atomic<int> named = 0;
    RunHostRanks(hosts,
                 [&](Comm& comm) {
                   // Alive, but elsewhere, until the others have given up.
                   if (comm.rank() == absent) return given_up.wait();
                   // Each rank's timeout begins with its call.
                   ready.arrive_and_wait();
                   for (int time = 0; time < 2; ++time) {
                     Tensors x = {at::ones({50'000})};
                     try {
                       Backend(comm).allreduce(x)->wait();
                       ADD_FAILURE() << "must throw";
                     } catch (const c10::DistBackendError& e) {
                       const std::string what = e.what_without_backtrace();
                       EXPECT_THAT(what, HasSubstr(c10::str("rank ", absent)));
                       EXPECT_THAT(what, HasSubstr("did not arrive in time"));
                       ++named;
                     }
                   }
                   given_up.count_down();
                 },
                 {.timeout = std::chrono::seconds(3)});
    EXPECT_EQ(named, 2 * absent) << hosts;
  }
}

constexpr int kRounds = 3;

c10::intrusive_ptr<c10d::ProcessGroup> Join(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            const std::string& hosts) {
  GlooOptions gloo;
  gloo.rank = rank;
  gloo.size = static_cast<int>(hosts.size());
  gloo.single_host = true;
  auto group = MakeGlooGroup(store, gloo);
  std::string why;
  TORCH_CHECK(
      AddShmBackend(group, store, std::chrono::minutes(5), &why, std::string(1, hosts[rank])), why);
  return group;
}

std::string RunRounds(Comm& comm, int rounds) {
  try {
    for (int i = 0; i < rounds; ++i) {
      at::Tensor x = at::ones({100'000});
      comm.AllReduce(x, ReduceOp::kSum);
    }
    return "";
  } catch (const c10::DistBackendError& e) {
    return e.what_without_backtrace();
  }
}

// A process of the test below: reports the errors of its collectives after the last rank was
// killed.
int Child(int port, int rank, const std::string& hosts) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(port);
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
  auto comm = MakeC10dComm(Join(store, rank, hosts), {.timeout = std::chrono::minutes(5)});
  if (rank == comm->size() - 1) {
    RunRounds(*comm, kRounds);
    static_cast<c10d::Store&>(*store).set("pid", std::to_string(getpid()));
    pause();
    return 0;
  }
  const std::string said = RunRounds(*comm, kRounds + 1);
  static_cast<c10d::Store&>(*store).set(c10::str("said/", rank), said);
  // Its end must not be a signal to the others.
  store->get_to_str("end");
  return 0;
}

TEST(HostsEngine, Processes_TheDeadOneIsNamedByAll) {
  for (const std::string hosts : {"aabb", "ab", "abbb", "abc"}) {
    c10d::TCPStoreOptions tcp;
    tcp.port = 0;
    tcp.isServer = true;
    tcp.waitWorkers = false;
    auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
    std::vector<pid_t> children;
    const int last = static_cast<int>(hosts.size()) - 1;
    for (int rank = 1; rank <= last; ++rank) {
      std::string program = "/proc/self/exe", flag = "--child";
      std::string port = std::to_string(store->getPort()), number = std::to_string(rank),
                  all = hosts;
      char* argv[] = {program.data(), flag.data(), port.data(), number.data(), all.data(), nullptr};
      children.emplace_back();
      ASSERT_EQ(posix_spawn(&children.back(), program.c_str(), nullptr, nullptr, argv, environ), 0);
    }
    auto comm = MakeC10dComm(Join(store, 0, hosts), {.timeout = std::chrono::minutes(5)});
    ASSERT_EQ(RunRounds(*comm, kRounds), "");
    const pid_t lost = std::stoi(store->get_to_str("pid"));
    EXPECT_EQ(lost, children.back());
    kill(lost, SIGKILL);
    std::vector<std::string> said = {RunRounds(*comm, 1)};
    for (int rank = 1; rank < last; ++rank) {
      said.push_back(store->get_to_str(c10::str("said/", rank)));
    }
    for (const std::string& text : said) {
      EXPECT_THAT(text, AllOf(HasSubstr(c10::str("rank ", last)), HasSubstr(" has died"))) << hosts;
    }
    static_cast<c10d::Store&>(*store).set("end", "");
    for (const pid_t child : children) waitpid(child, nullptr, 0);
  }
}

}  // namespace

int HostsTestChild(int port, int rank, const std::string& hosts) {
  return Child(port, rank, hosts);
}

}  // namespace muster

int main(int argc, char** argv) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  if (argc == 5 && std::string(argv[1]) == "--child") {
    return muster::HostsTestChild(std::atoi(argv[2]), std::atoi(argv[3]), argv[4]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
