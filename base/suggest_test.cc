#include "base/suggest.h"

#include "gtest/gtest.h"

namespace muster {
namespace {

const std::vector<std::string> kKeys = {"num_processes", "num_machines", "mixed_precision", "cpu"};

TEST(Nearest, TypingMistakes_FindTheWord) {
  EXPECT_EQ(Nearest("num_proceses", kKeys), "num_processes");
  EXPECT_EQ(Nearest("num_machnies", kKeys), "num_machines");
  EXPECT_EQ(Nearest("mixed_percision", kKeys), "mixed_precision");
  EXPECT_EQ(Nearest("cpus", kKeys), "cpu");
  EXPECT_EQ(Nearest("num_proc", kKeys), "num_processes");
}

TEST(Nearest, NothingNear_IsEmpty) {
  EXPECT_EQ(Nearest("zebra", kKeys), "");
  EXPECT_EQ(Nearest("", kKeys), "");
  EXPECT_EQ(Nearest("num", kKeys), "");
  EXPECT_EQ(DidYouMean("zebra", kKeys), "");
}

TEST(DidYouMean, Near_IsAQuestion) {
  EXPECT_EQ(DidYouMean("cpi", kKeys, "--"), "; did you mean --cpu?");
}

}  // namespace
}  // namespace muster
