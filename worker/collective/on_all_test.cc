#include "worker/collective/on_all.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "c10/util/Exception.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using testing::ElementsAre;

// Returns what each rank threw, or "".
std::vector<std::string> ErrorsOf(int n, const std::function<void(int rank)>& step) {
  std::vector<std::string> errors(n);
  RunRanks(n, [&](Comm& comm) {
    try {
      OnAll(comm, "open its file", [&] { step(comm.rank()); });
    } catch (...) {
      errors[comm.rank()] = TextOf(std::current_exception());
    }
    // The ranks are still in step.
    at::Tensor one = at::ones({1});
    comm.AllReduce(one, ReduceOp::kSum);
    EXPECT_EQ(one.item<float>(), n);
  });
  return errors;
}

TEST(OnAll, StepThatSucceeds_ThrowsNothing) {
  EXPECT_THAT(ErrorsOf(3, [](int) {}), ElementsAre("", "", ""));
}

TEST(OnAll, StepThatFailsOnSomeRanks_IsTheErrorOfAll) {
  EXPECT_THAT(ErrorsOf(4,
                       [](int rank) {
                         TORCH_CHECK(rank != 1, "it is not there");
                         if (rank == 2) throw std::runtime_error("");
                         if (rank == 3) throw 7;
                       }),
              ElementsAre("rank 1 cannot open its file: it is not there", "it is not there",
                          "an error without a text", "what is thrown is no exception"));
}

TEST(OnAll, OneProcess_ThrowsItsError) {
  LocalComm comm;
  EXPECT_THROW(OnAll(comm, "begin", [] { throw std::invalid_argument("no"); }),
               std::invalid_argument);
}

}  // namespace
}  // namespace muster
