#include "worker/collective/c10d_comm.h"

#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/_neg_view.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/complex.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/real.h"
#include "ATen/ops/repeat_interleave.h"
#include "ATen/ops/zeros.h"
#include "base/mutex.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/collectives.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/rank_order_reduce.h"
#include "worker/collective/test_error.h"
#include "worker/collective/test_lost_memory.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

using Body = std::function<void(Comm&)>;

enum class Kind { kThread, kGloo, kGlooUnchecked, kShm, kShmUnchecked, kHosts, kHostsUnchecked };

std::string KindName(const ::testing::TestParamInfo<Kind>& info) {
  switch (info.param) {
    case Kind::kThread:
      return "Thread";
    case Kind::kGloo:
      return "Gloo";
    case Kind::kGlooUnchecked:
      return "GlooUnchecked";
    case Kind::kShm:
      return "Shm";
    case Kind::kShmUnchecked:
      return "ShmUnchecked";
    case Kind::kHosts:
      return "Hosts";
    case Kind::kHostsUnchecked:
      return "HostsUnchecked";
  }
  return "";
}

// Two, with the ranks by turns.
std::string Hosts(int n) {
  std::string hosts;
  for (int r = 0; r < n; ++r) hosts += r % 2 == 0 ? 'a' : 'b';
  return hosts;
}

class CommTest : public ::testing::TestWithParam<Kind> {
 protected:
  void Run(int n, const Body& body) {
    switch (GetParam()) {
      case Kind::kThread:
        RunRanks(n, body);
        break;
      case Kind::kGloo:
        RunGlooRanks(n, body);
        break;
      case Kind::kGlooUnchecked:
        RunGlooRanks(n, body, {.check = false});
        break;
      case Kind::kShm:
        RunShmRanks(n, body);
        break;
      case Kind::kShmUnchecked:
        RunShmRanks(n, body, {.check = false});
        break;
      case Kind::kHosts:
        RunHostRanks(Hosts(n), body);
        break;
      case Kind::kHostsUnchecked:
        RunHostRanks(Hosts(n), body, {.check = false});
        break;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Every, CommTest,
                         ::testing::Values(Kind::kThread, Kind::kGloo, Kind::kGlooUnchecked,
                                           Kind::kShm, Kind::kShmUnchecked, Kind::kHosts,
                                           Kind::kHostsUnchecked),
                         KindName);

// Small ones travel inside a frame, large ones do not.
const int64_t kSizes[] = {0, 1, 3, 5000};

TEST_P(CommTest, AllReduce_EveryOpSizeAndDtype) {
  Run(3, [](Comm& comm) {
    for (const int64_t n : kSizes) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
                               at::kInt, at::kShort, at::kByte}) {
        const struct {
          ReduceOp op;
          int want;
        } cases[] = {
            {ReduceOp::kSum, 12}, {ReduceOp::kMean, 4}, {ReduceOp::kMax, 6}, {ReduceOp::kMin, 2}};
        for (const auto& c : cases) {
          at::Tensor x = at::full({n}, 2 * (comm.rank() + 1), dtype);
          if (c.op == ReduceOp::kMean && !x.is_floating_point()) continue;
          comm.AllReduce(x, c.op);
          EXPECT_TRUE(at::equal(x, at::full({n}, c.want, dtype))) << dtype << " " << n;
        }
      }
      at::Tensor flags = at::full({n}, comm.rank() == 1, at::kBool);
      comm.AllReduce(flags, ReduceOp::kMax);
      EXPECT_TRUE(at::equal(flags, at::ones({n}, at::kBool)));
      comm.AllReduce(flags, ReduceOp::kSum);
      EXPECT_TRUE(at::equal(flags, at::ones({n}, at::kBool)));
    }
  });
}

TEST_P(CommTest, AllReduce_SameBitsOnEveryRank) {
  Run(3, [](Comm& comm) {
    for (const int64_t n : kSizes) {
      at::Tensor x = at::rand({n});
      comm.AllReduce(x, ReduceOp::kMean);
      for (const at::Tensor& other : comm.AllGather(x)) EXPECT_TRUE(at::equal(other, x));
    }
  });
}

