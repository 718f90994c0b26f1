#include "worker/bigmodel/offload_ring.h"

#include <numeric>
#include <thread>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/test_error.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kRow = 2048;  // floats: two blocks

// Counts readings, and fails where told.
class CountingSource : public WeightSource {
 public:
  explicit CountingSource(std::vector<at::Tensor> values) {
    std::vector<std::string> names(values.size(), "w");
    host_ = HostWeightSource(names, std::move(values));
  }
  size_t size() const override { return host_->size(); }
  std::string Describe(size_t i) const override { return host_->Describe(i); }
  at::ScalarType type(size_t i) const override { return host_->type(i); }
  uint64_t bytes(size_t i) const override { return host_->bytes(i); }
  absl::Status Read(size_t i, uint64_t begin, size_t bytes, char* to,
                    ReadScratch& scratch) const override {
    MutexLock lock(&mu);
    order.push_back(i);
    if (i == broken) return absl::DataLossError("file model.safetensors: tensor w ends early");
    return host_->Read(i, begin, bytes, to, scratch);
  }
  absl::StatusOr<const char*> Fetch(size_t i, uint64_t begin, size_t bytes,
                                    ReadScratch& scratch) const override {
    return host_->Fetch(i, begin, bytes, scratch);
  }
  size_t Remainder(size_t) const override { return 0; }

  mutable Mutex mu;
  mutable std::vector<size_t> order;
  size_t broken = 1000;

 private:
  std::shared_ptr<const WeightSource> host_;
};

// Rows of ones, twos, threes, ..., each a unit.
struct Rows {
  Rows(size_t count, const OffloadRingOptions& options, at::ScalarType type = at::kFloat) {
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < count; ++i) {
      values.push_back(at::full({kRow}, static_cast<float>(i + 1), at::kFloat));
    }
    source = std::make_shared<CountingSource>(values);
    std::vector<OffloadedUnit> units;
    for (size_t i = 0; i < count; ++i) {
      rows.push_back(at::empty({kRow}, at::TensorOptions().device(at::kMeta)).requires_grad_());
      const std::string name = "rows." + std::to_string(i);
      units.push_back({name, {{name + ".weight", rows.back(), source, i, type}}});
    }
    auto made = OffloadRing::Make(units, options);
    EXPECT_TRUE(made.ok()) << made.status();
    ring = *std::move(made);
  }

  double Sum(size_t i) const {
    const at::NoGradGuard no_grad;
    return rows[i].sum().item<double>();
  }

  // Waits for what the use of each row has asked for. Else a row that comes late keeps its memory,
  // and what is read next depends on the threads.
  void UseOneByOne(const std::vector<size_t>& order, int passes) const {
    for (int pass = 0; pass < passes; ++pass) {
      for (const size_t i : order) {
        Sum(i);
        ring->WaitUntilIdle();
      }
    }
  }

  std::shared_ptr<CountingSource> source;
  std::vector<at::Tensor> rows;
  std::unique_ptr<OffloadRing> ring;
};

OffloadRingOptions RoomFor(uint64_t units, bool prefetch = true) {
  return {.bytes = units * kRow * sizeof(float), .prefetch = prefetch};
}

TEST(OffloadRing, MoreUnitsThanRoom_EachHasItsValues) {
  for (const uint64_t room : {1, 2, 3, 10}) {
    const Rows rows(6, RoomFor(room));
    for (int pass = 0; pass < 3; ++pass) {
      for (size_t i = 0; i < 6; ++i) EXPECT_EQ(rows.Sum(i), kRow * (i + 1.0)) << room;
    }
    rows.ring->WaitUntilIdle();
    EXPECT_EQ(rows.ring->stats().ring_bytes, room * kRow * sizeof(float));
    EXPECT_EQ(rows.ring->stats().overflow_bytes, 0u);
    EXPECT_EQ(rows.ring->stats().uses, 18);
  }
}

