#include "worker/parallel/shard_faults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::exception_ptr Thrown(const char* what) {
  return std::make_exception_ptr(std::runtime_error(what));
}

TEST(ShardFaults, WithoutFaults_ThrowNothing) {
  const ShardFaults faults(0, 2);
  EXPECT_NO_THROW(faults.CheckHasValues());
  EXPECT_NO_THROW(faults.CheckNotMixedHere());
  EXPECT_THAT(faults.own(), IsEmpty());
}

TEST(ShardFaults, FailureOfAStep_ThrowsHere_AndNotWhereAllRanksKnowOfNone) {
  ShardFaults faults(3, 4);
  faults.NoteStep(Thrown("no memory"));
  EXPECT_NO_THROW(faults.CheckNotMixed());
  EXPECT_THAT(ErrorOf([&] { faults.CheckNotMixedHere(); }),
              AllOf(HasSubstr("rank 3 has failed in a step"), HasSubstr("no memory"),
                    HasSubstr("other ranks may have stepped")));
}

TEST(ShardFaults, FailureOfTheOnlyRank_NamesNoOthers) {
  ShardFaults faults(0, 1);
  faults.NoteStep(Thrown("no memory"));
  EXPECT_THAT(faults.own(), EndsWith("no memory; its parameters may have changed in part: call "
                                     "load_state()"));
}

TEST(ShardFaults, FailureOfAPass_IsToldToOthers_AndKeepsNothingFromBeingReadHere) {
  ShardFaults faults(1, 2);
  faults.NoteEndOfBackward(Thrown("disk full"));
  EXPECT_THAT(faults.own(), HasSubstr("rank 1 has failed at the end of a backward pass"));
  EXPECT_NO_THROW(faults.CheckNotMixedHere());
  // The first failure is the reason for this rank's place.
  faults.NoteBeginningOfForward(Thrown("disk full again"));
  EXPECT_THAT(faults.own(), HasSubstr("at the end of a backward pass"));
  faults.ForgetOwn();
  faults.NoteBeginningOfForward(Thrown("disk full again"));
  EXPECT_THAT(faults.own(), HasSubstr("at the beginning of a forward pass"));
}

TEST(ShardFaults, LoadThatDoesNotComeAbout_RestoresWhatWas_AndKeepsWhatHasFailedSince) {
  ShardFaults faults(0, 2);
  faults.SetMixed("a mixture");
  faults.NoteStep(Thrown("before"));
  const ShardFaults::Failures before = faults.Forget();
  EXPECT_NO_THROW(faults.CheckNotMixedHere());
  faults.NoteEndOfBackward(Thrown("since"));
  faults.Restore(before);
  EXPECT_THAT(faults.own(), HasSubstr("since"));
  EXPECT_TRUE(faults.in_step());
  EXPECT_EQ(ErrorOf([&] { faults.CheckNotMixed(); }), "a mixture");
}

TEST(ShardFaults, ParametersWithoutValues_ThrowUntilAllHaveThem) {
  ShardFaults faults(0, 1);
  faults.SetWithoutValues({"a", "b", "c"});
  EXPECT_THAT(ErrorOf([&] { faults.CheckHasValues(); }),
              HasSubstr("parameter 'a' of a sharded model has no values, nor have 2 more"));
  faults.GiveValues([](const std::string& name) { return name != "b"; });
  EXPECT_THAT(ErrorOf([&] { faults.CheckHasValues(); }),
              HasSubstr("parameter 'b' of a sharded model has no values: the model"));
  // A failure that a load ends is unrelated.
  faults.Forget();
  EXPECT_NE(ErrorOf([&] { faults.CheckHasValues(); }), "no error");
  faults.GiveValues([](const std::string&) { return true; });
  EXPECT_NO_THROW(faults.CheckHasValues());
}

}  // namespace
}  // namespace muster
