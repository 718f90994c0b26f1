#include "worker/collective/thread_comm.h"

#include <exception>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "worker/collective/comm_checks.h"
#include "worker/collective/rank_order_reduce.h"

namespace muster {
namespace {

// A rank's data for a collective. Readable by the others between the first and the last Sync of the
// collective, while its owner blocks.
struct Slot {
  const char* operation = "";
  int detail = 0;  // reduction or root: must agree
  const at::Tensor* tensor = nullptr;
  const std::vector<at::Tensor>* parts = nullptr;
  const std::string* bytes = nullptr;
  comm_checks::TensorPlace place = comm_checks::CurrentPlace();
};

class ThreadGroup {
 public:
  explicit ThreadGroup(int size) : size_(size), slots_(size), here_(size, false), gone_(size) {}

  int size() const { return size_; }

  // Waits until all ranks have called it. Earlier writes are visible to all ranks afterwards.
  // Throws if a rank that has not called it is gone.
  void Sync(int rank, const char* operation, uint64_t sequence) {
    MutexLock lock(&mu_);
    const uint64_t round = round_;
    here_[rank] = true;
    if (++arrived_ == size_) {
      arrived_ = 0;
      here_.assign(size_, false);
      ++round_;
      cv_.SignalAll();
      return;
    }
    while (round == round_) {
      for (int peer = 0; peer < size_; ++peer) {
        if (here_[peer] || gone_[peer].empty()) continue;
        const std::string why = gone_[peer];
        here_[rank] = false;
        --arrived_;
        C10_THROW_ERROR(DistBackendError, c10::str(operation, " #", sequence, " on rank ", rank,
                                                   ": rank ", peer, " ", why));
      }
      cv_.Wait(&mu_);
    }
  }

  void Leave(int rank, const std::string& why) {
    MutexLock lock(&mu_);
    if (gone_[rank].empty()) gone_[rank] = why;
    cv_.SignalAll();
  }

  // Written by its rank before the first Sync of a collective, read by others until the last.
  Slot& slot(int rank) { return slots_[rank]; }
  // Written by rank 0 between two Syncs.
  at::Tensor& shared() { return shared_; }

 private:
  const int size_;
  std::vector<Slot> slots_;
  at::Tensor shared_;

  Mutex mu_;
  CondVar cv_;
  int arrived_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t round_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<bool> here_ ABSL_GUARDED_BY(mu_);
  // Why a rank is gone; empty while it is not.
  std::vector<std::string> gone_ ABSL_GUARDED_BY(mu_);
};

class ThreadComm : public Comm {
 public:
  ThreadComm(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  ~ThreadComm() override { group_->Leave(rank_, "has left the group"); }

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }

  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    comm_checks::CheckReduce(tensor, op, rank_);
    at::NoGradGuard no_grad;
    Enter({.operation = "AllReduce", .detail = static_cast<int>(op), .tensor = &tensor});
    CheckSame(/*same_tensors=*/true);
    // One rank adds, in rank order, and the others copy: the same bits everywhere. Every rank
    // leaves through both Syncs even if this one fails, so that all stay in step.
    std::exception_ptr error;
    if (rank_ == 0) {
      try {
        Reduce(op);
      } catch (...) {
        error = std::current_exception();
        group_->shared() = at::Tensor();
      }
    }
    Sync();
    const at::Tensor result = group_->shared();
    if (result.defined()) tensor.copy_(result);
    Sync();
    if (error) std::rethrow_exception(error);
    TORCH_CHECK(result.defined(), "AllReduce #", sequence_, " on rank ", rank_,
                ": rank 0 could not reduce ", comm_checks::Describe(tensor));
  }

  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    comm_checks::CheckTensor(tensor, "AllGather", rank_);
    at::NoGradGuard no_grad;
    Enter({.operation = "AllGather", .tensor = &tensor});
    CheckSame(/*same_tensors=*/true);
    std::vector<at::Tensor> all;
    for (int r = 0; r < size(); ++r) {
      all.push_back(group_->slot(r).tensor->detach().clone(at::MemoryFormat::Contiguous));
    }
    Sync();
    return all;
  }

