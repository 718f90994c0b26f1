#include "agent/end_class.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace muster::agent {
namespace {

WorkerEnd Ended(int exit_code, int signal = 0) {
  WorkerEnd end;
  end.exit.exit_code = exit_code;
  end.exit.signal = signal;
  return end;
}

TEST(EndClassTest, ExitCodesOfUserErrors_AreThoseOfAProgramThatEndedByItself) {
  for (const int code : {2, 126, 127, 42}) EXPECT_TRUE(IsUserError(Ended(code), {42})) << code;
  EXPECT_FALSE(IsUserError(Ended(1), {42}));
  EXPECT_FALSE(IsUserError(Ended(0, SIGSEGV), {}));
  WorkerEnd killed = Ended(2);
  killed.killed_because = "the job hangs";
  EXPECT_FALSE(IsUserError(killed, {}));
  EXPECT_EQ(ClassOf(killed, {}, false), v1::END_CLASS_PROCESS_FAILED);
  killed.killed_as = v1::END_CLASS_HANG;
  EXPECT_EQ(ClassOf(killed, {}, false), v1::END_CLASS_HANG);
}

TEST(EndClassTest, KilledByTheKernel_IsOutOfMemory_AsTheControlGroupSays) {
  WorkerEnd end = Ended(0, SIGKILL);
  EXPECT_EQ(ClassOf(end, {}, false), v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(ClassOf(end, {}, true), v1::END_CLASS_OUT_OF_MEMORY);
  end.counts_memory_kills = true;
  EXPECT_EQ(ClassOf(end, {}, true), v1::END_CLASS_PROCESS_FAILED);
  end.memory_kill = "for memory";
  EXPECT_EQ(ClassOf(end, {}, false), v1::END_CLASS_OUT_OF_MEMORY);
}

}  // namespace
}  // namespace muster::agent
