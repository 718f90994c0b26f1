#include "worker/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "ATen/ops/arange.h"
#include "ATen/ops/complex.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/imag.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/zeros.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/test_huge_file.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class SafetensorsTest : public testing::Test {
 protected:
  const TestFolder test_folder_;
  const std::string folder_ = test_folder_.path();
  const std::string path_ = test_folder_.Path("f.safetensors");
};

bool SameBytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

// An open for reading would wait for a writer.
TEST_F(SafetensorsTest, Pipe_IsRefusedAndNotWaitedFor) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  for (const absl::Status& status :
       {SafetensorsReader::Open(path_).status(), ReadSafetensorsHeader(path_).status()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is not a file"));
  }
}

TEST_F(SafetensorsTest, EveryType_RoundTripsByReadAndMap) {
  NamedTensors tensors;
  for (const at::ScalarType type :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
        at::kFloat, at::kDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt16, at::kUInt32,
        at::kUInt64, at::kComplexFloat}) {
    const std::string name = c10::toString(type);
    const at::Tensor values = at::arange(15, at::kFloat).reshape({3, 5});
    tensors.emplace_back(name, values.to(type));
    tensors.emplace_back(name + ".scalar", at::ones({}, at::kFloat).to(type));
    tensors.emplace_back(name + ".empty", at::empty({0, 4}, at::TensorOptions().dtype(type)));
  }
  const auto digest = WriteSafetensors(path_, tensors, {.metadata = {{{"format", "pt"}}}});
  ASSERT_TRUE(digest.ok()) << digest.status();
  EXPECT_EQ(*digest, *DigestFile(path_));
  auto reader = SafetensorsReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->header().metadata->at("format"), "pt");
  FileDigest read_digest;
  const auto all = reader->ReadAll(&read_digest);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(read_digest, *digest);
  EXPECT_EQ(all->size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(SameBytes(*reader->Read(name), tensor)) << name;
    EXPECT_TRUE(SameBytes(*reader->Map(name), tensor)) << name;
  }
}

TEST_F(SafetensorsTest, MappedTensor_OutlivesReaderAndKeepsFileUntouched) {
  ASSERT_TRUE(WriteSafetensors(path_, {{"w", at::ones({4})}}).ok());
  at::Tensor mapped = *SafetensorsReader::Open(path_)->Map("w");
  mapped.fill_(7);
  EXPECT_EQ(mapped.sum().item<float>(), 28);
  EXPECT_EQ(SafetensorsReader::Open(path_)->Read("w")->sum().item<float>(), 4);
}

TEST_F(SafetensorsTest, StridesAndConjugates_AreWrittenAsTheyLook) {
  const at::Tensor base = at::randn({4, 6});
  const at::Tensor complex = at::complex(at::randn({3}), at::randn({3}));
  ASSERT_TRUE(WriteSafetensors(path_, {{"t", base.t()}, {"c", complex.conj()}}).ok());
  auto reader = SafetensorsReader::Open(path_);
  EXPECT_TRUE(reader->Read("t")->equal(base.t()));
  EXPECT_TRUE(reader->Read("c")->equal(complex.conj().resolve_conj()));
}

TEST_F(SafetensorsTest, SharedTensors_KeepFirstNameOnly) {
  const at::Tensor shared = at::randn({8});
  const NamedTensors tensors = {{"b", shared},
                                {"a", shared},
                                {"first_half", shared.slice(0, 0, 4)},
                                {"second_half", shared.slice(0, 4, 8)},
                                {"e1", at::empty({0})},
                                {"e2", at::empty({0})}};
  ASSERT_TRUE(WriteSafetensors(path_, tensors).ok());
  auto reader = SafetensorsReader::Open(path_);
  EXPECT_NE(reader->header().Find("b"), nullptr);
  EXPECT_EQ(reader->header().Find("a"), nullptr);
  // Views of different parts are different tensors, and empty ones share nothing.
  EXPECT_TRUE(reader->Read("second_half")->equal(shared.slice(0, 4, 8)));
  EXPECT_NE(reader->header().Find("e2"), nullptr);
  ASSERT_TRUE(WriteSafetensors(path_, tensors, {.shared = SharedTensors::kWriteAll}).ok());
  EXPECT_TRUE(SafetensorsReader::Open(path_)->Read("a")->equal(shared));
}

// They share the memory of a tensor, but have other values.
TEST_F(SafetensorsTest, ConjugatedAndNegatedViews_AreTensorsOfTheirOwn) {
  const at::Tensor complex = at::randn({3}, at::kComplexFloat);
  const at::Tensor imaginary = at::imag(complex.conj());
  ASSERT_TRUE(imaginary.is_neg());
  const NamedTensors tensors = {{"complex", complex},
                                {"conjugated", complex.conj()},
                                {"negated", imaginary},
                                {"imaginary", at::imag(complex)}};
  ASSERT_TRUE(WriteSafetensors(path_, tensors).ok());
  auto reader = SafetensorsReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  for (const auto& [name, tensor] : tensors) {
    ASSERT_NE(reader->header().Find(name), nullptr) << name;
    EXPECT_TRUE(reader->Read(name)->equal(tensor.resolve_conj().resolve_neg())) << name;
  }
}

