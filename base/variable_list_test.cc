#include "base/variable_list.h"

#include <stdlib.h>
#include <unistd.h>

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

TEST(ProcessVariables, VariablesOfTheProcess_AreListedOnce) {
  setenv("MUSTER_VARIABLE_LIST_TEST", "a=b", 1);
  const std::map<std::string, std::string> variables = ProcessVariables();
  unsetenv("MUSTER_VARIABLE_LIST_TEST");
  EXPECT_EQ(variables.at("MUSTER_VARIABLE_LIST_TEST"), "a=b");
  EXPECT_FALSE(ProcessVariables().count("MUSTER_VARIABLE_LIST_TEST"));
}

TEST(ProcessVariables, NameThatOccursTwice_HasItsFirstValueAsGetenvDoes) {
  char first[] = "NAME=first", second[] = "NAME=second", none[] = "NONE";
  char* variables[] = {none, first, second, nullptr};
  char** const before = environ;
  environ = variables;
  const std::map<std::string, std::string> found = ProcessVariables();
  const std::string expected = getenv("NAME");
  environ = before;
  EXPECT_EQ(found, (std::map<std::string, std::string>{{"NAME", expected}}));
}

}  // namespace
}  // namespace muster
