#include "coordinator/jobs/record_history.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

HistoryKey KeyOf(const v1::JobAttempt& attempt) { return {attempt.number(), attempt.restarts()}; }

// Returns how many entries are before the one with `key`; all if there is no such entry.
int CountBefore(const v1::JobRecord& record, const HistoryKey& key) {
  int count = 0;
  while (count < record.history_size() && KeyOf(record.history(count)) != key) ++count;
  return count;
}

}  // namespace

HistoryKey CurrentEntry(const v1::JobRecord& record) {
  return record.history_size() == 0 ? HistoryKey()
                                    : KeyOf(record.history(record.history_size() - 1));
}

void OmitKnownHistory(const HistoryKey& known, v1::JobRecordChanged* change) {
  v1::JobRecord& record = *change->mutable_record();
  const int count = CountBefore(record, known);
  // If the history has grown beyond what is kept, the journal has none of its entries.
  if (count == 0 || count == record.history_size()) return;
  record.mutable_history()->DeleteSubrange(0, count);
  change->set_earlier_history(count);
}

absl::Status RestoreKnownHistory(const v1::JobRecord& before, v1::JobRecordChanged* change) {
  const int count = change->earlier_history();
  if (count == 0) return absl::OkStatus();
  v1::JobRecord& record = *change->mutable_record();
  const int end = record.history_size() == 0 ? 0 : CountBefore(before, KeyOf(record.history(0)));
  if (count < 0 || count > end) {
    return absl::DataLossError(absl::StrCat("the journal counts on ", count, " attempts of job ",
                                            record.job_id(), " that it does not have"));
  }
  google::protobuf::RepeatedPtrField<v1::JobAttempt> whole;
  for (int i = end - count; i < end; ++i) *whole.Add() = before.history(i);
  for (v1::JobAttempt& attempt : *record.mutable_history()) *whole.Add() = std::move(attempt);
  record.mutable_history()->Swap(&whole);
  change->clear_earlier_history();
  return absl::OkStatus();
}

}  // namespace muster::coordinator