TEST_P(CommTest, AllReduce_ComplexNumbers_OfAnySize_ByParts) {
  Run(3, [](Comm& comm) {
    for (const int64_t n : kSizes) {
      for (const auto dtype : {at::kComplexFloat, at::kComplexDouble}) {
        const auto make = [&](int rank) {
          return at::complex(at::arange(n, at::kDouble) + rank, at::arange(n, at::kDouble) * rank)
              .to(dtype);
        };
        at::Tensor x = make(comm.rank());
        comm.AllReduce(x, ReduceOp::kSum);
        EXPECT_TRUE(at::equal(x, make(0) + make(1) + make(2))) << dtype << " " << n;
        x = make(comm.rank()).conj();
        comm.AllReduce(x, ReduceOp::kMean);
        EXPECT_TRUE(at::equal(x.resolve_conj(), make(1).conj().resolve_conj()))
            << dtype << " " << n;
      }
    }
  });
}

// Without Gloo alone, which adds as it likes.
class OwnSumsTest : public CommTest {};
INSTANTIATE_TEST_SUITE_P(Every, OwnSumsTest,
                         ::testing::Values(Kind::kThread, Kind::kShm, Kind::kShmUnchecked,
                                           Kind::kHosts, Kind::kHostsUnchecked),
                         KindName);

// Whether they travel in a frame or not, their sum is rounded once.
TEST_P(OwnSumsTest, AllReduceOfHalfAndBFloat16_SameResultForEverySize) {
  Run(3, [](Comm& comm) {
    for (const auto& [dtype, large, small] :
         {std::tuple(at::kBFloat16, 256.0, 0.75), std::tuple(at::kHalf, 2048.0, 0.75)}) {
      for (const int64_t n : {8, 8192}) {
        at::Tensor x = at::full({n}, comm.rank() == 0 ? large : small, dtype);
        comm.AllReduce(x, ReduceOp::kSum);
        EXPECT_TRUE(at::equal(x, at::full({n}, large + 2 * small, at::kFloat).to(dtype)))
            << dtype << " " << n << " " << x[0].item<float>();
      }
    }
  });
}

