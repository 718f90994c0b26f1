#include "coordinator/barrier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/barrier_names.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

const absl::Time kStart = absl::FromUnixSeconds(1000);

class FakeHost : public BarrierHost {
 public:
  v1::ReplyHeader Header() const override { return {}; }
  v1::Culprit DescribeRank(int rank) const override {
    v1::Culprit culprit;
    culprit.set_rank(rank);
    culprit.set_worker_id(absl::StrCat("w", rank));
    culprit.set_host(absl::StrCat("h", rank));
    culprit.set_pid(100 + rank);
    culprit.set_native_stack(stack);
    return culprit;
  }
  void AskStack(int rank) override { asked.push_back(rank); }
  void Deliver(const std::vector<CallId>& calls, std::shared_ptr<const Answer> answer) override {
    for (const CallId call : calls) answers[call] = answer;
  }
  void JournalEnd(const std::string& id, uint64_t counter, const Answer&) override {
    journal.push_back(absl::StrCat(id, "/", counter));
  }
  void Report(const v1::BarrierReport& report, absl::Span<const int32_t>) override {
    reports.push_back(report);
  }
  void Blame(absl::Span<const int32_t> ranks) override {
    blamed.assign(ranks.begin(), ranks.end());
  }

  std::string stack;  // of every rank
  std::vector<int> asked;
  std::map<CallId, std::shared_ptr<const Answer>> answers;
  std::vector<std::string> journal;
  std::vector<v1::BarrierReport> reports;
  std::vector<int> blamed;
};

struct Extra {
  absl::Duration timeout = absl::ZeroDuration();
  absl::Duration soft = absl::ZeroDuration();
  std::vector<int32_t> participants = {};
  std::string payload = {};
  uint64_t site = 0;
  std::string site_text = {};
  v1::BarrierState previous = v1::BARRIER_STATE_UNSPECIFIED;
  absl::Duration waited = absl::ZeroDuration();
  std::vector<int32_t> ranks = {};  // ranks that come together, instead of one
  std::vector<int64_t> waited_less_us = {};
  int32_t lateness_us = 0;
};

class BarrierTest : public ::testing::Test {
 protected:
  void Make(int world, bool counters_known = true, BarrierOptions options = {}) {
    set_ = std::make_unique<BarrierSet>(options, 1, world, counters_known, &host_);
  }
  // Returns the call; an immediate error is kept like an answer.
  CallId Arrive(int rank, const std::string& id, uint64_t counter, const Extra& extra = {}) {
    const CallId call = next_call_++;
    const int32_t ranks[] = {rank};
    Arrival arrival;
    arrival.call = call;
    arrival.barrier_id = id;
    arrival.counter = counter;
    arrival.ranks = ranks;
    if (!extra.ranks.empty()) arrival.ranks = extra.ranks;
    arrival.waited_less_us = extra.waited_less_us;
    arrival.timeout = extra.timeout;
    arrival.soft_timeout = extra.soft;
    arrival.participants = extra.participants;
    if (!extra.payload.empty()) arrival.payloads.push_back(extra.payload);
    arrival.call_site = extra.site;
    arrival.call_site_text = extra.site_text;
    arrival.previous_state = extra.previous;
    arrival.waited = extra.waited;
    if (extra.lateness_us != 0) arrival.lateness_us = absl::MakeConstSpan(&extra.lateness_us, 1);
    if (auto error = set_->Arrive(arrival, now_)) {
      v1::OpResult result;
      *result.mutable_error() = *error;
      host_.answers[call] = std::make_shared<Answer>(result);
    }
    return call;
  }
  void PassAll(int world, const std::string& id, uint64_t counter) {
    for (int rank = 0; rank < world; ++rank) Arrive(rank, id, counter);
  }
  bool Answered(CallId call) const { return host_.answers.contains(call); }
  const v1::OpResult& Result(CallId call) {
    EXPECT_TRUE(Answered(call)) << call;
    const std::shared_ptr<const Answer>& answer = host_.answers[call];
    return parsed_.try_emplace(answer, answer->Parse()).first->second;
  }
  bool Passed(CallId call) {
    return Answered(call) && Result(call).has_arrive() &&
           Result(call).arrive().report().state() == v1::BARRIER_STATE_PASSED;
  }
  v1::ErrorReason Reason(CallId call) { return Result(call).error().detail().reason(); }

  FakeHost host_;
  std::map<std::shared_ptr<const Answer>, v1::OpResult> parsed_;
  std::unique_ptr<BarrierSet> set_;
  absl::Time now_ = kStart;
  CallId next_call_ = 1;
};

TEST_F(BarrierTest, GenerationHasEnded_PayloadsGoAndReportsStay) {
  Make(2);
  const std::string payload(1000, 'p');
  for (int rank = 0; rank < 2; ++rank) Arrive(rank, "gather", 0, {.payload = payload});
  Arrive(0, "late", 0, {.timeout = absl::Seconds(1)});
  while (set_->NextDeadline() != absl::InfiniteFuture()) {
    now_ = set_->NextDeadline();
    set_->Tick(now_);
  }
  const auto journaled = [this] {
    std::map<std::string, std::string> all;
    set_->ForEachJournaled(
        [&](const std::string& id, uint64_t, const Answer& answer) { all[id] = answer.bytes(); });
    return all;
  };
  const std::map<std::string, std::string> before = journaled();
  ASSERT_EQ(before.size(), 2u);
  EXPECT_GT(before.at("gather").size(), payload.size());
  set_->DropPayloads();
  std::map<std::string, std::string> after = journaled();
  EXPECT_LT(after["gather"].size(), 100u);
  EXPECT_EQ(after["late"], before.at("late"));
}

