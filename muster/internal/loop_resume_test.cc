// Programs of several loops, saved at each step and resumed: LoopTracker with loaders that have no
// data.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muster/internal/loop_tracker.h"
#include "muster/internal/test_parts.h"
#include "worker/train/optimizer.h"

namespace muster::internal {
namespace {

// Handles places and passes as LoaderCore does.
class CountingLoader : public LoaderStateHandle {
 public:
  class Iterator;

  CountingLoader(int64_t length, std::shared_ptr<LoaderObserver> observer)
      : length_(length), observer_(std::move(observer)) {}

  LoaderState State() const override { return place_; }
  std::map<std::string, at::Tensor> StateTensors() const override { return {}; }
  void CheckState(const LoaderState&, const std::map<std::string, at::Tensor>&) const override {}
  using LoaderStateHandle::LoadState;
  void LoadState(const LoaderState& state, const std::map<std::string, at::Tensor>&) override {
    next_epoch_ = state.epoch;
    place_ = state;
    resuming_ = true;
    live_.clear();
    owner_ = 0;
  }
  uint64_t live_pass() const override {
    for (const Live& live : live_) {
      if (live.id == owner_) return owner_;
    }
    return live_.empty() ? 0 : live_.back().id;
  }
  LoaderState StateBeforeBatch() const override {
    for (const Live& live : live_) {
      if (live.id == live_pass()) return live.before;
    }
    return place_;
  }
  std::string signature() const override { return ""; }
  LoaderState NextState() const override { return resuming_ ? place_ : At(next_epoch_, 0); }
  int64_t passes() const override { return passes_; }
  bool shuffles() const override { return true; }
  void OverrideEvenBatches(std::optional<bool>) override {}

  Iterator begin();

 private:
  struct Live {
    uint64_t id;
    LoaderState place, before;
    bool at_end;
  };

  static LoaderState At(int64_t epoch, int64_t index) {
    LoaderState state;
    state.epoch = epoch;
    state.position = state.index = index;
    return state;
  }

  const int64_t length_;
  const std::shared_ptr<LoaderObserver> observer_;
  LoaderState place_;
  int64_t next_epoch_ = 0, passes_ = 0;
  bool resuming_ = false;
  std::vector<Live> live_;
  uint64_t owner_ = 0;
};

class CountingLoader::Iterator {
 public:
  explicit Iterator(CountingLoader* loader) : loader_(loader) {
    static uint64_t passes = 0;
    loader_->observer_->OnStart();
    if (loader_->observer_->SkipsPass(*loader_)) return;
    id_ = ++passes;
    epoch_ = loader_->next_epoch_;
    if (loader_->resuming_) resumed_from_ = loader_->place_;
    index_ = (resumed_from_.has_value() ? resumed_from_->index : 0) - 1;
    loader_->resuming_ = false;
    ++loader_->passes_;
    loader_->next_epoch_ = epoch_ + 1;
    loader_->place_ = At(epoch_, index_ + 1);
    loader_->live_.push_back({id_, loader_->place_, loader_->place_, false});
    loader_->owner_ = id_;
    Next();
  }
  Iterator(Iterator&& other) noexcept { *this = std::move(other); }
  Iterator& operator=(Iterator&& other) noexcept {
    Finish(false);
    loader_ = other.loader_;
    epoch_ = other.epoch_;
    index_ = other.index_;
    resumed_from_ = other.resumed_from_;
    id_ = std::exchange(other.id_, 0);
    return *this;
  }
  ~Iterator() { Finish(false); }

