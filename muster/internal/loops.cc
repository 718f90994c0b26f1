// Core: which loops are under way, and what of an epoch is done.
#include "muster/internal/loops.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace muster::internal {

void Core::Observer::OnStart() {
  if (core_ != nullptr) core_->SynchronizeRngTypes();
}

bool Core::Observer::SkipsPass(const LoaderStateHandle& loader) {
  if (core_ == nullptr || !core_->epoch_open_ || core_->epoch_ != core_->first_epoch_) return false;
  for (size_t i = 0; i < core_->passes_to_skip_.size() && i < core_->loaders_.size(); ++i) {
    if (core_->loaders_[i].get() != &loader || core_->passes_to_skip_[i] == 0) continue;
    --core_->passes_to_skip_[i];
    ++core_->finished_passes_[i];
    core_->trained_in_epoch_ = true;
    return true;
  }
  return false;
}

void Core::Observer::OnBatch(uint64_t iteration, const BatchInfo& info) {
  if (core_ == nullptr) return;
  ++core_->batches_;
  std::vector<LiveLoop>& live = core_->live_;
  for (size_t i = 0; i < live.size(); ++i) {
    if (live[i].id != iteration) continue;
    live[i].info = info;
    // A loop inside of another one is over before the outer one moves on.
    const bool has_inner = i + 1 < live.size();
    for (size_t k = i; has_inner && k < live.size(); ++k) live[k].beside_another = true;
    return;
  }
  LiveLoop loop{.id = iteration, .info = info};
  for (size_t i = 0; i < core_->loaders_.size(); ++i) {
    if (core_->loaders_[i]->live_pass() == iteration) loop.loader = i;
  }
  live.push_back(std::move(loop));
}

// Asked of a pass that was left before its end, and then only.
bool Core::Observer::CountsAsTrained(uint64_t iteration) {
  left_early_ = iteration;
  if (core_ == nullptr || core_->optimizers_.empty()) return true;
  const LiveLoop* const loop = core_->FindLoop(iteration);
  return loop != nullptr && loop->trained >= 0;
}

void Core::Observer::OnEnd(uint64_t iteration) {
  if (core_ == nullptr) return;
  const LiveLoop* const loop = core_->FindLoop(iteration);
  if (loop != nullptr && loop->trained >= 0) {
    // Batches that the program has passed over at the end have been had all the same.
    if (iteration == left_early_ && !TrainedToTheEnd(*loop)) {
      core_->interrupted_ = true;
    } else if (loop->loader.has_value() && *loop->loader < core_->finished_passes_.size()) {
      ++core_->finished_passes_[*loop->loader];
    }
    core_->trained_in_epoch_ = true;
  }
  std::erase_if(core_->live_, [&](const LiveLoop& loop) { return loop.id == iteration; });
}

// What a micro-step trains on is, of each loop under way, its current batch.
void Core::MarkTrained() {
  if (live_.empty()) trained_outside_ = true;
  for (LiveLoop& loop : live_) {
    if (loop.trained < 0 && !claimed_done_.empty()) {
      MUSTER_LOG(Warning)
          << claimed_done_ << ", saved earlier in epoch " << epoch_
          << ", takes this epoch for trained, since its last loop over a prepared "
             "loader had ended; this epoch has another one, which a run resumed from "
             "there leaves out. Save at the end of the epoch, or from the second "
             "epoch on";
      claimed_done_.clear();
    }
    loop.trained = loop.info.index;
  }
}

const Core::LiveLoop* Core::FindLoop(uint64_t pass) const {
  const auto found = std::find_if(live_.begin(), live_.end(),
                                  [&](const LiveLoop& loop) { return loop.id == pass; });
  return found == live_.end() ? nullptr : &*found;
}

const BatchInfo* Core::BatchBesideOthers(
    absl::FunctionRef<bool(const BatchInfo&, const BatchInfo&)> same,
    absl::FunctionRef<std::string(const BatchInfo&, const BatchInfo&)> why) const {
  const BatchInfo* const inner = current_batch();
  if (inner == nullptr || !live_.back().beside_another) return inner;
  for (const LiveLoop& loop : live_) {
    if (!loop.beside_another) continue;
    TORCH_CHECK(same(loop.info, *inner), why(loop.info, *inner));
  }
  return inner;
}

const BatchInfo* Core::BatchOfMicroStep() const {
  if (gradient_accumulation_steps() == 1 || !accumulation_.options().sync_with_dataloader) {
    return current_batch();
  }
  return BatchBesideOthers(
      [](const BatchInfo& a, const BatchInfo& b) {
        return a.is_last == b.is_last && a.batches_left == b.batches_left;
      },
      [](const BatchInfo& a, const BatchInfo& b) {
        return absl::StrCat("accumulate() with several loaders side by side: one of them has ",
                            a.batches_left, " batches left and another ", b.batches_left,
                            ", so it is not clear where the accumulation window ends; pass the "
                            "batch that decides: accelerator.accumulate(batch)");
      });
}

