#include "worker/checkpoint/weight_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/weight_writer.h"

namespace {

// Calls the second before each read of a file whose path has the first part.
std::string before_reading;
std::function<void()> run_before;

bool IsRead(int fd) {
  if (run_before != nullptr && muster::PathHas(fd, before_reading.c_str())) run_before();
  return false;
}

}  // namespace

MUSTER_REPLACE_READS(IsRead)

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using testing_support::GoldenPath;
using testing_support::TestdataPath;

class WeightFilesTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return JoinPath(dir_, name); }
  void Put(const std::string& name, const std::string& text) {
    ASSERT_TRUE(MakeDirectories(ParentPath(Path(name))).ok());
    ASSERT_TRUE(WriteFileAtomically(Path(name), text).ok());
  }
  // Copies a file of tests/testdata/torch_files.
  void Fixture(const std::string& fixture, const std::string& name) {
    const auto text = ReadFile(TestdataPath("torch_files/" + fixture));
    ASSERT_TRUE(text.ok()) << text.status();
    Put(name, *text);
  }

  const TestFolder test_folder_;
  const std::string dir_ = test_folder_.path();
};

std::string Tensors(const std::vector<std::string>& names, char value) {
  std::vector<SafetensorsEntry> entries;
  std::vector<std::string> data;
  for (const std::string& name : names) {
    entries.push_back({.name = name, .type = SafetensorsType::kU8, .shape = {2}});
    data.push_back(std::string(2, value));
  }
  return *EncodeSafetensors(entries, data, std::nullopt);
}

std::string OfFormat(const std::optional<SafetensorsMetadata>& metadata) {
  return *EncodeSafetensors({{.name = "w", .type = SafetensorsType::kU8, .shape = {2}}}, {"ab"},
                            metadata);
}

std::string Bytes(const WeightFiles& files, const std::string& name) {
  std::string bytes;
  const WeightFiles::Entry* const entry = files.Find(name);
  if (entry == nullptr) return "no such tensor";
  const absl::Status read = files.Stream(*entry, [&](absl::string_view part) {
    bytes.append(part.data(), part.size());
    return absl::OkStatus();
  });
  EXPECT_TRUE(read.ok()) << read;
  EXPECT_EQ(bytes.size(), WeightFiles::BytesOf(*entry)) << name;
  return bytes;
}

// Expects the same names, types, shapes and bytes.
void ExpectSame(const WeightFiles& a, const WeightFiles& b) {
  ASSERT_EQ(a.entries().size(), b.entries().size());
  for (const WeightFiles::Entry& entry : a.entries()) {
    const std::string& name = entry.tensor.name;
    const WeightFiles::Entry* const other = b.Find(name);
    ASSERT_NE(other, nullptr) << name;
    EXPECT_EQ(entry.tensor.type, other->tensor.type) << name;
    EXPECT_EQ(entry.tensor.shape, other->tensor.shape) << name;
    EXPECT_EQ(Bytes(a, name), Bytes(b, name)) << name;
  }
}

TEST_F(WeightFilesTest, FormatOfAnotherLibrary_IsRefused) {
  const std::string path = Path("model.safetensors");
  for (const auto& [format, part] : {std::pair{"tf", "the weights of a TensorFlow model"},
                                     {"flax", "from_flax=True"},
                                     {"np", "says \"format\": \"np\", which is not \"pt\""}}) {
    Put("model.safetensors", OfFormat(SafetensorsMetadata{{"format", format}}));
    for (const std::string& given : {path, dir_}) {
      const auto files = WeightFiles::Open(given);
      EXPECT_EQ(files.status().code(), absl::StatusCode::kInvalidArgument) << format;
      EXPECT_THAT(std::string(files.status().message()), HasSubstr(path + ": "));
      EXPECT_THAT(std::string(files.status().message()), HasSubstr(part));
    }
  }
  for (const auto& metadata :
       {std::optional<SafetensorsMetadata>(), std::optional(SafetensorsMetadata()),
        std::optional(SafetensorsMetadata{{"made_by", "tf"}}),
        std::optional(SafetensorsMetadata{{"format", "pt"}}),
        std::optional(SafetensorsMetadata{{"format", "mlx"}})}) {
    Put("model.safetensors", OfFormat(metadata));
    const auto files = WeightFiles::Open(dir_);
    EXPECT_TRUE(files.ok()) << files.status();
  }
}

