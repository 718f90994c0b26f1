#include "muster/internal/loop_tracker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "c10/util/Exception.h"

namespace muster::internal {
namespace {

// The keys of a checkpoint's cursor; all but the first are followed by a loader's number.
constexpr char kFirstEpoch[] = "first_epoch";
constexpr char kFinishedPasses[] = "finished_passes.";
constexpr char kPassesPerEpoch[] = "passes_per_epoch.";
constexpr char kBeginsAgain[] = "begins_again.";
constexpr char kInside[] = "inside.";
constexpr char kBegan[] = "began.";

// Returns the place where the pass after the one that `place` is inside of begins.
LoaderState AfterPass(LoaderState place) {
  ++place.epoch;
  place.position = place.index = place.rank_position = 0;
  place.order_digest.clear();
  return place;
}

}  // namespace

// Notifies the tracker while it exists.
class LoopTracker::Observer : public LoaderObserver {
 public:
  explicit Observer(LoopTracker* tracker) : tracker_(tracker) {}

  void OnStart() override {
    if (tracker_ != nullptr) tracker_->on_start_();
  }
  bool SkipsPass(const LoaderStateHandle& loader) override {
    return tracker_ != nullptr && tracker_->SkipsPass(loader);
  }
  void OnBatch(uint64_t iteration, const std::shared_ptr<const BatchInfo>& info) override {
    if (tracker_ != nullptr) tracker_->OnBatch(iteration, info);
  }
  bool CountsAsTrained(uint64_t iteration) override {
    return tracker_ == nullptr || tracker_->CountsAsTrained(iteration);
  }
  void OnEnd(uint64_t iteration) override {
    if (tracker_ != nullptr) tracker_->OnEnd(iteration);
  }

  void Forget() { tracker_ = nullptr; }

