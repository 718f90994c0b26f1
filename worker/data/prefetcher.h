#ifndef MUSTER_WORKER_DATA_PREFETCHER_H_
#define MUSTER_WORKER_DATA_PREFETCHER_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "worker/data/worker_thread.h"

namespace muster {

// Makes items 0, 1, 2, ... on its own threads and returns them in that order, at most `capacity`
// ahead of the consumer. Each function runs on one thread; it is called with increasing numbers
// (not all of them: the functions share the work) and returns nullopt for a number past the end. An
// exception takes the place of its item.
//
// For one consumer thread. Next() blocks until its item is ready. The destructor stops and joins
// the threads; it waits for items being made, never for the consumer, so a loop may be left at any
// time.
template <class Item>
class Prefetcher {
 public:
  using Produce = std::function<std::optional<Item>(int64_t)>;

  // Uses fewer of the functions if the system provides no more threads. Throws std::system_error if
  // it provides none.
  Prefetcher(std::vector<Produce> produce, int64_t capacity)
      : produce_(std::move(produce)), slots_(static_cast<size_t>(capacity)) {
    threads_.reserve(produce_.size());
    for (Produce& function : produce_) {
      try {
        threads_.emplace_back([this, &function] { Work(function); });
      } catch (const std::system_error&) {
        if (threads_.empty()) throw;
        return;
      }
    }
  }

  ~Prefetcher() {
    {
      MutexLock lock(&mu_);
      stop_ = true;
    }
    room_.SignalAll();
    for (std::thread& thread : threads_) thread.join();
  }

  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Returns the next item; nullopt after the last. Rethrows an exception from making the item;
  // after that there are no more items.
  std::optional<Item> Next() {
    std::optional<Item> item;
    std::exception_ptr error;
    bool wake;
    {
      MutexLock lock(&mu_);
      if (finished_) return std::nullopt;
      Slot& slot = slots_[static_cast<size_t>(consumed_) % slots_.size()];
      while (!slot.ready) ready_.Wait(&mu_);
      item = std::exchange(slot.item, std::nullopt);
      error = std::exchange(slot.error, nullptr);
      slot.ready = false;
      ++consumed_;
      if (!item.has_value()) {
        finished_ = true;
        stop_ = true;
      }
      // Threads without room sleep until half of the slots are free: waking one for each item would
      // cost more than making small items.
      wake = stop_ || started_ - consumed_ <= static_cast<int64_t>(slots_.size() / 2);
    }
    if (wake) room_.SignalAll();
    if (error) std::rethrow_exception(error);
    return item;
  }

 private:
  struct Slot {
    bool ready = false;
    std::optional<Item> item;
    std::exception_ptr error;
  };

  void Work(const Produce& produce) {
    BeSingleThreaded();
    while (true) {
      int64_t number;
      {
        MutexLock lock(&mu_);
        while (!stop_ && started_ - consumed_ >= static_cast<int64_t>(slots_.size()))
          room_.Wait(&mu_);
        if (stop_) return;
        number = started_++;
      }
      std::optional<Item> item;
      std::exception_ptr error;
      try {
        item = produce(number);
      } catch (...) {
        error = std::current_exception();
      }
      const bool last = !item.has_value();
      {
        MutexLock lock(&mu_);
        Slot& slot = slots_[static_cast<size_t>(number) % slots_.size()];
        slot.item = std::move(item);
        slot.error = std::move(error);
        slot.ready = true;
      }
      ready_.Signal();
      if (last) return;
    }
  }

  // Constant after construction.
  std::vector<Produce> produce_;

  // Guarded by mu_.
  Mutex mu_;
  CondVar ready_;
  CondVar room_;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mu_);
  int64_t started_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t consumed_ ABSL_GUARDED_BY(mu_) = 0;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;

  std::vector<std::thread> threads_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_PREFETCHER_H_