TEST_F(BarrierTest, RanksOfOneNodeAfterARestart_AreAsLateAsEachWas) {
  Make(3, /*counters_known=*/false);
  // Rank 0 has waited for 10 s, and rank 1, which came 7 s later, for 3 s.
  const CallId call = Arrive(
      0, "b", 4, {.waited = absl::Seconds(10), .ranks = {0, 1}, .waited_less_us = {0, 7'000'000}});
  Arrive(2, "b", 4);
  ASSERT_TRUE(Passed(call));
  const v1::BarrierReport& report = Result(call).arrive().report();
  EXPECT_EQ(report.first_rank(), 0);
  ASSERT_EQ(report.latest_size(), 3);
  EXPECT_EQ(report.latest(0).rank(), 2);
  EXPECT_EQ(report.latest(0).lateness().seconds(), 10);
  EXPECT_EQ(report.latest(1).rank(), 1);
  EXPECT_EQ(report.latest(1).lateness().seconds(), 7);
}

TEST_F(BarrierTest, LastArrival_ReleasesAllWithOneAnswer) {
  Make(3);
  const CallId a = Arrive(0, "b", 0);
  const CallId b = Arrive(1, "b", 0);
  EXPECT_FALSE(Answered(a));
  const CallId c = Arrive(2, "b", 0);
  EXPECT_TRUE(Passed(a));
  EXPECT_EQ(host_.answers[a], host_.answers[b]);
  EXPECT_EQ(host_.answers[a], host_.answers[c]);
  EXPECT_THAT(host_.journal, IsEmpty());
}

TEST_F(BarrierTest, RepeatedArrival_IsNotCountedTwice) {
  Make(2);
  const CallId first = Arrive(0, "b", 0);
  const CallId second = Arrive(0, "b", 0);
  EXPECT_FALSE(Answered(second));
  Arrive(1, "b", 0);
  EXPECT_TRUE(Passed(first));
  EXPECT_TRUE(Passed(second));
}

TEST_F(BarrierTest, FinishedCounter_GivesItsResultAgain) {
  Make(2);
  const CallId a = Arrive(0, "b", 0);
  Arrive(1, "b", 0);
  const CallId again = Arrive(0, "b", 0);
  EXPECT_EQ(host_.answers[a], host_.answers[again]);
  PassAll(2, "b", 1);
  EXPECT_EQ(host_.answers[Arrive(1, "b", 0)], host_.answers[a]);
}

TEST_F(BarrierTest, OldResult_IsForgottenBeyondTheKept) {
  BarrierOptions options;
  options.kept_results = 3;
  Make(1, true, options);
  for (int counter = 0; counter < 5; ++counter) Arrive(0, "b", counter);
  EXPECT_TRUE(Passed(Arrive(0, "b", 2)));
  const CallId old = Arrive(0, "b", 1);
  EXPECT_EQ(Reason(old), v1::ERROR_REASON_RESULT_FORGOTTEN);
  EXPECT_EQ(Result(old).error().code(), static_cast<int>(absl::StatusCode::kOutOfRange));
}

TEST_F(BarrierTest, Counter_TooHighOrNotFromZero_IsRefused) {
  Make(2);
  EXPECT_EQ(Reason(Arrive(0, "b", 1)), v1::ERROR_REASON_BARRIER_COUNTER);
  PassAll(2, "b", 0);
  EXPECT_EQ(Reason(Arrive(0, "b", 2)), v1::ERROR_REASON_BARRIER_COUNTER);
  const CallId next = Arrive(0, "b", 1);
  Arrive(1, "b", 1);
  EXPECT_TRUE(Passed(next));
}

TEST_F(BarrierTest, Counter_AheadOfAnOpenOne_IsADesyncForAll) {
  Make(3);
  PassAll(3, "b", 0);
  const CallId a = Arrive(0, "b", 1);
  const CallId odd = Arrive(2, "b", 2);
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_DESYNC);
  EXPECT_EQ(Reason(odd), v1::ERROR_REASON_DESYNC);
  EXPECT_THAT(Result(a).error().message(), HasSubstr("rank 2"));
  // A later caller gets the same answer.
  EXPECT_EQ(host_.answers[Arrive(1, "b", 1)], host_.answers[a]);
}

