#include "worker/collective/engine_backend.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/core/ivalue.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "base/mutex.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace muster {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Steady = std::chrono::steady_clock;

thread_local bool next_here = false;

class EngineWork : public c10d::Work {
 public:
  EngineWork(int rank, c10d::OpType type, uint64_t sequence, Tensors outputs)
      : Work(rank, type),
        sequence_(sequence),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }

  void Done(std::exception_ptr error) {
    // Complete the future first: code that waits for the work may use it right away.
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

class EngineBackend : public c10d::Backend {
 public:
  EngineBackend(c10::intrusive_ptr<c10d::Backend> fallback,
                std::unique_ptr<CollectiveEngine> engine, std::chrono::milliseconds timeout,
                int64_t first_own_tag)
      : Backend(engine->rank(), engine->size()),
        fallback_(std::move(fallback)),
        engine_(std::move(engine)),
        first_own_tag_(first_own_tag),
        timeout_(timeout),
        helper_([this] { Help(); }) {}

  ~EngineBackend() override {
    {
      MutexLock lock(&mu_);
      stop_ = true;
      cv_.SignalAll();
      // Nothing waits for these operations any more: do not delay the end of the process.
      if (busy_ || !tasks_.empty()) engine_->Break(c10::str("rank ", rank_, " left the group"));
    }
    helper_.join();
  }

  const std::string getBackendName() const override { return engine_->name(); }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return fallback_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    {
      MutexLock lock(&mu_);
      timeout_ = timeout;
    }
    fallback_->setTimeout(timeout);
  }

  // Allocates tensors that collectives work on in place.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return engine_->allocates(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    at::Tensor tensor = engine_->allocates() ? engine_->Allocate(size, options) : at::Tensor();
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
    return Start(c10d::OpType::ALLREDUCE, call, tensors, opts,
                 [this, tensor](const ShmCall& c, Steady::time_point deadline) {
                   engine_->AllReduce(Data(tensor), c, deadline);
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
    return Start(c10d::OpType::BROADCAST, call, tensors, opts,
                 [this, tensor](const ShmCall& c, Steady::time_point deadline) {
                   engine_->Broadcast(Data(tensor), c, deadline);
                 });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    if (!Suits({input}) || !Suits({output}) || output.nbytes() != input.nbytes() * size_) {
      return fallback_->_allgather_base(output, input, opts);
    }
    std::vector<char*> outputs;
    for (int r = 0; r < size_; ++r) outputs.push_back(Data(output) + r * input.nbytes());
    return StartAllGather(c10d::OpType::_ALLGATHER_BASE, input, {output}, std::move(outputs), opts);
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
    return StartAllGather(c10d::OpType::ALLGATHER, inputs[0], outputs[0], std::move(places), opts);
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
    return Start(c10d::OpType::_REDUCE_SCATTER_BASE, call, {output}, opts,
                 [this, input, output](const ShmCall& c, Steady::time_point deadline) {
                   engine_->ReduceScatter(Data(input), Data(output), c, deadline);
                 });
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    ShmCall call;
    call.operation = static_cast<uint8_t>(Operation::kBarrier);
    return Start(
        c10d::OpType::BARRIER, call, {}, opts,
        [this](const ShmCall& c, Steady::time_point deadline) { engine_->Barrier(c, deadline); });
  }

  // Rare or point-to-point operations are left to Gloo.
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
    if (outputs.size() != 1 || inputs.size() != 1 ||
        inputs[0].size() != static_cast<size_t>(size_) || !Suits(outputs) ||
        !std::all_of(inputs[0].begin(), inputs[0].end(), [&](const at::Tensor& input) {
          return input.is_cpu() && input.scalar_type() == outputs[0].scalar_type() &&
                 input.numel() == outputs[0].numel();
        })) {
      return fallback_->reduce_scatter(outputs, inputs, opts);
    }
    at::NoGradGuard no_grad;
    Tensors flat;
    for (const at::Tensor& input : inputs[0]) flat.push_back(input.reshape({-1}));
    at::Tensor input = at::cat(flat);
    return _reduce_scatter_base(outputs[0], input, opts);
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
    CheckTag(tag);
    return fallback_->send(tensors, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    CheckTag(tag);
    return fallback_->recv(tensors, from, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    CheckTag(tag);
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
  void abort() override { engine_->Break(c10::str("rank ", rank_, " aborted the group")); }

 private:
  using Body = std::function<void(const ShmCall&, Steady::time_point)>;
  struct Task {
    c10::intrusive_ptr<EngineWork> work;
    ShmCall call;
    std::chrono::milliseconds timeout;
    Body body;
  };

  void CheckTag(int tag) const {
    TORCH_CHECK(tag < first_own_tag_, "send and receive: the tags from ", first_own_tag_,
                " on are those of collectives between hosts, so tag ", tag, " cannot be used");
  }

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

  template <class Options>
  WorkPtr StartAllGather(c10d::OpType type, const at::Tensor& input, Tensors outputs,
                         std::vector<char*> places, const Options& opts) {
    const ShmCall call = CallFor(Operation::kAllGather, input);
    // The work keeps the outputs alive, the body keeps the input.
    return Start(
        type, call, std::move(outputs), opts,
        [this, input, places = std::move(places)](const ShmCall& c, Steady::time_point deadline) {
          engine_->AllGather(Data(input), places, c, deadline);
        });
  }

  template <class Options>
  WorkPtr Start(c10d::OpType type, ShmCall call, Tensors outputs, const Options& opts, Body body) {
    Task task;
    {
      MutexLock lock(&mu_);
      call.sequence = ++sequence_;
      task = {c10::make_intrusive<EngineWork>(rank_, type, call.sequence, std::move(outputs)), call,
              opts.timeout == c10d::kUnsetTimeout ? timeout_ : opts.timeout, std::move(body)};
      // If the caller waits for it, another thread can hide nothing.
      const bool waited_for = std::exchange(next_here, false) || !opts.asyncOp;
      const bool at_once =
          (waited_for || call.bytes <= engine_->at_once_bytes()) && tasks_.empty() && !busy_;
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

  // Called with busy_ set, which makes this the only thread in the engine.
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
      // Wake the helper only if it has work: otherwise it takes the core of a thread that computes.
      if (stop_ || !tasks_.empty()) cv_.SignalAll();
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

  const c10::intrusive_ptr<c10d::Backend> fallback_;
  const std::unique_ptr<CollectiveEngine> engine_;
  const int64_t first_own_tag_;

  Mutex mu_;
  CondVar cv_;
  std::chrono::milliseconds timeout_ ABSL_GUARDED_BY(mu_);
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;  // a thread is in the engine
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t sequence_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread helper_;  // last member
};

}  // namespace

void StartNextHere() { next_here = true; }

bool IsEngineBackend(const c10d::Backend& backend) {
  return dynamic_cast<const EngineBackend*>(&backend) != nullptr;
}

c10::intrusive_ptr<c10d::Backend> MakeEngineBackend(c10::intrusive_ptr<c10d::Backend> fallback,
                                                    std::unique_ptr<CollectiveEngine> engine,
                                                    std::chrono::milliseconds timeout,
                                                    int64_t first_own_tag) {
  return c10::make_intrusive<EngineBackend>(std::move(fallback), std::move(engine), timeout,
                                            first_own_tag);
}

}  // namespace muster
