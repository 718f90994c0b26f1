#include "worker/checkpoint/deferred_copy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/fake_clock.h"
#include "c10/core/InferenceMode.h"
#include "worker/collective/fake_streams.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kNumbers = 5000;

class DeferredCopyTest : public testing::Test {
 protected:
  bool CopiedIs(const at::Tensor& tensor) {
    return std::memcmp(memory_.data(), tensor.const_data_ptr(), tensor.nbytes()) == 0;
  }

  const at::Tensor tensor_ = at::arange(kNumbers, at::kFloat);
  std::vector<char> memory_ = std::vector<char>(kNumbers * sizeof(float));
  DeferredCopy copy_;
};

TEST_F(DeferredCopyTest, Run_CopiesOnce) {
  copy_.Add("t", tensor_.detach(), 0);
  copy_.Start(memory_.data());
  copy_.Run();
  EXPECT_TRUE(copy_.status().ok()) << copy_.status();
  EXPECT_TRUE(CopiedIs(tensor_));
  const at::Tensor before = tensor_.clone();
  tensor_.fill_(1);
  copy_.Run();
  EXPECT_TRUE(copy_.status().ok()) << copy_.status();
  EXPECT_TRUE(CopiedIs(before));
}

TEST_F(DeferredCopyTest, ThreadsTogether_AllSeeTheWholeCopy) {
  // A tensor of five parts, and tensors of one.
  const at::Tensor large = at::arange(9'000'000, at::kFloat);
  std::vector<char> to(large.nbytes() + tensor_.nbytes());
  copy_.Add("t", tensor_.detach(), large.nbytes());
  copy_.Add("large", large.detach(), 0);
  copy_.Start(to.data());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      copy_.Run();
      EXPECT_EQ(std::memcmp(to.data(), large.const_data_ptr(), large.nbytes()), 0);
    });
  }
  copy_.Wait();
  EXPECT_EQ(std::memcmp(to.data() + large.nbytes(), tensor_.const_data_ptr(), tensor_.nbytes()), 0);
  for (std::thread& thread : threads) thread.join();
}

// Digests cover bytes that copies fill, bytes between them, and blocks with both.
TEST_F(DeferredCopyTest, Files_AreDigestedInBlocksAsTheyAreInTheEnd) {
  const size_t block = DeferredCopy::kBlockBytes;
  const at::Tensor large = at::arange(700'000, at::kFloat), odd = at::arange(5001, at::kByte);
  std::vector<char> to(6 * block, 'x');
  const std::vector<DeferredCopy::Digested> files = {{.offset = 4096, .bytes = 4 * block + 77},
                                                     {.offset = 5 * block, .bytes = 0},
                                                     {.offset = 5 * block, .bytes = 900}};
  copy_.Add("odd", odd.detach(), 4096 + 3 * block + 333'001);
  copy_.Add("large", large.detach(), 4096 + 104);
  copy_.Start(to.data(), files);
  EXPECT_FALSE(copy_.empty());
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { copy_.Run(); });
  copy_.Wait();
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(copy_.status().ok()) << copy_.status();
  EXPECT_EQ(std::memcmp(to.data() + 4096 + 104, large.const_data_ptr(), large.nbytes()), 0);
  EXPECT_EQ(std::memcmp(to.data() + 4096 + 3 * block + 333'001, odd.const_data_ptr(), odd.nbytes()),
            0);
  ASSERT_EQ(copy_.digests().size(), files.size());
  for (size_t i = 0; i < files.size(); ++i) {
    std::vector<uint64_t> expected;
    const absl::string_view file(to.data() + files[i].offset, files[i].bytes);
    for (size_t at = 0; at < file.size(); at += block) {
      expected.push_back(DigestBlock(file.substr(at, block)));
    }
    EXPECT_EQ(copy_.digests()[i].xxh3, expected) << i;
    EXPECT_EQ(copy_.digests()[i].block_bytes, block);
  }
}

TEST_F(DeferredCopyTest, TensorChangedInPlace_IsNamed) {
  const auto change = [](const std::function<void(at::Tensor)>& how) {
    DeferredCopy copy;
    at::Tensor parameter = at::ones({kNumbers}).requires_grad_();
    std::vector<char> to(parameter.nbytes());
    copy.Add("\"w\" of model.safetensors", parameter.detach(), 0);
    copy.Start(to.data());
    how(parameter);
    copy.Run();
    return copy.status();
  };
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(change([](const at::Tensor&) {}).ok());
  // A change of one number is detected by the version. The other changes leave the version as it
  // was.
  for (const absl::Status& status : {
           change([](const at::Tensor& parameter) { parameter[77].fill_(2); }),
           change([](const at::Tensor& parameter) { parameter.data().mul_(1.5); }),
           change([](const at::Tensor& parameter) {
             std::memset(parameter.data_ptr(), 0, parameter.nbytes());
           }),
       }) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(HasSubstr("\"w\" of model.safetensors was changed by the program"),
                               HasSubstr("options.checkpoint.lazy = false")));
  }
}