TEST_F(BarrierTest, FirstArrival_FixesTheDeadline) {
  Make(3);
  const CallId a = Arrive(0, "b", 0, {.timeout = absl::Seconds(10)});
  now_ += absl::Seconds(5);
  const CallId b = Arrive(1, "b", 0, {.timeout = absl::Seconds(100)});
  set_->Tick(kStart + absl::Seconds(10) - absl::Nanoseconds(1));
  EXPECT_FALSE(Answered(a));
  set_->Tick(kStart + absl::Seconds(10));
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_BARRIER_TIMEOUT);
  EXPECT_EQ(host_.answers[a], host_.answers[b]);
  EXPECT_THAT(Result(a).error().detail().missing_ranks(), ElementsAre(2));
  EXPECT_THAT(Result(a).error().message(), HasSubstr("rank 2 (w2 on h2, pid 102)"));
  EXPECT_THAT(host_.blamed, ElementsAre(2));
  EXPECT_THAT(host_.journal, ElementsAre("b/0"));
  EXPECT_EQ(Reason(Arrive(2, "b", 0)), v1::ERROR_REASON_BARRIER_TIMEOUT);
}

// The missing ranks may have lost the same rank, and timed out.
TEST_F(BarrierTest, DeadlineAfterALoss_BlamesNobody) {
  Make(3);
  const std::string name(kAfterLostCollective);
  std::vector<CallId> calls;
  for (const std::string& id : {name, name + " of ranks 0, 2", std::string(kAfterLostConnection)}) {
    calls.push_back(Arrive(0, id, 0, {.timeout = absl::Seconds(10), .participants = {0, 2}}));
  }
  set_->Tick(kStart + absl::Seconds(10));
  for (const CallId call : calls) {
    EXPECT_EQ(Reason(call), v1::ERROR_REASON_BARRIER_TIMEOUT);
    EXPECT_THAT(Result(call).error().detail().missing_ranks(), ElementsAre(2));
  }
  EXPECT_THAT(host_.blamed, IsEmpty());
}

TEST_F(BarrierTest, DeadlineOfABarrierOfTheProgram_BlamesWhoeverItsNameIs) {
  Make(2);
  Arrive(0, "after a lost collective", 0, {.timeout = absl::Seconds(10)});
  set_->Tick(kStart + absl::Seconds(10));
  EXPECT_THAT(host_.blamed, ElementsAre(1));
}

// A message has at most 4 MiB.
TEST_F(BarrierTest, ThousandsAreMissingWithStacks_TheReportFitsIntoOneAnswer) {
  for (const auto& [world, stack_bytes] : {std::pair(8000, 16 << 10), std::pair(100'000, 0)}) {
    Make(world);
    host_.stack = std::string(stack_bytes, 's');
    Arrive(0, "b", 0, {.timeout = absl::Seconds(10)});
    v1::BarrierReport report;
    ASSERT_FALSE(set_->Describe("b", 0, kStart, &report).has_value());
    EXPECT_LT(report.ByteSizeLong(), size_t{15} << 18);
    EXPECT_EQ(report.missing_ranks_size(), world - 1);
    EXPECT_GE(report.culprits_size(), 7999);
    EXPECT_EQ(report.culprits(0).native_stack(), host_.stack);
    EXPECT_EQ(report.culprits(7998).native_stack(), "");
    EXPECT_THAT(report.message(), HasSubstr(absl::StrCat(" and ", world - 5, " more")));
  }
}

TEST_F(BarrierTest, NegativeTimeout_NeverExpires) {
  Make(2);
  const CallId a = Arrive(0, "b", 0, {.timeout = -absl::Seconds(1)});
  set_->Tick(kStart + absl::Hours(10000));
  EXPECT_FALSE(Answered(a));
}

TEST_F(BarrierTest, NoTimeout_HasTheDefault) {
  Make(2);
  const CallId a = Arrive(0, "b", 0);
  set_->Tick(kStart + absl::Seconds(1799));
  EXPECT_FALSE(Answered(a));
  set_->Tick(kStart + absl::Seconds(1800));
  EXPECT_TRUE(Answered(a));
}

TEST_F(BarrierTest, SoftDeadline_ReportsWithoutFailing) {
  Make(2);
  const CallId a = Arrive(0, "b", 0, {.timeout = absl::Seconds(100), .soft = absl::Seconds(5)});
  // The stacks are asked for early enough to be in the report.
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Milliseconds(3750));
  set_->Tick(kStart + absl::Milliseconds(3750));
  EXPECT_THAT(host_.asked, ElementsAre(1));
  EXPECT_TRUE(host_.reports.empty());
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(5));
  set_->Tick(kStart + absl::Seconds(5));
  ASSERT_EQ(host_.reports.size(), 1u);
  EXPECT_EQ(host_.reports[0].state(), v1::BARRIER_STATE_OPEN);
  EXPECT_THAT(host_.reports[0].missing_ranks(), ElementsAre(1));
  EXPECT_THAT(host_.asked, ElementsAre(1));
  EXPECT_FALSE(Answered(a));
  set_->Tick(kStart + absl::Seconds(98));  // fresh stacks before the deadline
  EXPECT_THAT(host_.asked, ElementsAre(1, 1));
  Arrive(1, "b", 0);
  EXPECT_TRUE(Passed(a));
  EXPECT_EQ(set_->NextDeadline(), absl::InfiniteFuture());
}