TEST_F(WeightFilesTest, Tilde_IsHome) {
  Put("model.safetensors", OfFormat(std::nullopt));
  ASSERT_EQ(setenv("HOME", dir_.c_str(), 1), 0);
  const auto files = WeightFiles::Open("~/model.safetensors");
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(files->path(), Path("model.safetensors"));
}

// Like save_state("best") of a running training: both have the same files and tensors.
TEST_F(WeightFilesTest, ReplacedWhileItIsOpened_IsNoMixture) {
  const auto put = [&](const std::string& folder, char value) {
    (void)RemoveTree(Path(folder));
    Put(folder + "/model-00001-of-00002.safetensors", Tensors({"a"}, value));
    Put(folder + "/model-00002-of-00002.safetensors", Tensors({"b"}, value));
    Put(folder + "/model.safetensors.index.json",
        R"({"weight_map": {"a": "model-00001-of-00002.safetensors",)"
        R"( "b": "model-00002-of-00002.safetensors"}})");
  };
  int times = 0;  // how often it is replaced
  char last = 0;
  run_before = [&] {
    if (times == 0) return;
    --times;
    ASSERT_EQ(std::rename(Path("best").c_str(), Path(absl::StrCat("old", times)).c_str()), 0);
    put("best", ++last);
  };
  for (const std::string file : {"index.json", "00001-of", "00002-of"}) {
    SCOPED_TRACE(file);
    put("best", last = 'x');
    before_reading = file;
    times = 1;
    const auto files = WeightFiles::Open(Path("best"));
    ASSERT_TRUE(files.ok()) << files.status();
#ifndef __SANITIZE_ADDRESS__  // whose own call replaces the test's for the index
    EXPECT_EQ(times, 0);
#endif
    EXPECT_EQ(Bytes(*files, "a"), std::string(2, last));
    EXPECT_EQ(Bytes(*files, "b"), std::string(2, last));
    ASSERT_TRUE(RemoveTree(Path("old0")).ok());
  }
  times = 100;
  const auto files = WeightFiles::Open(Path("best"));
  EXPECT_TRUE(absl::IsUnavailable(files.status())) << files.status();
  run_before = nullptr;
}

TEST_F(WeightFilesTest, TorchFiles_HoldWhatTorchWroteAsSafetensors) {
  for (const std::string name : {"types", "layouts", "pytorch_model"}) {
    SCOPED_TRACE(name);
    const auto pickled = WeightFiles::Open(TestdataPath("torch_files/" + name + ".bin"));
    const auto plain = WeightFiles::Open(TestdataPath("torch_files/" + name + ".safetensors"));
    ASSERT_TRUE(pickled.ok()) << pickled.status();
    ASSERT_TRUE(plain.ok()) << plain.status();
    ExpectSame(*pickled, *plain);
  }
  const auto two = WeightFiles::Open(TestdataPath("torch_files/types.bin"));
  const auto four = WeightFiles::Open(TestdataPath("torch_files/types_protocol4.bin"));
  ASSERT_TRUE(two.ok() && four.ok()) << four.status();
  ExpectSame(*two, *four);
}

TEST_F(WeightFilesTest, NestedCheckpoint_NamesTensorsByTheirPlace) {
  const auto files = WeightFiles::Open(TestdataPath("torch_files/nested.pt"));
  ASSERT_TRUE(files.ok()) << files.status();
  std::vector<std::string> names;
  for (const auto& entry : files->entries()) names.push_back(entry.tensor.name);
  EXPECT_THAT(names,
              ElementsAre("state_dict.embed.weight", "state_dict.norm.weight",
                          "state_dict.norm.bias", "state_dict.norm.running_mean",
                          "state_dict.norm.running_var", "state_dict.norm.num_batches_tracked",
                          "state_dict.head.weight", "parameter", "optimizer.state.0.step"));
  EXPECT_EQ(files->StorageOf(*files->Find("state_dict.embed.weight")),
            files->StorageOf(*files->Find("state_dict.head.weight")));
}