  void AllGatherParts(at::Tensor& flat) override {
    comm_checks::CheckFlat(flat, size(), "AllGatherParts", rank_);
    at::NoGradGuard no_grad;
    Enter({.operation = "AllGatherParts", .tensor = &flat});
    CheckSame(/*same_tensors=*/true);
    const int64_t part = flat.numel() / size();
    at::Tensor mine = flat.detach();
    // Each rank writes all parts of its own tensor except the one that the others read.
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      mine.narrow(0, r * part, part)
          .copy_(group_->slot(r).tensor->detach().narrow(0, r * part, part));
    }
    Sync();
  }

  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    comm_checks::CheckReduceScatter(flat, op, size(), rank_);
    at::NoGradGuard no_grad;
    Enter({.operation = "ReduceScatter", .detail = static_cast<int>(op), .tensor = &flat});
    CheckSame(/*same_tensors=*/true);
    const int64_t part = flat.numel() / size();
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < size(); ++r) {
      inputs.push_back(group_->slot(r).tensor->detach().narrow(0, rank_ * part, part));
    }
    const at::Tensor result = ReduceInRankOrder(inputs, op);
    // The owner may free their memory when this function has returned there.
    inputs.clear();
    Sync();
    return result;
  }

  void Broadcast(at::Tensor& tensor, int root) override {
    comm_checks::CheckTensor(tensor, "Broadcast", rank_);
    comm_checks::CheckRoot(root, size(), "Broadcast", rank_);
    at::NoGradGuard no_grad;
    Enter({.operation = "Broadcast", .detail = root, .tensor = &tensor});
    CheckSame(/*same_tensors=*/true);
    if (rank_ != root) tensor.copy_(*group_->slot(root).tensor);
    Sync();
  }

  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override {
    comm_checks::CheckRoot(root, size(), "Scatter", rank_);
    comm_checks::CheckTensor(out, "Scatter", rank_);
    if (rank_ == root) comm_checks::CheckParts(parts, size(), rank_);
    at::NoGradGuard no_grad;
    Enter({.operation = "Scatter", .detail = root, .tensor = &out, .parts = &parts});
    CheckSame(/*same_tensors=*/false);
    const std::vector<at::Tensor>& all = *group_->slot(root).parts;
    std::exception_ptr error;
    for (int r = 0; r < size() && !error; ++r) {
      try {
        comm_checks::CheckPart(all[r], *group_->slot(r).tensor, r);
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (!error) out.copy_(all[rank_]);
    Sync();
    if (error) std::rethrow_exception(error);
  }

  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    Enter({.operation = "AllGatherBytes", .bytes = &bytes});
    CheckSame(/*same_tensors=*/false);
    std::vector<std::string> all;
    for (int r = 0; r < size(); ++r) all.push_back(*group_->slot(r).bytes);
    Sync();
    return all;
  }

  std::string BroadcastBytes(const std::string& bytes, int root) override {
    comm_checks::CheckRoot(root, size(), "BroadcastBytes", rank_);
    Enter({.operation = "BroadcastBytes", .detail = root, .bytes = &bytes});
    CheckSame(/*same_tensors=*/false);
    std::string result = *group_->slot(root).bytes;
    Sync();
    return result;
  }

  void Barrier() override {
    Enter({.operation = "Barrier"});
    CheckSame(/*same_tensors=*/false);
    Sync();
  }

 private:
  void Enter(const Slot& slot) {
    ++sequence_;
    group_->slot(rank_) = slot;
    Sync();
  }

  void Sync() { group_->Sync(rank_, group_->slot(rank_).operation, sequence_); }

  static std::string DescribeSlot(const Slot& slot, bool with_tensor) {
    std::ostringstream text;
    text << slot.operation;
    if (std::string(slot.operation) == "AllReduce" ||
        std::string(slot.operation) == "ReduceScatter") {
      text << "(" << comm_checks::OpName(static_cast<ReduceOp>(slot.detail)) << ")";
    } else if (std::string(slot.operation) == "Broadcast" ||
               std::string(slot.operation) == "BroadcastBytes" ||
               std::string(slot.operation) == "Scatter") {
      text << "(root " << slot.detail << ")";
    }
    if (with_tensor && slot.tensor != nullptr) text << " " << comm_checks::Describe(*slot.tensor);
    text << comm_checks::Describe(slot.place);
    return text.str();
  }

  // Every rank sees the same slots, so either all throw or none. Ends the collective before
  // throwing.
  void CheckSame(bool same_tensors) {
    std::vector<std::string> calls;
    bool same = true;
    for (int r = 0; r < size(); ++r) {
      calls.push_back(DescribeSlot(group_->slot(r), same_tensors));
      same = same && calls[r] == calls[0];
    }
    if (same) return;
    Sync();
    TORCH_CHECK(false, "collective #", sequence_,
                ": ranks disagree: ", comm_checks::ByRanks(calls, "called", "called"));
  }

  void Reduce(ReduceOp op) {
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < size(); ++r) inputs.push_back(*group_->slot(r).tensor);
    group_->shared() = ReduceInRankOrder(inputs, op);
  }

  const std::shared_ptr<ThreadGroup> group_;
  const int rank_;
  uint64_t sequence_ = 0;
};

std::string Message(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace

std::vector<std::unique_ptr<Comm>> MakeThreadComms(int n) {
  TORCH_CHECK(n > 0, "MakeThreadComms: the number of ranks must be positive, not ", n);
  auto group = std::make_shared<ThreadGroup>(n);
  std::vector<std::unique_ptr<Comm>> comms;
  for (int rank = 0; rank < n; ++rank) comms.push_back(std::make_unique<ThreadComm>(group, rank));
  return comms;
}

void RunRanks(int n, const std::function<void(Comm&)>& fn) {
  TORCH_CHECK(n > 0, "RunRanks: the number of ranks must be positive, not ", n);
  auto group = std::make_shared<ThreadGroup>(n);
  Mutex mu;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      // Destroyed when this thread ends, which informs ranks that still wait for it.
      ThreadComm comm(group, rank);
      try {
        fn(comm);
      } catch (...) {
        const std::exception_ptr error = std::current_exception();
        {
          MutexLock lock(&mu);
          if (!first) first = error;
        }
        group->Leave(rank, "failed: " + Message(error));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace muster