TEST_F(BarrierTest, Diagnosis_AsksABoundedNumberOfStacks) {
  BarrierOptions options;
  options.diag_max_stacks = 4;
  Make(100, true, options);
  Arrive(0, "b", 0, {.timeout = absl::Seconds(10), .soft = absl::Seconds(1)});
  set_->Tick(kStart + absl::Seconds(1));
  EXPECT_EQ(host_.asked.size(), 4u);
}

TEST_F(BarrierTest, Payloads_AreGatheredByRankAndJournaled) {
  Make(3);
  const CallId a = Arrive(2, "b", 0, {.payload = "two"});
  Arrive(0, "b", 0, {.payload = "zero"});
  Arrive(1, "b", 0);
  EXPECT_THAT(Result(a).arrive().payloads(), ElementsAre("zero", "", "two"));
  EXPECT_THAT(host_.journal, ElementsAre("b/0"));
}

TEST_F(BarrierTest, Payload_TooLarge_IsRefusedAndHasNoEffect) {
  Make(2);
  EXPECT_EQ(Reason(Arrive(0, "b", 0, {.payload = std::string(4097, 'x')})), v1::ERROR_REASON_LIMIT);
  EXPECT_EQ(set_->open(), 0u);
  Make(10000);
  EXPECT_EQ(Reason(Arrive(0, "b", 0, {.payload = std::string(4000, 'x')})), v1::ERROR_REASON_LIMIT);
}

TEST_F(BarrierTest, Subset_WaitsForItsMembersOnly) {
  Make(4);
  const CallId a = Arrive(1, "s", 0, {.participants = {1, 3}, .payload = "a"});
  Arrive(3, "s", 0, {.participants = {1, 3}, .payload = "b"});
  EXPECT_TRUE(Passed(a));
  EXPECT_THAT(Result(a).arrive().payloads(), ElementsAre("a", "b"));
  EXPECT_EQ(Result(a).arrive().report().expected(), 2);
}

TEST_F(BarrierTest, Subset_OtherSetOrOutsider_IsADesyncForAll) {
  Make(4);
  const CallId a = Arrive(1, "s", 0, {.participants = {1, 3}});
  const CallId b = Arrive(2, "s", 0, {.participants = {1, 2}});
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_DESYNC);
  EXPECT_EQ(host_.answers[a], host_.answers[b]);
  const CallId c = Arrive(1, "t", 0, {.participants = {1, 3}});
  const CallId d = Arrive(0, "t", 0, {.participants = {1, 3}});
  EXPECT_EQ(Reason(c), v1::ERROR_REASON_DESYNC);
  EXPECT_EQ(Reason(d), v1::ERROR_REASON_DESYNC);
}

TEST_F(BarrierTest, Subset_UnsortedOrOutOfRange_IsRefused) {
  Make(4);
  EXPECT_EQ(Reason(Arrive(1, "s", 0, {.participants = {3, 1}})), v1::ERROR_REASON_BAD_FIELD);
  EXPECT_EQ(Reason(Arrive(1, "s", 0, {.participants = {1, 4}})), v1::ERROR_REASON_BAD_FIELD);
  EXPECT_EQ(Reason(Arrive(7, "s", 0)), v1::ERROR_REASON_BAD_FIELD);
  EXPECT_EQ(Reason(Arrive(0, "", 0)), v1::ERROR_REASON_BAD_FIELD);
}

TEST_F(BarrierTest, AllRanksNamed_IsTheSameAsNone) {
  Make(2);
  const CallId a = Arrive(0, "b", 0, {.participants = {0, 1}});
  Arrive(1, "b", 0);
  EXPECT_TRUE(Passed(a));
}

TEST_F(BarrierTest, CallSite_Differs_NamesBothPlaces) {
  Make(3);
  const CallId a = Arrive(0, "b", 0, {.site = 1, .site_text = "train.cc:41"});
  Arrive(1, "b", 0, {.site = 2, .site_text = "eval.cc:7"});
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_DESYNC);
  EXPECT_THAT(Result(a).error().message(), HasSubstr("train.cc:41"));
  EXPECT_THAT(Result(a).error().message(), HasSubstr("eval.cc:7"));
}

TEST_F(BarrierTest, OtherBarrierAtTheSamePoint_IsNamedInOneRoundTrip) {
  Make(3);
  const CallId a = Arrive(0, "step", 0, {.site = 1, .site_text = "train.cc:41"});
  const CallId b = Arrive(1, "save", 0, {.site = 2, .site_text = "save.cc:7"});
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_DESYNC);
  EXPECT_EQ(Reason(b), v1::ERROR_REASON_DESYNC);
  EXPECT_THAT(Result(a).error().message(), HasSubstr("rank 0 waits in barrier \"step\""));
  EXPECT_THAT(Result(a).error().message(), HasSubstr("rank 1 in barrier \"save\""));
  EXPECT_EQ(Result(a).error().message(), Result(b).error().message());
  EXPECT_EQ(set_->open(), 0u);
}

