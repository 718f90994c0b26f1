#include "worker/bigmodel/offload_ring.h"

#include <atomic>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/time/time.h"
#include "base/fake_clock.h"
#include "base/test_folder.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/bigmodel/fake_gpus.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/test_huge_file.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/collective/test_error.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kRow = 2048;  // floats: two blocks

// Counts readings, and fails on request.
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

// Rows of ones, twos, threes, ..., each of which is a unit.
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

  // Waits for the reads that the use of each row has caused. Otherwise a row that arrives late
  // keeps its memory, and the next reads depend on the threads.
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
  // The first pass has no order to follow; from then on each unit is asked for by a previous one.
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

TEST(OffloadRing, MemoryBesidesThatTheHostRefuses_IsNamed_AndThePartComesOnceThereIsSome) {
  constexpr int64_t kWide = int64_t{1} << 24;
  std::vector<at::Tensor> rows;
  std::vector<OffloadedUnit> units;
  for (const float value : {1.0f, 2.0f}) {
    const std::string name = "rows." + std::to_string(rows.size());
    rows.push_back(at::empty({kWide}, at::TensorOptions().device(at::kMeta)));
    units.push_back({name,
                     {{name + ".weight", rows.back(),
                       HostWeightSource({name}, {at::full({kWide}, value)}), 0, at::kFloat}}});
  }
  const auto ring = OffloadRing::Make(units, {.bytes = kWide * sizeof(float), .prefetch = false});
  ASSERT_TRUE(ring.ok()) << ring.status();
  const at::NoGradGuard no_grad;
  {
    const AtMostMoreMemory scarce(kWide * sizeof(float) / 2);
    const absl::Status status = Guard([&] { at::dot(rows[0], rows[1]); });
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("offloaded part \"rows.1\": needs 67108864 bytes"),
                      HasSubstr("raise ring_bytes")));
  }
  EXPECT_EQ(at::dot(rows[0], rows[1]).item<double>(), 2.0 * kWide);
}

// Tensors of one unit, used where their file is mapped. `names` in the order of the unit.
struct MappedUnit {
  MappedUnit(const NamedTensors& in_file, const std::vector<std::string>& names,
             const Clock& clock) {
    EXPECT_TRUE(WriteSafetensors(folder.Path("model.safetensors"), in_file).ok());
    auto files = WeightFiles::Open(folder.path());
    EXPECT_TRUE(files.ok()) << files.status();
    const auto shared = std::make_shared<const WeightFiles>(*std::move(files));
    OffloadedUnit unit{"unit", {}};
    for (const std::string& name : names) {
      for (size_t i = 0; i < shared->entries().size(); ++i) {
        const StoredTensor& stored = shared->entries()[i].tensor;
        if (stored.name != name) continue;
        auto source = OpenWeightSource(shared, {i}, /*mmap=*/true);
        EXPECT_TRUE(source.ok()) << source.status();
        tensors.push_back(at::empty(std::vector<int64_t>(stored.shape.begin(), stored.shape.end()),
                                    at::TensorOptions().device(at::kMeta)));
        unit.tensors.push_back({name, tensors.back(), *std::move(source), 0, at::kFloat});
      }
    }
    auto made = OffloadRing::Make({std::move(unit)}, {.clock = &clock});
    EXPECT_TRUE(made.ok()) << made.status();
    ring = *std::move(made);
  }

  TestFolder folder;
  std::vector<at::Tensor> tensors;
  std::unique_ptr<OffloadRing> ring;
};

// The kernel may have evicted them.
TEST(OffloadRing, MappedUnitThatWasThereAWhileAgo_IsAskedForItsPagesAgain) {
  FakeClock clock;
  const MappedUnit unit({{"a", at::ones({kRow})}}, {"a"}, clock);
  for (const int64_t waits : {1, 1, 2, 2}) {
    EXPECT_EQ(unit.tensors[0].sum().item<double>(), kRow);
    EXPECT_EQ(unit.ring->stats().waits, waits);
    clock.Advance(absl::Milliseconds(600));
  }
}

