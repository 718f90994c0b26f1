#include "worker/bigmodel/weight_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/cached_pages.h"
#include "worker/checkpoint/mapped_file.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/streamed_file.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Saved {
  std::shared_ptr<const WeightFiles> files;
  std::shared_ptr<const WeightSource> source;
};

Saved Save(const std::string& folder, const NamedTensors& tensors, bool mmap = false) {
  EXPECT_TRUE(SaveModelFiles(folder, tensors).ok());
  auto files = WeightFiles::Open(folder);
  EXPECT_TRUE(files.ok()) << files.status();
  Saved saved;
  saved.files = std::make_shared<const WeightFiles>(*std::move(files));
  std::vector<size_t> all(saved.files->entries().size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  auto source = OpenWeightSource(saved.files, all, mmap);
  EXPECT_TRUE(source.ok()) << source.status();
  saved.source = *source;
  return saved;
}

void DropFromCache(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY);
  EXPECT_EQ(fsync(fd), 0);
  EXPECT_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  close(fd);
}

// From the cache and from the disk, into memory of any alignment, up to the last byte of the file.
TEST(WeightSource, AnyRange_HasTheBytesOfTheFile) {
  const TestFolder folder;
  const at::Tensor values = at::arange(100'001, at::kInt);
  const Saved saved = Save(folder.path(), {{"a", at::arange(3, at::kInt)}, {"b", values}});
  ASSERT_EQ(saved.source->size(), 2u);
  const size_t b = saved.source->bytes(0) == 12 ? 1 : 0;
  ASSERT_EQ(saved.source->bytes(b), 400'004u);
  ReadScratch scratch;
  std::vector<char> memory(400'004 + 8192);
  const auto* const wanted = static_cast<const char*>(values.const_data_ptr());
  for (const bool cached : {true, false}) {
    for (const auto& [begin, bytes] :
         std::vector<std::pair<uint64_t, size_t>>{{0, 400'004}, {4, 4096}, {399'000, 1004}}) {
      for (const size_t offset : {0, 7}) {
        if (!cached) DropFromCache(folder.Path("model.safetensors"));
        char* const to = memory.data() + offset;
        const absl::Status read = saved.source->Read(b, begin, bytes, to, scratch);
        ASSERT_TRUE(read.ok()) << read;
        EXPECT_EQ(memcmp(to, wanted + begin, bytes), 0) << begin << " " << cached;
        const auto fetched = saved.source->Fetch(b, begin, bytes, scratch);
        ASSERT_TRUE(fetched.ok()) << fetched.status();
        EXPECT_EQ(memcmp(*fetched, wanted + begin, bytes), 0);
      }
    }
  }
}

// Cached bytes are taken from the cache, the others from the disk.
TEST(WeightSource, PartlyCachedRange_HasTheBytesOfTheFile) {
  const TestFolder folder;
  const std::string path = folder.Path("model.safetensors");
  const at::Tensor values = at::arange(300'000, at::kInt);
  const Saved saved = Save(folder.path(), {{"b", values}});
  const size_t bytes = 1'200'000;
  ReadScratch scratch;
  AlignedMemory memory;
  ASSERT_TRUE(memory.Grow(bytes + 8192).ok());
  // Read in place, and not.
  for (const size_t offset : {saved.source->Remainder(0), saved.source->Remainder(0) + 4}) {
    for (const size_t cached : {4096, 100'000, 600'000}) {
      DropFromCache(path);
      const int file = open(path.c_str(), O_RDONLY);
      ASSERT_EQ(posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM), 0);
      std::vector<char> part(cached);
      ASSERT_GT(pread(file, part.data(), cached, 0), 0);
      close(file);
      std::memset(memory.data(), 0xaa, bytes + 8192);
      const absl::Status read = saved.source->Read(0, 0, bytes, memory.data() + offset, scratch);
      ASSERT_TRUE(read.ok()) << read;
      EXPECT_EQ(memcmp(memory.data() + offset, values.const_data_ptr(), bytes), 0);
    }
  }
}

// A model that is streamed must not evict what others have cached.
TEST(WeightSource, FileThatIsNotCached_StaysSo) {
  const TestFolder folder;
  const std::string path = folder.Path("model.safetensors");
  const size_t bytes = 16 << 20;
  const Saved saved =
      Save(folder.path(), {{"b", at::zeros({static_cast<int64_t>(bytes)}, at::kByte)}});
  const auto cached = [&] {
    const int file = open(path.c_str(), O_RDONLY);
    const CachedPages pages(file, bytes);
    close(file);
    int64_t count = 0;
    for (size_t page = 0; page < bytes; page += 4096) count += pages.Has(page, 1) ? 1 : 0;
    return count;
  };
  DropFromCache(path);
  const int64_t before = cached();
  const int direct = open(path.c_str(), O_RDONLY | O_DIRECT);
  // If a file system cannot bypass the cache, the file is cached afterwards.
  if (direct < 0) return;
  close(direct);
  ReadScratch scratch;
  std::vector<char> to(bytes);
  for (size_t begin = 0; begin < bytes; begin += 4 << 20) {
    ASSERT_TRUE(saved.source->Read(0, begin, 4 << 20, to.data() + begin, scratch).ok());
  }
  // All of a file in memory.
  EXPECT_EQ(cached(), before);
}

TEST(WeightSource, FileThatBecameShorter_IsNamedWithItsTensor) {
  const TestFolder folder;
  const Saved saved = Save(folder.path(), {{"layers.3.up", at::zeros({10'000})}});
  ASSERT_EQ(truncate(folder.Path("model.safetensors").c_str(), 8000), 0);
  ReadScratch scratch;
  std::vector<char> memory(40'000);
  const absl::Status read = saved.source->Read(0, 0, 40'000, memory.data(), scratch);
  EXPECT_EQ(read.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(read.message()),
              AllOf(HasSubstr("model.safetensors: tensor \"layers.3.up\""),
                    HasSubstr("ends at byte 8000")));
}

TEST(WeightSource, FileThatIsWrittenInto_IsNamedWithItsTensor) {
  const TestFolder folder;
  const std::string path = folder.Path("model.safetensors");
  const Saved saved = Save(folder.path(), {{"layers.3.up", at::zeros({10'000})}});
  ReadScratch scratch;
  std::vector<char> memory(40'000);
  ASSERT_TRUE(saved.source->Read(0, 0, 40'000, memory.data(), scratch).ok());
  // The file has the same size, but another time.
  const timespec times[2] = {{.tv_sec = 1, .tv_nsec = 0}, {.tv_sec = 1, .tv_nsec = 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  for (const absl::Status& status : {saved.source->Read(0, 0, 100, memory.data(), scratch),
                                     saved.source->Fetch(0, 0, 100, scratch).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("model.safetensors: tensor \"layers.3.up\""),
                      HasSubstr("changed while it is used")));
  }
}

// Like a file on a server that has lost it (ESTALE).
TEST(WeightSource, FileThatCannotBeExamined_IsNamedWithTheReason) {
  const TestFolder folder;
  const Saved saved = Save(folder.path(), {{"a", at::zeros({10})}});
  const int fd = saved.files->StreamedFileOf(saved.files->entries()[0])->fd();
  const int kept = dup(fd);
  ASSERT_EQ(close(fd), 0);
  const absl::Status status = OpenWeightSource(saved.files, {0}).status();
  ASSERT_EQ(dup2(kept, fd), fd);
  close(kept);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("model.safetensors: tensor \"a\": cannot examine it"),
                    HasSubstr("Bad file descriptor")));
}

TEST(WeightSource, Mmap_HasTensorsWhereTheirNumbersAreAtMultiplesOfTheirSize) {
  const TestFolder folder;
  const at::Tensor a = at::arange(0, 5, at::kByte), b = at::arange(0, 1000, at::kInt);
  // The second begins after 5 bytes.
  ASSERT_TRUE(WriteSafetensors(folder.Path("model.safetensors"), {{"a", a}, {"b", b}}).ok());
  auto files = WeightFiles::Open(folder.path());
  ASSERT_TRUE(files.ok()) << files.status();
  const auto shared = std::make_shared<const WeightFiles>(*std::move(files));
  const auto copied = OpenWeightSource(shared, {0, 1});
  ASSERT_TRUE(copied.ok()) << copied.status();
  EXPECT_EQ((*copied)->Mapped(0).file, nullptr);
  const auto mapped = OpenWeightSource(shared, {0, 1}, /*mmap=*/true);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  for (size_t i = 0; i < 2; ++i) {
    const at::Tensor& wanted = shared->entries()[i].tensor.name == "a" ? a : b;
    const WeightSource::MappedPlace place = (*mapped)->Mapped(i);
    const uint64_t begin = shared->entries()[i].tensor.begin;
    ASSERT_EQ(place.file != nullptr, begin % wanted.element_size() == 0);
    if (place.file == nullptr) continue;
    EXPECT_TRUE((*mapped)->LoadPages(i, 0, wanted.nbytes()).ok());
    EXPECT_EQ(memcmp(place.file->data() + place.begin, wanted.const_data_ptr(), wanted.nbytes()),
              0);
  }
}

TEST(WeightSource, MappedFileThatIsChanged_IsNamedWithItsTensor) {
  const TestFolder folder;
  const std::string path = folder.Path("model.safetensors");
  const Saved saved = Save(folder.path(), {{"layers.3.up", at::zeros({10'000})}}, /*mmap=*/true);
  ASSERT_NE(saved.source->Mapped(0).file, nullptr);
  ASSERT_TRUE(saved.source->CheckUnchanged(0).ok());
  ASSERT_TRUE(saved.source->LoadPages(0, 0, 40'000).ok());
  ASSERT_EQ(truncate(path.c_str(), 8000), 0);
  for (const absl::Status& status :
       {saved.source->CheckUnchanged(0), saved.source->LoadPages(0, 0, 40'000)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("model.safetensors: tensor \"layers.3.up\""),
                      HasSubstr("changed while it is used")));
  }
}

TEST(WeightSource, HostMemory_IsReadWhereItIs) {
  const at::Tensor values = at::arange(10, at::kFloat);
  const auto source = HostWeightSource({"a"}, {values});
  ReadScratch scratch;
  const auto fetched = source->Fetch(0, 4, 8, scratch);
  ASSERT_TRUE(fetched.ok());
  EXPECT_EQ(static_cast<const void*>(*fetched), values.data_ptr<float>() + 1);
}

}  // namespace
}  // namespace muster
