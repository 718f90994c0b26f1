#include "worker/checkpoint/save_progress.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"

namespace muster {
namespace {

constexpr absl::Duration kFirstLog = absl::Seconds(5);
constexpr absl::Duration kNextLog = absl::Seconds(10);
constexpr absl::Duration kLogBesideTraining = absl::Minutes(1);

}  // namespace

std::string DescribeSave(uint64_t written, uint64_t bytes, absl::Duration elapsed) {
  std::string text = absl::StrCat(HumanBytes(static_cast<int64_t>(written)), " of ",
                                  HumanBytes(static_cast<int64_t>(bytes)));
  if (const double seconds = absl::ToDoubleSeconds(elapsed); seconds > 0) {
    absl::StrAppend(&text, ", ",
                    HumanBytes(static_cast<int64_t>(static_cast<double>(written) / seconds)), "/s");
  }
  return absl::StrCat(text, ", for ", HumanDuration(elapsed));
}

SaveProgress::Save::Save(SaveProgress& all, RunningSave facts, bool logs)
    : all_(all),
      facts_(std::move(facts)),
      start_(all.clock_.Now()),
      next_log_(
          absl::ToUnixNanos(logs ? start_ + (facts_.asynchronous ? kLogBesideTraining : kFirstLog)
                                 : absl::InfiniteFuture())) {}

SaveProgress::Save::~Save() {
  MutexLock lock(&all_.mu_);
  all_.saves_.erase(std::find(all_.saves_.begin(), all_.saves_.end(), this));
}

void SaveProgress::Save::Expect(uint64_t bytes) {
  uint64_t now = expected_.load(std::memory_order_relaxed);
  while (now < bytes && !expected_.compare_exchange_weak(now, bytes, std::memory_order_relaxed)) {
  }
}

RunningSave SaveProgress::Save::Read() const {
  RunningSave facts = facts_;
  facts.written = written_.load(std::memory_order_relaxed);
  facts.bytes = std::max({expected_.load(std::memory_order_relaxed),
                          begun_.load(std::memory_order_relaxed), facts.written});
  facts.elapsed = all_.clock_.Now() - start_;
  return facts;
}

void SaveProgress::Save::Wrote(uint64_t bytes) {
  written_.fetch_add(bytes, std::memory_order_relaxed);
  if (!facts_.asynchronous) all_.signs_.fetch_add(1, std::memory_order_relaxed);
  int64_t due = next_log_.load(std::memory_order_relaxed);
  const absl::Time now = all_.clock_.Now();
  if (absl::ToUnixNanos(now) < due) return;
  const absl::Time next = now + (facts_.asynchronous ? kLogBesideTraining : kNextLog);
  // Only one of the threads that see it logs.
  if (!next_log_.compare_exchange_strong(due, absl::ToUnixNanos(next))) return;
  const RunningSave facts = Read();
  MUSTER_LOG(Info) << "saving " << facts.path << ": rank 0 has written "
                   << DescribeSave(facts.written, facts.bytes, facts.elapsed);
}

SaveProgress::SaveProgress() : SaveProgress(Clock::Real()) {}
SaveProgress::SaveProgress(const Clock& clock) : clock_(clock) {}

std::unique_ptr<SaveProgress::Save> SaveProgress::Begin(std::string path, int64_t step,
                                                        bool asynchronous, bool logs) {
  // Not make_unique, because the constructor is private.
  RunningSave facts;
  facts.path = std::move(path);
  facts.step = step;
  facts.asynchronous = asynchronous;
  std::unique_ptr<Save> save(new Save(*this, std::move(facts), logs));
  MutexLock lock(&mu_);
  saves_.push_back(save.get());
  return save;
}

std::optional<RunningSave> SaveProgress::Read() const {
  MutexLock lock(&mu_);
  if (saves_.empty()) return std::nullopt;
  return saves_.front()->Read();
}

}  // namespace muster