TEST_F(BarrierTest, OtherBarrierWithoutCallSite_IsNoDesync) {
  Make(2);
  const CallId a = Arrive(0, "main", 0, {.site = 1});
  const CallId b = Arrive(1, "background", 0);
  EXPECT_FALSE(Answered(a));
  EXPECT_FALSE(Answered(b));
  Arrive(0, "background", 0);
  Arrive(1, "main", 0, {.site = 1});
  EXPECT_TRUE(Passed(a));
  EXPECT_TRUE(Passed(b));
}

TEST_F(BarrierTest, LocalThenGlobalBarriers_AreNoDesync) {
  Make(4);
  Arrive(0, "local", 0, {.participants = {0, 1}, .site = 1});
  Arrive(2, "local2", 0, {.participants = {2, 3}, .site = 1});
  Arrive(3, "local2", 0, {.participants = {2, 3}, .site = 1});
  const CallId global = Arrive(2, "global", 0, {.site = 2});
  Arrive(3, "global", 0, {.site = 2});
  EXPECT_FALSE(Answered(global));
  Arrive(1, "local", 0, {.participants = {0, 1}, .site = 1});
  Arrive(0, "global", 0, {.site = 2});
  Arrive(1, "global", 0, {.site = 2});
  EXPECT_TRUE(Passed(global));
}

TEST_F(BarrierTest, RankGone_FailsAtOnceAndNamesIt) {
  Make(3);
  const CallId a = Arrive(0, "b", 0, {.site = 1, .site_text = "train.cc:41"});
  set_->RankGone(2, "was killed by signal 9", now_);
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_RANK_FAILED);
  EXPECT_THAT(
      Result(a).error().message(),
      AllOf(StartsWith("rank 2"),
            HasSubstr("was killed by signal 9 and cannot come to barrier \"b\" counter 0 at "
                      "\"train.cc:41\", where rank 0 waits (1 of 3 ranks had arrived); all ranks "
                      "must call it equally often")));
  EXPECT_EQ(Reason(Arrive(1, "other", 0)), v1::ERROR_REASON_RANK_FAILED);
}

TEST_F(BarrierTest, RankGone_AfterTheFirstWasReplaced_NamesThoseWhoWait) {
  Make(4);
  const CallId a = Arrive(0, "b", 0);
  set_->RankReplaced(0, now_);
  Arrive(2, "b", 0);
  Arrive(1, "b", 0);
  set_->RankGone(3, "was killed by signal 9", now_);
  EXPECT_THAT(Result(a).error().message(),
              AnyOf(HasSubstr(", where rank 1 and 1 more wait (2 of 4"),
                    HasSubstr(", where rank 2 and 1 more wait (2 of 4")));
}

TEST_F(BarrierTest, RankGone_AfterAllWereReplaced_SaysThatNoneHadArrived) {
  Make(2);
  const CallId a = Arrive(0, "b", 0);
  set_->RankReplaced(0, now_);
  set_->RankGone(1, "was killed by signal 9", now_);
  EXPECT_THAT(Result(a).error().message(),
              AllOf(HasSubstr(" (0 of 2 ranks had arrived)"), Not(HasSubstr("wait"))));
}

TEST_F(BarrierTest, RankGone_AfterItArrived_DoesNotFail) {
  Make(2);
  const CallId a = Arrive(0, "b", 0);
  set_->RankGone(0, "exited with code 0", now_);
  EXPECT_FALSE(Answered(a));
  Arrive(1, "b", 0);
  EXPECT_TRUE(Passed(a));
}

TEST_F(BarrierTest, RankReplaced_MustComeAgain) {
  Make(2);
  const CallId a = Arrive(0, "b", 0);
  set_->RankReplaced(0, now_);
  Arrive(1, "b", 0);
  EXPECT_FALSE(Answered(a));
  Arrive(0, "b", 0);
  EXPECT_TRUE(Passed(a));
}

TEST_F(BarrierTest, Cancel_TellsAllAndOnlyAnOpenOne) {
  Make(2);
  const CallId a = Arrive(0, "b", 0);
  EXPECT_EQ(set_->Cancel("b", 1, "rank 1", "", now_)->code(),
            static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_FALSE(set_->Cancel("b", 0, "rank 1", "disk is full", now_).has_value());
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_CANCELLED_BY_PEER);
  EXPECT_THAT(Result(a).error().message(), HasSubstr("was cancelled by rank 1: disk is full"));
  EXPECT_EQ(Reason(Arrive(1, "b", 0)), v1::ERROR_REASON_CANCELLED_BY_PEER);
  EXPECT_TRUE(set_->Cancel("b", 0, "rank 1", "", now_).has_value());
}

TEST_F(BarrierTest, EndAll_EndsEveryOpenBarrier) {
  Make(2);
  const CallId a = Arrive(0, "a", 0);
  const CallId b = Arrive(1, "b", 0);
  set_->EndAll(MakeError(absl::StatusCode::kAborted, v1::ERROR_REASON_GENERATION_ENDED, "over"));
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_GENERATION_ENDED);
  EXPECT_EQ(Reason(b), v1::ERROR_REASON_GENERATION_ENDED);
  EXPECT_EQ(set_->NextDeadline(), absl::InfiniteFuture());
}

