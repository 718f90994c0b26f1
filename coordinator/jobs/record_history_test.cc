#include "coordinator/jobs/record_history.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

// Record makes a job with these entries of the history. Entries returns its entries, with the R-th
// restart within attempt N as "N+R ".
v1::JobRecord Record(const std::vector<HistoryKey>& entries) {
  v1::JobRecord record;
  record.set_job_id("j-1");
  for (const auto& [number, restarts] : entries) {
    v1::JobAttempt* const attempt = record.add_history();
    attempt->set_number(number);
    attempt->set_restarts(restarts);
    attempt->mutable_end()->add_last_lines(std::string(1000, 'x'));
  }
  return record;
}
std::string Entries(const v1::JobRecord& record) {
  std::string text;
  for (const v1::JobAttempt& attempt : record.history()) {
    absl::StrAppend(&text, attempt.number(), "+", attempt.restarts(), " ");
  }
  return text;
}

class RecordHistoryTest : public testing::Test {
 protected:
  // Returns what is written for a change to `after` when the journal has `before`. Checks that
  // reading it restores `after`.
  std::string Written(const v1::JobRecord& before, const v1::JobRecord& after) {
    v1::JobRecordChanged change;
    *change.mutable_record() = after;
    OmitKnownHistory(CurrentEntry(before), &change);
    const std::string written = Entries(change.record());
    EXPECT_TRUE(RestoreKnownHistory(before, &change).ok());
    EXPECT_EQ(change.record().SerializeAsString(), after.SerializeAsString());
    EXPECT_EQ(change.earlier_history(), 0);
    return written;
  }
};

TEST_F(RecordHistoryTest, OnlyWhatMayHaveChanged_IsWritten) {
  const v1::JobRecord none = Record({}), one = Record({{1, 0}}), two = Record({{1, 0}, {2, 0}});
  EXPECT_EQ(Written(none, none), "");
  EXPECT_EQ(Written(none, one), "1+0 ");
  EXPECT_EQ(Written(one, one), "1+0 ");
  // This includes how the former attempt has ended.
  EXPECT_EQ(Written(one, two), "1+0 2+0 ");
  EXPECT_EQ(Written(two, two), "2+0 ");
  const v1::JobRecord in_place = Record({{1, 0}, {2, 0}, {2, 1}, {3, 0}});
  EXPECT_EQ(Written(two, in_place), "2+0 2+1 3+0 ");
  EXPECT_EQ(Written(in_place, in_place), "3+0 ");
}

TEST_F(RecordHistoryTest, EntriesThatAreNoLongerKept_DoNotReturn) {
  EXPECT_EQ(Written(Record({{1, 0}, {2, 0}, {3, 0}}), Record({{2, 0}, {3, 0}, {4, 0}})),
            "3+0 4+0 ");
  // The whole history is new.
  EXPECT_EQ(Written(Record({{1, 0}}), Record({{4, 0}, {5, 0}})), "4+0 5+0 ");
}

TEST_F(RecordHistoryTest, ChangeThatCountsOnMore_IsRefused) {
  v1::JobRecordChanged change;
  *change.mutable_record() = Record({{2, 0}});
  for (const int count : {-1, 2, 1000}) {
    change.set_earlier_history(count);
    EXPECT_TRUE(absl::IsDataLoss(RestoreKnownHistory(Record({{1, 0}, {2, 0}}), &change)));
  }
  change.mutable_record()->clear_history();
  change.set_earlier_history(1);
  EXPECT_TRUE(absl::IsDataLoss(RestoreKnownHistory(Record({{1, 0}}), &change)));
}

}  // namespace
}  // namespace muster::coordinator