TEST_F(WeightFilesTest, Folder_PrefersSafetensorsToPickles) {
  Fixture("pytorch_model.bin", "pytorch_model.bin");
  EXPECT_NE(WeightFiles::Open(dir_)->Find("embed.weight"), nullptr);
  Put("a.safetensors", Tensors({"a"}, 'a'));
  Put("model.safetensors.index.json", R"({"weight_map": {"a": "a.safetensors"}})");
  EXPECT_NE(WeightFiles::Open(dir_)->Find("a"), nullptr);
  Put("model.safetensors", Tensors({"b"}, 'b'));
  EXPECT_NE(WeightFiles::Open(dir_)->Find("b"), nullptr);
}

TEST_F(WeightFilesTest, HiddenFiles_AreNoWeights) {
  Put("._adapter.safetensors", "AppleDouble");
  Put("._x.index.json", "AppleDouble");
  EXPECT_TRUE(absl::IsNotFound(WeightFiles::Open(dir_).status()));
  Put("adapter.safetensors", Tensors({"a"}, 'x'));
  const auto files = WeightFiles::Open(dir_);
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(Bytes(*files, "a"), "xx");
}

TEST_F(WeightFilesTest, DistributedCheckpointOfTorch_IsNamed) {
  Put("pytorch_model_fsdp_0/.metadata", "x");
  Put("pytorch_model_fsdp_0/__0_0.distcp", "x");
  for (const std::string& folder : {dir_, Path("pytorch_model_fsdp_0")}) {
    EXPECT_THAT(WeightFiles::Open(folder).status().message(),
                HasSubstr("`accelerate merge-weights " + Path("pytorch_model_fsdp_0") + " OUT`"));
  }
}

TEST_F(WeightFilesTest, FolderWithoutOneAnswer_SaysWhatIsThere) {
  EXPECT_THAT(WeightFiles::Open(dir_).status().message(), HasSubstr("holds no weights"));
  Put("one.safetensors", Tensors({"a"}, 'a'));
  EXPECT_TRUE(WeightFiles::Open(dir_).ok());
  Put("two.safetensors", Tensors({"a"}, 'a'));
  EXPECT_THAT(WeightFiles::Open(dir_).status().message(), HasSubstr("holds 2 files *.safetensors"));
  EXPECT_TRUE(absl::IsNotFound(WeightFiles::Open(Path("nothing")).status()));
}

TEST_F(WeightFilesTest, Index_OverShardsOfBothFormats) {
  Fixture("pytorch_model.bin", "pytorch_model-00001-of-00002.bin");
  Put("pytorch_model-00002-of-00002.bin", Tensors({"extra", "unlisted"}, 'x'));
  Put("pytorch_model.bin.index.json",
      R"({"weight_map": {"norm.bias": "pytorch_model-00001-of-00002.bin",
                         "extra": "pytorch_model-00002-of-00002.bin"}})");
  const auto files = WeightFiles::Open(dir_);
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(files->entries().size(), 2u) << "what the index does not place is not the model's";
  EXPECT_EQ(Bytes(*files, "extra"), "xx");
  Put("pytorch_model.bin.index.json",
      R"({"weight_map": {"gone": "pytorch_model-00001-of-00002.bin"}})");
  EXPECT_THAT(WeightFiles::Open(dir_).status().message(), HasSubstr("places tensor \"gone\" in"));
  Put("pytorch_model.bin.index.json", R"({"weight_map": {"gone": "../other.bin"}})");
  EXPECT_TRUE(absl::IsInvalidArgument(WeightFiles::Open(dir_).status()));
}

TEST_F(WeightFilesTest, Divide_TakesMatricesOutOfATensor) {
  std::string bytes;
  for (char c = 'a'; c < 'a' + 24; ++c) bytes.push_back(c);
  Put("model.safetensors",
      *EncodeSafetensors({{.name = "all", .type = SafetensorsType::kU8, .shape = {2, 4, 3}},
                          {.name = "other", .type = SafetensorsType::kU8, .shape = {2}}},
                         {bytes, "yz"}, std::nullopt));
  auto files = WeightFiles::Open(dir_);
  ASSERT_TRUE(files.ok()) << files.status();
  std::vector<std::string> names = {"a", "b", "c", "d"};
  const auto parts = [&names](const std::string& name) {
    return name == "all" ? names : std::vector<std::string>();
  };
  ASSERT_TRUE(files->Divide(parts).ok());
  ASSERT_EQ(files->entries().size(), 5u);
  EXPECT_EQ(files->Find("all"), nullptr);
  EXPECT_THAT(files->Find("b")->tensor.shape, ElementsAre(2, 3));
  EXPECT_EQ(Bytes(*files, "a"), "abcdef");
  EXPECT_EQ(Bytes(*files, "b"), "ghijkl");
  EXPECT_EQ(Bytes(*files, "d"), "stuvwx");
  EXPECT_EQ(Bytes(*files, "other"), "yz");

  names.push_back("e");
  auto uneven = WeightFiles::Open(dir_);
  ASSERT_TRUE(uneven.ok()) << uneven.status();
  EXPECT_THAT(std::string(uneven->Divide(parts).message()),
              HasSubstr("tensor \"all\" of shape [2, 4, 3] should be 5 matrices of one size"));
  EXPECT_EQ(Bytes(*uneven, "all"), bytes);
  EXPECT_THAT(std::string(uneven
                              ->Divide([](const std::string& name) {
                                return name == "other" ? std::vector<std::string>{"x"}
                                                       : std::vector<std::string>();
                              })
                              .message()),
              HasSubstr("\"other\" of shape [2]"));
}