TEST_F(DeferredCopyTest, WhatCannotWait_IsNotTaken) {
  EXPECT_TRUE(DeferredCopy::Takes(tensor_));
  EXPECT_TRUE(DeferredCopy::Takes(at::ones({64, 64}).requires_grad_()));
  EXPECT_FALSE(DeferredCopy::Takes(at::ones({100})));
  EXPECT_FALSE(DeferredCopy::Takes(at::ones({64, 64}).t().slice(0, 0, 63)));
  EXPECT_FALSE(DeferredCopy::Takes(at::ones({5000}, at::kComplexFloat).conj()));
  EXPECT_FALSE(DeferredCopy::Takes(at::ones({5000}, at::TensorOptions(at::kMeta))));
  const c10::InferenceMode inference;
  EXPECT_FALSE(DeferredCopy::Takes(at::ones({5000})));
}

TEST_F(DeferredCopyTest, TimeThatTrainingWaits_IsCountedUntilItIsCopied) {
  // A clock whose time advances with each reading.
  class Passing final : public Clock {
   public:
    absl::Time Now() const override {
      clock_.Advance(absl::Seconds(1));
      return clock_.Now();
    }
    absl::Time WallNow() const override { return Now(); }

   private:
    mutable FakeClock clock_;
  };
  const Passing clock;
  copy_.Add("t", tensor_.detach(), 0);
  copy_.Start(memory_.data());
  EXPECT_EQ(copy_.waited(), absl::ZeroDuration());
  EXPECT_EQ(copy_.cpu(), absl::ZeroDuration());
  copy_.RunWhileTrainingWaits(clock);
  EXPECT_GT(copy_.cpu(), absl::ZeroDuration());
  EXPECT_TRUE(CopiedIs(tensor_));
  EXPECT_EQ(copy_.waited(), absl::Seconds(1));
  copy_.RunWhileTrainingWaits(clock);
  EXPECT_EQ(copy_.waited(), absl::Seconds(1));
}

TEST_F(DeferredCopyTest, NothingToCopy_WaitsForNobody) {
  EXPECT_TRUE(copy_.empty());
  copy_.Wait();
  copy_.Run();
  EXPECT_TRUE(copy_.status().ok());
}

// A CPU tensor acts as one on a device, on fake streams.
class DeferredCopyFromDevice : public testing::Test {
 protected:
  static void SetUpTestSuite() { FakeStreams::Install(c10::kCPU); }

  const at::Tensor there_ = at::full({kNumbers}, 7, at::kFloat), here_ = at::ones({kNumbers});
  std::vector<char> memory_ = std::vector<char>(2 * kNumbers * sizeof(float));
  int queued_ = 0;
  DeferredCopy copy_{[this](const at::Tensor& tensor) {
                       return tensor.const_data_ptr() == there_.const_data_ptr();
                     },
                     [this](char* to, const at::Tensor& from) {
                       ++queued_;
                       std::memcpy(to, from.const_data_ptr(), from.nbytes());
                     }};

  void Add() {
    copy_.Add("there", there_.detach(), 0);
    copy_.Add("here", here_.detach(), there_.nbytes());
  }
  bool AllThere() {
    return std::memcmp(memory_.data(), there_.const_data_ptr(), there_.nbytes()) == 0 &&
           std::memcmp(memory_.data() + there_.nbytes(), here_.const_data_ptr(), here_.nbytes()) ==
               0;
  }
};

TEST_F(DeferredCopyFromDevice, Run_CopiesBoth) {
  Add();
  copy_.Start(memory_.data());
  EXPECT_FALSE(copy_.empty());
  copy_.Run();
  copy_.Wait();
  EXPECT_TRUE(copy_.status().ok()) << copy_.status();
  EXPECT_TRUE(AllThere());
  EXPECT_EQ(queued_, 1);
}

TEST_F(DeferredCopyFromDevice, TrainingThatWaits_QueuesAndCopiesAndLetsTensorsChange) {
  Add();
  copy_.Start(memory_.data());
  FakeClock clock;
  copy_.RunWhileTrainingWaits(clock);
  EXPECT_EQ(queued_, 1);
  EXPECT_TRUE(AllThere());
  there_.fill_(-1);
  here_.fill_(-1);
  copy_.Wait();
  EXPECT_TRUE(copy_.status().ok()) << copy_.status();
}

TEST_F(DeferredCopyFromDevice, OnlyThere_WaitQueuesItIfNobodyHas) {
  copy_.Add("there", there_.detach(), 0);
  copy_.Start(memory_.data());
  EXPECT_FALSE(copy_.empty());
  copy_.Wait();
  EXPECT_EQ(queued_, 1);
  EXPECT_TRUE(copy_.status().ok()) << copy_.status();
}

TEST_F(DeferredCopyFromDevice, EarlyChange_FailsTheSave) {
  Add();
  copy_.Start(memory_.data());
  there_.fill_(-1);
  copy_.Run();
  EXPECT_EQ(copy_.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(copy_.status().message()), HasSubstr("there was changed"));
}

TEST_F(DeferredCopyFromDevice, Digests_AreOfWhatTheDeviceHasCopied) {
  Add();
  copy_.Start(memory_.data(), {{.offset = 0, .bytes = memory_.size()}});
  copy_.Run();
  ASSERT_TRUE(copy_.status().ok()) << copy_.status();
  EXPECT_TRUE(AllThere());
  BlockDigester digester;
  digester.Update(absl::string_view(memory_.data(), memory_.size()));
  ASSERT_EQ(copy_.digests().size(), 1u);
  EXPECT_EQ(copy_.digests()[0].xxh3, std::vector<uint64_t>{digester.Finish()});
}

}  // namespace
}  // namespace muster