TEST_F(BarrierTest, Report_OnSuccess_TellsFirstLastAndLatest) {
  Make(4);
  Arrive(2, "b", 0);
  now_ += absl::Milliseconds(10);
  Arrive(0, "b", 0);
  now_ += absl::Milliseconds(10);
  Arrive(3, "b", 0);
  now_ += absl::Milliseconds(30);
  const CallId a = Arrive(1, "b", 0);
  const v1::BarrierReport& report = Result(a).arrive().report();
  EXPECT_EQ(report.first_rank(), 2);
  EXPECT_EQ(report.last_rank(), 1);
  ASSERT_EQ(report.latest_size(), 3);
  EXPECT_EQ(report.latest(0).rank(), 1);
  EXPECT_EQ(FromProto(report.latest(0).lateness()), absl::Milliseconds(50));
  EXPECT_EQ(report.latest(1).rank(), 3);
  EXPECT_EQ(report.latest(2).rank(), 0);
  EXPECT_EQ(FromProto(report.open_for()), absl::Milliseconds(50));
}

TEST_F(BarrierTest, Stragglers_RanksByMeanLateness) {
  Make(3);
  for (int counter = 0; counter < 10; ++counter) {
    Arrive(0, "b", counter);
    now_ += absl::Milliseconds(1);
    Arrive(1, "b", counter);
    now_ += absl::Milliseconds(counter == 0 ? 100 : 4);
    Arrive(2, "b", counter);
  }
  v1::StragglerReportReply reply;
  set_->Stragglers(&reply);
  ASSERT_EQ(reply.rows_size(), 3);
  EXPECT_EQ(reply.rows(0).rank(), 2);
  EXPECT_EQ(reply.rows(0).barriers(), 10u);
  EXPECT_EQ(reply.rows(0).times_last(), 10u);
  EXPECT_EQ(FromProto(reply.rows(0).max_lateness()), absl::Milliseconds(101));
  EXPECT_EQ(FromProto(reply.rows(1).mean_lateness()), absl::Milliseconds(1));
}

TEST_F(BarrierTest, Stragglers_OfTheFormerGeneration_GoOnWithTheirNewRank) {
  Make(3);
  for (int counter = 0; counter < 10; ++counter) {
    Arrive(0, "b", counter);
    Arrive(2, "b", counter);
    now_ += absl::Milliseconds(5);
    Arrive(1, "b", counter);
  }
  // Rank 2 is gone, rank 1 has become rank 0 and rank 0 rank 1; a newcomer is rank 2.
  const std::unique_ptr<BarrierSet> former = std::move(set_);
  Make(3);
  const std::vector<int> former_ranks = {1, 0, -1};
  set_->InheritScores(*former, former_ranks);
  Arrive(0, "b", 0);
  Arrive(1, "b", 0);
  now_ += absl::Milliseconds(1);
  Arrive(2, "b", 0);
  v1::StragglerReportReply reply;
  set_->Stragglers(&reply);
  ASSERT_EQ(reply.rows_size(), 3);
  EXPECT_EQ(reply.rows(0).rank(), 0);
  EXPECT_EQ(reply.rows(0).barriers(), 11u);
  EXPECT_EQ(reply.rows(0).times_last(), 10u);
  EXPECT_EQ(FromProto(reply.rows(0).max_lateness()), absl::Milliseconds(5));
  EXPECT_EQ(reply.rows(1).rank(), 2);
  EXPECT_EQ(reply.rows(1).barriers(), 1u);
  EXPECT_EQ(reply.rows(2).rank(), 1);
  EXPECT_EQ(reply.rows(2).barriers(), 11u);
}

TEST_F(BarrierTest, Describe_OpenFinishedAndUnknown) {
  Make(2);
  Arrive(0, "b", 0);
  v1::BarrierReport report;
  EXPECT_FALSE(set_->Describe("b", 0, now_, &report).has_value());
  EXPECT_EQ(report.state(), v1::BARRIER_STATE_OPEN);
  EXPECT_THAT(report.missing_ranks(), ElementsAre(1));
  Arrive(1, "b", 0);
  EXPECT_FALSE(set_->Describe("b", 0, now_, &report).has_value());
  EXPECT_EQ(report.state(), v1::BARRIER_STATE_PASSED);
  EXPECT_TRUE(set_->Describe("b", 1, now_, &report).has_value());
  v1::ListBarriersReply list;
  set_->List(true, now_, &list);
  EXPECT_EQ(list.reports_size(), 0);
  set_->List(false, now_, &list);
  EXPECT_EQ(list.reports_size(), 1);
}

TEST_F(BarrierTest, Restarted_AnyCounterOpensThenStrictAgain) {
  Make(2, false);
  const CallId a = Arrive(0, "b", 17);
  Arrive(1, "b", 17);
  EXPECT_TRUE(Passed(a));
  EXPECT_EQ(Reason(Arrive(0, "b", 30)), v1::ERROR_REASON_BARRIER_COUNTER);
  EXPECT_FALSE(Answered(Arrive(0, "b", 18)));
}

