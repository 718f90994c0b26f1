#include "worker/data/token_dataset.h"

#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/loader.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class Token>
std::string WriteTokens(const std::string& name, const std::vector<Token>& tokens) {
  const std::string path = TestPath(name);
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(tokens.data()),
            static_cast<std::streamsize>(tokens.size() * sizeof(Token)));
  return path;
}

std::vector<int64_t> Values(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

TEST(TokenDataset, Windows_AreInputsAndTheNextTokens) {
  const auto data = TokenDataset::Open(
      WriteTokens<uint16_t>("u16", {10, 11, 12, 13, 14, 15, 65535, 17}), {.context = 3});
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->size(), 2U);
  const auto [inputs, targets] = data->get_batch({1, 0});
  EXPECT_THAT(Values(inputs), ElementsAre(13, 14, 15, 10, 11, 12));
  EXPECT_THAT(Values(targets), ElementsAre(14, 15, 65535, 11, 12, 13));
  EXPECT_ANY_THROW(data->get_batch({2}));
  EXPECT_ANY_THROW(data->get_batch({-1}));
}

TEST(TokenDataset, StrideAndWidth_AreTaken) {
  const auto bytes = TokenDataset::Open(WriteTokens<uint8_t>("u8", {1, 2, 3, 4, 255}),
                                        {.context = 2, .stride = 1, .bytes_per_token = 1});
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(bytes->size(), 3U);
  EXPECT_THAT(Values(bytes->get_batch({2}).second), ElementsAre(4, 255));
  const auto words = TokenDataset::Open(WriteTokens<uint32_t>("u32", {1, 4000000000U, 3}),
                                        {.context = 2, .bytes_per_token = 4});
  ASSERT_TRUE(words.ok()) << words.status();
  EXPECT_THAT(Values(words->get_batch({0}).first), ElementsAre(1, 4000000000));
}

// Code that handles several tokens at a time must not differ at the ends of a window.
template <class Token>
void ExpectWidened(const std::string& name) {
  std::vector<Token> tokens(200);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<Token>(0 - i * i);
  const std::string path = WriteTokens(name, tokens);
  for (int64_t context = 1; context <= 40; ++context) {
    const auto data = TokenDataset::Open(
        path,
        {.context = context, .stride = 3, .bytes_per_token = static_cast<int>(sizeof(Token))});
    ASSERT_TRUE(data.ok()) << data.status();
    const int64_t last = static_cast<int64_t>(data->size()) - 1;
    const auto [inputs, targets] = data->get_batch({last, 1});
    std::vector<int64_t> expected_inputs, expected_targets;
    for (const int64_t start : {3 * last, int64_t{3}}) {
      for (int64_t i = start; i < start + context; ++i) {
        expected_inputs.push_back(tokens[i]);
        expected_targets.push_back(tokens[i + 1]);
      }
    }
    EXPECT_EQ(Values(inputs), expected_inputs) << "context " << context;
    EXPECT_EQ(Values(targets), expected_targets) << "context " << context;
  }
}

TEST(TokenDataset, EveryWidthAndContext_IsWidenedExactly) {
  ExpectWidened<uint8_t>("widen8");
  ExpectWidened<uint16_t>("widen16");
  ExpectWidened<uint32_t>("widen32");
}

TEST(TokenDataset, BadFilesAndOptions_AreNamed) {
  EXPECT_EQ(TokenDataset::Open("/nonexistent/tokens", {}).status().code(),
            absl::StatusCode::kNotFound);
  const std::string path = WriteTokens<uint8_t>("odd", {1, 2, 3});
  EXPECT_THAT(TokenDataset::Open(path, {.context = 1}).status().message(), HasSubstr("3 bytes"));
  EXPECT_THAT(TokenDataset::Open(path, {.context = 3, .bytes_per_token = 1}).status().message(),
              HasSubstr("needs 4"));
  EXPECT_THAT(TokenDataset::Open(path, {.bytes_per_token = 3}).status().message(),
              HasSubstr("1, 2 or 4"));
  EXPECT_THAT(TokenDataset::Open(path, {.context = 0}).status().message(),
              HasSubstr("context is 0"));
}

TEST(TokenDataset, Pipe_IsRefusedAndNotWaitedFor) {
  const TestFolder folder;
  ASSERT_EQ(mkfifo(folder.Path("pipe").c_str(), 0600), 0);
  const absl::Status opened = TokenDataset::Open(folder.Path("pipe"), {.context = 1}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(opened)) << opened;
}

TEST(TokenDataset, InALoader_WorkersShareTheFile) {
  std::vector<uint16_t> tokens(1025);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i);
  auto data = TokenDataset::Open(WriteTokens("loader", tokens), {.context = 8});
  ASSERT_TRUE(data.ok()) << data.status();
  auto loader = PrepareLoader(batches(*data, 16).shuffle(true).workers(2), {}, nullptr);
  int64_t sum = 0;
  for (auto& [inputs, targets] : loader) {
    EXPECT_EQ(inputs.size(1), 8);
    sum += targets.sub(inputs).sum().item<int64_t>();
  }
  EXPECT_EQ(sum, 1024);
}

}  // namespace
}  // namespace muster
