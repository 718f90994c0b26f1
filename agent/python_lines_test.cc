#include "agent/python_lines.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

#include "absl/strings/escaping.h"
#include "agent/python_layout.h"

namespace muster::agent {
namespace {

using Lines = PythonLayout::Lines;

// The tables are those that CPython makes for a function at line 10, and the lines are those of
// dis.findlinestarts() and co_lines():
//   def f(a):
//       b = a
//       for i in (
//           a
//       ):
//           b += i
//       return b
TEST(PythonLine, TableOf39_IsDeltas) {
  const std::string table = absl::HexStringToBytes("0001040202ff06030a01");
  const auto line = [&](int64_t offset) { return PythonLine(Lines::kDeltas, table, 10, offset); };
  EXPECT_EQ(line(0), 11);
  EXPECT_EQ(line(3), 11);
  EXPECT_EQ(line(4), 13);
  EXPECT_EQ(line(6), 12);
  EXPECT_EQ(line(12), 15);
  EXPECT_EQ(line(21), 15);
  EXPECT_EQ(line(22), 16);
}

TEST(PythonLine, TableOf310_IsRanges) {
  const std::string table = absl::HexStringToBytes("0401020206ff0a030401");
  const auto line = [&](int64_t offset) { return PythonLine(Lines::kRanges, table, 10, offset); };
  EXPECT_EQ(line(0), 11);
  EXPECT_EQ(line(3), 11);
  EXPECT_EQ(line(4), 13);
  EXPECT_EQ(line(6), 12);
  EXPECT_EQ(line(21), 15);
  EXPECT_EQ(line(22), 16);
  EXPECT_EQ(line(26), 0);
}

TEST(PythonLine, RangeOf310WithoutALine_HasNone) {
  const std::string table = absl::HexStringToBytes("040102800402");
  EXPECT_EQ(PythonLine(Lines::kRanges, table, 10, 4), 0);
  EXPECT_EQ(PythonLine(Lines::kRanges, table, 10, 6), 13);
}

TEST(PythonLine, TableOf313_IsLocations) {
  const std::string table = absl::HexStringToBytes(
      "8000d808098041e30809f00300090af00600090a89068a01f10500090af006000c0d8048");
  const auto line = [&](int64_t offset) {
    return PythonLine(Lines::kLocations, table, 10, offset);
  };
  EXPECT_EQ(line(-2), 10);
  EXPECT_EQ(line(0), 10);
  EXPECT_EQ(line(2), 11);
  EXPECT_EQ(line(6), 13);
  EXPECT_EQ(line(14), 12);
  EXPECT_EQ(line(16), 15);
  EXPECT_EQ(line(28), 13);
  EXPECT_EQ(line(32), 16);
  EXPECT_EQ(line(36), 0);
}

TEST(PythonLine, TableOf311_HasEveryKindOfEntry) {
  // One instruction on the line itself (short form), two on the next one, one without a line, one
  // 100 lines later (long form), one 101 lines earlier without columns.
  const std::string table = absl::HexStringToBytes("8045d90102f8f0480301020304e84b03");
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 10, -2), 10);
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 10, 0), 10);
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 10, 2), 11);
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 10, 4), 11);
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 10, 6), 0);
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 10, 8), 111);
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 10, 10), 10);
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 10, 12), 0);
}

TEST(PythonLine, AnyBytes_AreATable) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20'000; ++i) {
    std::string table(random() % 60, '\0');
    for (char& byte : table) byte = static_cast<char>(random());
    for (const Lines kind : {Lines::kDeltas, Lines::kRanges, Lines::kLocations}) {
      const int64_t line = PythonLine(kind, table, static_cast<int32_t>(random()),
                                      static_cast<int64_t>(random() % 200));
      EXPECT_GE(line, 0);
      EXPECT_LE(line, INT32_MAX);
    }
  }
}

TEST(PythonLine, NumbersWithoutEnd_AreNoLines) {
  std::string table;
  for (int i = 0; i < 1000; ++i) table += absl::HexStringToBytes("f07f7f7f7f7f7f7f7f7f7f7f7f7f7f");
  EXPECT_EQ(PythonLine(Lines::kLocations, table, 1, 10'000), 0);
  EXPECT_EQ(PythonLine(Lines::kLocations, "", 5, 0), 0);
  EXPECT_EQ(PythonLine(Lines::kLocations, "\x80", 5, 0), 5);
  EXPECT_EQ(PythonLine(Lines::kLocations, "\xf0", 5, 0), 5);  // its number is cut off
}

}  // namespace
}  // namespace muster::agent