TEST_F(SafetensorsTest, UnwritableTensors_NameFileAndTensorAndLeaveOldFile) {
  ASSERT_TRUE(WriteSafetensors(path_, {{"w", at::ones({2})}}).ok());
  const auto write = [&](const at::Tensor& tensor) {
    const auto digest = WriteSafetensors(path_, {{"layer.w", tensor}});
    return std::string(digest.status().message());
  };
  EXPECT_EQ(write(at::Tensor()), path_ + ": tensor \"layer.w\": is undefined");
  EXPECT_THAT(write(at::empty({2}, at::TensorOptions().device(at::kMeta))), HasSubstr("meta"));
  EXPECT_THAT(write(at::zeros({2}, at::TensorOptions().dtype(at::kComplexDouble))),
              HasSubstr("ComplexDouble"));
  EXPECT_THAT(write(at::zeros({2, 2}).to_sparse()), HasSubstr("sparse"));
  EXPECT_FALSE(WriteSafetensors(path_, {{"a", at::ones({1})}, {"a", at::ones({2})}}).ok());
  EXPECT_TRUE(SafetensorsReader::Open(path_)->Read("w")->equal(at::ones({2})));
  EXPECT_EQ(ListDirectory(folder_)->size(), 1u);
}

TEST_F(SafetensorsTest, MissingTensor_NamesFileAndTensor) {
  ASSERT_TRUE(WriteSafetensors(path_, {{"w", at::ones({2})}}).ok());
  const auto tensor = SafetensorsReader::Open(path_)->Read("v");
  EXPECT_EQ(tensor.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(tensor.status().message()), path_ + ": tensor \"v\": is not in the file");
}

TEST_F(SafetensorsTest, TypeThatTorchLacks_NamesTheTensorHoweverItIsRead) {
  const std::vector<SafetensorsEntry> entries = {
      {.name = "quantized", .type = SafetensorsType::kF4, .shape = {16}}};
  const auto bytes = EncodeSafetensors(entries, {std::string(8, 'x')}, std::nullopt);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  ASSERT_TRUE(WriteFileAtomically(path_, *bytes).ok());
  const auto reader = SafetensorsReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  for (const absl::Status& status :
       {reader->Read("quantized").status(), reader->Map("quantized").status(),
        reader->ReadAll().status()}) {
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    EXPECT_EQ(status.message(), path_ +
                                    ": tensor \"quantized\": dtype: the type F4 can be listed "
                                    "but not loaded");
  }
}

TEST_F(SafetensorsTest, TensorOfTerabytes_IsAStatusThatNamesIt) {
  WriteHugeFile(path_, "huge");
  const AtMostOneMoreTebibyte scarce;
  const auto reader = SafetensorsReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  for (const absl::Status& status :
       {reader->Read("huge").status(), reader->ReadAll().status(),
        reader->ReadAllBlocks({.block_bytes = 1 << 20, .xxh3 = {}}).status()}) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(testing::StartsWith(path_ + ": "), HasSubstr(" bytes of memory")));
  }
}

TEST_F(SafetensorsTest, FileLargerThanTheMachinesMemory_CanBeMapped) {
  WriteHugeFile(path_, "huge");
  const auto reader = SafetensorsReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const absl::StatusOr<at::Tensor> mapped = reader->Map("huge");
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ((*mapped)[kTebibyte - 1].item<float>(), 0);
}

TEST_F(SafetensorsTest, GoldenFiles_LoadWithTheirShapes) {
  int loaded = 0;
  for (const nlohmann::json& item : testing_support::GoldenCases("safetensors_files")) {
    if (item.contains("error")) continue;
    auto reader = SafetensorsReader::Open(testing_support::GoldenPath(item["in"]["file"]));
    ASSERT_TRUE(reader.ok()) << reader.status();
    for (const auto& entry : item["out"]["tensors"]) {
      const std::string name = entry["name"];
      const std::string dtype = entry["dtype"];
      const auto tensor = reader->Read(name);
      if (dtype == "F4" || dtype.rfind("F6_", 0) == 0) {
        EXPECT_EQ(tensor.status().code(), absl::StatusCode::kUnimplemented);
        continue;
      }
      ASSERT_TRUE(tensor.ok()) << tensor.status();
      EXPECT_EQ(tensor->sizes().vec(), entry["shape"].get<std::vector<int64_t>>());
      EXPECT_TRUE(SameBytes(*tensor, *reader->Map(name)));
      ++loaded;
    }
  }
  EXPECT_GT(loaded, 80);
}

}  // namespace
}  // namespace muster