TEST(OffloadRing, Prefetch_AsksBeforeTheUse) {
  const Rows rows(6, RoomFor(3));
  rows.UseOneByOne({3, 0, 5, 1, 2, 4}, 4);
  // The first pass has no order to go by; from then on each unit was asked for by one before it.
  EXPECT_LE(rows.ring->stats().waits, 6);
  const Rows slow(6, RoomFor(3, /*prefetch=*/false));
  slow.UseOneByOne({3, 0, 5, 1, 2, 4}, 4);
  EXPECT_GE(slow.ring->stats().waits, 15);
}

TEST(OffloadRing, AllFits_IsReadOnce) {
  const Rows rows(4, RoomFor(4));
  for (int pass = 0; pass < 3; ++pass) {
    for (size_t i = 0; i < 4; ++i) rows.Sum(i);
  }
  EXPECT_EQ(rows.ring->stats().read_bytes, 4 * kRow * sizeof(float));
}

TEST(OffloadRing, RingForMostOfTheModel_ReadsTheRestInEachPass) {
  const Rows rows(20, RoomFor(16));
  std::vector<size_t> order(20);
  std::iota(order.begin(), order.end(), 0);
  rows.UseOneByOne(order, 10);
  const uint64_t passes = rows.ring->stats().read_bytes / (kRow * sizeof(float)) / 10;
  EXPECT_LE(passes, 14u) << "of 20 rows in each pass";
}

TEST(OffloadRing, OtherType_ConvertsOnTheWay) {
  const Rows rows(3, RoomFor(1), at::kBFloat16);
  EXPECT_EQ(rows.rows[1].scalar_type(), at::kBFloat16);
  EXPECT_EQ(rows.Sum(1), kRow * 2.0);
}

TEST(OffloadRing, OperatorThatUsesMoreThanFits_GetsMemoryBesides) {
  const Rows rows(4, RoomFor(1));
  const at::NoGradGuard no_grad;
  const at::Tensor all = at::stack(rows.rows);
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(all[i].sum().item<double>(), kRow * (i + 1.0));
  EXPECT_EQ(rows.ring->stats().overflow_bytes, 3 * kRow * sizeof(float));
}

TEST(OffloadRing, Training_IsRefused) {
  const Rows rows(2, RoomFor(1));
  EXPECT_THAT(ErrorOf([&] { rows.rows[0].sum(); }),
              AllOf(HasSubstr("weight 'rows.0.weight', which is offloaded"),
                    HasSubstr("torch::NoGradGuard")));
  rows.rows[0].requires_grad_(false);
  EXPECT_EQ(rows.rows[0].sum().item<double>(), kRow);
  const at::NoGradGuard no_grad;
  EXPECT_THAT(ErrorOf([&] { rows.rows[1].add_(1); }),
              HasSubstr("aten::add_ writes weight 'rows.1.weight', which is offloaded"));
}

TEST(OffloadRing, FrozenWeight_LetsGradientsThrough) {
  const Rows rows(3, RoomFor(1));
  for (const at::Tensor& row : rows.rows) row.requires_grad_(false);
  const at::Tensor x = at::ones({kRow}).requires_grad_();
  x.mul(rows.rows[0]).mul(rows.rows[1]).mul(rows.rows[2]).sum().backward();
  EXPECT_EQ(x.grad()[0].item<float>(), 6);
}