  bool at_end() const { return id_ == 0; }
  uint64_t pass() const { return id_; }
  int64_t index() const { return index_; }
  // Returns the batch's name. At the end it must not be called.
  std::string operator*() const {
    if (at_end()) {
      ADD_FAILURE() << "a batch after the end";
      return "none";
    }
    return absl::StrCat(epoch_, ".", index_);
  }
  void Next() {
    if (at_end()) return;
    if (index_ + 1 >= loader_->length_) {
      Finish(true);
      return;
    }
    ++index_;
    auto info = std::make_shared<BatchInfo>();
    info->iteration = id_;
    info->index = index_;
    info->is_last = index_ + 1 == loader_->length_;
    for (Live& live : loader_->live_) {
      if (live.id != id_) continue;
      live.before = live.place;
      live.place = At(epoch_, index_ + 1);
      live.at_end = info->is_last;
      loader_->place_ = live.place;
      loader_->owner_ = id_;
    }
    loader_->observer_->OnBatch(id_, info);
  }

 private:
  void Finish(bool exhausted) {
    if (at_end()) return;
    const uint64_t id = std::exchange(id_, 0);
    const bool counts = exhausted || loader_->observer_->CountsAsTrained(id);
    std::erase_if(loader_->live_, [&](const Live& live) {
      if (live.id != id) return false;
      if (loader_->owner_ != id) return true;
      if (!counts && resumed_from_.has_value() && loader_->next_epoch_ == epoch_ + 1) {
        loader_->place_ = *resumed_from_;
        loader_->resuming_ = true;
        loader_->next_epoch_ = epoch_;
      } else if (exhausted || live.at_end || !counts) {
        loader_->place_ = At(loader_->next_epoch_, 0);
      }
      return true;
    });
    loader_->observer_->OnEnd(id);
  }

  CountingLoader* loader_ = nullptr;
  uint64_t id_ = 0;  // 0: at the end
  int64_t epoch_ = 0, index_ = 0;
  std::optional<LoaderState> resumed_from_;
};

CountingLoader::Iterator CountingLoader::begin() { return Iterator(this); }

using Iterator = CountingLoader::Iterator;

struct Saved {
  CheckpointInfo info;
  std::vector<LoaderState> places;
};

// Thrown to end a process of a program at a save.
struct Stopped {};

class Process {
 public:
  Process(const std::vector<int64_t>& lengths, const Saved* from, int stop_at) : stop_at_(stop_at) {
    slot_ = parts_.registry.AddOptimizer(
        std::make_shared<OptimizerSlot>(&parts_.steps, &sgd_, nullptr, &sgd_, sgd_.id()));
    for (const int64_t length : lengths) {
      loaders.push_back(std::make_shared<CountingLoader>(length, parts_.loops.observer()));
      parts_.registry.AddLoader(loaders.back());
    }
    parts_.loops.LoadersAdded();
    if (from == nullptr) return;
    for (size_t i = 0; i < loaders.size(); ++i) loaders[i]->LoadState(from->places[i]);
    parts_.loops.LoadPlace(from->info, loaders.size());
  }

  void Epochs(int64_t count, const std::function<void(int64_t)>& body) {
    for (int64_t epoch = parts_.loops.FirstEpoch(count, ""); epoch < count; ++epoch) {
      parts_.loops.SetEpoch(epoch, /*open=*/true);
      body(epoch);
      parts_.loops.SetEpoch(epoch + 1, /*open=*/false);
    }
  }
  Iterator Begin(size_t loader) { return loaders[loader]->begin(); }
  void Step(const std::string& what) {
    seen.push_back(what);
    parts_.loops.MarkTrained();
  }
  // Calls accumulate() with the batch of that loop.
  void Decides(const Iterator& it) { parts_.loops.NoteDecides(it.pass()); }
  void MaySave() {
    if (stops++ != stop_at_) return;
    saved.emplace();
    const bool done = parts_.loops.EpochIsDone();
    parts_.loops.SavePlace(&saved->info);
    for (const auto& loader : loaders) saved->places.push_back(parts_.loops.PlaceToSave(*loader));
    parts_.loops.NoteSaved("the checkpoint", done);
    throw Stopped();
  }

  std::vector<std::shared_ptr<CountingLoader>> loaders;
  std::vector<std::string> seen;
  std::optional<Saved> saved;
  int stops = 0;

