#include "worker/collective/shm_backend.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/core/ivalue.h"
#include "ATen/ops/empty.h"
#include "base/mutex.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/shm_pool.h"
#include "worker/collective/shm_reduce.h"
#include "worker/collective/shm_segment.h"

namespace muster {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Steady = std::chrono::steady_clock;

enum class Operation : uint8_t { kAllReduce = 1, kBroadcast, kAllGather, kReduceScatter, kBarrier };

const char* Name(uint8_t operation) {
  switch (static_cast<Operation>(operation)) {
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kBarrier:
      return "barrier";
  }
  return "an unknown operation";
}

// Below this, handing the work to another thread costs more than it hides.
constexpr int64_t kAtOnceBytes = 32 << 10;
// Below this, every rank adds up everything itself rather than meet a second time.
constexpr int64_t kAddAllBytes = 16 << 10;

class ShmWork : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, uint64_t sequence, Tensors outputs)
      : Work(rank, type),
        sequence_(sequence),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }

  void Done(std::exception_ptr error) {
    // The future first: a waiter of the work may use it right away.
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
    finish(error);
  }

 private:
  const uint64_t sequence_;
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class ShmBackend : public c10d::Backend {
 public:
  ShmBackend(c10::intrusive_ptr<c10d::Backend> fallback, std::shared_ptr<ShmPool> pool,
             std::unique_ptr<ShmSegment> segment, std::chrono::milliseconds timeout)
      : Backend(segment->rank(), segment->size()),
        fallback_(std::move(fallback)),
        pool_(std::move(pool)),
        segment_(std::move(segment)),
        timeout_(timeout),
        helper_([this] { Help(); }) {}

  ~ShmBackend() override {
    {
      MutexLock lock(&mu_);
      stop_ = true;
      cv_.SignalAll();
      // These have no waiters any more: do not delay the end of the process.
      if (busy_ || !tasks_.empty()) segment_->Break(c10::str("rank ", rank_, " left the group"));
    }
    helper_.join();
  }

  const std::string getBackendName() const override { return "muster-shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return fallback_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
    fallback_->setTimeout(timeout);
  }

  // Tensors that collectives work on in place.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return segment_->reaches_pools(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    at::Tensor tensor = segment_->reaches_pools() ? pool_->Allocate(size, options) : at::Tensor();
    return tensor.defined() ? tensor : at::empty({size}, options);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    ShmReduceOp op;
    if (!Suits(tensors) || !ToOp(opts.reduceOp, &op) || !CanReduce(tensors[0].scalar_type(), op)) {
      return fallback_->allreduce(tensors, opts);
    }
    const at::Tensor tensor = tensors[0];
    ShmCall call = CallFor(Operation::kAllReduce, tensor);
    call.reduction = static_cast<uint8_t>(op);
    return Start(c10d::OpType::ALLREDUCE, call, tensors, opts.timeout,
                 [this, tensor, op](const ShmCall& c, Steady::time_point deadline) {
                   AllReduce(tensor, op, c, deadline);
                 });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return fallback_->allreduce_coalesced(tensors, opts);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    if (!Suits(tensors)) return fallback_->broadcast(tensors, opts);
    const at::Tensor tensor = tensors[0];
    const int root = static_cast<int>(opts.rootRank);
    TORCH_CHECK(root >= 0 && root < size_, "broadcast: there is no rank ", root);
    ShmCall call = CallFor(Operation::kBroadcast, tensor);
    call.root = root;
    return Start(c10d::OpType::BROADCAST, call, tensors, opts.timeout,
                 [this, tensor, root](const ShmCall& c, Steady::time_point deadline) {
                   Broadcast(tensor, root, c, deadline);
                 });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    if (!Suits({input}) || !Suits({output}) || output.nbytes() != input.nbytes() * size_) {
      return fallback_->_allgather_base(output, input, opts);
    }
    std::vector<char*> outputs;
    for (int r = 0; r < size_; ++r) outputs.push_back(Data(output) + r * input.nbytes());
    return StartAllGather(c10d::OpType::_ALLGATHER_BASE, input, {output}, std::move(outputs),
                          opts.timeout);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    if (!Suits(inputs) || outputs.size() != 1 || outputs[0].size() != static_cast<size_t>(size_) ||
        !std::all_of(outputs[0].begin(), outputs[0].end(), [&](const at::Tensor& output) {
          return Suits({output}) && output.scalar_type() == inputs[0].scalar_type() &&
                 output.nbytes() == inputs[0].nbytes();
        })) {
      return fallback_->allgather(outputs, inputs, opts);
    }
    std::vector<char*> places;
    for (const at::Tensor& output : outputs[0]) places.push_back(Data(output));
    return StartAllGather(c10d::OpType::ALLGATHER, inputs[0], outputs[0], std::move(places),
                          opts.timeout);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    ShmReduceOp op;
    if (!Suits({input}) || !Suits({output}) || input.numel() != output.numel() * size_ ||
        input.scalar_type() != output.scalar_type() || !ToOp(opts.reduceOp, &op) ||
        !CanReduce(input.scalar_type(), op)) {
      return fallback_->_reduce_scatter_base(output, input, opts);
    }
    ShmCall call = CallFor(Operation::kReduceScatter, output);
    call.reduction = static_cast<uint8_t>(op);
    return Start(c10d::OpType::_REDUCE_SCATTER_BASE, call, {output}, opts.timeout,
                 [this, input, output, op](const ShmCall& c, Steady::time_point deadline) {
                   ReduceScatter(input, output, op, c, deadline);
                 });
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    ShmCall call;
    call.operation = static_cast<uint8_t>(Operation::kBarrier);
    return Start(c10d::OpType::BARRIER, call, {}, opts.timeout,
                 [this](const ShmCall& c, Steady::time_point deadline) {
                   segment_->Begin(c);
                   MeetAndCompare(c, deadline);
                 });
  }

  // Rare or point-to-point: Gloo's.
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return fallback_->allreduce_sparse(tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return fallback_->reduce(tensors, opts);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return fallback_->allgather_coalesced(outputs, inputs, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return fallback_->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    return fallback_->gather(outputs, inputs, opts);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    return fallback_->scatter(outputs, inputs, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return fallback_->reduce_scatter(outputs, inputs, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return fallback_->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& opts) override {
    return fallback_->alltoall_base(output, input, output_sizes, input_sizes, opts);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return fallback_->send(tensors, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return fallback_->recv(tensors, from, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return fallback_->recvAnysource(tensors, tag);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all) override {
    fallback_->monitoredBarrier(opts, wait_all);
  }
  void setSequenceNumberForGroup() override { fallback_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override {
    MutexLock lock(&mu_);
    return sequence_;
  }
  void abort() override { segment_->Break(c10::str("rank ", rank_, " aborted the group")); }

 private:
  using Body = std::function<void(const ShmCall&, Steady::time_point)>;
  struct Task {
    c10::intrusive_ptr<ShmWork> work;
    ShmCall call;
    std::chrono::milliseconds timeout;
    Body body;
  };

  static char* Data(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

  // One dense CPU tensor whose elements lie one after the other.
  static bool Suits(const Tensors& tensors) {
    return tensors.size() == 1 && tensors[0].defined() && tensors[0].is_cpu() &&
           tensors[0].layout() == at::kStrided && tensors[0].is_non_overlapping_and_dense();
  }

  static bool ToOp(const c10d::ReduceOp& reduce, ShmReduceOp* op) {
    switch (reduce.op_) {
      case c10d::ReduceOp::SUM:
        *op = ShmReduceOp::kSum;
        return true;
      case c10d::ReduceOp::AVG:
        *op = ShmReduceOp::kAverage;
        return true;
      case c10d::ReduceOp::MAX:
        *op = ShmReduceOp::kMax;
        return true;
      case c10d::ReduceOp::MIN:
        *op = ShmReduceOp::kMin;
        return true;
      case c10d::ReduceOp::PRODUCT:
        *op = ShmReduceOp::kProduct;
        return true;
      default:
        return false;
    }
  }

  static ShmCall CallFor(Operation operation, const at::Tensor& tensor) {
    ShmCall call;
    call.operation = static_cast<uint8_t>(operation);
    call.dtype = static_cast<uint8_t>(tensor.scalar_type());
    call.bytes = static_cast<int64_t>(tensor.nbytes());
    return call;
  }

  WorkPtr StartAllGather(c10d::OpType type, const at::Tensor& input, Tensors outputs,
                         std::vector<char*> places, std::chrono::milliseconds timeout) {
    const ShmCall call = CallFor(Operation::kAllGather, input);
    // The work keeps the outputs alive, the body the input.
    return Start(
        type, call, std::move(outputs), timeout,
        [this, input, places = std::move(places)](const ShmCall& c, Steady::time_point deadline) {
          AllGather(input, places, c, deadline);
        });
  }

  WorkPtr Start(c10d::OpType type, ShmCall call, Tensors outputs, std::chrono::milliseconds timeout,
                Body body) {
    Task task;
    {
      MutexLock lock(&mu_);
      call.sequence = ++sequence_;
      task = {c10::make_intrusive<ShmWork>(rank_, type, call.sequence, std::move(outputs)), call,
              timeout == c10d::kUnsetTimeout ? timeout_ : timeout, std::move(body)};
      const bool at_once = call.bytes <= kAtOnceBytes && tasks_.empty() && !busy_;
      if (!at_once) {
        tasks_.push_back(task);
        cv_.SignalAll();
        return task.work;
      }
      busy_ = true;
    }
    Execute(task);
    return task.work;
  }

  // With busy_ set, which makes this the only thread in the segment.
  void Execute(const Task& task) {
    std::exception_ptr error;
    try {
      at::NoGradGuard no_grad;
      task.body(task.call, Steady::now() + task.timeout);
    } catch (...) {
      error = std::current_exception();
    }
    {
      MutexLock lock(&mu_);
      busy_ = false;
      cv_.SignalAll();
    }
    task.work->Done(error);
  }

  void Help() {
    while (true) {
      Task task;
      {
        MutexLock lock(&mu_);
        while (!stop_ && (tasks_.empty() || busy_)) cv_.Wait(&mu_);
        if (tasks_.empty()) {
          if (busy_) continue;
          return;
        }
        if (busy_) continue;
        task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
      }
      Execute(task);
    }
  }

  std::string What(const ShmCall& call) const {
    return c10::str(Name(call.operation), " #", call.sequence, " of ", call.bytes, " bytes");
  }

  // Arrives, waits for all, and makes sure that all are in the same call.
  void MeetAndCompare(const ShmCall& call, Steady::time_point deadline) {
    segment_->Meet(deadline, What(call));
    bool same = true;
    for (int r = 0; r < size_; ++r) same = same && segment_->call(r) == segment_->call(0);
    if (same) return;
    std::string text = "ranks disagree about a collective:";
    for (int r = 0; r < size_; ++r) {
      const ShmCall& other = segment_->call(r);
      text += c10::str(r == 0 ? " " : "; ", "rank ", r, " called ", What(other), " of ",
                       c10::toString(static_cast<at::ScalarType>(other.dtype)));
    }
    TORCH_CHECK(false, text);
  }

  // Calls step(offset, bytes) for one slot's worth after the other, while it returns true; once if
  // there is nothing to move.
  template <class Step>
  static void ForChunks(int64_t bytes, int64_t chunk, Step step) {
    int64_t offset = 0;
    do {
      const int64_t n = std::min(chunk, bytes - offset);
      if (!step(offset, n)) return;
      offset += n;
    } while (offset < bytes);
  }

  // Where `bytes` from `data` are for all ranks, if that is worth asking.
  ShmPlace PlaceOf(const char* data, int64_t bytes) {
    if (bytes <= kAddAllBytes || !segment_->all_reach_pools()) return {};
    return pool_->Find(data, static_cast<uint64_t>(bytes));
  }

  // Where every rank's data lie, with this rank's at `data`.
  std::vector<char*> Everyones(char* data) {
    std::vector<char*> places(size_, data);
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) places[r] = segment_->At(r);
    }
    return places;
  }

  // The steps of a call whose data go through the slots, chunk by chunk, or stay where they are if
  // those of every rank lie in its pool. put(offset, bytes) writes a chunk to this rank's slot, and
  // take(offset, bytes) takes it from there once all have; in_place(places) does all at once,
  // between two meetings.
  template <class InPlace, class Put, class Take>
  void Exchange(const ShmCall& call, char* data, int64_t data_bytes, int64_t chunk,
                Steady::time_point deadline, InPlace in_place, Put put, Take take) {
    const ShmPlace mine = PlaceOf(data, data_bytes);
    bool first = true;
    ForChunks(call.bytes, chunk, [&](int64_t offset, int64_t bytes) {
      if (first && mine) {
        segment_->Begin(call, mine);
      } else {
        segment_->Begin(call);
        put(offset, bytes);
      }
      MeetAndCompare(call, deadline);
      if (first) {
        first = false;
        int placed = 0;
        for (int r = 0; r < size_; ++r) placed += segment_->place(r) ? 1 : 0;
        if (placed == size_) {
          in_place(Everyones(data));
          segment_->Meet(deadline, What(call));
          return false;
        }
        if (placed > 0) {
          // Some have written their slot and some have not: once more, all by slots.
          segment_->Begin(call);
          put(offset, bytes);
          MeetAndCompare(call, deadline);
        }
      }
      take(offset, bytes);
      return true;
    });
  }

  void AllReduce(const at::Tensor& tensor, ShmReduceOp op, const ShmCall& call,
                 Steady::time_point deadline) {
    const auto dtype = tensor.scalar_type();
    const auto width = static_cast<int64_t>(tensor.element_size());
    char* const data = Data(tensor);
    std::vector<const void*> sources(size_);
    // The part of `bytes` that this rank adds up for all.
    const auto part = [&](int64_t bytes) {
      const int64_t count = bytes / width;
      return std::make_pair(count * rank_ / size_ * width, count * (rank_ + 1) / size_ * width);
    };
    Exchange(
        call, data, call.bytes, ShmSegment::kSlotBytes, deadline,
        [&](const std::vector<char*>& places) {
          const auto [begin, end] = part(call.bytes);
          std::vector<void*> outs(size_);
          for (int r = 0; r < size_; ++r) sources[r] = outs[r] = places[r] + begin;
          ReduceArrays(dtype, op, sources, outs, (end - begin) / width);
        },
        [&](int64_t offset, int64_t bytes) { std::memcpy(segment_->slot(), data + offset, bytes); },
        [&](int64_t offset, int64_t bytes) {
          if (bytes <= kAddAllBytes) {
            for (int r = 0; r < size_; ++r) sources[r] = segment_->slot(r);
            ReduceArrays(dtype, op, sources, {data + offset}, bytes / width);
            return;
          }
          const auto [begin, end] = part(bytes);
          for (int r = 0; r < size_; ++r) sources[r] = segment_->slot(r) + begin;
          ReduceArrays(dtype, op, sources, {segment_->result() + begin}, (end - begin) / width);
          segment_->Meet(deadline, What(call));
          std::memcpy(data + offset, segment_->result(), bytes);
        });
  }

  void Broadcast(const at::Tensor& tensor, int root, const ShmCall& call,
                 Steady::time_point deadline) {
    char* const data = Data(tensor);
    // The others write nothing, so only where the root's data lie matters.
    const ShmPlace mine = rank_ == root ? PlaceOf(data, call.bytes) : ShmPlace();
    ForChunks(call.bytes, ShmSegment::kSlotBytes, [&](int64_t offset, int64_t bytes) {
      segment_->Begin(call, mine);
      if (rank_ == root && !mine) std::memcpy(segment_->slot(), data + offset, bytes);
      MeetAndCompare(call, deadline);
      if (segment_->place(root)) {
        if (rank_ != root) std::memcpy(data, segment_->At(root), call.bytes);
        segment_->Meet(deadline, What(call));
        return false;
      }
      if (rank_ != root) std::memcpy(data + offset, segment_->slot(root), bytes);
      return true;
    });
  }

  void AllGather(const at::Tensor& input, const std::vector<char*>& outputs, const ShmCall& call,
                 Steady::time_point deadline) {
    char* const data = Data(input);
    // The input may lie inside the output.
    const auto copy = [&](int r, int64_t offset, const char* from, int64_t bytes) {
      if (outputs[r] != data) std::memcpy(outputs[r] + offset, from, bytes);
    };
    Exchange(
        call, data, call.bytes, ShmSegment::kSlotBytes, deadline,
        [&](const std::vector<char*>& places) {
          for (int r = 0; r < size_; ++r) copy(r, 0, places[r], call.bytes);
        },
        [&](int64_t offset, int64_t bytes) { std::memcpy(segment_->slot(), data + offset, bytes); },
        [&](int64_t offset, int64_t bytes) {
          for (int r = 0; r < size_; ++r) copy(r, offset, segment_->slot(r), bytes);
        });
  }

  void ReduceScatter(const at::Tensor& input, const at::Tensor& output, ShmReduceOp op,
                     const ShmCall& call, Steady::time_point deadline) {
    const auto width = static_cast<int64_t>(input.element_size());
    // A slot holds a piece for every rank.
    const int64_t piece = ShmSegment::kSlotBytes / size_ / 64 * 64;
    char* const in = Data(input);
    char* const out = Data(output);
    std::vector<const void*> sources(size_);
    Exchange(
        call, in, call.bytes * size_, piece, deadline,
        [&](const std::vector<char*>& places) {
          for (int r = 0; r < size_; ++r) sources[r] = places[r] + rank_ * call.bytes;
          ReduceArrays(input.scalar_type(), op, sources, {out}, call.bytes / width);
        },
        [&](int64_t offset, int64_t bytes) {
          for (int r = 0; r < size_; ++r) {
            if (r == rank_) continue;
            std::memcpy(segment_->slot() + r * piece, in + r * call.bytes + offset, bytes);
          }
        },
        [&](int64_t offset, int64_t bytes) {
          for (int r = 0; r < size_; ++r) {
            sources[r] =
                r == rank_ ? in + rank_ * call.bytes + offset : segment_->slot(r) + rank_ * piece;
          }
          ReduceArrays(input.scalar_type(), op, sources, {out + offset}, bytes / width);
        });
  }

  const c10::intrusive_ptr<c10d::Backend> fallback_;
  const std::shared_ptr<ShmPool> pool_;  // may be null
  const std::unique_ptr<ShmSegment> segment_;
  std::chrono::milliseconds timeout_;

  Mutex mu_;
  CondVar cv_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;  // a thread is in the segment
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t sequence_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread helper_;  // last member
};

}  // namespace

bool AddShmBackend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout,
                   std::string* why) {
  auto prefixed =
      c10::make_intrusive<c10d::PrefixStore>("muster/shm/" + group->getGroupName(), store);
  std::shared_ptr<ShmPool> pool = ShmPool::Create();  // null: data are copied
  std::unique_ptr<ShmSegment> segment =
      ShmSegment::Open(prefixed, group->getRank(), group->getSize(), pool.get(), why);
  if (segment == nullptr) return false;
  auto backend = c10::make_intrusive<ShmBackend>(group->getBackend(c10::DeviceType::CPU),
                                                 std::move(pool), std::move(segment), timeout);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::static_intrusive_pointer_cast<c10d::Backend>(backend));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return true;
}

}  // namespace muster
