#include "base/columns.h"

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(Columns, Characters_TakeWhatATerminalGivesThem) {
  EXPECT_EQ(Columns(""), 0);
  EXPECT_EQ(Columns("step 3"), 6);
  EXPECT_EQ(Columns("é█▏"), 3);
  EXPECT_EQ(Columns("数据🚀"), 6);
  EXPECT_EQ(Columns("e\xcc\x81"), 1) << "a combining accent";
  EXPECT_EQ(Columns("\xff\x80 \xe6"), 4) << "not UTF-8";
}

TEST(CharacterBytes, BytesThatAreNoUtf8_CountOneByOne) {
  EXPECT_EQ(CharacterBytes("step"), 1u);
  EXPECT_EQ(CharacterBytes("数据"), 3u);
  EXPECT_EQ(CharacterBytes("\xff\xff"), 1u);
  EXPECT_EQ(CharacterBytes("\xe6\x95"), 1u);
}

TEST(FitColumns, Text_IsCutBeforeTheCharacterThatDoesNotFit) {
  EXPECT_EQ(FitColumns("step", 4), "step");
  EXPECT_EQ(FitColumns("step", 3), "ste");
  EXPECT_EQ(FitColumns("step", 0), "");
  EXPECT_EQ(FitColumns("数据", 3), "数");
  EXPECT_EQ(FitColumns("数据", 1), "");
  EXPECT_EQ(FitColumns("e\xcc\x81"
                       "a",
                       1),
            "e\xcc\x81")
      << "the accent is of the character";
  EXPECT_EQ(FitColumns("\xff\xff\xff", 2), "\xff\xff");
}

TEST(TerminalColumns, NoTerminal_HasThoseOfAnOldOne) { EXPECT_EQ(TerminalColumns(-1), 80); }

}  // namespace
}  // namespace muster
