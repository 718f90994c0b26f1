#include "worker/train/batch_size_finder.h"

#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

TEST(FindExecutableBatchSize, Sizes_AreAcceleratesSequence) {
  LocalComm comm;
  std::vector<int64_t> tried;
  EXPECT_THROW(FindExecutableBatchSize(comm, {},
                                       [&](int64_t size) {
                                         tried.push_back(size);
                                         TORCH_CHECK(false,
                                                     "CUDA out of memory. Tried to allocate");
                                       }),
               c10::Error);
  EXPECT_THAT(tried,
              ::testing::ElementsAre(128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32, 28, 25,
                                     22, 19, 17, 15, 13, 11, 9, 8, 7, 6, 5, 4, 3, 2, 1));
}

TEST(FindExecutableBatchSize, D13_OneRankOutOfMemory_AllRanksTakeTheSmallerSize) {
  std::mutex mu;
  std::vector<std::vector<int64_t>> tried(3);
  std::vector<int64_t> found(3);
  RunRanks(3, [&](Comm& comm) {
    found[comm.rank()] = FindExecutableBatchSize(
        comm, {.starting_batch_size = 16, .reduce = [](int64_t size) { return size / 2; }},
        [&](int64_t size) {
          std::lock_guard<std::mutex> lock(mu);
          tried[comm.rank()].push_back(size);
          if (comm.rank() == 1 && size > 4) throw std::bad_alloc();
        });
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(found[rank], 4);
    EXPECT_THAT(tried[rank], ::testing::ElementsAre(16, 8, 4));
  }
}

TEST(FindExecutableBatchSize, DifferentSizes_AreNamedOnEveryRank) {
  RunRanks(3, [](Comm& comm) {
    try {
      FindExecutableBatchSize(
          comm, {.starting_batch_size = comm.rank() == 2 ? 32 : 64, .reduce = nullptr},
          [](int64_t) {});
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("ranks 0, 1 try batch size 64; rank 2 tries "
                                                     "batch size 32"));
    }
  });
}

// Until a load, a sharded model throws the error of its last step.
TEST(FindExecutableBatchSize, ErrorThatOnlyALoadEnds_IsNotOutOfMemory) {
  LocalComm comm;
  std::vector<int64_t> tried;
  try {
    FindExecutableBatchSize(comm, {.starting_batch_size = 8, .reduce = nullptr}, [&](int64_t size) {
      tried.push_back(size);
      if (size == 8) throw std::bad_alloc();
      TORCH_CHECK(false, "rank 0 has failed in a step: CUDA out of memory: call load_state()");
    });
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("CUDA out of memory"));
  }
  EXPECT_THAT(tried, ::testing::ElementsAre(8, 7));
}

TEST(FindExecutableBatchSize, OtherFailure_ReachesEveryRank) {
  std::mutex mu;
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    try {
      FindExecutableBatchSize(comm, {.starting_batch_size = 8, .reduce = nullptr}, [&](int64_t) {
        if (comm.rank() == 1) throw std::runtime_error("no such file");
      });
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(mu);
      errors[comm.rank()] = error.what();
    }
  });
  EXPECT_THAT(errors[0], ::testing::HasSubstr("failed on rank 1: no such file"));
  EXPECT_EQ(errors[1], "no such file");
}

TEST(FindExecutableBatchSize, WhatIsNoException_ReachesEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    try {
      FindExecutableBatchSize(comm, {.starting_batch_size = 8, .reduce = nullptr}, [&](int64_t) {
        if (comm.rank() == 1) throw 1;
      });
    } catch (const std::exception& error) {
      errors[comm.rank()] = error.what();
    } catch (int) {
      errors[comm.rank()] = "a number";
    }
  });
  EXPECT_THAT(errors[0], ::testing::HasSubstr("failed on rank 1: what is thrown is no exception"));
  EXPECT_EQ(errors[1], "a number");
}

TEST(FindExecutableBatchSize, ReduceThatDoesNotReduce_IsAnError) {
  LocalComm comm;
  EXPECT_THROW(FindExecutableBatchSize(comm, {.reduce = [](int64_t size) { return size; }},
                                       [](int64_t) { throw std::bad_alloc(); }),
               c10::Error);
}

TEST(IsOutOfMemory, KnownTexts_AreRecognised) {
  for (const char* text :
       {"CUDA error: out of memory", "CUDA out of memory. Tried",
        "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"}) {
    EXPECT_TRUE(IsOutOfMemory(std::runtime_error(text))) << text;
  }
  EXPECT_TRUE(IsOutOfMemory(std::bad_alloc()));
  EXPECT_FALSE(IsOutOfMemory(std::runtime_error("shape mismatch")));
}

}  // namespace
}  // namespace muster