const BatchInfo* Core::BatchOfMetrics() const {
  if (size() == 1) return current_batch();
  return BatchBesideOthers(
      [](const BatchInfo& a, const BatchInfo& b) {
        return a.size == b.size && a.rank_real_samples == b.rank_real_samples;
      },
      [](const BatchInfo&, const BatchInfo&) -> std::string {
        return "gather_for_metrics() with several loaders side by side, whose batches differ: use "
               "gather_for_metrics_of(batch, value)";
      });
}

// Epochs.

void Core::SetEpoch(int64_t epoch, bool open) {
  if (!open && epoch_open_ && epoch > epoch_ && !interrupted_) {
    for (size_t i = 0; i < finished_passes_.size(); ++i) {
      passes_per_epoch_[i] = std::max(passes_per_epoch_[i], finished_passes_[i]);
    }
  }
  if (epoch != first_epoch_) passes_to_skip_.clear();
  epoch_ = epoch;
  epoch_open_ = open;
  interrupted_ = false;
  trained_in_epoch_ = false;
  trained_outside_ = false;
  claimed_done_.clear();
  std::fill(finished_passes_.begin(), finished_passes_.end(), 0);
}

int64_t Core::FirstEpoch(int64_t count) {
  if (!resumed_ || rank() != 0 || std::exchange(resume_told_, true)) return first_epoch_;
  if (first_epoch_ >= count) {
    MUSTER_LOG(Info) << "resumed from " << last_checkpoint_ << " at epoch " << count << " of "
                     << count << ": nothing left to do";
  } else {
    MUSTER_LOG(Info) << "resumed from " << last_checkpoint_ << " in epoch " << first_epoch_ + 1
                     << " of " << count;
  }
  return first_epoch_;
}

bool Core::EpochIsDone() const {
  if (!epoch_open_ || !live_.empty() || interrupted_) return false;
  // Of data that no prepared loader gives the end cannot be seen.
  if (!trained_in_epoch_) return trained_outside_ || optimizers_.empty();
  const bool epoch_seen = std::any_of(passes_per_epoch_.begin(), passes_per_epoch_.end(),
                                      [](int64_t passes) { return passes > 0; });
  for (size_t i = 0; i < passes_per_epoch_.size(); ++i) {
    if (finished_passes_[i] < passes_per_epoch_[i]) return false;
    if (i >= loaders_.size()) continue;
    // Before an epoch has been seen whole, shuffling tells whether a loader that has never been
    // used is for training.
    if (!epoch_seen && passes_per_epoch_[i] == 0 && finished_passes_[i] == 0 &&
        loaders_[i]->passes() == 0 && loaders_[i]->shuffles()) {
      return false;
    }
  }
  return true;
}

bool Core::TrainedToTheEnd(const LiveLoop& loop) {
  return loop.info.is_last && loop.trained == loop.info.index;
}

LoaderState Core::PlaceToSave(const LoaderStateHandle& loader) const {
  const uint64_t pass = loader.live_pass();
  if (pass == 0 || optimizers_.empty()) return loader.State();
  const LiveLoop* const loop = FindLoop(pass);
  if (loop == nullptr) return loader.State();
  // What the loop has got but not trained on yet, it gets again.
  if (loop->trained != loop->info.index) return loader.StateBeforeBatch();
  // The pass is one that the resumed epoch leaves out.
  return epoch_open_ && TrainedToTheEnd(*loop) ? loader.NextState() : loader.State();
}

std::vector<int64_t> Core::FinishedPasses() const {
  std::vector<int64_t> finished = finished_passes_;
  for (const LiveLoop& loop : live_) {
    if (loop.loader.has_value() && *loop.loader < finished.size() && !optimizers_.empty() &&
        TrainedToTheEnd(loop)) {
      ++finished[*loop.loader];
    }
  }
  return finished;
}

int64_t EpochRange::Iterator::operator*() const {
  core_->SetEpoch(epoch_, /*open=*/true);
  return epoch_;
}
EpochRange::Iterator& EpochRange::Iterator::operator++() {
  ++epoch_;
  core_->SetEpoch(epoch_, /*open=*/false);
  return *this;
}
EpochRange::Iterator EpochRange::begin() const {
  return Iterator(core_, core_->FirstEpoch(count_));
}

}  // namespace muster::internal
