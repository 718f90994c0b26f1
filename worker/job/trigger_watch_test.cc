#include "worker/job/trigger_watch.h"

#include <gtest/gtest.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "worker/collective/progress_board.h"

namespace muster {
namespace {

const TriggerWatch::Options kFast = {.period = absl::Microseconds(200),
                                     .pending_period = absl::Microseconds(50)};

// Follows the coordinator's rule, for ranks in one process.
class Board {
 public:
  explicit Board(int size) : size_(size) {}

  uint64_t Raise(const std::string& name, const std::string& payload = "") {
    MutexLock lock(&mu_);
    Entry& entry = triggers_.emplace_back();
    entry.info.id = triggers_.size();
    entry.info.name = name;
    entry.info.payload = payload;
    return entry.info.id;
  }
  absl::StatusOr<std::vector<TriggerInfo>> Poll(int rank, const TriggerPoll& poll) {
    MutexLock lock(&mu_);
    ++polls_;
    changed_.SignalAll();
    if (!down_.ok()) return down_;
    EXPECT_TRUE(poll.horizon == 0 || poll.horizon > poll.step);
    for (const uint64_t id : poll.pending) {
      Entry& entry = triggers_[id - 1];
      if (entry.info.decided) continue;
      int64_t& promised = entry.promised[rank];
      promised = std::max(promised, poll.horizon);
      if (static_cast<int>(entry.promised.size()) < size_) continue;
      entry.info.decided = true;
      for (const auto& [who, step] : entry.promised) {
        entry.info.effective_step = std::max(entry.info.effective_step, step);
      }
    }
    for (const uint64_t id : poll.acknowledged) triggers_[id - 1].acked[rank] = true;
    changed_.SignalAll();
    std::vector<TriggerInfo> told;
    for (Entry& entry : triggers_) {
      if (!entry.acked[rank]) told.push_back(entry.info);
    }
    return told;
  }
  TriggerWatch::PollFunction For(int rank) {
    return [this, rank](const TriggerPoll& poll) { return Poll(rank, poll); };
  }
  void SetDown(absl::Status down) {
    MutexLock lock(&mu_);
    down_ = std::move(down);
  }
  // Like a coordinator that restarted.
  void ForgetAcknowledgements() {
    MutexLock lock(&mu_);
    for (Entry& entry : triggers_) entry.acked.clear();
  }
  void WaitForPolls(int count) {
    MutexLock lock(&mu_);
    const int64_t until = polls_ + count;
    while (polls_ < until) changed_.Wait(&mu_);
  }
  void WaitUntilAcknowledged(uint64_t id) {
    MutexLock lock(&mu_);
    const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      int acked = 0;
      for (const auto& [rank, yes] : triggers_[id - 1].acked) acked += yes ? 1 : 0;
      return acked == size_;
    };
    while (!done()) changed_.Wait(&mu_);
  }

