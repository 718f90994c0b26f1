#include "worker/job/peer_loss.h"

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(IsLossOfPeer, EchoesOfAnotherProcessesEnd) {
  for (const char* text : {
           "AllReduce #4: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]",
           "AllReduce #5: the group is unusable since AllReduce #4: Connection closed by peer",
           "rank 1 (node1, pid 7) did not take part in AllReduce #4 after step 3: it was killed by "
           "signal 9; rank 0 waits (Connection closed by peer)",
           "Barrier #2: rank 1 has left the group",
           "all_reduce #3 on rank 0: rank 1 did not arrive in time",
           "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
           "1800000ms for recv operation to complete",
           "AllGather #1: rank 1 (pid 12) has died",
           "lost another process at step 3: all ranks are alive",
           "begin a checkpoint: generation 2 of job \"j\" has ended: rank 1 was killed; join the "
           "next one",
           "triggers: generation 1 of job \"j\" has ended, generation 2 is current: join again",
           "the generation has ended: rank 1 was killed by signal 9",
       }) {
    EXPECT_TRUE(IsLossOfPeer(absl::InternalError(text))) << text;
  }
}

TEST(IsLossOfPeer, ErrorsOfTheProgram_AreNot) {
  EXPECT_FALSE(IsLossOfPeer(absl::OkStatus()));
  for (const char* text :
       {"the loss is NaN", "mat1 and mat2 shapes cannot be multiplied", "No space left on device",
        "the next generation of models is not supported", "the generation of samples has ended",
        "GET http://data/17: timed out", "cannot write to the tracker: Broken pipe",
        "recv: Connection reset by peer"}) {
    EXPECT_FALSE(IsLossOfPeer(absl::InternalError(text))) << text;
  }
}

}  // namespace
}  // namespace muster