TEST_F(WeightFilesTest, ReadAll_PutsEachTensorWhereItGoes) {
  // A tensor of several pieces, and one of less than a block of the disk.
  std::string large((5 << 20) + 77, '\0');
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i % 251);
  Put("model.safetensors",
      *EncodeSafetensors({{.name = "a", .type = SafetensorsType::kU8, .shape = {large.size()}},
                          {.name = "b", .type = SafetensorsType::kU8, .shape = {3}},
                          {.name = "none", .type = SafetensorsType::kU8, .shape = {0}}},
                         {large, "xyz", ""}, std::nullopt));
  const auto files = WeightFiles::Open(dir_);
  ASSERT_TRUE(files.ok()) << files.status();
  for (const int threads : {1, 4}) {
    std::string a(large.size(), '\0'), b(3, '\0');
    const std::vector<WeightFiles::Reading> readings = {
        {files->Find("a"), a.data()}, {files->Find("none"), nullptr}, {files->Find("b"), b.data()}};
    const absl::Status read = files->ReadAll(readings, threads);
    ASSERT_TRUE(read.ok()) << read;
    EXPECT_TRUE(a == large);
    EXPECT_EQ(b, "xyz");
  }
  // Piece by piece.
  std::string taken(large.size(), '\0');
  const WeightFiles::Reading in_pieces = {
      .entry = files->Find("a"), .take = [&](uint64_t begin, absl::string_view piece) {
        // replace() also sets the length, which all threads would write.
        std::copy(piece.begin(), piece.end(), taken.data() + begin);
        return absl::OkStatus();
      }};
  ASSERT_TRUE(files->ReadAll({in_pieces}, 4).ok());
  EXPECT_TRUE(taken == large);
  const WeightFiles::Reading refused = {
      .entry = files->Find("b"),
      .take = [](uint64_t, absl::string_view) { return absl::InternalError("no"); }};
  EXPECT_EQ(files->ReadAll({refused}, 4),
            absl::InternalError(absl::StrCat(Path("model.safetensors"), ": tensor \"b\": no")));
  AlignedMemory block;
  ASSERT_TRUE(block.Grow(1 << 20).ok());
  const absl::StatusOr<size_t> fetched = files->Fetch(*files->Find("a"), 1000, 5000, block.data());
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(absl::string_view(block.data() + *fetched, 5000), large.substr(1000, 5000));

  ASSERT_EQ(truncate(Path("model.safetensors").c_str(), 2 << 20), 0);
  std::string a(large.size(), '\0');
  for (const absl::Status& status :
       {files->ReadAll({{files->Find("a"), a.data()}}, 4),
        files->Fetch(*files->Find("a"), 3 << 20, 5000, block.data()).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(Path("model.safetensors"), ": tensor \"a\": it ends at")));
  }
}

TEST_F(WeightFilesTest, Copy_KeepsBytesAndTheFirstNameOfATiedTensor) {
  const auto files = WeightFiles::Open(TestdataPath("torch_files/pytorch_model.bin"));
  ASSERT_TRUE(files.ok()) << files.status();
  for (const std::string& to : {Path("out"), Path("out.safetensors"), Path("shards")}) {
    const auto copied = CopyWeights(*files, to, to == Path("shards") ? 70 : 1 << 20);
    ASSERT_TRUE(copied.ok()) << copied.status();
    EXPECT_THAT(copied->left_out, ElementsAre("head.weight"));
    EXPECT_EQ(copied->tensors, 6u);
    const auto written = WeightFiles::Open(to);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_EQ(written->entries().size(), 6u);
    for (const auto& entry : written->entries()) {
      EXPECT_EQ(Bytes(*written, entry.tensor.name), Bytes(*files, entry.tensor.name));
    }
  }
  EXPECT_THAT(*ListDirectory(Path("shards")),
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                          "model.safetensors.index.json"));
}

