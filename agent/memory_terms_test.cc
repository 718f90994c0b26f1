#include "agent/memory_terms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::agent {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(MemoryTerms, WithoutAnAttempt_MemoryIsKeptForATime) {
  const absl::Time start = absl::UnixEpoch();
  const auto later = [&](double share) { return start + MemoryTerms::kKept * share; };
  MemoryTerms terms;
  EXPECT_THAT(terms.Expired({"a", "b"}, {"a", "b"}, start), IsEmpty());
  EXPECT_THAT(terms.Expired({"a", "b"}, {"b"}, later(10)), IsEmpty());
  EXPECT_THAT(terms.Expired({"a", "b"}, {"b"}, later(10.9)), IsEmpty());
  // Another attempt begins and ends: the time starts again.
  EXPECT_THAT(terms.Expired({"a", "b"}, {"a", "b"}, later(10.95)), IsEmpty());
  EXPECT_THAT(terms.Expired({"a", "b"}, {}, later(11)), IsEmpty());
  EXPECT_THAT(terms.Expired({"a", "b"}, {}, later(11.9)), IsEmpty());
  EXPECT_THAT(terms.Expired({"a", "b"}, {}, later(12)), ElementsAre("a", "b"));
  // Memory that was dropped and is held again has its whole time.
  EXPECT_THAT(terms.Expired({}, {}, later(12)), IsEmpty());
  EXPECT_THAT(terms.Expired({"a"}, {}, later(13)), IsEmpty());
}

TEST(MemoryTerms, JobThatStarts_TakesThePlaceOfThoseThatWait) {
  const absl::Time now = absl::UnixEpoch();
  MemoryTerms terms;
  EXPECT_THAT(terms.Expired({"a", "b"}, {"a", "b", "c"}, now), IsEmpty());
  // Jobs that ran beside it may continue or end.
  EXPECT_THAT(terms.Expired({"a", "b"}, {"b", "c"}, now), IsEmpty());
  EXPECT_THAT(terms.Expired({"a", "b"}, {"b"}, now), IsEmpty());
  EXPECT_THAT(terms.Expired({"a", "b"}, {"b", "d"}, now), ElementsAre("a"));
}

TEST(MemoryTerms, JobThatHasEnded_HasNoTime) {
  const absl::Time now = absl::UnixEpoch();
  MemoryTerms terms;
  EXPECT_THAT(terms.Expired({"a", "b"}, {}, now), IsEmpty());
  terms.Ended("a");
  terms.Ended("never held");
  EXPECT_THAT(terms.Expired({"a", "b"}, {}, now), ElementsAre("a"));
  // Not for a job with an attempt here: it was ended before that, or is reported again afterwards.
  terms.Ended("b");
  EXPECT_THAT(terms.Expired({"b"}, {"b"}, now), IsEmpty());
  EXPECT_THAT(terms.Expired({"b"}, {}, now), IsEmpty());
}

}  // namespace
}  // namespace muster::agent