 private:
  LoopTracker* tracker_;
};

LoopTracker::LoopTracker(Registry& registry, std::function<void()> on_start)
    : registry_(registry),
      on_start_(std::move(on_start)),
      observer_(std::make_shared<Observer>(this)) {}

LoopTracker::~LoopTracker() { observer_->Forget(); }

std::shared_ptr<LoaderObserver> LoopTracker::observer() const { return observer_; }

bool LoopTracker::SkipsPass(const LoaderStateHandle& loader) {
  SettleLoaders();
  if (!epoch_open_ || epoch_ != first_epoch_) return false;
  for (size_t i = 0; i < passes_to_skip_.size() && i < registry_.loaders().size(); ++i) {
    if (registry_.loaders()[i].get() != &loader || passes_to_skip_[i] == 0) continue;
    --passes_to_skip_[i];
    ++finished_passes_[i];
    // The loader may begin again beside the loop that follows, or at the next batch of the outer
    // loop.
    if (live_.empty()) {
      provisional_[i] = 1;
    } else if (inside_[i]) {
      ++provisional_[i];
      live_.back().inner_ended = live_.back().info->index;
      live_.back().trained = live_.back().info->index;
    }
    trained_in_epoch_ = true;
    return true;
  }
  return false;
}

void LoopTracker::OnBatch(uint64_t iteration, const std::shared_ptr<const BatchInfo>& info) {
  ++batches_;
  for (size_t i = 0; i < live_.size(); ++i) {
    if (live_[i].id != iteration) continue;
    live_[i].info = info;
    ++live_[i].batches;
    // A nested loop ends before the outer one advances.
    const bool has_inner = i + 1 < live_.size();
    if (has_inner && !live_[i].beside_another) WarnIfInOneOrder(live_[i]);
    for (size_t k = i; has_inner && k < live_.size(); ++k) live_[k].beside_another = true;
    return;
  }
  LiveLoop loop{.id = iteration, .info = info};
  for (size_t i = 0; i < registry_.loaders().size(); ++i) {
    if (registry_.loaders()[i]->live_pass() != iteration) continue;
    loop.loader = i;
    if (i < left_beside_.size()) left_beside_[i] = false;
    if (i < began_.size()) began_[i] = true;
  }
  TakeBackPasses(loop);
  live_.push_back(std::move(loop));
}

namespace {

uint64_t SeedOfOrder(const LoaderState& state) {
  return static_cast<uint64_t>(state.seed) + static_cast<uint64_t>(state.epoch);
}

}  // namespace

// Mixing samples with those of a second loader, or training on two unrelated data sets, is not what
// it seems if both have the same random order.
void LoopTracker::WarnIfInOneOrder(const LiveLoop& loop) {
  const auto shuffled = [this](const LiveLoop& live) -> std::optional<LoaderState> {
    if (!live.loader.has_value() || *live.loader >= registry_.loaders().size()) return std::nullopt;
    const LoaderStateHandle& loader = *registry_.loaders()[*live.loader];
    // A seed in the recipe is the program's choice.
    if (absl::StrContains(loader.signature(), " seed=")) return std::nullopt;
    const LoaderState state = loader.State();
    return state.order == "shuffle" ? std::optional(state) : std::nullopt;
  };
  if (one_order_told_) return;
  const std::optional<LoaderState> mine = shuffled(loop);
  for (auto inner = live_.begin() + (&loop - live_.data()) + 1; inner != live_.end(); ++inner) {
    const std::optional<LoaderState> other = shuffled(*inner);
    if (!mine.has_value() || !other.has_value() || loop.loader == inner->loader ||
        mine->num_samples != other->num_samples || SeedOfOrder(*mine) != SeedOfOrder(*other)) {
      continue;
    }
    one_order_told_ = true;
    MUSTER_LOG(Warning) << "two shuffled loaders that are read side by side have "
                        << mine->num_samples
                        << " samples each and the same seed, so both read theirs in the same "
                           "order; if that is not what you want, give one of them another seed: "
                           "batches(...).shuffle(true).seed(1)";
    return;
  }
}

void LoopTracker::TakeBackPasses(const LiveLoop& loop) {
  if (!loop.loader.has_value() || *loop.loader >= provisional_.size()) return;
  int64_t& provisional = provisional_[*loop.loader];
  if (provisional == 0) return;
  bool beside = false;
  for (const LiveLoop& other : live_) {
    if (other.spans_epochs) continue;
    // Another pass for the same batch of the outer loop.
    if (other.inner_ended == other.info->index) return;
    beside = true;
  }
  if (beside) {
    if (!inside_[*loop.loader]) begins_again_[*loop.loader] = true;
    int64_t& finished = finished_passes_[*loop.loader];
    finished = std::max<int64_t>(finished - provisional, 0);
    // An older version counted such passes.
    passes_per_epoch_[*loop.loader] = finished;
  }
  provisional = 0;
}

// Called only for a pass that was left before its end. If a program that trains leaves a pass
// without a micro-step (a look at the first batch, an evaluation that had seen enough), that says
// nothing about how far the data are trained on.
bool LoopTracker::CountsAsTrained(uint64_t iteration) {
  left_early_ = iteration;
  if (registry_.optimizers().empty()) return true;
  const LiveLoop* const loop = FindLoop(iteration);
  return loop != nullptr && loop->trained >= 0;
}

void LoopTracker::OnEnd(uint64_t iteration) {
  const auto found = std::find_if(live_.begin(), live_.end(),
                                  [&](const LiveLoop& loop) { return loop.id == iteration; });
  if (found == live_.end()) return;
  // A nested loop ends before the outer one.
  if (found + 1 != live_.end()) {
    for (auto it = found; it != live_.end(); ++it) it->beside_another = true;
  }
  const LiveLoop loop = *found;
  const bool inside = IsInside(loop), goes_on = GoesOnBeside(loop);
  const auto of_this_epoch = [](const LiveLoop& other) { return !other.spans_epochs; };
  const bool began_within = std::any_of(live_.begin(), found, of_this_epoch);
  const bool began_before = std::any_of(found + 1, live_.end(), of_this_epoch);
  live_.erase(found);
  if (live_.empty()) {
    // The outer loop's training is over, and so are the passes inside it.
    for (size_t i = 0; i < provisional_.size(); ++i) {
      if (inside_[i] && TrainedToTheEnd(loop)) finished_passes_[i] -= provisional_[i];
      provisional_[i] = 0;
    }
  }
  if (loop.trained < 0) return;
  trained_in_epoch_ = true;
  const auto note = [&](std::vector<bool>& what) {
    if (loop.loader.has_value() && *loop.loader < what.size()) what[*loop.loader] = true;
  };
  // If the program has only skipped batches at the end, the pass still counts as complete.
  if (iteration == left_early_ && !TrainedToTheEnd(loop)) {
    if (loop.outlived) {
      note(left_beside_);
    } else {
      interrupted_ = true;
    }
    return;
  }
  if (!loop.loader.has_value() || *loop.loader >= finished_passes_.size()) return;
  const size_t place = *loop.loader;
  if (inside) {
    LiveLoop& outer = live_.back();
    inside_[place] = true;
    // An outer batch that has had a step of its own is not read again.
    const bool again = outer.trained_as_innermost != outer.info->index;
    outer.inner_ended = outer.info->index;
    if (again) {
      ++finished_passes_[place];
      ++provisional_[place];
    }
    // An older version counted all of them.
    passes_per_epoch_[place] = finished_passes_[place] - provisional_[place];
    return;
  }
  ++finished_passes_[place];
  if (goes_on || began_before || Has(begins_again_, loop) ||
      (!loop.beside_another && began_within)) {
    provisional_[place] = 1;
  }
  if (!goes_on) {
    for (LiveLoop& other : live_) other.outlived = other.beside_another;
  }
}

bool LoopTracker::IsInside(const LiveLoop& loop) const {
  if (loop.beside_another) return false;
  for (const LiveLoop& outer : live_) {
    if (outer.id == loop.id) break;
    if (outer.spans_epochs) continue;
    // At their first batches, two loops might also be side by side.
    if (outer.inner_ended >= 0 || loop.batches > 1 || Has(inside_, loop)) return true;
  }
  return false;
}

// If two loops are read side by side, the one whose batch accumulate() got determines when both are
// over, else the one that does not begin again. Otherwise, a loop whose current batch has been
// trained on is in the middle of its body, and so continues; one that has moved on waits for the
// other's end.
bool LoopTracker::GoesOnBeside(const LiveLoop& loop) const {
  if (loop.decides) return false;
  bool is_inner = false;
  return std::any_of(live_.begin(), live_.end(), [&](const LiveLoop& other) {
    const bool is_this = other.id == loop.id;
    is_inner = is_inner || is_this;
    if (is_this || other.spans_epochs || TrainedToTheEnd(other)) return false;
    // No other batch has come yet. Inside the last batch of `loop` or beside it, `other` continues.
    if (!loop.beside_another) {
      return other.trained >= 0 && (is_inner || Has(begins_again_, loop));
    }
    if (!other.beside_another) return false;
    if (other.decides) return true;
    // If `other` began first, its data may just be taken along, from a longer loader.
    if (!is_inner && !Has(begins_again_, loop)) return false;
    return !Has(begins_again_, other) && other.trained == other.info->index;
  });
}

bool LoopTracker::BeginsAgainAfter(const LiveLoop& loop) const {
  if (!GoesOnBeside(loop)) return false;
  if (TrainsInside(loop)) return true;
  // If an epoch ended with such a pass, the loader did not begin again after it.
  return !loop.loader.has_value() || *loop.loader >= passes_per_epoch_.size() ||
         passes_per_epoch_[*loop.loader] == 0;
}

bool LoopTracker::TrainsInside(const LiveLoop& loop) const {
  if (loop.beside_another || loop.trained_as_innermost == loop.info->index) return false;
  const LiveLoop& innermost = live_.back();
  // At their first batches, loops that are side by side look like nested ones.
  if (innermost.id == loop.id) return loop.inner_ended == loop.info->index;
  return innermost.trained >= 0 &&
         (loop.inner_ended >= 0 || innermost.batches > 1 || Has(inside_, innermost));
}

// A micro-step trains on the current batch of each loop under way.
void LoopTracker::MarkTrained() {
  saved_undone_.clear();
  if (live_.empty()) trained_outside_ = true;
  for (LiveLoop& loop : live_) {
    if (loop.trained < 0 && !claimed_done_.empty()) {
      MUSTER_LOG(Warning)
          << claimed_done_ << ", saved earlier in epoch " << epoch_
          << ", counts this epoch as trained, because its last loop over a prepared loader had "
             "ended; this epoch has another one, which a run resumed from there skips. Save at the "
             "end of the epoch, or from the second "
             "epoch on";
      claimed_done_.clear();
    }
    // The loop continues alone, for its own sake.
    if (loop.trained != loop.info->index) loop.outlived = false;
    loop.trained = loop.info->index;
  }
  if (!live_.empty()) live_.back().trained_as_innermost = live_.back().trained;
}

void LoopTracker::NoteDecides(uint64_t iteration) {
  for (LiveLoop& loop : live_) loop.decides = loop.id == iteration;
}

const LoopTracker::LiveLoop* LoopTracker::FindLoop(uint64_t pass) const {
  const auto found = std::find_if(live_.begin(), live_.end(),
                                  [&](const LiveLoop& loop) { return loop.id == pass; });
  return found == live_.end() ? nullptr : &*found;
}

const BatchInfo* LoopTracker::BatchBesideOthers(
    absl::FunctionRef<bool(const BatchInfo&, const BatchInfo&)> same,
    absl::FunctionRef<std::string(const BatchInfo&, const BatchInfo&)> why) const {
  const BatchInfo* const inner = current_batch();
  if (inner == nullptr || !live_.back().beside_another) return inner;
  for (const LiveLoop& loop : live_) {
    if (!loop.beside_another) continue;
    TORCH_CHECK(same(*loop.info, *inner), why(*loop.info, *inner));
  }
  return inner;
}

const BatchInfo* LoopTracker::BatchOfMicroStep() const {
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

const BatchInfo* LoopTracker::BatchOfMetrics() const {
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

void LoopTracker::SetEpoch(int64_t epoch, bool open) {
  const bool ends = !open && epoch_open_ && epoch > epoch_;
  if (ends && !interrupted_) {
    for (size_t i = 0; i < finished_passes_.size(); ++i) {
      passes_per_epoch_[i] = std::max(passes_per_epoch_[i], finished_passes_[i]);
    }
  }
  if (ends && resumed_ && epoch_ == first_epoch_) GiveUpLoadedPlaces();
  if (ends && !saved_left_early_.empty() && !std::exchange(left_early_told_, true)) {
    MUSTER_LOG(Warning)
        << saved_left_early_ << " was saved in epoch " << epoch_
        << " after a training loop had been left before its last batch, and the program continues "
           "with the next epoch. A run resumed from there continues that loop first, as after an "
           "interruption, so it takes more steps than this one. Instead of a break, give such an "
           "epoch a data set or a sampler of its length";
  }
  if (ends && !saved_undone_.empty() && !std::exchange(undone_told_, true)) {
    MUSTER_LOG(Warning)
        << saved_undone_ << " was saved at the end of epoch " << epoch_
        << " and counts it as not done, because this epoch has not trained on a loader that other "
           "epochs may train on. A run resumed from there runs the body of epoch "
        << epoch_
        << " again, without the passes that had finished: what the body does once an epoch, such "
           "as step() of a schedule or an evaluation, it does twice. Prepare the loader that an "
           "epoch trains on in its body, or save at the beginning of the next epoch";
  }
  if (epoch != first_epoch_) passes_to_skip_.clear();
  epoch_ = epoch;
  if (open) furthest_epoch_ = std::max(furthest_epoch_, epoch);
  epoch_open_ = open;
  interrupted_ = false;
  trained_in_epoch_ = false;
  trained_outside_ = false;
  claimed_done_.clear();
  saved_left_early_.clear();
  saved_undone_.clear();
  std::fill(finished_passes_.begin(), finished_passes_.end(), 0);
  std::fill(provisional_.begin(), provisional_.end(), 0);
  if (!ends && !open) return;
  for (LiveLoop& loop : live_) loop.spans_epochs = true;
  // The facts of a loaded state belong to this epoch.
  if (open && epoch == first_epoch_ && resumed_) return;
  for (std::vector<bool>* facts : {&begins_again_, &inside_, &began_}) {
    std::fill(facts->begin(), facts->end(), false);
  }
}

// Without the interruption, the run would have left these passes by now, in their middle, and begun
// new ones in the next epoch. A pass that is under way spans epochs and continues.
void LoopTracker::GiveUpLoadedPlaces() {
  for (const std::shared_ptr<LoaderStateHandle>& loader : registry_.loaders()) {
    const size_t i = static_cast<size_t>(&loader - registry_.loaders().data());
    // A loader that the epoch has not used waits for a later epoch.
    if (i >= began_before_.size() || !began_before_[i]) continue;
    const LoaderState place = loader->NextState();
    if (!place.inside_epoch() || loader->live_pass() != 0) continue;
    loader->LoadState(AfterPass(place));
  }
}

int64_t LoopTracker::FirstEpoch(int64_t count, const std::string& resumed_from) {
  if (first_epoch_ < count && first_epoch_ <= furthest_epoch_) epochs_began_anew_ = true;
  if (!resumed_ || resumed_from.empty() || std::exchange(resume_told_, true)) return first_epoch_;
  if (first_epoch_ >= count) {
    MUSTER_LOG(Info) << "resumed from " << resumed_from << " at epoch " << count << " of " << count
                     << ": nothing left to do";
  } else {
    MUSTER_LOG(Info) << "resumed from " << resumed_from << " in epoch " << first_epoch_ + 1
                     << " of " << count;
  }
  return first_epoch_;
}

bool LoopTracker::EpochIsDone() const {
  if (!epoch_open_ || !live_.empty() || interrupted_) return false;
  // If the data come from no prepared loader, their end cannot be seen.
  if (!trained_in_epoch_) return trained_outside_ || registry_.optimizers().empty();
  const bool epoch_seen = std::any_of(passes_per_epoch_.begin(), passes_per_epoch_.end(),
                                      [](int64_t passes) { return passes > 0; });
  for (size_t i = 0; i < passes_per_epoch_.size(); ++i) {
    if (finished_passes_[i] < passes_per_epoch_[i]) return false;
    if (i >= registry_.loaders().size()) continue;
    // Before the first complete epoch, shuffling indicates whether an unused loader is for
    // training.
    if (!epoch_seen && passes_per_epoch_[i] == 0 && finished_passes_[i] == 0 &&
        registry_.loaders()[i]->passes() == 0 && registry_.loaders()[i]->shuffles()) {
      return false;
    }
  }
  return true;
}

bool LoopTracker::TrainedToTheEnd(const LiveLoop& loop) {
  return loop.info->is_last && loop.trained == loop.info->index;
}

LoaderState LoopTracker::PlaceToSave(const LoaderStateHandle& loader) const {
  const uint64_t pass = loader.live_pass();
  if (pass == 0) {
    for (size_t i = 0; i < left_beside_.size() && i < registry_.loaders().size(); ++i) {
      if (registry_.loaders()[i].get() != &loader) continue;
      if (left_beside_[i]) return loader.NextState();
      // As GiveUpLoadedPlaces() does at the end of the epoch.
      const LoaderState next = loader.NextState();
      if (resumed_ && epoch_ == first_epoch_ && began_before_[i] && next.inside_epoch() &&
          EpochIsDone()) {
        return AfterPass(next);
      }
    }
  }
  if (pass == 0 || registry_.optimizers().empty()) return loader.State();
  const LiveLoop* const loop = FindLoop(pass);
  if (loop == nullptr) return loader.State();
  // The loop gets again the batches that it has received but not trained on.
  if (loop->trained != loop->info->index || TrainsInside(*loop)) return loader.StateBeforeBatch();
  // The resumed epoch leaves this pass out.
  return epoch_open_ && TrainedToTheEnd(*loop) ? loader.NextState() : loader.State();
}

at::Tensor LoopTracker::GeneratorToSave() const {
  // In several loops the numbers of one batch lie between those of others.
  if (live_.size() != 1 || registry_.optimizers().empty()) return {};
  const LiveLoop& loop = live_.front();
  if (!loop.loader.has_value() || *loop.loader >= registry_.loaders().size()) return {};
  const LoaderStateHandle& loader = *registry_.loaders()[*loop.loader];
  if (loader.live_pass() != loop.id || loop.trained == loop.info->index || TrainsInside(loop)) {
    return {};
  }
  return loader.GeneratorBeforeBatch();
}

std::vector<int64_t> LoopTracker::FinishedPasses() const {
  std::vector<int64_t> finished = finished_passes_;
  if (registry_.optimizers().empty()) return finished;
  for (const LiveLoop& loop : live_) {
    if (loop.loader.has_value() && *loop.loader < finished.size() && TrainedToTheEnd(loop) &&
        !TrainsInside(loop) && (IsInside(loop) || !BeginsAgainAfter(loop))) {
      ++finished[*loop.loader];
    }
  }
  return finished;
}

void LoopTracker::SavePlace(CheckpointInfo* info) const {
  const bool done = EpochIsDone();
  info->epoch = epoch_;
  info->cursor[kFirstEpoch] = done ? epoch_ + 1 : epoch_;
  const std::vector<int64_t> finished = FinishedPasses();
  for (size_t i = 0; i < finished.size(); ++i) {
    const int64_t passes = std::max(passes_per_epoch_[i], epoch_open_ ? finished[i] : 0);
    if (passes > 0) info->cursor[absl::StrCat(kPassesPerEpoch, i)] = passes;
    // The epoch's finished training loops: a run that resumes in it skips them.
    if (!done && epoch_open_ && finished[i] > 0) {
      info->cursor[absl::StrCat(kFinishedPasses, i)] = finished[i];
    }
    if (done || !epoch_open_) continue;
    if (begins_again_[i]) info->cursor[absl::StrCat(kBeginsAgain, i)] = 1;
    const bool inside =
        inside_[i] || (live_.size() > 1 && live_.back().loader == i &&
                       std::any_of(live_.begin(), live_.end() - 1,
                                   [&](const auto& loop) { return TrainsInside(loop); }));
    if (inside) info->cursor[absl::StrCat(kInside, i)] = 1;
    const bool began_before =
        epoch_ == first_epoch_ && i < began_before_.size() && began_before_[i];
    if (began_[i] || began_before) info->cursor[absl::StrCat(kBegan, i)] = 1;
  }
}

void LoopTracker::LoadPlace(const CheckpointInfo& info, size_t loaders) {
  const auto first = info.cursor.find(kFirstEpoch);
  first_epoch_ = first == info.cursor.end() ? info.epoch : first->second;
  SetEpoch(first_epoch_, /*open=*/false);
  furthest_epoch_ = -1;
  epochs_began_anew_ = false;
  const auto passes = [&](const char* what, std::vector<int64_t>& list) {
    list.assign(std::max(registry_.loaders().size(), loaders), 0);
    for (size_t i = 0; i < list.size(); ++i) {
      const auto found = info.cursor.find(absl::StrCat(what, i));
      if (found != info.cursor.end()) list[i] = found->second;
    }
  };
  passes(kFinishedPasses, passes_to_skip_);
  passes(kPassesPerEpoch, passes_per_epoch_);
  finished_passes_.assign(passes_per_epoch_.size(), 0);
  provisional_.assign(passes_per_epoch_.size(), 0);
  const auto facts = [&](const char* what, std::vector<bool>& list) {
    list.assign(passes_per_epoch_.size(), false);
    for (size_t i = 0; i < list.size(); ++i) {
      list[i] = info.cursor.contains(absl::StrCat(what, i));
    }
  };
  facts(kBeginsAgain, begins_again_);
  facts(kInside, inside_);
  facts(kBegan, began_before_);
  for (std::vector<bool>* list : {&left_beside_, &began_}) {
    list->assign(passes_per_epoch_.size(), false);
  }
  resumed_ = true;
}

void LoopTracker::NoteSaved(const std::string& path, bool done) {
  for (const LiveLoop& loop : live_) {
    if (loop.trained < 0 || !TrainedToTheEnd(loop) || IsInside(loop) || !BeginsAgainAfter(loop) ||
        Has(begins_again_, loop)) {
      continue;
    }
    MUSTER_LOG(Warning) << path
                        << " was saved at the last batch of a loader that is read beside another "
                           "one, in the first pass over it: a run resumed from there begins it "
                           "again, which is right if this program does so beside the other one, "
                           "and one pass too many if not. Save at another batch";
  }
  claimed_done_ = done && trained_in_epoch_ ? path : "";
  if (!done && epoch_open_ && interrupted_) saved_left_early_ = path;
  saved_undone_ =
      !done && epoch_open_ && live_.empty() && !interrupted_ && trained_in_epoch_ ? path : "";
  if (!epochs_began_anew_ || std::exchange(anew_told_, true)) return;
  MUSTER_LOG(Warning) << "saved in a second loop over epochs(): " << path
                      << " records one count of epochs, so a run that resumes from it begins every "
                         "such loop at epoch "
                      << epoch_ << "; use epochs() for one loop, and plain counters around it";
}

void LoopTracker::LoadersAdded() {
  const size_t loaders = registry_.loaders().size();
  finished_passes_.resize(std::max(finished_passes_.size(), loaders));
  passes_per_epoch_.resize(std::max(passes_per_epoch_.size(), loaders));
  provisional_.resize(finished_passes_.size());
  for (std::vector<bool>* facts :
       {&begins_again_, &inside_, &left_beside_, &began_, &began_before_}) {
    facts->resize(finished_passes_.size());
  }
}

void LoopTracker::SettleLoaders() {
  registry_.SettleLoaders([this](size_t place) {
    return place < passes_per_epoch_.size() && passes_per_epoch_[place] > 0;
  });
}

void LoopTracker::LoadersCleared() {
  finished_passes_.clear();
  passes_per_epoch_.clear();
  passes_to_skip_.clear();
  provisional_.clear();
  for (std::vector<bool>* facts :
       {&begins_again_, &inside_, &left_beside_, &began_, &began_before_}) {
    facts->clear();
  }
  furthest_epoch_ = -1;
  epochs_began_anew_ = false;
}

}  // namespace muster::internal