TEST(OffloadRing, MappedEmptyTensor_TakesNothingFromTheOneThatBeginsWithIt) {
  const FakeClock clock;
  const MappedUnit unit({{"empty", at::ones({0})}, {"row", at::ones({kRow})}}, {"row", "empty"},
                        clock);
  EXPECT_EQ(unit.tensors[0].slice(0, 1000).sum().item<double>(), kRow - 1000);
  EXPECT_EQ(unit.tensors[1].sum().item<double>(), 0);
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

constexpr c10::StreamId kOperators = 7, kCopies = 8;

// Records the order of a device's streams without a device.
class RecordedFences : public StreamFences {
 public:
  // The number of fences of its kind, including this one.
  struct Point {
    c10::StreamId stream;
    int number;
  };

  c10::Stream Current() const override { return StreamOf(operators); }
  c10::Stream Copies() const override { return StreamOf(kCopies); }
  Fence After(const c10::Stream& stream) override {
    MutexLock lock(&mu);
    TORCH_CHECK(!lost || stream.id() == kCopies, "the device is lost");
    TORCH_CHECK(!no_arrival || stream.id() != kCopies, "no event is left");
    return std::make_shared<Point>(Point{stream.id(), ++made[stream.id()]});
  }
  void Wait(const c10::Stream& stream, const Fence& fence) override {
    MutexLock lock(&mu);
    TORCH_CHECK(!copies_fail || stream.id() != kCopies, "the copy failed");
    const auto* const point = static_cast<const Point*>(fence.get());
    EXPECT_NE(point->stream, stream.id());
    int& newest = waited[{stream.id(), point->stream}];
    newest = std::max(newest, point->number);
  }
  int Made(c10::StreamId stream) {
    MutexLock lock(&mu);
    return made[stream];
  }
  // Returns the newest fence of stream `of` for which `stream` waits.
  int Waited(c10::StreamId stream, c10::StreamId of) {
    MutexLock lock(&mu);
    return waited[{stream, of}];
  }

  std::atomic<c10::StreamId> operators = kOperators;
  Mutex mu;
  std::map<c10::StreamId, int> made;
  std::map<std::pair<c10::StreamId, c10::StreamId>, int> waited;
  bool lost = false;
  bool copies_fail = false;
  bool no_arrival = false;

 private:
  static c10::Stream StreamOf(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, at::kCPU, id);
  }
};

TEST(OffloadRing, OnADevice_CopiesWaitForTheOperatorsThatUsedTheMemory) {
  RecordedFences fences;
  OffloadRingOptions options = RoomFor(1, /*prefetch=*/false);
  options.fences = &fences;
  const Rows rows(3, options);
  // The ring's own memory may have been another tensor's a moment ago.
  EXPECT_EQ(fences.Made(kOperators), 1);
  rows.Sum(0);
  EXPECT_EQ(fences.Made(kOperators), 1);
  EXPECT_EQ(fences.Waited(kCopies, kOperators), 1);
  rows.Sum(1);
  EXPECT_EQ(fences.Made(kOperators), 2);
  rows.Sum(2);
  EXPECT_EQ(fences.Made(kOperators), 3);
  rows.ring->WaitUntilIdle();
  EXPECT_EQ(fences.Waited(kCopies, kOperators), 3);
}

TEST(OffloadRing, OnADevice_OperatorsWaitForTheCopiesOnce_InEachStream) {
  RecordedFences fences;
  OffloadRingOptions options = RoomFor(2, /*prefetch=*/false);
  options.fences = &fences;
  const Rows rows(3, options);
  rows.Sum(0);
  EXPECT_EQ(fences.Made(kCopies), 1);
  EXPECT_EQ(fences.Waited(kOperators, kCopies), 1);
  rows.Sum(1);
  EXPECT_EQ(fences.Made(kCopies), 2);
  EXPECT_EQ(fences.Waited(kOperators, kCopies), 2);
  // It has arrived, but operators of another stream do not know that.
  fences.operators = 9;
  rows.Sum(0);
  EXPECT_EQ(fences.Made(kCopies), 2);
  EXPECT_EQ(fences.Waited(9, kCopies), 1);
  // Both streams have used row 0 before its memory is given to another unit.
  rows.Sum(2);
  rows.Sum(1);
  rows.Sum(0);
  rows.ring->WaitUntilIdle();
  EXPECT_GE(fences.Waited(kCopies, kOperators), 2);
  EXPECT_GE(fences.Waited(kCopies, 9), 1);
}

