#include "base/variable_list.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(VariableList, Variables_ComeBackAsTheyAre) {
  const std::map<std::string, std::string> variables = {
      {"A", "b=c\nD=e"}, {"EMPTY", ""}, {"a b", "secret \"x\""}};
  EXPECT_EQ(*ParseVariableList(VariableList(variables), "env"), variables);
  EXPECT_TRUE(ParseVariableList("", "env")->empty());
  EXPECT_EQ(VariableList({{"A", "1"}}), std::string("A=1\0", 4));
}

TEST(VariableList, NameTwice_TheLastCounts) {
  const std::map<std::string, std::string> last = {{"A", "2"}};
  EXPECT_EQ(*ParseVariableList(absl::string_view("A=1\0A=2\0", 8), "env"), last);
}

TEST(VariableList, EntryWithoutAName_IsRefused) {
  for (const char* const bad : {"A", "=1", "\n"}) {
    const std::string text = std::string(bad) + '\0';
    const absl::Status status = ParseVariableList(text, "/run/env").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(status.message(), HasSubstr("/run/env: "));
  }
}

TEST(VariableList, LinesAndACutList_AreRefused) {
  for (const absl::string_view bad :
       {absl::string_view("A=1\nB=2\n"), absl::string_view("A=1\0B=2", 7)}) {
    const absl::Status status = ParseVariableList(bad, "/run/env").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("/run/env has no null byte at its end"));
  }
}

}  // namespace
}  // namespace muster
