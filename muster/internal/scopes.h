#ifndef MUSTER_INTERNAL_SCOPES_H_
#define MUSTER_INTERNAL_SCOPES_H_

#include <cstdint>
#include <utility>

// The scope objects that methods of Accelerator return. They borrow the Core.
namespace muster::internal {

class Core;
class StepController;

// One micro-step; see Accelerator::accumulate.
class [[nodiscard]] AccumulateScope {
 public:
  explicit AccumulateScope(StepController* steps) : steps_(steps) {}
  // Not noexcept: a zero_grad() that was called before the window's step is carried out here and
  // may read gradients from a disk.
  ~AccumulateScope() noexcept(false);
  AccumulateScope(AccumulateScope&& other) noexcept
      : steps_(std::exchange(other.steps_, nullptr)) {}
  AccumulateScope(const AccumulateScope&) = delete;
  AccumulateScope& operator=(const AccumulateScope&) = delete;

 private:
  StepController* steps_;
};

class [[nodiscard]] NoSyncScope {
 public:
  explicit NoSyncScope(Core* core);
  ~NoSyncScope();
  NoSyncScope(const NoSyncScope&) = delete;
  NoSyncScope& operator=(const NoSyncScope&) = delete;

 private:
  Core* const core_;
};

class [[nodiscard]] JoinScope {
 public:
  JoinScope(Core* core, bool even_batches);
  // Takes part in the exchanges of the processes that still have batches until all have arrived,
  // unless an exception is leaving the scope.
  ~JoinScope() noexcept(false);
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

 private:
  Core* const core_;
  const int exceptions_;
};

// Backward passes in this scope exchange no gradients, but windows end and optimizers step.
class [[nodiscard]] LocalScope {
 public:
  explicit LocalScope(Core* core);
  ~LocalScope();
  LocalScope(const LocalScope&) = delete;
  LocalScope& operator=(const LocalScope&) = delete;

 private:
  Core* const core_;
};

class [[nodiscard]] FirstScope {
 public:
  FirstScope(Core* core, bool per_host);
  ~FirstScope();
  FirstScope(const FirstScope&) = delete;
  FirstScope& operator=(const FirstScope&) = delete;

 private:
  const char* Name() const;

  Core* const core_;
  const bool per_host_;
  const bool first_;
};

// The epochs 0 ... count-1 without those that a loaded state has finished.
class EpochRange {
 public:
  class Iterator {
   public:
    Iterator(Core* core, int64_t epoch) : core_(core), epoch_(epoch) {}
    int64_t operator*() const;
    Iterator& operator++();
    bool operator!=(const Iterator& other) const { return epoch_ < other.epoch_; }

   private:
    Core* const core_;
    int64_t epoch_;
  };
  EpochRange(Core* core, int64_t count) : core_(core), count_(count) {}
  Iterator begin() const;
  Iterator end() const { return Iterator(core_, count_); }

 private:
  Core* const core_;
  const int64_t count_;
};

// Marks a prepare() call in progress; the destructor ties its schedules to its optimizer.
class PrepareCall {
 public:
  explicit PrepareCall(Core* core);
  // Not noexcept: a schedule without an optimizer is refused here, once all objects are known.
  ~PrepareCall() noexcept(false);

 private:
  Core* const core_;
  const int exceptions_;
};
}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_SCOPES_H_
