// Barriers that not all ranks reach, with real processes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "tests/support/command.h"

namespace muster {
namespace {

using testing_support::CommandResult;
using testing_support::RunCommand;

void ExpectContains(const CommandResult& run, const std::string& text) {
  EXPECT_NE(run.output.find(text), std::string::npos) << "no \"" << text << "\" in\n" << run.output;
}

TEST(Barrier, RankThatNeverComes_IsNamedWithAllThatIsKnownOfIt) {
  const CommandResult run = RunCommand(
      "client/cli/muster launch --cpu --num_processes 2 -- tests/e2e/absent_rank stuck 2>&1");
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  EXPECT_NE(run.exit_code, 0);
  // At the soft deadline in the launcher's log, then at the deadline for whoever waits.
  ExpectContains(run, "barrier \"saved\" counter 0 has waited 4s for 1 of 2 ranks: rank 1 (");
  ExpectContains(run, "barrier \"saved\" counter 0 timed out after 8s: 1 of 2 ranks did not come");
  const size_t verdict = run.output.find("timed out after 8s");
  ASSERT_NE(verdict, std::string::npos);
  const std::string line = run.output.substr(verdict, run.output.find('\n', verdict) - verdict);
  EXPECT_NE(line.find(host), std::string::npos) << line;
  EXPECT_NE(line.find(", pid "), std::string::npos) << line;
  EXPECT_NE(line.find(", step 2"), std::string::npos) << line;
  EXPECT_NE(line.find(", last collective "), std::string::npos) << line;
  EXPECT_NE(line.find(", last heard of "), std::string::npos) << line;
  EXPECT_NE(line.find(", sleeping"), std::string::npos) << line;
  ExpectContains(run, "rank 1 did not come; it stands at");
  ExpectContains(run, "AugmentImagesForever()");
}

TEST(Barrier, RanksInDifferentBarriers_AreToldSoAtOnce) {
  const CommandResult run = RunCommand(
      "client/cli/muster launch --cpu --num_processes 2 -- tests/e2e/absent_rank desync 2>&1");
  EXPECT_NE(run.exit_code, 0);
  ExpectContains(run, "saved");
  ExpectContains(run, "evaluated");
  ExpectContains(run, "absent_rank.cc:");
  EXPECT_EQ(run.output.find("timed out"), std::string::npos) << run.output;
}

}  // namespace
}  // namespace muster