TEST_F(BarrierTest, Restarted_RecallBeforeOrAfterTheReentry_GivesPassed) {
  Make(2, false);
  set_->Recall("a", 4, v1::BARRIER_STATE_PASSED);
  EXPECT_TRUE(Passed(Arrive(0, "a", 4)));
  const CallId b = Arrive(0, "b", 4);
  set_->Recall("b", 4, v1::BARRIER_STATE_PASSED);
  EXPECT_TRUE(Passed(b));
  const CallId next = Arrive(0, "b", 5);
  Arrive(1, "b", 5);
  EXPECT_TRUE(Passed(next));
}

TEST_F(BarrierTest, Restarted_EvidenceOfALaterCounter_GivesPassed) {
  Make(3, false);
  const CallId a = Arrive(0, "b", 4);
  const CallId ahead = Arrive(1, "b", 5, {.previous = v1::BARRIER_STATE_PASSED});
  EXPECT_TRUE(Passed(a));
  EXPECT_FALSE(Answered(ahead));
  const CallId behind = Arrive(2, "b", 4);
  EXPECT_TRUE(Passed(behind));
  Arrive(2, "b", 5);
  Arrive(0, "b", 5);
  EXPECT_TRUE(Passed(ahead));
}

TEST_F(BarrierTest, Restarted_ReplacedRankCatchesUp_LaterInstancesMayHavePassedToo) {
  Make(3, false);
  // A new incarnation begins at 0; the others are far ahead, and say so only now and then.
  const CallId first = Arrive(2, "b", 0);
  set_->Recall("b", 0, v1::BARRIER_STATE_PASSED);
  EXPECT_TRUE(Passed(first));
  const CallId second = Arrive(2, "b", 1);
  set_->Recall("b", 1, v1::BARRIER_STATE_PASSED);
  EXPECT_TRUE(Passed(second));
}

TEST_F(BarrierTest, Restarted_EvidenceCannotPassWhatBeganInThisTerm) {
  Make(3, false);
  PassAll(3, "b", 4);
  const CallId a = Arrive(0, "b", 5);
  set_->Recall("b", 5, v1::BARRIER_STATE_PASSED);
  EXPECT_FALSE(Answered(a));
  Arrive(1, "b", 6, {.previous = v1::BARRIER_STATE_PASSED});
  EXPECT_EQ(Reason(a), v1::ERROR_REASON_DESYNC);
}

TEST_F(BarrierTest, Restarted_RankGone_WaitsForThoseWhoSawItPass) {
  Make(3, false);
  set_->HoldFailuresUntil(kStart + absl::Seconds(6));
  set_->RankGone(2, "was killed by signal 9", now_);
  const CallId a = Arrive(0, "b", 4);
  const CallId c = Arrive(0, "c", 4);
  EXPECT_FALSE(Answered(a));
  set_->Recall("b", 4, v1::BARRIER_STATE_PASSED);
  EXPECT_TRUE(Passed(a));
  set_->Tick(kStart + absl::Seconds(6));
  EXPECT_EQ(Reason(c), v1::ERROR_REASON_RANK_FAILED);
}

TEST_F(BarrierTest, Restarted_OtherBarrierAtTheSamePoint_MayHavePassedBefore) {
  Make(2, false);
  const CallId behind = Arrive(0, "a", 3, {.site = 1});
  const CallId ahead = Arrive(1, "b", 0, {.site = 1});
  EXPECT_FALSE(Answered(behind));
  set_->Recall("a", 3, v1::BARRIER_STATE_PASSED);
  EXPECT_TRUE(Passed(behind));
  Arrive(0, "b", 0, {.site = 1});
  EXPECT_TRUE(Passed(ahead));
}

TEST_F(BarrierTest, NotRestarted_RecallIsIgnored) {
  Make(2);
  const CallId a = Arrive(0, "b", 0);
  set_->Recall("b", 0, v1::BARRIER_STATE_PASSED);
  set_->Recall("c", 9, v1::BARRIER_STATE_PASSED);
  EXPECT_FALSE(Answered(a));
  EXPECT_FALSE(Answered(Arrive(0, "c", 0)));
}

TEST_F(BarrierTest, Restarted_JournaledResultComesBackWhole) {
  Make(2);
  Arrive(0, "b", 0, {.timeout = absl::Seconds(1)});
  set_->Tick(kStart + absl::Seconds(1));
  const CallId first = Arrive(1, "b", 0);
  const v1::OpResult result = Result(first);
  Make(2, false);
  set_->RestoreEnd("b", 0, result);
  EXPECT_EQ(Result(Arrive(0, "b", 0)).SerializeAsString(), result.SerializeAsString());
  set_->Recall("b", 0, v1::BARRIER_STATE_PASSED);  // no rank can have seen that
  EXPECT_EQ(Reason(Arrive(0, "b", 0)), v1::ERROR_REASON_BARRIER_TIMEOUT);
  v1::BarrierReport report;
  set_->Describe("b", 0, now_, &report);
  EXPECT_EQ(report.state(), v1::BARRIER_STATE_TIMED_OUT);
}