 private:
  Parts parts_;
  FusedSGD sgd_{{at::ones({1}).requires_grad_(true)}, {.lr = 0.1}};
  std::shared_ptr<OptimizerSlot> slot_;
  const int stop_at_;
};

struct Program {
  std::string name;
  std::vector<int64_t> lengths;  // of the program's loaders
  std::function<void(Process&)> run;
  // The saves after which a resumed run is not exact.
  std::set<int> inexact = {};
};

// Runs the program, and adds what it trains on to `seen`.
std::optional<Saved> RunOnce(const Program& program, const Saved* from, int stop_at,
                             std::vector<std::string>* seen) {
  Process process(program.lengths, from, stop_at);
  try {
    program.run(process);
  } catch (const Stopped&) {
  }
  seen->insert(seen->end(), process.seen.begin(), process.seen.end());
  return process.saved;
}

// Saves at each place, and after each of these at each place of the resumed run.
void ExpectExact(const Program& program) {
  SCOPED_TRACE(program.name);
  std::vector<std::string> whole;
  RunOnce(program, nullptr, -1, &whole);
  for (int stop = 0;; ++stop) {
    std::vector<std::string> first;
    const std::optional<Saved> saved = RunOnce(program, nullptr, stop, &first);
    if (!saved.has_value()) break;
    if (program.inexact.count(stop) > 0) continue;
    std::vector<std::string> resumed = first;
    RunOnce(program, &*saved, -1, &resumed);
    ASSERT_EQ(absl::StrJoin(resumed, " "), absl::StrJoin(whole, " ")) << "stopped at " << stop;
    for (int again = 0;; ++again) {
      std::vector<std::string> second = first;
      const std::optional<Saved> saved_again = RunOnce(program, &*saved, again, &second);
      if (!saved_again.has_value()) break;
      if (program.inexact.count(stop + again + 1) > 0) continue;
      RunOnce(program, &*saved_again, -1, &second);
      ASSERT_EQ(absl::StrJoin(second, " "), absl::StrJoin(whole, " "))
          << "stopped at " << stop << ", and then at " << again;
    }
  }
}

TEST(LoopResume, LoopsOneAfterAnother_AreExact) {
  ExpectExact({"one", {4}, [](Process& p) {
                 p.Epochs(3, [&](int64_t) {
                   for (Iterator a = p.Begin(0); !a.at_end(); a.Next()) {
                     p.Step(*a);
                     p.MaySave();
                   }
                   p.MaySave();
                 });
               }});
  ExpectExact({"two, the second in every other epoch", {4, 6}, [](Process& p) {
                 p.Epochs(4, [&](int64_t epoch) {
                   for (const size_t loader : {0, 1}) {
                     if (loader == 1 && epoch % 2 == 1) continue;
                     for (Iterator a = p.Begin(loader); !a.at_end(); a.Next()) {
                       p.Step(absl::StrCat(loader, ":", *a));
                       p.MaySave();
                     }
                   }
                   p.MaySave();
                 });
               }});
}

// Every step counts for the batch of each loop under way, even if it does not use that loop's data.
TEST(LoopResume, PlaceOfALoaderThatAnEpochDoesNotUse_IsKept) {
  const Program program = {"used in even epochs", {4, 40}, [](Process& p) {
                             std::optional<Iterator> side;
                             p.Epochs(3, [&](int64_t epoch) {
                               const bool used = epoch % 2 == 0;
                               if (used && !side.has_value()) side.emplace(p.Begin(1));
                               for (Iterator a = p.Begin(0); !a.at_end(); a.Next()) {
                                 p.Step(used ? absl::StrCat(*a, "+", **side) : *a);
                                 if (used) side->Next();
                                 if (!used) p.MaySave();
                               }
                             });
                           }};
  std::vector<std::string> seen, resumed;
  const std::optional<Saved> saved = RunOnce(program, nullptr, 1, &seen);
  ASSERT_TRUE(saved.has_value());
  RunOnce(program, &*saved, -1, &resumed);
  EXPECT_THAT(resumed,
              testing::ElementsAre("1.2", "1.3", "2.0+0.5", "2.1+0.6", "2.2+0.7", "2.3+0.8"));
}

TEST(LoopResume, BatchKeptBesideTheTrainingLoop_IsExact) {
  for (const bool outside : {true, false}) {
    ExpectExact({absl::StrCat("fixed, ", outside), {4, 40}, [=](Process& p) {
                   std::optional<Iterator> fixed;
                   if (outside) fixed.emplace(p.Begin(1));
                   p.Epochs(3, [&](int64_t) {
                     if (!outside) fixed.emplace(p.Begin(1));
                     for (Iterator a = p.Begin(0); !a.at_end(); a.Next()) {
                       p.Step(*a);
                       p.MaySave();
                     }
                     p.MaySave();
                     if (!outside) fixed.reset();
                   });
                 }});
  }
}

// `ahead`: advances the side loader before the step, which then counts for its next batch as well,
// so that a save loses one batch of it; what matters is that no pass is repeated.
void TrainBesideLongerLoader(Process& p, bool outside, int passes) {
  std::optional<Iterator> side;
  if (outside) side.emplace(p.Begin(1));
  p.Epochs(3, [&](int64_t) {
    if (!outside) side.emplace(p.Begin(1));
    for (int pass = 0; pass < passes; ++pass) {
      for (Iterator a = p.Begin(0); !a.at_end(); a.Next()) {
        p.Step(absl::StrCat(*a, "+", **side));
        p.MaySave();
        side->Next();
      }
    }
    p.MaySave();
    if (!outside) side.reset();
  });
}

TEST(LoopResume, LongerSideLoader_IsExact) {
  for (const bool outside : {true, false}) {
    for (const int passes : {1, 2}) {
      // Before an epoch is known to have two passes, its end is taken for the end of the first
      // pass.
      ExpectExact({absl::StrCat("side, ", outside, ", ", passes), {4, 40}, [=](Process& p) {
                     TrainBesideLongerLoader(p, outside, passes);
                   }});
    }
  }
}

TEST(LoopResume, SideLoaderMovedBeforeTheStep_RepeatsNoPass) {
  const Program program = {"side", {4, 40}, [](Process& p) {
                             Iterator side = p.Begin(1);
                             p.Epochs(3, [&](int64_t) {
                               for (Iterator a = p.Begin(0); !a.at_end(); a.Next()) {
                                 side.Next();
                                 p.Step(*a);
                                 p.MaySave();
                               }
                               p.MaySave();
                             });
                           }};
  ExpectExact(program);
}

// `both`: the training ends with the shorter loader; otherwise it continues alone.
Program Together(int64_t first, int64_t second, bool both, bool save_first,
                 std::set<int> inexact = {}) {
  return {absl::StrCat(first, " and ", second, ", ", both, ", ", save_first),
          {first, second},
          [=](Process& p) {
            p.Epochs(3, [&](int64_t) {
              {
                Iterator b = p.Begin(1);
                Iterator a = p.Begin(0);
                while (!a.at_end() && (!both || !b.at_end())) {
                  p.Step(absl::StrCat(*a, "+", b.at_end() ? "" : *b));
                  if (save_first) p.MaySave();
                  a.Next();
                  b.Next();
                  if (!save_first) p.MaySave();
                }
              }
              p.MaySave();
            });
          },
          std::move(inexact)};
}

TEST(LoopResume, LoadersReadTogetherUntilOneEnds_AreExact) {
  for (const bool save_first : {true, false}) {
    ExpectExact(Together(4, 4, true, save_first));
    ExpectExact(Together(4, 6, true, save_first));
  }
  ExpectExact(Together(6, 4, true, false));
  ExpectExact(Together(6, 2, false, false));
  ExpectExact(Together(6, 1, false, false));
}

TEST(LoopResume, LastBatchOfAShorterLoaderNotYetSeenToEnd_IsWarnedOf) {
  const Program program = Together(6, 2, false, true, /*inexact=*/{1});
  ExpectExact(program);
  testing::internal::CaptureStderr();
  std::vector<std::string> seen;
  RunOnce(program, nullptr, 1, &seen);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::HasSubstr("one pass too many if not"));
  testing::internal::CaptureStderr();
  // In the second epoch it is known.
  RunOnce(program, nullptr, 8, &seen);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(LoopResume, ShorterLoaderThatBeginsAgain_IsExact) {
  for (const auto& [length, shorter] :
       std::vector<std::pair<int64_t, int64_t>>{{7, 2}, {6, 2}, {3, 1}, {2, 2}}) {
    for (const bool at_head : {true, false}) {
      for (const bool say : {true, false}) {
        // At the last batch of both it is not known that the shorter one begins again.
        std::set<int> inexact;
        for (int epoch = 0; !at_head && length % shorter == 0 && epoch < 3; ++epoch) {
          inexact.insert(static_cast<int>(epoch * (length + 1) + length - 1));
        }
        ExpectExact({absl::StrCat(length, ", ", shorter, ", ", at_head, ", ", say),
                     {length, shorter},
                     [=](Process& p) {
                       p.Epochs(3, [&](int64_t) {
                         {
                           Iterator b = p.Begin(1);
                           for (Iterator a = p.Begin(0); !a.at_end(); a.Next()) {
                             if (at_head && b.at_end()) b = p.Begin(1);
                             if (say) p.Decides(a);
                             p.Step(absl::StrCat(*a, "+", *b));
                             p.MaySave();
                             b.Next();
                             if (!at_head && b.at_end()) b = p.Begin(1);
                           }
                         }
                         p.MaySave();
                       });
                     },
                     inexact});
      }
    }
  }
}

Program Nested(int64_t outer, int64_t inner, bool save_inside) {
  return {
      absl::StrCat(outer, " around ", inner, ", ", save_inside), {outer, inner}, [=](Process& p) {
        p.Epochs(3, [&](int64_t) {
          for (Iterator a = p.Begin(0); !a.at_end(); a.Next()) {
            for (Iterator b = p.Begin(1); !b.at_end(); b.Next()) {
              p.Step(absl::StrCat(*a, "/", *b));
              // At the first batches of both they may be side by side.
              if (save_inside && a.index() + b.index() > 0) p.MaySave();
            }
            p.MaySave();
          }
          p.MaySave();
        });
      }};
}

TEST(LoopResume, LoopInsideOfAnother_IsExact) {
  ExpectExact(Nested(3, 3, false));
  ExpectExact(Nested(3, 3, true));
  ExpectExact({"an inner pass at one outer batch", {3, 3}, [](Process& p) {
                 p.Epochs(3, [&](int64_t) {
                   for (Iterator a = p.Begin(0); !a.at_end(); a.Next()) {
                     p.Step(*a);
                     if (a.index() == 1) {
                       for (Iterator b = p.Begin(1); !b.at_end(); b.Next()) p.Step(*b);
                     }
                     p.MaySave();
                   }
                   p.MaySave();
                 });
               }});
}

// An older version counted each inner pass.
TEST(LoopResume, InnerPassesThatAnOlderVersionCounted_DoNotKeepAnEpochOpen) {
  const Program program = Nested(2, 3, false);
  std::vector<std::string> whole, parts;
  RunOnce(program, nullptr, -1, &whole);
  std::optional<Saved> saved = RunOnce(program, nullptr, 2, &parts);
  ASSERT_TRUE(saved.has_value());
  saved->info.cursor = {{"first_epoch", 1}, {"passes_per_epoch.0", 1}, {"passes_per_epoch.1", 2}};
  saved = RunOnce(program, &*saved, 2, &parts);
  ASSERT_TRUE(saved.has_value());
  EXPECT_EQ(saved->info.cursor["first_epoch"], 2);
  RunOnce(program, &*saved, -1, &parts);
  EXPECT_EQ(parts, whole);
}

}  // namespace
}  // namespace muster::internal
