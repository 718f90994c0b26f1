#include "worker/train/disk_copies.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

// Counts maps of files in `folder` that have no name any more.
int MapsOf(const TestFolder& folder) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(folder.path()) == std::string::npos ? 0 : 1;
  }
  return count;
}

// Returns the bytes of this process's memory that belong to no file.
int64_t Held() {
  std::ifstream status("/proc/self/status");
  for (std::string name; status >> name;) {
    int64_t kib = 0;
    if (name == "RssAnon:" && status >> kib) return kib << 10;
  }
  return std::numeric_limits<int64_t>::min();
}

// 1 MiB.
at::Tensor Filled(int64_t value) { return at::full({kMiB / 8}, value, at::kLong); }

TEST(DiskCopies, Tensors_AreTheSameInFilesWithoutNames) {
  const TestFolder folder;
  DiskCopies copies(folder.path());
  const at::Tensor rows = at::arange(2'000'000, at::kFloat).view({1000, 2000});
  const at::Tensor complex = at::complex(rows, rows.neg());
  for (const at::Tensor& tensor : {rows, rows.t(), rows.narrow(0, 1, 333), complex.conj(),
                                   at::imag(complex.conj()), at::arange(5), at::empty({0, 3})}) {
    const at::Tensor copy = copies.Copy(tensor);
    EXPECT_TRUE(copy.equal(tensor)) << tensor.sizes();
    EXPECT_EQ(copy.dtype(), tensor.dtype());
    EXPECT_TRUE(copy.is_contiguous());
    EXPECT_TRUE(tensor.numel() == 0 || copy.data_ptr() != tensor.data_ptr());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DiskCopies, ManyCopies_ShareMapsThatGoWithTheLastOfThem) {
  const TestFolder folder;
  std::vector<at::Tensor> kept;
  {
    DiskCopies copies(folder.path());
    for (int64_t i = 0; i < 150; ++i) kept.push_back(copies.Copy(Filled(i)));
    EXPECT_EQ(MapsOf(folder), 3) << "64 copies have one";
  }
  for (int64_t i = 0; i < 150; ++i) {
    EXPECT_TRUE(kept[i].eq(i).all().item<bool>()) << i;
  }
  kept.erase(kept.begin(), kept.begin() + 64);
  EXPECT_EQ(MapsOf(folder), 2);
  kept.clear();
  EXPECT_EQ(MapsOf(folder), 0);
}

TEST(DiskCopies, LargeCopies_HaveFilesOfTheirOwnAndLeaveTheOneThatIsFilled) {
  const TestFolder folder;
  DiskCopies copies(folder.path(), 4 * kMiB);
  const at::Tensor first = copies.Copy(Filled(1));
  const at::Tensor large = copies.Copy(at::arange(5 * kMiB, at::kByte));
  const at::Tensor second = copies.Copy(Filled(2));
  EXPECT_EQ(MapsOf(folder), 2);
  // It does not fit into the rest of 2 MiB.
  const at::Tensor third = copies.Copy(at::full({3 * kMiB}, 3, at::kByte));
  const at::Tensor fourth = copies.Copy(Filled(4));
  EXPECT_EQ(MapsOf(folder), 3);
  EXPECT_TRUE(large.equal(at::arange(5 * kMiB, at::kByte)));
  EXPECT_TRUE(first.equal(Filled(1)));
  EXPECT_TRUE(second.equal(Filled(2)));
  EXPECT_TRUE(third.eq(3).all().item<bool>());
  EXPECT_TRUE(fourth.equal(Filled(4)));
}

TEST(DiskCopies, CopyThatIsDropped_GivesBackItsPagesWhileOthersOfItsFileAreUsed) {
  const TestFolder folder;
  DiskCopies copies(folder.path());
  at::Tensor changed = copies.Copy(at::zeros({16 * kMiB}, at::kByte));
  const at::Tensor neighbour = copies.Copy(Filled(5));
  at::Tensor written = copies.Copy(Filled(6));
  written.fill_(7);
  const int64_t before = Held();
  changed.fill_(1);
  EXPECT_GT(Held(), before + 12 * kMiB);
  changed.reset();
  EXPECT_LT(Held(), before + 4 * kMiB);
  EXPECT_TRUE(neighbour.equal(Filled(5)));
  EXPECT_TRUE(written.equal(Filled(7)));
}

TEST(DiskCopies, Keep_TakesItsOwnCopiesAsTheyAreUnlessTheyAreOlder) {
  const TestFolder folder;
  DiskCopies copies(folder.path()), others(folder.path());
  const at::Tensor before = copies.Copy(Filled(1));
  const uint64_t since = DiskCopies::Made();
  const at::Tensor after = copies.Copy(Filled(2));
  EXPECT_EQ(others.Keep(after, since).data_ptr(), after.data_ptr());
  EXPECT_EQ(others.Keep(after.view({2, -1})[1], since).data_ptr(),
            after.view({2, -1})[1].data_ptr());
  const at::Tensor live = Filled(3);
  for (const at::Tensor& tensor : {before, live, after.view({2, -1}).t(), at::arange(3)}) {
    const at::Tensor kept = others.Keep(tensor, since);
    EXPECT_NE(kept.data_ptr(), tensor.data_ptr());
    EXPECT_TRUE(kept.equal(tensor));
  }
}

TEST(DiskCopies, FolderThatIsAFile_IsNamed) {
  const TestFolder folder;
  std::ofstream(folder.Path("file")) << "text";
  DiskCopies copies(folder.Path("file"));
  EXPECT_THAT(ErrorOf([&] { copies.Copy(Filled(1)); }), HasSubstr(folder.Path("file")));
}

}  // namespace
}  // namespace muster