TEST_F(WeightFilesTest, Copy_ReplacesAnEarlierOneButNeverItsSource) {
  Put("in/model.safetensors", Tensors({"a", "b"}, 'a'));
  Put("out/model-00001-of-00001.safetensors", Tensors({"old"}, 'o'));
  Put("out/config.json", "{}");
  const auto files = WeightFiles::Open(Path("in"));
  ASSERT_TRUE(files.ok()) << files.status();
  ASSERT_TRUE(CopyWeights(*files, Path("out")).ok());
  EXPECT_THAT(*ListDirectory(Path("out")),
              UnorderedElementsAre("config.json", "model.safetensors"));
  for (const std::string& to : {Path("in"), Path("in/model.safetensors")}) {
    const auto copied = CopyWeights(*files, to, 2);
    EXPECT_TRUE(absl::IsAlreadyExists(copied.status())) << copied.status();
    EXPECT_THAT(copied.status().message(), HasSubstr("is one of the files that are read"));
  }
  EXPECT_EQ(Bytes(*WeightFiles::Open(Path("in")), "a"), "aa");
  EXPECT_FALSE(CopyWeights(*files, "/proc/nowhere").ok());
}

// A full disk, which is noticed before and while it is written.
TEST_F(WeightFilesTest, Copy_ThatFails_LeavesNoFolderBehind) {
  Put("in/model.safetensors", Tensors({"a"}, 'a'));
  const auto files = WeightFiles::Open(Path("in"));
  ASSERT_TRUE(files.ok()) << files.status();
  const auto larger = WeightFiles::Open(TestdataPath("torch_files/expanded.bin"));
  ASSERT_TRUE(larger.ok()) << larger.status();
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  for (const char* to : {"new", "new/of/all", "new/of/all/model.safetensors"}) {
    SCOPED_TRACE(to);
    EXPECT_FALSE(CopyWeights(*larger, Path(to)).ok());
    EXPECT_FALSE(PathExists(Path("new")));
    const rlimit none = {.rlim_cur = 1, .rlim_max = before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
    const auto copied = CopyWeights(*files, Path(to));
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_FALSE(copied.ok());
    EXPECT_FALSE(PathExists(Path("new")));
  }
  signal(SIGXFSZ, handler);
  // Existing files stay.
  ASSERT_TRUE(MakeDirectories(Path("old")).ok());
  EXPECT_FALSE(CopyWeights(*larger, Path("old/new")).ok());
  EXPECT_FALSE(CopyWeights(*larger, Path("old")).ok());
  EXPECT_THAT(*ListDirectory(Path("old")), UnorderedElementsAre());
}

// For every model that save_pretrained wrote, one file merged from its shards, and shards of that
// file, have the same bytes under the same names.
TEST_F(WeightFilesTest, RecordedModels_MergeAndDivideWithoutChange) {
  for (const std::string model : {"bert", "gpt2", "llama", "mixtral", "qwen2"}) {
    SCOPED_TRACE(model);
    const auto shards = WeightFiles::Open(GoldenPath("hf_models/" + model + "_shared"));
    ASSERT_TRUE(shards.ok()) << shards.status();
    ASSERT_TRUE(CopyWeights(*shards, Path(model + ".safetensors")).ok());
    const auto merged = WeightFiles::Open(Path(model + ".safetensors"));
    ASSERT_TRUE(merged.ok()) << merged.status();
    ExpectSame(*shards, *merged);
    const auto copied = CopyWeights(*merged, Path(model), 50'000);
    ASSERT_TRUE(copied.ok()) << copied.status();
    EXPECT_THAT(copied->left_out, IsEmpty());
    const auto divided = WeightFiles::Open(Path(model));
    ASSERT_TRUE(divided.ok()) << divided.status();
    EXPECT_GT(divided->Files().size(), 1u);
    ExpectSame(*shards, *divided);
  }
}

}  // namespace
}  // namespace muster