TEST(OffloadRing, SourceThatFails_IsNamedAtTheUse_AndTriedAgain) {
  const Rows rows(3, RoomFor(1, /*prefetch=*/false));
  rows.source->broken = 1;
  EXPECT_EQ(rows.Sum(0), kRow);
  const absl::Status status = Guard([&] { rows.Sum(1); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor w ends early"));
  EXPECT_EQ(rows.Sum(2), 3 * kRow);
  rows.source->broken = 1000;
  EXPECT_EQ(rows.Sum(1), 2 * kRow);
}

TEST(OffloadRing, UseAfterTheEnd_IsAnError) {
  Rows rows(2, RoomFor(1));
  rows.ring.reset();
  EXPECT_THAT(ErrorOf([&] { rows.Sum(0); }), HasSubstr("what holds its values is gone"));
}

TEST(OffloadRing, AddressAfterTheEnd_IsAnError) {
  Rows rows(2, RoomFor(2));
  rows.Sum(0);
  EXPECT_NE(rows.rows[0].const_data_ptr<float>(), nullptr);
  rows.ring.reset();
  EXPECT_THAT(ErrorOf([&] { rows.rows[0].const_data_ptr<float>(); }), HasSubstr("not allocated"));
}

TEST(OffloadRing, SeveralThreads_FindTheirValues) {
  const Rows rows(8, RoomFor(2));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&rows, t] {
      for (size_t i = 0; i < 200; ++i) {
        const size_t row = (i * (t + 1)) % 8;
        EXPECT_EQ(rows.Sum(row), kRow * (static_cast<double>(row) + 1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The order of a device's stream, seen without a device.
class RecordedFences : public StreamFences {
 public:
  c10::Stream Current() const override { return c10::Stream(c10::Stream::UNSAFE, at::kCPU, 7); }
  c10::Stream Copies() const override { return c10::Stream(c10::Stream::UNSAFE, at::kCPU, 8); }
  Fence After(const c10::Stream& stream) override {
    EXPECT_EQ(stream.id(), 7);
    TORCH_CHECK(!lost, "the device is lost");
    return std::make_shared<int>(++made);
  }
  void Wait(const c10::Stream& stream, const Fence& fence) override {
    EXPECT_EQ(stream.id(), 8);
    MutexLock lock(&mu);
    TORCH_CHECK(!copies_fail, "the copy failed");
    newest = std::max(newest, *static_cast<const int*>(fence.get()));
  }
  int made = 0;
  bool lost = false;
  Mutex mu;
  int newest = 0;
  bool copies_fail = false;
};

TEST(OffloadRing, OnADevice_CopiesWaitForTheOperatorsThatUsedTheMemory) {
  RecordedFences fences;
  OffloadRingOptions options = RoomFor(1, /*prefetch=*/false);
  options.fences = &fences;
  const Rows rows(3, options);
  rows.Sum(0);
  EXPECT_EQ(fences.made, 0);
  rows.Sum(1);
  EXPECT_EQ(fences.made, 1);
  rows.Sum(2);
  EXPECT_EQ(fences.made, 2);
  rows.ring->WaitUntilIdle();
  MutexLock lock(&fences.mu);
  EXPECT_EQ(fences.newest, 2);
}

// A use that fails leaves nothing that the next one waits for.
TEST(OffloadRing, DeviceThatFails_IsAnErrorAtTheUse_AndTriedAgain) {
  for (const bool prefetch : {false, true}) {
    RecordedFences fences;
    OffloadRingOptions options = RoomFor(1, prefetch);
    options.fences = &fences;
    const Rows rows(3, options);
    EXPECT_EQ(rows.Sum(0), kRow);
    rows.ring->WaitUntilIdle();
    fences.lost = true;
    EXPECT_THAT(ErrorOf([&] { rows.Sum(2); }), HasSubstr("the device is lost"));
    EXPECT_EQ(rows.Sum(0), kRow);
    rows.ring->WaitUntilIdle();
    fences.lost = false;
    EXPECT_EQ(rows.Sum(2), 3 * kRow);
    rows.ring->WaitUntilIdle();
    {
      MutexLock lock(&fences.mu);
      fences.copies_fail = true;
    }
    EXPECT_THAT(ErrorOf([&] { rows.Sum(1); }), HasSubstr("the copy failed"));
    rows.ring->WaitUntilIdle();
    MutexLock lock(&fences.mu);
    fences.copies_fail = false;
  }
}

// More units than one operator's own error can leave behind: all wait, none for ever.
TEST(OffloadRing, ThreadsWhileTheSourceFails_EachGetsItsValuesOrTheError) {
  const Rows rows(8, RoomFor(2));
  rows.source->broken = 3;
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&rows, t] {
      for (size_t i = 0; i < 200; ++i) {
        const size_t row = (i * (t + 1)) % 8;
        const absl::Status status =
            Guard([&] { EXPECT_EQ(rows.Sum(row), kRow * (static_cast<double>(row) + 1)) << row; });
        EXPECT_EQ(status.ok(), row != 3) << status;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace muster
