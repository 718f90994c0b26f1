#include "worker/train/disk_parts.h"

#include <errno.h>

#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

std::vector<float> Numbers(size_t count, float first) {
  std::vector<float> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = first + static_cast<float>(i % 1000);
  return numbers;
}

TEST(DiskParts, Parts_ComeBack) {
  const TestFolder folder;
  absl::StatusOr<std::shared_ptr<ScratchFile>> file = ScratchFile::Create(folder.path());
  ASSERT_TRUE(file.ok()) << file.status();
  DiskParts parts(*file);
  // Sizes that are no multiples of those for direct I/O; one exceeds a block.
  const std::vector<std::vector<float>> all = {
      Numbers(5, 1), Numbers(3'000'001, 2), {}, Numbers(1025, 3)};
  std::vector<uint64_t> places;
  for (const auto& part : all) places.push_back(parts.Reserve(part.size() * sizeof(float)));
  for (size_t i = 0; i < all.size(); ++i) {
    parts.Write(places[i], all[i].data(), all[i].size() * sizeof(float));
  }
  for (size_t i = 0; i < all.size(); ++i) {
    std::vector<float> read(all[i].size());
    parts.Read(places[i], read.data(), read.size() * sizeof(float));
    EXPECT_EQ(read, all[i]) << i;
  }
}

TEST(DiskParts, PartsOfADevice_ComeBack_AfterItsCopies) {
  const TestFolder folder;
  absl::StatusOr<std::shared_ptr<ScratchFile>> file = ScratchFile::Create(folder.path());
  ASSERT_TRUE(file.ok()) << file.status();
  DiskParts parts(*file);
  EXPECT_TRUE(parts.Takes(FakeDevice().device()));
  // One of them has two blocks.
  const std::vector<std::vector<float>> all = {Numbers(5, 1), Numbers(3'000'001, 2)};
  std::vector<uint64_t> places;
  for (const auto& part : all) places.push_back(parts.Reserve(part.size() * sizeof(float)));
  int waits = FakeDevice().host_waits();
  for (size_t i = 0; i < all.size(); ++i) parts.WriteFrom(places[i], OnFakeDevice(all[i]));
  EXPECT_EQ(FakeDevice().host_waits(), waits + 3) << "a block is written when it is copied";
  waits = FakeDevice().host_waits();
  for (size_t i = 0; i < all.size(); ++i) {
    const at::Tensor read = OnFakeDevice(std::vector<float>(all[i].size()));
    parts.ReadTo(places[i], read);
    EXPECT_EQ(ValuesOf(read), all[i]) << i;
  }
  EXPECT_EQ(FakeDevice().host_waits(), waits + 3) << "and is used again when it is copied";
}

TEST(DiskParts, FolderThatIsAFile_IsNamedByTheFirstReservation) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("file"), "").ok());
  DiskParts parts(folder.Path("file"));
  EXPECT_THAT(ErrorOf([&] { parts.Reserve(4); }), HasSubstr(folder.Path("file")));
  DiskParts others(folder.Path("new"));
  const uint64_t place = others.Reserve(sizeof(float));
  const float number = 1;
  others.Write(place, &number, sizeof(number));
  float read = 0;
  others.Read(place, &read, sizeof(read));
  EXPECT_EQ(read, number);
}

TEST(DiskParts, DiskThatFails_IsNamed) {
  const TestFolder folder;
  DirectFileSystem system;
  absl::StatusOr<std::shared_ptr<ScratchFile>> file = ScratchFile::Create(folder.path(), &system);
  ASSERT_TRUE(file.ok()) << file.status();
  DiskParts parts(*file);
  const uint64_t place = parts.Reserve(4);
  system.pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  const float number = 1;
  EXPECT_THAT(ErrorOf([&] { parts.Write(place, &number, sizeof(number)); }),
              HasSubstr("cannot write the file for offloaded state in " + folder.path()));
}

}  // namespace
}  // namespace muster
