#include "worker/bigmodel/weight_readers.h"

#include <new>
#include <numeric>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/model_files.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(WeightReaders, TensorOfManyPieces_ArrivesWhole_AlsoInAnotherType) {
  const TestFolder folder;
  const at::Tensor values = at::arange(3'000'001, at::kFloat).remainder(1000).div(8);
  ASSERT_TRUE(SaveModelFiles(folder.path(), {{"w", values}}).ok());
  auto opened = WeightFiles::Open(folder.path());
  ASSERT_TRUE(opened.ok());
  const auto files = std::make_shared<const WeightFiles>(*std::move(opened));
  const auto source = OpenWeightSource(files, {0});
  ASSERT_TRUE(source.ok()) << source.status();
  WeightReaders readers(3);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor read = at::empty({3'000'001}, type);
    const auto pieces = PiecesOf(**source, 0, static_cast<char*>(read.data_ptr()), type, at::kCPU);
    EXPECT_EQ(std::accumulate(pieces.begin(), pieces.end(), int64_t{0},
                              [](int64_t sum, const auto& piece) { return sum + piece.count; }),
              3'000'001);
    const absl::Status filled = readers.Fill(pieces);
    ASSERT_TRUE(filled.ok()) << filled;
    EXPECT_TRUE(at::equal(read, values.to(type)));
  }
}

TEST(WeightReaders, PiecesForADevice_AreLargeWhereItCopiesByItself) {
  const std::vector<at::Tensor> values = {at::zeros({40 << 20}, at::kByte)};
  const auto host = HostWeightSource({"w"}, values);
  const at::Device gpu(at::kCUDA, 0);
  EXPECT_EQ(PiecesOf(*host, 0, nullptr, at::kByte, gpu).size(), 1u);
  EXPECT_GE(PiecesOf(*host, 0, nullptr, at::kByte, at::kCPU).size(), 10u);
  // Values that are converted go through memory of the thread.
  EXPECT_GE(PiecesOf(*host, 0, nullptr, at::kHalf, gpu).size(), 40u);
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), {{"w", values[0]}}).ok());
  auto opened = WeightFiles::Open(folder.path());
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto files = std::make_shared<const WeightFiles>(*std::move(opened));
  const auto source = OpenWeightSource(files, {0});
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_GE(PiecesOf(**source, 0, nullptr, at::kByte, gpu).size(), 40u);
}

class BrokenSource : public WeightSource {
 public:
  size_t size() const override { return 1; }
  std::string Describe(size_t) const override { return "broken"; }
  at::ScalarType type(size_t) const override { return at::kFloat; }
  uint64_t bytes(size_t) const override { return 100 << 20; }
  absl::Status Read(size_t, uint64_t, size_t, char*, ReadScratch&) const override {
    return absl::DataLossError("broken at once");
  }
  absl::StatusOr<const char*> Fetch(size_t, uint64_t, size_t, ReadScratch&) const override {
    return absl::DataLossError("broken at once");
  }
  size_t Remainder(size_t) const override { return 0; }
};

TEST(WeightReaders, Error_EndsTheReading) {
  const BrokenSource source;
  WeightReaders readers(2);
  const absl::Status filled = readers.Fill(PiecesOf(source, 0, nullptr, at::kFloat, at::kCPU));
  EXPECT_THAT(std::string(filled.message()), HasSubstr("broken at once"));
}

// On a thread of its own, where no caller would catch it.
class ThrowingSource final : public BrokenSource {
 public:
  absl::Status Read(size_t, uint64_t, size_t, char*, ReadScratch&) const override {
    throw std::bad_alloc();
  }
};

TEST(WeightReaders, ExceptionOfAThread_IsAnErrorThatNamesTheTensor) {
  const ThrowingSource source;
  WeightReaders readers(2);
  const absl::Status filled = readers.Fill(PiecesOf(source, 0, nullptr, at::kFloat, at::kCPU));
  EXPECT_EQ(filled.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(filled.message()), HasSubstr("broken: out of host memory"));
}

TEST(WeightReaders, MemoryThatADeviceStillUses_IsWrittenAfterThat) {
  const std::vector<float> values(5000, 3);
  const auto host = HostWeightSource({"w"}, {at::full({5000}, 3, at::kFloat)});
  const at::Tensor there = OnFakeDevice(std::vector<float>(5000, 0));
  const size_t before = CopiesToFakeDevice().size();
  int copied_first = -1;  // copies before the first wait for the device
  FakeDevice().LeaveUntilWaitedFor([&] {
    if (copied_first < 0) copied_first = static_cast<int>(CopiesToFakeDevice().size() - before);
  });
  WeightReaders readers(1);
  const absl::Status filled = readers.Fill(
      PiecesOf(*host, 0, static_cast<char*>(there.data_ptr()), at::kFloat, FakeDevice().device()));
  FakeDevice().LeaveUntilWaitedFor(nullptr);
  ASSERT_TRUE(filled.ok()) << filled;
  EXPECT_EQ(copied_first, 0);
  EXPECT_EQ(ValuesOf(there), values);
}

TEST(WeightReaders, NothingToRead_IsDone) {
  WeightReaders readers(1);
  EXPECT_TRUE(readers.Fill({}).ok());
}

}  // namespace
}  // namespace muster