TEST(OffloadRing, OnADevice_UnitsBesidesTheRing_FollowWhatTheirMemoryWasUsedFor) {
  RecordedFences fences;
  OffloadRingOptions options = RoomFor(1, /*prefetch=*/false);
  options.fences = &fences;
  const Rows rows(2, options);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(at::add(rows.rows[0], rows.rows[1]).sum().item<double>(), 3 * kRow);
  EXPECT_GT(rows.ring->stats().overflow_bytes, 0u);
  // One for the memory of the ring, and one for the other.
  EXPECT_EQ(fences.Made(kOperators), 2);
  EXPECT_EQ(fences.Waited(kCopies, kOperators), 2);
}

TEST(OffloadRing, OnADevice_ArrivalThatCannotBeTold_IsAnErrorAtTheUse_AndTriedAgain) {
  RecordedFences fences;
  OffloadRingOptions options = RoomFor(2, /*prefetch=*/false);
  options.fences = &fences;
  const Rows rows(3, options);
  const auto set = [&fences](bool fails) {
    MutexLock lock(&fences.mu);
    fences.no_arrival = fails;
  };
  set(true);
  EXPECT_THAT(ErrorOf([&] { rows.Sum(1); }), HasSubstr("no event is left"));
  set(false);
  EXPECT_EQ(rows.Sum(1), 2 * kRow);
}

// Records the current devices of threads that have ordered copies.
class DevicesOfCopies : public StreamFences {
 public:
  c10::Stream Current() const override { return StreamOf(kOperators); }
  c10::Stream Copies() const override { return StreamOf(kCopies); }
  Fence After(const c10::Stream& stream) override {
    Note(stream);
    return std::make_shared<int>(0);
  }
  void Wait(const c10::Stream& stream, const Fence& /*fence*/) override { Note(stream); }

  std::vector<int> seen() const {
    MutexLock lock(&mu_);
    return seen_;
  }

 private:
  static c10::Stream StreamOf(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, FakeGpu(1), id);
  }
  void Note(const c10::Stream& stream) {
    if (stream.id() != kCopies) return;
    MutexLock lock(&mu_);
    seen_.push_back(c10::impl::VirtualGuardImpl(FakeGpu(1).type()).getDevice().index());
  }

  mutable Mutex mu_;
  std::vector<int> seen_;
};

// An event restores the current device that it finds, which allocates memory there.
TEST(OffloadRing, ThreadsThatCopyToADevice_HaveItAsTheirOwn) {
  InstallFakeGpus();
  DevicesOfCopies fences;
  OffloadRingOptions options = RoomFor(1, /*prefetch=*/false);
  options.device = FakeGpu(1);
  options.readers = 1;
  options.fences = &fences;
  const Rows rows(3, options);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(rows.Sum(i), kRow * (static_cast<double>(i) + 1));
  EXPECT_THAT(fences.seen(), AllOf(SizeIs(6), Each(1)));
}

// A failed use leaves nothing for which the next one waits.
TEST(OffloadRing, DeviceThatFails_IsAnErrorAtTheUse_AndTriedAgain) {
  for (const bool prefetch : {false, true}) {
    RecordedFences fences;
    OffloadRingOptions options = RoomFor(1, prefetch);
    options.fences = &fences;
    const Rows rows(3, options);
    EXPECT_EQ(rows.Sum(0), kRow);
    rows.ring->WaitUntilIdle();
    const auto set_lost = [&fences](bool lost) {
      MutexLock lock(&fences.mu);
      fences.lost = lost;
    };
    set_lost(true);
    EXPECT_THAT(ErrorOf([&] { rows.Sum(2); }), HasSubstr("the device is lost"));
    EXPECT_EQ(rows.Sum(0), kRow);
    rows.ring->WaitUntilIdle();
    set_lost(false);
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

// More units than the error of one operator can leave behind: all wait, none forever.
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