 private:
  struct Entry {
    TriggerInfo info;
    std::map<int, int64_t> promised;
    std::map<int, bool> acked;
  };
  const int size_;
  Mutex mu_;
  CondVar changed_;
  std::vector<Entry> triggers_ ABSL_GUARDED_BY(mu_);
  int64_t polls_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status down_ ABSL_GUARDED_BY(mu_);
};

// Runs steps until `watch` returns trigger `name`; returns after how many finished ones.
int64_t StepsUntil(TriggerWatch& watch, const std::string& name, int64_t finished) {
  for (;; ++finished) {
    const auto trigger = watch.Check(name, finished);
    EXPECT_TRUE(trigger.ok()) << trigger.status();
    if (!trigger.ok() || trigger->has_value()) return finished;
  }
}

TEST(TriggerWatch, NothingRaised_ChecksGoOnWithoutTheCoordinator) {
  Board board(1);
  TriggerWatch watch(0, board.For(0), kFast);
  ASSERT_TRUE(watch.Check("stop", 0).ok());
  board.SetDown(absl::UnavailableError("away"));
  for (int64_t step = 0; step < 10'000; ++step) {
    const auto trigger = watch.Check("stop", step);
    ASSERT_TRUE(trigger.ok());
    EXPECT_FALSE(trigger->has_value());
  }
}

#if !defined(__SANITIZE_THREAD__)  // TSan's own system calls say nothing of ours
// Runs `step` a million times on a thread that the kernel kills at its first system call, in a
// process of its own. Returns whether the process survived.
template <typename F>
bool RunsWithoutSystemCalls(F make_step) {
  const pid_t child = fork();
  if (child == 0) {
    auto step = make_step();
    step();  // whatever happens only once
    bool done = false;
    pthread_t thread;
    auto body = [&] {
      if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) _exit(3);
      for (int i = 0; i < 1'000'000; ++i) step();
      done = true;
      syscall(SYS_exit, 0);  // of the thread: one of the four calls that are allowed
    };
    pthread_create(
        &thread, nullptr,
        [](void* f) -> void* {
          (*static_cast<decltype(body)*>(f))();
          return nullptr;
        },
        &body);
    pthread_join(thread, nullptr);
    _exit(done ? 0 : 4);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && status == 0;
}

TEST(TriggerWatch, NothingRaised_ACheckMakesNoSystemCall) {
  EXPECT_TRUE(RunsWithoutSystemCalls([] {
    auto board = std::make_shared<Board>(1);
    // One poll, and then none for an hour.
    auto watch = std::make_shared<TriggerWatch>(0, board->For(0),
                                                TriggerWatch::Options{.period = absl::Hours(1)});
    return [board, watch, step = int64_t{0}]() mutable {
      const auto trigger = watch->Check("stop", step++);
      if (!trigger.ok() || trigger->has_value()) _exit(5);
    };
  }));
  EXPECT_TRUE(RunsWithoutSystemCalls([] {
    auto progress = std::make_shared<ProgressBoard>();
    return [progress, step = int64_t{0}]() mutable {
      progress->SetStep(++step);
      progress->SetPhase("training");
      CollectiveOnBoard collective(*progress, "AllReduce", step, "Float");
    };
  }));
  EXPECT_FALSE(RunsWithoutSystemCalls([] { return [] { getppid(); }; })) << "the test sees none";
}
#endif

TEST(TriggerWatch, DecidedBeforeThisRankCame_IsKnownAtTheFirstCheck) {
  Board board(1);
  const uint64_t id = board.Raise("stop");
  ASSERT_TRUE(board.Poll(0, {.step = 6, .pending = {id}}).ok());
  TriggerWatch watch(6, board.For(0), kFast);
  EXPECT_TRUE(watch.Check("stop", 6)->has_value());
}

TEST(TriggerWatch, Raised_IsToldOnceWithItsPayload) {
  Board board(1);
  TriggerWatch watch(0, board.For(0), kFast);
  const uint64_t id = board.Raise("checkpoint", "why");
  int64_t step = 0;
  std::optional<TriggerInfo> told;
  for (; !told.has_value(); ++step) told = *watch.Check("checkpoint", step);
  EXPECT_EQ(told->id, id);
  EXPECT_EQ(told->payload, "why");
  board.WaitUntilAcknowledged(id);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(watch.Check("checkpoint", step + i)->has_value());
}

TEST(TriggerWatch, OtherName_IsNotTold) {
  Board board(1);
  TriggerWatch watch(0, board.For(0), kFast);
  board.Raise("profile");
  board.Raise("stop");
  EXPECT_GE(StepsUntil(watch, "stop", 0), 0);
  // Asked for later, it is still there.
  EXPECT_GE(StepsUntil(watch, "profile", 1'000'000), 1'000'000);
}

TEST(TriggerWatch, NameThatNobodyAsksFor_IsAcknowledgedOnceItsStepHasPassed) {
  Board board(1);
  TriggerWatch watch(0, board.For(0), kFast);
  const uint64_t id = board.Raise("profile");
  std::atomic<bool> done{false};
  std::thread training([&] {
    for (int64_t step = 0; !done; ++step) ASSERT_TRUE(watch.Check("stop", step).ok());
  });
  board.WaitUntilAcknowledged(id);
  done = true;
  training.join();
}

TEST(TriggerWatch, CoordinatorThatForgotAcknowledgements_DoesNotRepeatTriggers) {
  Board board(1);
  TriggerWatch watch(0, board.For(0), kFast);
  const uint64_t id = board.Raise("stop");
  const int64_t step = StepsUntil(watch, "stop", 0);
  board.WaitUntilAcknowledged(id);
  board.ForgetAcknowledgements();
  board.WaitUntilAcknowledged(id);
  EXPECT_FALSE(watch.Check("stop", step + 1)->has_value());
}

TEST(TriggerWatch, GenerationEnded_CheckSaysSoEvenWhileItWaits) {
  Board board(2);  // the other rank never promises
  TriggerWatch watch(0, board.For(0), kFast);
  board.Raise("stop");
  std::thread ender([&] {
    board.WaitForPolls(20);
    board.SetDown(absl::AbortedError("the generation has ended"));
  });
  absl::Status status;
  for (int64_t step = 0; status.ok(); ++step) status = watch.Check("stop", step).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  ender.join();
}

TEST(TriggerWatch, RankThatNeverAsks_IsWarnedOf) {
  Board board(2);  // the other rank never promises
  TriggerWatch::Options options = kFast;
  options.warn_after = absl::ZeroDuration();
  Notification warned;
  std::string warning;
  options.warn = [&](const std::string& text) {
    if (text.find("has not polled") == std::string::npos || warned.HasBeenNotified()) return;
    warning = text;
    warned.Notify();
  };
  TriggerWatch watch(0, board.For(0), options);
  board.Raise("stop");
  std::thread training([&] {
    for (int64_t step = 0; watch.Check("stop", step).ok(); ++step) {
    }
  });
  warned.WaitForNotification();
  EXPECT_NE(warning.find("trigger 'stop' waits"), std::string::npos) << warning;
  board.SetDown(absl::AbortedError("the generation has ended"));
  training.join();
}

TEST(TriggerWatch, CoordinatorThatRefuses_EndsTheWatch) {
  int polls = 0;
  std::string warning;
  TriggerWatch::Options options = kFast;
  options.warn = [&](const std::string& text) { warning = text; };
  absl::Status status;
  {
    TriggerWatch watch(
        0,
        [&](const TriggerPoll&) -> absl::StatusOr<std::vector<TriggerInfo>> {
          ++polls;
          return absl::UnauthenticatedError("no such user");
        },
        options);
    status = watch.Check("stop", 0).status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(polls, 1);
  EXPECT_EQ(warning, "no more triggers: no such user");
}

TEST(TriggerWatch, RankThatKnows_DoesNotOverrunItsPromise) {
  Board board(2);
  TriggerWatch watch(0, board.For(0), kFast);
  board.Raise("stop");
  std::atomic<int64_t> finished{0};
  std::thread training([&] {
    for (;; ++finished) {
      const auto trigger = watch.Check("stop", finished);
      if (!trigger.ok() || trigger->has_value()) return;
    }
  });
  // The other rank is far ahead: it promises for a later step, and that counts.
  board.WaitForPolls(20);
  const int64_t stood_at = finished;
  board.WaitForPolls(20);
  EXPECT_EQ(finished, stood_at);
  ASSERT_TRUE(board.Poll(1, {.step = 1, .horizon = stood_at + 5000, .pending = {1}}).ok());
  training.join();
  EXPECT_EQ(finished, stood_at + 4999);  // before step stood_at + 5000
}

TEST(TriggerWatch, ManyRanksAtTheirOwnPace_ActAtTheSameSteps) {
  constexpr int kRanks = 4, kTriggers = 25;
  Board board(kRanks);
  std::vector<std::vector<std::pair<uint64_t, int64_t>>> acted(kRanks);
  std::vector<std::thread> ranks;
  std::atomic<int> running{kRanks};
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      std::mt19937 random(rank);
      TriggerWatch watch(0, board.For(rank), kFast);
      int64_t finished = 0;
      while (static_cast<int>(acted[rank].size()) < kTriggers) {
        // Some ranks check often, some now and then: all act at the same steps.
        const auto trigger = watch.Check("mark", finished);
        ASSERT_TRUE(trigger.ok());
        if (trigger->has_value()) {
          acted[rank].emplace_back((*trigger)->id, finished);
          continue;
        }
        ++finished;
        for (volatile uint32_t spin = random() % 2000; spin > 0;) spin = spin - 1;
      }
      --running;
      // The other ranks' decisions wait for this rank, too.
      while (running > 0) board.WaitForPolls(1);
    });
  }
  for (int i = 0; i < kTriggers; ++i) {
    board.WaitForPolls(7 * (i % 5));
    board.Raise("mark");
  }
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 1; rank < kRanks; ++rank) EXPECT_EQ(acted[rank], acted[0]) << "rank " << rank;
}

}  // namespace
}  // namespace muster
