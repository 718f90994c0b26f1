#include "worker/collective/engine_backend.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/zeros.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace muster {
namespace {

using ::testing::ElementsAre;

// Records the thread that calls it, and holds the first call until Open().
class NotingEngine : public CollectiveEngine {
 public:
  struct Notes {
    void Open() {
      MutexLock lock(&mu);
      open = true;
      changed.SignalAll();
    }
    Mutex mu;
    CondVar changed;
    bool open ABSL_GUARDED_BY(mu) = true;
    std::vector<std::thread::id> threads ABSL_GUARDED_BY(mu);
    std::vector<int64_t> bytes ABSL_GUARDED_BY(mu);
    std::vector<Deadline> deadlines ABSL_GUARDED_BY(mu);  // of all-reduces
  };

  explicit NotingEngine(Notes& notes) : notes_(notes) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string name() const override { return "noting"; }
  int64_t at_once_bytes() const override { return 16; }
  void AllReduce(char*, const ShmCall& call, Deadline deadline) override {
    {
      MutexLock lock(&notes_.mu);
      notes_.deadlines.push_back(deadline);
    }
    Note(call);
  }
  void Broadcast(char*, const ShmCall& call, Deadline) override { Note(call); }
  void AllGather(char*, const std::vector<char*>&, const ShmCall& call, Deadline) override {
    Note(call);
  }
  void ReduceScatter(char*, char*, const ShmCall& call, Deadline) override { Note(call); }
  void Barrier(const ShmCall& call, Deadline) override { Note(call); }
  void Break(const std::string&) override {}
  bool allocates() const override { return false; }
  at::Tensor Allocate(int64_t, const at::TensorOptions&) override { return {}; }

 private:
  void Note(const ShmCall& call) {
    MutexLock lock(&notes_.mu);
    notes_.threads.push_back(std::this_thread::get_id());
    notes_.bytes.push_back(call.bytes);
    notes_.changed.SignalAll();
    while (!notes_.open) notes_.changed.Wait(&notes_.mu);
  }

  Notes& notes_;
};

// For operations that the engine does not support; does nothing here.
class NoBackend : public c10d::Backend {
 public:
  NoBackend() : Backend(0, 1) {}
  void setTimeout(std::chrono::milliseconds) override {}
};

struct Group {
  c10::intrusive_ptr<c10d::Work> AllReduce(int64_t elements) {
    std::vector<at::Tensor> tensors = {at::zeros({elements})};
    return backend->allreduce(tensors);
  }

  NotingEngine::Notes notes;
  c10::intrusive_ptr<c10d::Backend> backend =
      MakeEngineBackend(c10::make_intrusive<NoBackend>(), std::make_unique<NotingEngine>(notes),
                        std::chrono::seconds(60));
};

TEST(EngineBackend, StartNextHere_RunsOneOperationOnTheCallersThread) {
  Group group;
  StartNextHere();
  const auto here = group.AllReduce(100);
  EXPECT_TRUE(here->isCompleted());
  group.AllReduce(100)->wait();
  group.AllReduce(2)->wait();
  MutexLock lock(&group.notes.mu);
  const std::thread::id mine = std::this_thread::get_id();
  ASSERT_EQ(group.notes.threads.size(), 3u);
  EXPECT_EQ(group.notes.threads[0], mine);
  EXPECT_NE(group.notes.threads[1], mine) << "the hint counts once";
  EXPECT_EQ(group.notes.threads[2], mine) << "small ones run at once";
}

TEST(EngineBackend, StartNextHere_BehindAQueue_KeepsTheOrder) {
  Group group;
  {
    MutexLock lock(&group.notes.mu);
    group.notes.open = false;
  }
  const auto first = group.AllReduce(100);
  StartNextHere();
  const auto second = group.AllReduce(200);
  EXPECT_FALSE(second->isCompleted());
  group.notes.Open();
  second->wait();
  EXPECT_TRUE(first->isCompleted());
  MutexLock lock(&group.notes.mu);
  EXPECT_THAT(group.notes.bytes, ElementsAre(400, 800));
}

TEST(EngineBackend, OperationBehindOneThatRunsHere_IsNotForgotten) {
  Group group;
  {
    MutexLock lock(&group.notes.mu);
    group.notes.open = false;
  }
  std::thread caller([&] {
    StartNextHere();
    group.AllReduce(100)->wait();
  });
  {
    MutexLock lock(&group.notes.mu);
    while (group.notes.threads.empty()) group.notes.changed.Wait(&group.notes.mu);
  }
  const auto behind = group.AllReduce(200);
  group.notes.Open();
  behind->wait();
  caller.join();
  MutexLock lock(&group.notes.mu);
  EXPECT_THAT(group.notes.bytes, ElementsAre(400, 800));
}

TEST(EngineBackend, SetTimeout_BesideOperations_CountsFromTheNextOne) {
  Group group;
  // One thread sets it while another one starts: without a lock, a sanitizer would report a race.
  std::thread caller([&] {
    for (int i = 0; i < 200; ++i) group.AllReduce(2)->wait();
  });
  for (int i = 1; i <= 200; ++i) group.backend->setTimeout(std::chrono::seconds(60 + i));
  caller.join();
  group.backend->setTimeout(std::chrono::hours(48));
  const auto before = std::chrono::steady_clock::now();
  group.AllReduce(2)->wait();
  MutexLock lock(&group.notes.mu);
  EXPECT_GE(group.notes.deadlines.back(), before + std::chrono::hours(48));
  EXPECT_LT(group.notes.deadlines.front(), before + std::chrono::hours(1));
}

}  // namespace
}  // namespace muster
