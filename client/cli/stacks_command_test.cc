#include "client/cli/stacks_command.h"

#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::RankStack Stack(int rank, const std::string& text) {
  v1::RankStack stack;
  stack.mutable_worker()->set_rank(rank);
  stack.mutable_worker()->set_native_stack(text);
  return stack;
}

std::string TwoThreads(int pid, const std::string& main_place, const std::string& workers) {
  return absl::StrCat("pid ", pid, " (train), sleeping in futex, 3 threads\nthread ", pid,
                      " (train), sleeping in futex:\n  #0 ", main_place,
                      "\n  #1 main train.cc:41 (train)\n", workers, " (pool), sleeping:\n",
                      "  #0 futex (libc.so.6)\n");
}

std::vector<std::vector<int>> Rows(const std::vector<v1::RankStack>& stacks) {
  std::vector<std::vector<int>> rows;
  for (const StackGroup& group : GroupStacks(stacks)) rows.push_back(group.rows);
  return rows;
}

TEST(GroupStacks, SamePlace_WhateverTheNumbersAndTheCountOfThreads) {
  EXPECT_THAT(Rows({Stack(0, TwoThreads(10, "all_reduce", "thread 11")),
                    Stack(1, TwoThreads(20, "read_shard", "thread 21")),
                    Stack(2, TwoThreads(30, "all_reduce", "threads 31 (pool), 32"))}),
              ElementsAre(ElementsAre(0, 2), ElementsAre(1)));
}

TEST(GroupStacks, OtherThreadElsewhere_IsAnotherPlace) {
  const std::string same = TwoThreads(10, "all_reduce", "thread 11");
  EXPECT_THAT(Rows({Stack(0, same), Stack(1, absl::StrCat(same, "thread 12 (x):\n  #0 write\n"))}),
              ElementsAre(ElementsAre(0), ElementsAre(1)));
}

TEST(GroupStacks, SamePythonPlace_WhateverTheInterpreterDoes) {
  const auto python = [](int pid, const std::string& place, const std::string& native) {
    return absl::StrCat("pid ", pid, " (python3), running, 1 thread, Python 3.11.2\nthread ", pid,
                        " (python3), running:\n  py#0 ", place, "\n  #0 ", native,
                        " (python3.11)\nthread 7 (pool), sleeping:\n  #0 futex (libc.so.6)\n");
  };
  EXPECT_THAT(Rows({Stack(0, python(10, "step (/srv/a.py:4)", "PyNumber_Add")),
                    Stack(1, python(20, "step (/srv/a.py:5)", "PyNumber_Add")),
                    Stack(2, python(30, "step (/srv/a.py:4)", "PyObject_Free"))}),
              ElementsAre(ElementsAre(0, 2), ElementsAre(1)));
}

TEST(GroupStacks, WithoutFrames_ByTheirText) {
  v1::RankStack missing = Stack(2, "");
  missing.set_missing("its agent has not answered in time");
  EXPECT_THAT(Rows({Stack(0, "no stack: EPERM"), Stack(1, ""), missing, missing}),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2, 3)));
}

TEST(StackRanks, AreWrittenAsRanges) {
  EXPECT_EQ(RanksText({0, 1, 2, 5, 7, 8}), "0-2,5,7,8");
  EXPECT_EQ(RanksText({3}), "3");
  EXPECT_EQ(RanksText({}), "");
}

TEST(StacksCommand, WrongOptions_AreNamed) {
  const auto run = [](const std::vector<std::string>& args) {
    std::ostringstream out, err;
    const CommandContext context = {.variables = {}, .out = out, .err = err};
    EXPECT_EQ(RunStacksCommand(args, context), kExitUsage);
    return err.str();
  };
  EXPECT_THAT(run({}), HasSubstr("write muster stacks JOB"));
  EXPECT_THAT(run({"j", "--rank", "3-1"}), HasSubstr("--rank 3-1: write ranks such as"));
  // The last one is the largest number that the reader can hold: counting up to it never ended.
  for (const char* ranks : {"99999999999", "0-9999999", "2147483647"}) {
    EXPECT_THAT(run({"j", "--rank", ranks}),
                HasSubstr("write ranks such as 3 or 0,4-7, from 0 to 1048575"))
        << ranks;
  }
  EXPECT_THAT(run({"j", "--rank", "x"}), HasSubstr("--rank x"));
  EXPECT_THAT(run({"j", "--rank", ""}), HasSubstr("--rank"));
  EXPECT_THAT(run({"j", "--output", "yaml"}), HasSubstr("text or json"));
}

}  // namespace
}  // namespace muster::client