// Also in a frame or in pieces.
TEST_P(CommTest, MeanOfHalfAndBFloat16_IsRoundedOnceAndDoesNotOverflow) {
  Run(3, [](Comm& comm) {
    for (const int64_t n : {1, 8, 8192}) {
      at::Tensor x = at::full({n}, 40'000 + 1000 * comm.rank(), at::kHalf);
      comm.AllReduce(x, ReduceOp::kMean);
      EXPECT_TRUE(at::equal(x, at::full({n}, 41'000, at::kHalf))) << n << " " << x[0].item<float>();
      const at::Tensor parts = at::full({3 * n}, 40'000 + 1000 * comm.rank(), at::kHalf);
      EXPECT_TRUE(
          at::equal(comm.ReduceScatter(parts, ReduceOp::kMean), at::full({n}, 41'000, at::kHalf)))
          << n;
      // The sum is 778 and its third 259.33; in bf16 they would be 776 and, of that, 258.
      const double values[] = {256, 260, 262};
      at::Tensor y = at::full({n}, values[comm.rank()], at::kBFloat16);
      comm.AllReduce(y, ReduceOp::kMean);
      EXPECT_TRUE(at::equal(y, at::full({n}, 260, at::kBFloat16)))
          << n << " " << y[0].item<float>();
    }
  });
}

TEST_P(CommTest, AllReduce_OfADtypeThatNoBackendAdds_IsRefused_GroupStaysUsable) {
  Run(2, [](Comm& comm) {
    for (const int64_t n : {4, 4096}) {
      for (const auto dtype : {at::kFloat8_e4m3fn, at::kUInt32}) {
        at::Tensor x = at::empty({n}, dtype);
        EXPECT_THAT(ErrorOf([&] { comm.AllReduce(x, ReduceOp::kSum); }),
                    HasSubstr("cannot be reduced"));
      }
    }
    comm.Barrier();
  });
}

TEST_P(CommTest, AllReduce_ScalarsViewsAndLeaves_InPlace) {
  Run(2, [](Comm& comm) {
    at::Tensor scalar = at::full({}, comm.rank());
    comm.AllReduce(scalar, ReduceOp::kSum);
    EXPECT_EQ(scalar.item<int64_t>(), 1);
    for (const int64_t n : {2, 200}) {
      at::Tensor base = at::ones({n, 3});
      at::Tensor view = base.t();
      comm.AllReduce(view, ReduceOp::kSum);
      EXPECT_TRUE(at::equal(base, at::full({n, 3}, 2.0)));
      at::Tensor leaf = at::ones({n});
      leaf.requires_grad_();
      comm.AllReduce(leaf, ReduceOp::kSum);
      EXPECT_TRUE(leaf.is_leaf());
      EXPECT_EQ(leaf[0].item<float>(), 2);
    }
  });
}

TEST_P(CommTest, AllGatherAndBroadcast_EverySizeAndDtype) {
  Run(3, [](Comm& comm) {
    const int r = comm.rank();
    for (const int64_t n : kSizes) {
      for (const auto dtype : {at::kFloat, at::kLong, at::kBool, at::kShort, at::kBFloat16,
                               at::kComplexFloat, at::kFloat8_e4m3fn}) {
        const auto make = [&](int rank) {
          return at::full({2, n}, static_cast<float>(rank == 1), at::kFloat).to(dtype);
        };
        // Transposed: not contiguous.
        const auto all = comm.AllGather(make(r).t());
        ASSERT_EQ(all.size(), 3u);
        for (int i = 0; i < 3; ++i) {
          EXPECT_EQ(all[i].sizes(), (at::IntArrayRef{n, 2}));
          EXPECT_TRUE(all[i].is_contiguous());
          EXPECT_TRUE(at::equal(all[i].to(at::kComplexDouble), make(i).t().to(at::kComplexDouble)));
        }
        at::Tensor x = make(r).t();
        comm.Broadcast(x, 1);
        EXPECT_TRUE(at::equal(x.to(at::kComplexDouble), make(1).t().to(at::kComplexDouble)));
      }
    }
    const auto scalars = comm.AllGather(at::full({}, r));
    EXPECT_EQ(scalars[2].dim(), 0);
    EXPECT_EQ(scalars[2].item<int64_t>(), 2);
  });
}

// Such views share the memory of what they conjugate or negate, and are contiguous as that is.
TEST_P(CommTest, ViewThatConjugatesOrNegates_TravelsAsItsValues) {
  Run(2, [](Comm& comm) {
    for (const int64_t n : {1, 4, 4096}) {
      const auto numbers = [n](int rank) {
        return at::complex(at::arange(n, at::kFloat), at::arange(n, at::kFloat) + rank + 1);
      };
      const auto conjugate = [&](int rank) { return numbers(rank).conj(); };
      const auto negative = [&](int rank) { return at::_neg_view(at::real(numbers(rank)) + rank); };
      for (const std::function<at::Tensor(int)>& make :
           {std::function<at::Tensor(int)>(conjugate), std::function<at::Tensor(int)>(negative)}) {
        const auto values = [&](int rank) { return make(rank).resolve_conj().resolve_neg(); };
        const at::Tensor mine = make(comm.rank());
        ASSERT_TRUE(mine.is_contiguous() && (mine.is_conj() || mine.is_neg()));
        const auto all = comm.AllGather(mine);
        for (int r = 0; r < 2; ++r) EXPECT_TRUE(at::equal(all[r], values(r))) << n << " " << r;
        at::Tensor x = make(comm.rank());
        comm.Broadcast(x, 1);
        EXPECT_TRUE(at::equal(x.resolve_conj().resolve_neg(), values(1))) << n;
        x = make(comm.rank());
        comm.Scatter({make(1), make(0)}, x, 0);
        EXPECT_TRUE(at::equal(x.resolve_conj().resolve_neg(), values(1 - comm.rank()))) << n;
        if (n % 2 != 0) continue;
        x = make(comm.rank());
        comm.AllGatherParts(x);
        EXPECT_TRUE(at::equal(x.narrow(0, 0, n / 2).resolve_conj().resolve_neg(),
                              values(0).narrow(0, 0, n / 2)));
        EXPECT_TRUE(at::equal(x.narrow(0, n / 2, n / 2).resolve_conj().resolve_neg(),
                              values(1).narrow(0, n / 2, n / 2)));
      }
      at::Tensor sum = negative(comm.rank());
      comm.AllReduce(sum, ReduceOp::kSum);
      EXPECT_TRUE(at::equal(sum.resolve_neg(), negative(0) + negative(1)));
      const at::Tensor pairs = at::_neg_view(at::ones({2 * n}));
      EXPECT_TRUE(at::equal(comm.ReduceScatter(pairs, ReduceOp::kSum), at::full({n}, -2.0)));
    }
  });
}

TEST_P(CommTest, AllGatherParts_CompletesTheFlatTensorInPlace) {
  Run(3, [](Comm& comm) {
    for (const int64_t part : {0, 1, 7, 3000}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        at::Tensor flat = at::full({3 * part}, -1, dtype);
        flat.narrow(0, comm.rank() * part, part).fill_(comm.rank() + 1);
        comm.AllGatherParts(flat);
        const at::Tensor want = at::arange(1, 4, at::kLong).repeat_interleave(part).to(dtype);
        EXPECT_TRUE(at::equal(flat, want)) << dtype << " " << part;
      }
    }
  });
}

TEST_P(CommTest, ReduceScatter_GivesEachRankItsPartOfTheSum) {
  Run(3, [](Comm& comm) {
    for (const int64_t part : {0, 1, 7, 3000}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        const at::Tensor flat =
            at::arange(3 * part).remainder(5).to(dtype).add(comm.rank()).clone();
        const at::Tensor before = flat.clone();
        const at::Tensor mine =
            at::arange(3 * part).remainder(5).to(dtype).narrow(0, comm.rank() * part, part);
        EXPECT_TRUE(at::equal(comm.ReduceScatter(flat, ReduceOp::kSum), mine * 3 + 3));
        EXPECT_TRUE(at::equal(comm.ReduceScatter(flat, ReduceOp::kMean), mine + 1));
        EXPECT_TRUE(at::equal(flat, before));
      }
    }
  });
}

// Collectives in shared memory and over Gloo (MUSTER_SHM=no); Muster does not use Gloo's own
// reduce-scatter: that adds up in another order for each part, and rounds after each term.
class RankOrderTest : public CommTest {};
INSTANTIATE_TEST_SUITE_P(Every, RankOrderTest,
                         ::testing::Values(Kind::kThread, Kind::kGloo, Kind::kGlooUnchecked,
                                           Kind::kShm, Kind::kShmUnchecked),
                         KindName);

TEST_P(RankOrderTest, ReduceScatter_HasTheBitsOfTheSumInRankOrder) {
  for (const int ranks : {2, 3, 4}) {
    Run(ranks, [ranks](Comm& comm) {
      uint64_t seed = 0;
      for (const int64_t part : {1, 7, 4099, 70'001}) {
        for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
          std::vector<at::Tensor> all, parts;
          for (int r = 0; r < ranks; ++r) {
            const auto generator = at::make_generator<at::CPUGeneratorImpl>(++seed);
            all.push_back(at::randn({ranks * part}, generator, at::kFloat).to(dtype));
            parts.push_back(all.back().narrow(0, comm.rank() * part, part));
          }
          for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
            const at::Tensor got = comm.ReduceScatter(all[comm.rank()], op);
            EXPECT_EQ(got.scalar_type(), dtype);
            EXPECT_TRUE(at::equal(got, ReduceInRankOrder(parts, op)))
                << ranks << " ranks, parts of " << part << " " << dtype;
          }
        }
      }
    });
  }
}

// Over Gloo it goes in pieces, of which the last one is shorter.
TEST_P(RankOrderTest, ReduceScatterOfManyMegabytes_HasTheSameBits) {
  for (const int ranks : {2, 3}) {
    Run(ranks, [ranks](Comm& comm) {
      constexpr int64_t kPart = 4'300'001;
      std::vector<at::Tensor> all, parts;
      for (int r = 0; r < ranks; ++r) {
        all.push_back(at::arange(ranks * kPart, at::kFloat).mul_(0.37).add_(r).frac_());
        parts.push_back(all.back().narrow(0, comm.rank() * kPart, kPart));
      }
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
        EXPECT_TRUE(
            at::equal(comm.ReduceScatter(all[comm.rank()], op), ReduceInRankOrder(parts, op)))
            << ranks;
      }
    });
  }
}

TEST_P(CommTest, FlatTensorOfUnequalParts_IsRefused) {
  Run(2, [](Comm& comm) {
    at::Tensor odd = at::ones({3});
    EXPECT_THAT(ErrorOf([&] { comm.AllGatherParts(odd); }), HasSubstr("2 equal parts"));
    EXPECT_THAT(ErrorOf([&] { comm.ReduceScatter(odd, ReduceOp::kSum); }),
                HasSubstr("2 equal parts"));
    const at::Tensor flat = at::ones({4});
    EXPECT_THAT(ErrorOf([&] { comm.ReduceScatter(flat, ReduceOp::kMax); }),
                HasSubstr("sum or mean"));
  });
}

TEST_P(CommTest, Scatter_PartsOfDifferentShapes) {
  Run(3, [](Comm& comm) {
    const int r = comm.rank();
    for (const int64_t n : kSizes) {
      std::vector<at::Tensor> parts;
      if (r == 1) {
        for (int i = 0; i < 3; ++i) parts.push_back(at::full({2, n * i}, static_cast<float>(i)));
      }
      at::Tensor out = at::zeros({n * r, 2}).t();
      comm.Scatter(parts, out, 1);
      EXPECT_TRUE(at::equal(out, at::full({2, n * r}, static_cast<float>(r))));
    }
  });
}

// With Gloo's collectives and with Muster's own, which leave sending to Gloo. The connection is
// lost where `short_part` is: at the rank that receives, or at the one that sends.
TEST(C10dComm, RankLostInTheMiddleOfAScatter_IsNoticedAtOnce) {
  for (const bool own : {false, true}) {
    for (const bool at_receiver : {false, true}) {
      const Body body = [&](Comm& comm) {
        const LongMemory long_part;
        const ShortMemory short_part;
        const auto whole = [](const LongMemory& memory) {
          return at::from_blob(memory.data(), {LongMemory::kBytes}, at::kByte);
        };
        const bool root = comm.rank() == 0;
        at::Tensor out = whole(!root && at_receiver ? short_part : long_part);
        std::vector<at::Tensor> parts;
        if (root) parts = {out, whole(at_receiver ? long_part : short_part)};
        EXPECT_THAT(
            ErrorOf([&] { comm.Scatter(parts, out, 0); }),
            // Gloo itself ends what has not begun to move.
            AllOf(HasSubstr(c10::str("Scatter #1 on rank ", comm.rank(), " of 2")),
                  AnyOf(HasSubstr(c10::str("connection to rank ", 1 - comm.rank(), " is lost")),
                        HasSubstr("gloo/transport/tcp"))));
      };
      if (own) {
        RunHostRanks("ab", body);
      } else {
        RunGlooRanks(2, body);
      }
    }
  }
}

TEST_P(CommTest, Bytes_AnyLengthEvenVeryUneven) {
  Run(3, [](Comm& comm) {
    for (const size_t n : {0, 10, 1000, 100000}) {
      const auto make = [&](int rank) { return std::string(rank == 2 ? n : rank, 'a' + rank); };
      const auto all = comm.AllGatherBytes(make(comm.rank()));
      EXPECT_EQ(all, (std::vector<std::string>{make(0), make(1), make(2)}));
      const auto even = comm.AllGatherBytes(std::string(n, 'a' + comm.rank()));
      for (int r = 0; r < 3; ++r) EXPECT_EQ(even[r], std::string(n, 'a' + r));
      EXPECT_EQ(comm.BroadcastBytes(comm.rank() == 2 ? std::string(n, '\0') : "ignored", 2),
                std::string(n, '\0'));
    }
    comm.Barrier();
  });
}

TEST_P(CommTest, OneRank_Works) {
  Run(1, [](Comm& comm) {
    at::Tensor x = at::ones({2});
    comm.AllReduce(x, ReduceOp::kMean);
    EXPECT_EQ(x[1].item<float>(), 1);
    comm.Barrier();
    EXPECT_EQ(comm.AllGather(x).size(), 1u);
  });
}

class CheckedCommTest : public CommTest {};
INSTANTIATE_TEST_SUITE_P(Every, CheckedCommTest,
                         ::testing::Values(Kind::kThread, Kind::kGloo, Kind::kShm), KindName);

TEST_P(CheckedCommTest, WrongUse_EveryRankThrowsTheSame_GroupStaysUsable) {
  struct Case {
    const char* name;
    Body body;
    std::vector<std::string> want;
  };
  const std::vector<Case> cases = {
      {"shape",
       [](Comm& c) { c.AllGather(at::zeros({c.rank() == 1 ? 5 : 4})); },
       {"ranks 0, 2 called AllGather", "float32[4]", "rank 1 called AllGather", "float32[5]"}},
      {"large shape",
       [](Comm& c) {
         at::Tensor x = at::zeros({c.rank() == 1 ? 5000 : 1});
         c.AllReduce(x, ReduceOp::kSum);
       },
       {"rank 1 called AllReduce(sum)", "float32[5000]"}},
      {"dtype",
       [](Comm& c) {
         at::Tensor x = at::zeros({2}, c.rank() == 0 ? at::kFloat : at::kHalf);
         c.Broadcast(x, 0);
       },
       {"float32[2]", "float16[2]"}},
      {"reduction",
       [](Comm& c) {
         at::Tensor x = at::zeros({2});
         c.AllReduce(x, c.rank() == 2 ? ReduceOp::kMax : ReduceOp::kSum);
       },
       {"rank 2 called AllReduce(max)", "ranks 0, 1 called AllReduce(sum)"}},
      {"root",
       [](Comm& c) {
         at::Tensor x = at::zeros({2});
         c.Broadcast(x, c.rank());
       },
       {"Broadcast(root 2)"}},
      {"operation",
       [](Comm& c) {
         if (c.rank() == 0) {
           c.Barrier();
         } else {
           c.AllGatherBytes("x");
         }
       },
       {"rank 0 called Barrier", "ranks 1, 2 called AllGatherBytes"}},
      {"number of tensors",
       [](Comm& c) {
         std::vector<at::Tensor> tensors(c.rank() == 1 ? 1 : 2, at::zeros({2}));
         GatherTensors(c, tensors);
       },
       {"ranks 0, 2 called AllGather", "float32[2], tensor 1 of 2; rank 1 called AllGather"}},
      {"no tensors",
       [](Comm& c) { GatherTensors(c, std::vector<at::Tensor>(c.rank(), at::zeros({2}))); },
       {"rank 0 called Barrier", "for a structure without tensors; rank 1 called AllGather",
        "tensor 1 of 2"}},
      {"scatter part",
       [](Comm& c) {
         std::vector<at::Tensor> parts = {at::zeros({1}), at::zeros({1}), at::zeros({1})};
         at::Tensor out = at::zeros({c.rank() == 2 ? 2 : 1});
         c.Scatter(parts, out, 0);
       },
       {"Scatter on rank 2", "part for this rank is float32[1] but its output is float32[2]"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    std::atomic<int> threw = 0;
    Run(3, [&](Comm& comm) {
      try {
        c.body(comm);
      } catch (const c10::Error& e) {
        for (const std::string& want : c.want) EXPECT_THAT(e.what(), HasSubstr(want));
        ++threw;
      }
      at::Tensor x = at::ones({1});
      comm.AllReduce(x, ReduceOp::kSum);
      EXPECT_EQ(x.item<float>(), 3);
    });
    EXPECT_EQ(threw, 3);
  }
}

TEST(C10dComm, PeerGone_ErrorNamesOperationSequenceAndRank_ThenFailsAtOnce) {
  RunGlooRanks(2,
               [](Comm& comm) {
                 comm.Barrier();
                 if (comm.rank() == 1) return;
                 try {
                   comm.Barrier();
                   ADD_FAILURE() << "must throw";
                 } catch (const c10::DistBackendError& e) {
                   EXPECT_THAT(e.what(), HasSubstr("Barrier #2 on rank 0 of 2: "));
                 }
                 try {
                   at::Tensor x = at::ones({1});
                   comm.AllReduce(x, ReduceOp::kSum);
                   ADD_FAILURE() << "must throw";
                 } catch (const c10::DistBackendError& e) {
                   EXPECT_THAT(e.what(),
                               AllOf(HasSubstr("AllReduce #3 on rank 0 of 2 (float32[1])"),
                                     HasSubstr("unusable since Barrier #2")));
                 }
               },
               {});
}

TEST(C10dComm, D30_PeerThatNeverComes_TimesOutAfterTheGivenTime) {
  std::atomic<bool> timed_out = false;
  Notification done;
  RunGlooRanks(2,
               [&](Comm& comm) {
                 // Alive, but elsewhere.
                 if (comm.rank() == 1) return done.WaitForNotification();
                 try {
                   comm.Barrier();
                 } catch (const c10::DistBackendError& e) {
                   timed_out = true;
                   EXPECT_THAT(e.what(), AllOf(HasSubstr("Barrier #1 on rank 0 of 2"),
                                               HasSubstr("timeout 300 ms")));
                 }
                 done.Notify();
               },
               {.timeout = std::chrono::milliseconds(300)});
  EXPECT_TRUE(timed_out);
}

TEST(RunGlooRanks, OneRankThrows_ItsErrorIsRethrown) {
  try {
    RunGlooRanks(2, [](Comm& comm) {
      if (comm.rank() == 1) throw std::runtime_error("disk on fire");
      comm.Barrier();
    });
    ADD_FAILURE() << "must throw";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "disk on fire");
  }
}

TEST(C10dComm, ProcessGroup_IsTheOneGiven) {
  RunGlooRanks(1, [](Comm& comm) {
    ASSERT_NE(comm.process_group(), nullptr);
    EXPECT_EQ(comm.process_group()->getSize(), 1);
  });
}

}  // namespace
}  // namespace muster
