#include "worker/checkpoint/digest.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

TEST(Digest, KnownValueOfNothing_Matches) {
  EXPECT_EQ(DigestBytes("").xxh3, "99aa06d3014798d86001c324468d497f");
}

// Must hold whatever instructions the processor has.
TEST(Digest, KnownValuesOfLongTexts_Match) {
  std::string text(100'000, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31 + i / 255);
  EXPECT_EQ(DigestBytes(text).xxh3, "eda52c3b1e59fb6b24ab638bff39ab18");
  EXPECT_EQ(absl::StrFormat("%016x", DigestBlock(text)), "24ab638bff39ab18");
  BlockDigester digester;
  digester.Update(absl::string_view(text).substr(0, 70'000));
  digester.Update(absl::string_view(text).substr(70'000));
  EXPECT_EQ(digester.Finish(), DigestBlock(text));
}

TEST(Digest, PiecesAndFile_GiveTheSame) {
  std::string text;
  for (int i = 0; i < 3'000'000; ++i) text += static_cast<char>(i * 7 + i / 256);
  Digester digester;
  digester.Update(absl::string_view(text).substr(0, 1000));
  digester.Update(absl::string_view(text).substr(1000));
  EXPECT_EQ(digester.Finish(), DigestBytes(text));
  EXPECT_EQ(digester.Finish().bytes, text.size());
  const TestFolder folder;
  const std::string path = folder.Path("digest");
  ASSERT_TRUE(WriteFileAtomically(path, text).ok());
  EXPECT_EQ(*DigestFile(path), DigestBytes(text));
  ASSERT_TRUE(RemoveTree(path).ok());
  EXPECT_FALSE(DigestFile(path).ok());
}

TEST(DigestFileTest, Pipe_IsRefusedAndNotWaitedFor) {
  const TestFolder folder;
  const std::string path = folder.Path("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const absl::Status digested = DigestFile(path).status();
  EXPECT_TRUE(absl::IsDataLoss(digested)) << digested;
}

}  // namespace
}  // namespace muster
