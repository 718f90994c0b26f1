#include "coordinator/jobs/attempt_times.h"

#include <algorithm>

namespace muster::coordinator {
namespace {

using Times = v1::AttemptTimes;

struct Field {
  AttemptStage stage;
  int64_t (Times::*get)() const;
  void (Times::*set)(int64_t);
};

constexpr Field kFields[] = {
    {AttemptStage::kPlaced, &Times::placed_unix_ms, &Times::set_placed_unix_ms},
    {AttemptStage::kSealed, &Times::sealed_unix_ms, &Times::set_sealed_unix_ms},
    {AttemptStage::kRestored, &Times::restored_unix_ms, &Times::set_restored_unix_ms},
    {AttemptStage::kStepped, &Times::stepped_unix_ms, &Times::set_stepped_unix_ms},
    {AttemptStage::kFailed, &Times::failed_unix_ms, &Times::set_failed_unix_ms},
    {AttemptStage::kDetected, &Times::detected_unix_ms, &Times::set_detected_unix_ms},
    {AttemptStage::kDecided, &Times::decided_unix_ms, &Times::set_decided_unix_ms},
    {AttemptStage::kFenced, &Times::fenced_unix_ms, &Times::set_fenced_unix_ms},
};

}  // namespace

int64_t LatestOf(const v1::AttemptTimes& times) {
  int64_t latest = 0;
  for (const Field& field : kFields) latest = std::max(latest, (times.*field.get)());
  return latest;
}

bool NoteStage(const StageNews& news, v1::AttemptTimes* times) {
  bool changed = false;
  if (news.stage == AttemptStage::kSealed && times->decided_unix_ms() == 0) {
    changed = times->failed_unix_ms() != 0 || times->detected_unix_ms() != 0;
    times->clear_failed_unix_ms();
    times->clear_detected_unix_ms();
  }
  const Field* own = nullptr;
  int64_t before = news.not_before, after = 0;  // the nearest known times; after 0: none
  for (const Field& field : kFields) {
    const int64_t time = (times->*field.get)();
    if (field.stage == news.stage) {
      own = &field;
    } else if (own == nullptr) {
      before = std::max(before, time);
    } else if (after == 0) {
      after = time;
    }
  }
  const int64_t noted = (times->*own->get)();
  const bool may_move = news.stage == AttemptStage::kSealed || news.stage == AttemptStage::kFailed;
  if (noted != 0 && !may_move) return changed;
  if (after != 0 && news.stage != AttemptStage::kFailed) return changed;
  const int64_t now = absl::ToUnixMillis(news.now);
  const int64_t latest = after != 0 ? after : now;
  if (now < before || latest < before) return changed;
  const int64_t told = absl::ToUnixMillis(news.at);
  int64_t at = news.as_told ? told : std::clamp(told, before, latest);
  if (news.stage == AttemptStage::kFailed && noted != 0) at = std::min(at, noted);
  (times->*own->set)(at);
  return changed || at != noted;
}

}  // namespace muster::coordinator