TEST_F(BarrierTest, Report_OfHours_IsExact) {
  Make(3);
  Arrive(0, "b", 0, {.timeout = absl::Hours(100), .lateness_us = 1'000'000});
  now_ += absl::Hours(20);
  Arrive(1, "b", 0, {.timeout = absl::Hours(100)});
  const CallId last =
      Arrive(2, "b", 0, {.timeout = absl::Hours(100), .lateness_us = 1'800'000'000});
  const v1::BarrierReport report = Result(last).arrive().report();
  EXPECT_EQ(FromProto(report.open_for()), absl::Hours(20) + absl::Seconds(1));
  EXPECT_EQ(report.last_rank(), 1);
  EXPECT_EQ(FromProto(report.latest(0).lateness()), absl::Hours(20) + absl::Seconds(1));
  EXPECT_EQ(FromProto(report.latest(1).lateness()),
            absl::Hours(20) + absl::Seconds(1) - absl::Seconds(1800));
  v1::StragglerReportReply stragglers;
  set_->Stragglers(&stragglers);
  EXPECT_EQ(FromProto(stragglers.rows(0).max_lateness()), absl::Hours(20) + absl::Seconds(1));
}

TEST_F(BarrierTest, Restarted_Waited_ShortensTheDeadlineButNotBelowTheHold) {
  Make(2, /*counters_known=*/false);
  set_->HoldFailuresUntil(now_ + absl::Seconds(6));
  const CallId call = Arrive(0, "b", 7, {.timeout = absl::Seconds(100), .waited = absl::Hours(9)});
  now_ += absl::Seconds(5);
  set_->Tick(now_);
  EXPECT_FALSE(Answered(call)) << "others may still be on their way back";
  now_ += absl::Seconds(1);
  set_->Tick(now_);
  EXPECT_EQ(Reason(call), v1::ERROR_REASON_BARRIER_TIMEOUT);
}

TEST_F(BarrierTest, NotRestarted_Waited_ChangesNothing) {
  Make(2);
  const CallId call = Arrive(0, "b", 0, {.timeout = absl::Seconds(100), .waited = absl::Hours(9)});
  now_ += absl::Seconds(99);
  set_->Tick(now_);
  EXPECT_FALSE(Answered(call));
  now_ += absl::Seconds(1);
  set_->Tick(now_);
  EXPECT_EQ(Reason(call), v1::ERROR_REASON_BARRIER_TIMEOUT);
}

TEST_F(BarrierTest, Names_BeyondTheLimit_AreRecycledFromTheOldest) {
  BarrierOptions options;
  options.kept_results = 10;
  Make(2, /*counters_known=*/true, options);
  const CallId open = Arrive(0, "open", 0);
  const auto pass = [&](const std::string& id, uint64_t counter) {
    const CallId call = Arrive(0, id, counter);
    Arrive(1, id, counter);
    const bool passed = Passed(call);
    host_.answers.erase(call);
    host_.answers.erase(call + 1);
    parsed_.clear();
    return passed;
  };
  ASSERT_TRUE(pass("often", 0));
  ASSERT_TRUE(pass("once", 0));
  uint64_t often = 0;
  const int names = static_cast<int>(BarrierSet::kMaxNames) + 1000;
  for (int i = 0; i < names; ++i) {
    ASSERT_TRUE(pass(absl::StrCat("n", i), 0)) << i;
    if (i % 8 == 0) {
      ASSERT_TRUE(pass("often", ++often)) << i;
    }
  }
  // A name in use is known: another counter is a mistake, and waiting callers go on waiting.
  EXPECT_EQ(Reason(Arrive(0, "often", often + 5)), v1::ERROR_REASON_BARRIER_COUNTER);
  EXPECT_FALSE(Answered(open));
  Arrive(1, "open", 0);
  EXPECT_TRUE(Passed(open));
  // The use count of other names is unknown.
  EXPECT_TRUE(pass("once", 1));
  EXPECT_EQ(Reason(Arrive(0, "once", 5)), v1::ERROR_REASON_BARRIER_COUNTER);
}

TEST_F(BarrierTest, Names_ThatOnlyMadeErrors_TakeNoRoom) {
  Make(2, /*counters_known=*/true);
  for (size_t i = 0; i < BarrierSet::kMaxNames + 10; ++i) {
    const CallId call = Arrive(0, absl::StrCat("n", i), 3);
    ASSERT_EQ(Reason(call), v1::ERROR_REASON_BARRIER_COUNTER) << i;
    host_.answers.erase(call);
    parsed_.clear();
  }
  EXPECT_FALSE(Answered(Arrive(0, "b", 0)));
}

TEST_F(BarrierTest, ManyOpenSubsets_StayCheap) {
  Make(10000);
  for (int node = 0; node < 1250; ++node) {
    std::vector<int32_t> members;
    for (int i = 0; i < 8; ++i) members.push_back(8 * node + i);
    Arrive(8 * node, absl::StrCat("local", node), 0, {.participants = members, .site = 1});
  }
  for (int node = 0; node < 1250; ++node) {
    std::vector<int32_t> members;
    for (int i = 0; i < 8; ++i) members.push_back(8 * node + i);
    for (int i = 1; i < 8; ++i) {
      Arrive(8 * node + i, absl::StrCat("local", node), 0, {.participants = members, .site = 1});
    }
  }
  EXPECT_EQ(set_->counts().passed, 1250u);
}

}  // namespace
}  // namespace muster::coordinator
