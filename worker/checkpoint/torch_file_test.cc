#include "worker/checkpoint/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "base/file.h"
#include "tests/testdata/golden.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using testing_support::TestdataPath;

std::string Fixture(const std::string& name) {
  const auto text = ReadFile(TestdataPath("torch_files/" + name));
  EXPECT_TRUE(text.ok()) << text.status();
  return text.value_or("");
}

std::string ErrorOf(const std::string& name) {
  const auto tensors = ReadTorchFile(*MemorySource(Fixture(name), name));
  return std::string(tensors.status().message());
}

TEST(TorchFile, EveryFileThatIsNoDictionaryOfTensors_IsRefusedByWhatItIs) {
  EXPECT_THAT(ErrorOf("legacy.bin"), HasSubstr("torch.save's legacy format"));
  EXPECT_THAT(ErrorOf("torchscript.pt"), HasSubstr("is a TorchScript archive"));
  EXPECT_THAT(ErrorOf("big_endian.bin"), HasSubstr("byte order is \"big\""));
  EXPECT_THAT(ErrorOf("plain.pkl"), HasSubstr("is a plain Python pickle"));
  EXPECT_THAT(ErrorOf("compressed.bin"), HasSubstr("is compressed"));
  EXPECT_THAT(ErrorOf("other.zip"), HasSubstr("not of torch.save"));
  EXPECT_THAT(ErrorOf("types.safetensors"), HasSubstr("is not a file of torch.save"));
  EXPECT_THAT(ErrorOf("evil.bin"), HasSubstr("names posix.system, which is refused"));
  EXPECT_THAT(ErrorOf("sparse.bin"), HasSubstr("torch._utils._rebuild_sparse_tensor"));
  EXPECT_THAT(ErrorOf("module.bin"), HasSubstr("torch.nn.modules.linear.Linear"));
}

TEST(TorchFile, StorageThatIsMissingOrShort_NamesTheTensor) {
  EXPECT_THAT(ErrorOf("missing_storage.bin"),
              HasSubstr("tensor \"whole\": its storage 0 has 0 bytes in the archive, but 96"));
  EXPECT_THAT(ErrorOf("short_storage.bin"), HasSubstr("has 92 bytes in the archive, but 96"));
}

TEST(TorchFile, Beginnings_TellTheFormats) {
  for (const char* name : {"types.bin", "nested.pt", "legacy.bin", "plain.pkl", "torchscript.pt"}) {
    EXPECT_TRUE(LooksLikeTorchFile(Fixture(name).substr(0, 16))) << name;
  }
  EXPECT_FALSE(LooksLikeTorchFile(Fixture("types.safetensors").substr(0, 16)));
  // Lengths of safetensors headers that look like the marks of other formats.
  EXPECT_FALSE(LooksLikeTorchFile(std::string("\x80\x02\x8a\x00\x00\x00\x00\x00{\"a\"", 12)));
  EXPECT_FALSE(LooksLikeTorchFile(std::string("PK\x03\x04\x00\x00\x00\x00{\"a\"", 12)));
  EXPECT_FALSE(LooksLikeTorchFile(""));
}

// Archives with damage anywhere: nothing is read outside of the file (under asan), and everything
// that is accepted can be read.
TEST(TorchFile, HundredThousandMutants_AreReadOrRefused) {
  const std::vector<std::string> seeds = {Fixture("layouts.bin"), Fixture("nested.pt"),
                                          Fixture("types_protocol4.bin")};
  std::mt19937_64 random(11);
  const auto below = [&](size_t limit) { return limit == 0 ? 0 : random() % limit; };
  int accepted = 0, refused = 0;
  std::string bytes;
  for (int i = 0; i < 100'000; ++i) {
    std::string file = seeds[i % seeds.size()];
    // Most of a file is tensor bytes, so aim at the pickle, and at the directory at the end.
    const size_t pickle = file.find("data.pkl"), directory = file.find("PK\x01\x02");
    for (size_t changes = 1 + below(3); changes > 0; --changes) {
      const size_t at = below(3) == 0   ? below(file.size())
                        : below(2) == 0 ? std::min(pickle + below(1200), file.size() - 1)
                                        : std::min(directory + below(1200), file.size() - 1);
      switch (below(4)) {
        case 0:
          file[at] = static_cast<char>(random());
          break;
        case 1:
          file[at] ^= static_cast<char>(1 << below(8));
          break;
        case 2:
          file.erase(at, below(200) == 0 ? file.size() : below(16));
          break;
        case 3:
          file.replace(at, std::min<size_t>(4, file.size() - at),
                       below(2) == 0 ? "\xff\xff\xff\xff" : "\x7f");
          break;
      }
      if (file.empty()) break;
    }
    const auto source = MemorySource(std::move(file), "mutant.bin");
    const auto tensors = ReadTorchFile(*source);
    if (!tensors.ok()) {
      ++refused;
      continue;
    }
    ++accepted;
    for (const StoredTensor& tensor : *tensors) {
      ASSERT_LE(tensor.extent_bytes, source->size());
      bytes.resize(tensor.extent_bytes);
      ASSERT_TRUE(source->Read(tensor.begin, bytes.data(), bytes.size()).ok()) << tensor.name;
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace muster
