#include "worker/job/agent_tells.h"

#include <map>
#include <string>

#include "gtest/gtest.h"

namespace muster {
namespace {

const std::map<std::string, std::string> kUnderAgent = {{"MUSTER_AGENT_TELLS", "true"}};

TEST(AgentTells, FailureOfAnotherProcess_IsAnEcho) {
  for (const char* text : {
           "lost another process at step 3: rank 1 (h, pid 7) did not take part in AllReduce #9 "
           "after step 2: it has exited with code 1; rank 0 waits (Connection closed by peer)",
           "lost another process at step 3: rank 1 (h, pid 7) was killed by signal 9",
           "rank 0 (h, pid 6) did not take part in AllReduce #9 bucket 2 of 5 (1,048,576 Float) "
           "after step 3 within 10m: it runs after step 0; rank 1 (h, pid 7) did not take part in "
           "it: it has exited with code 3; "
           "rank 2 "
           "waits",
           "the generation has ended: rank 1 (h, pid 7) exited with code 3: rank 1 exited with "
           "code 3",
           "generation 1 of job \"j\" has ended: rank 1 (h, pid 7) was killed by signal 9; join "
           "the "
           "next one",
           "rank 1 (h, pid 7) exited with code 12 and cannot come to barrier \"b\" counter 3, "
           "where "
           "rank 0 waits (1 of 2 ranks had arrived); all ranks must call it equally often: end the "
           "generation and join the next one",
       }) {
    EXPECT_TRUE(AgentTells(absl::UnavailableError(text), kUnderAgent)) << text;
    EXPECT_FALSE(AgentTells(absl::UnavailableError(text), {})) << text;
    EXPECT_FALSE(AgentTells(absl::UnavailableError(text), {{"MUSTER_AGENT_TELLS", "false"}}))
        << text;
  }
}

TEST(AgentTells, WhatNoAgentKnows_IsSaid) {
  for (const char* text : {
           "",
           "the user's own trouble",
           "ffmpeg exited with code 1",
           "lost another process at step 3: all ranks are alive, so the cause is the network "
           "between them",
           "lost another process at step 3: rank 1 (h, pid 7) did not take part in AllReduce #9 "
           "after step 2: it has left the job; rank 0 waits",
           "lost another process at step 3: rank 1 (h, pid 7): it has exited with code 0; rank 0 "
           "waits",
           "the generation has ended: rank 1 (h, pid 7) gave no sign of life for 6s",
       }) {
    EXPECT_FALSE(AgentTells(absl::UnavailableError(text), kUnderAgent)) << text;
  }
}

}  // namespace
}  // namespace muster
