// GCC 12 takes what <regex> moves for uninitialized when it builds for sanitizers.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "worker/parallel/ddp.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <optional>
#include <regex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/zeros_like.h"
#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "torch/csrc/distributed/c10d/logger.hpp"
#include "torch/csrc/distributed/c10d/reducer.hpp"
#include "worker/collective/engine_backend.h"
#include "worker/collective/on_all.h"
#include "worker/collective/progress_board.h"
#include "worker/parallel/coalesce.h"
#include "worker/parallel/comm_hooks.h"
#include "worker/parallel/gradient_observers.h"
#include "worker/parallel/same_model.h"

namespace muster {
namespace {

constexpr size_t kUnbounded = std::numeric_limits<size_t>::max();

// Joins all outputs in one node of the graph, so that outputs left out of the loss pass undefined
// gradients on and every parameter behind them takes part.
struct Sink : public torch::autograd::Function<Sink> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                at::TensorList outputs) {
    context->set_materialize_grads(false);
    // Copies, because a view from a function with several outputs may not be changed in place.
    torch::autograd::variable_list copies;
    for (const at::Tensor& output : outputs) copies.push_back(output.clone());
    return copies;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list grads) {
    return grads;
  }
};

// The Reducer of c10d, with access to its private state about the progress of a backward pass.
class Reducer : public c10d::Reducer {
 public:
  using c10d::Reducer::Reducer;

  // Whether it is between the forward pass that communicates and the end of its reduction.
  bool expecting() const { return expect_autograd_hooks_; }
  // Whether rebuild_buckets() has something to do.
  bool rebuilds() const { return should_rebuild_buckets() && !rebuilt_params_.empty(); }
  // How many buckets have been launched.
  size_t launched() const { return next_bucket_; }
  size_t num_buckets() const { return buckets_.size(); }

  void Show(ProgressBoard& board, size_t bucket) const {
    const Bucket& shown = buckets_[bucket];
    // A sparse bucket has no flat tensor before its gradient has arrived.
    const at::Tensor& tensor =
        shown.expect_sparse_gradient ? shown.variables.front() : shown.gradients;
    board.SetBucket(static_cast<int>(bucket) + 1, static_cast<int>(buckets_.size()), tensor.numel(),
                    c10::toString(tensor.scalar_type()));
  }

  // Moves the buckets to memory in which `group` exchanges them without copies, if it has such
  // memory. The constructor does that for NCCL under DDP_DISABLE_COMM_MEM=0, a variable of the
  // whole process. The buckets are new: nothing has been written to them but gradients that are
  // views of them.
  void ShareBuckets(c10d::ProcessGroup& group) {
    for (Bucket& bucket : buckets_) {
      if (bucket.expect_sparse_gradient || !bucket.gradients.is_cpu()) continue;
      c10d::Backend& backend = *group.getBackend(c10::DeviceType::CPU);
      if (!backend.supportsTensorAlloc(bucket.gradients.device().index())) return;
      bucket.gradients =
          backend.allocateTensor(bucket.gradients.numel(), bucket.gradients.options());
      bucket.bucket_views_in.clear();
      bucket.bucket_views_out.clear();
      initialize_bucket_views(bucket);
    }
  }

  // Waits for the buckets in the order in which finalize_backward() does, and shows on `board` the
  // one that it waits for. A failed bucket stays there: finalize_backward() throws its error.
  void AwaitBuckets(ProgressBoard& board) const {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (buckets_[b].future_work == nullptr) return;
      Show(board, b);
      buckets_[b].future_work->wait();
      if (buckets_[b].future_work->hasError()) return;
    }
  }
};

}  // namespace

class DataParallel::Impl {
 public:
  Impl(Comm& comm, std::vector<at::Tensor> parameters, std::vector<std::string> names,
       std::vector<at::Tensor> buffers, const DataParallelOptions& options,
       std::vector<bool> sparse)
      : comm_(comm), board_(comm.board()), options_(options), buffers_(std::move(buffers)) {
    TORCH_CHECK(parameters.size() == names.size(), "got ", names.size(), " names for ",
                parameters.size(), " parameters");
    TORCH_CHECK(sparse.empty() || sparse.size() == parameters.size(), "got ", sparse.size(),
                " marks of sparse gradients for ", parameters.size(), " parameters");
    TORCH_CHECK(options.bucket_cap_mb > 0, "bucket_cap_mb must be above 0, got ",
                options.bucket_cap_mb);
    const bool built_in_hook =
        options.comm_hook != CommHook::kNone || options.comm_wrapper != CommWrapper::kNone;
    TORCH_CHECK(options.gradient_hook == nullptr || !built_in_hook,
                "gradient_hook and comm_hook or comm_wrapper exclude each other: keep one of them");
    std::unordered_set<const void*> seen;
    for (size_t i = 0; i < parameters.size(); ++i) {
      TORCH_CHECK(parameters[i].defined(), "parameter '", names[i], "' is undefined");
      if (!seen.insert(parameters[i].unsafeGetTensorImpl()).second) continue;
      all_.push_back(parameters[i]);
      names_.push_back(std::move(names[i]));
      sparse_.push_back(!sparse.empty() && sparse[i]);
      kinds_.push_back({parameters[i].scalar_type(), parameters[i].device()});
    }
    trains_.resize(all_.size());
    local_.resize(all_.size());
    for (size_t i = 0; i < all_.size(); ++i) trains_[i] = all_[i].requires_grad();
    if (comm_.size() == 1) return;
    VerifySameModel(comm_, all_, names_, sparse_, /*frozen_too=*/false);
    if (const std::string name = sparse_parameter(); !name.empty()) {
      TORCH_CHECK(!built_in_hook && options.gradient_hook == nullptr, "parameter '", name,
                  "' has a sparse gradient, which communication hooks cannot exchange: turn the "
                  "hook off, or make the embedding dense (sparse(false))");
    }
    if (options_.init_sync) BroadcastModel(0);
    c10d::ProcessGroup* group = comm_.process_group();
    if (group != nullptr) {
      group_ = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(group);
      // The counter of rank 0's process, because threads of one process share it.
      static std::atomic<uint64_t> count{0};
      id_ = comm_.BroadcastBytes(std::to_string(++count), 0);
    }
    TORCH_CHECK(group_ != nullptr || options.gradient_hook == nullptr,
                "gradient_hook needs a process group, and these ranks are threads without one");
    // The Reducer's buckets are as large as the gradients.
    OnAll(comm_, "exchange gradients", [this] { StartExchange(); });
  }

  void BeforeForward(bool communicate) {
    communicate_ = communicate;
    if (comm_.size() == 1) return;
    if (announced_ == true && AllFrozen()) {
      // The ranks without batches learn of this before the next micro-step. In this one they wait
      // for its exchange.
      announced_.reset();
      if (communicate) ExchangeZeros();
    }
    if (!c10::GradMode::is_enabled()) return;
    PreparePass();
    announced_.reset();
    // The Reducer learns a static graph from the first backward pass, so it must reduce that pass.
    // Reducing early does no harm: the mean of a mean is the mean.
    if (options_.static_graph && !delay_enqueued_) communicate_ = true;
    if (reducer_ != nullptr && communicate_ && !idle_) reducer_->prepare_for_forward();
  }

  std::vector<at::Tensor> PassOutputs(std::vector<at::Tensor> outputs) {
    if (comm_.size() == 1 || !c10::GradMode::is_enabled()) return outputs;
    if (!communicate_ || idle_) return outputs;
    const bool find_unused = options_.find_unused_parameters && !options_.static_graph;
    Arm(find_unused ? outputs : std::vector<at::Tensor>{});
    if (reducer_ == nullptr) return outputs;
    const bool first_static = options_.static_graph && !delay_enqueued_;
    if (find_unused || first_static) outputs = ThroughSink(std::move(outputs));
    if (first_static) DelayFirstReduction(outputs);
    return outputs;
  }

  void ArmBackward() {
    communicate_ = true;
    if (comm_.size() > 1 && !idle_) Arm({});
  }

  void ArmAgain() {
    if (comm_.size() == 1 || idle_) return;
    if (reducer_ == nullptr) {
      if (!armed_) Arm({});
      return;
    }
    if (reducer_->expecting() || options_.find_unused_parameters || options_.static_graph) return;
    // The Reducer rebuilds its buckets according to the previous pass; two passes would be too
    // many.
    FinishPrior();
    Arm({});
  }

  std::vector<std::string> UnexchangedGradients() {
    std::vector<std::string> result;
    if (comm_.size() == 1) return result;
    if (reducer_ != nullptr) Guarded([&] { reducer_->check_finalized(); });
    const bool open = reducer_ != nullptr && reducer_->expecting();
    for (size_t i = 0; i < all_.size(); ++i) {
      const bool pending =
          trains_[i] ? IsLocal(i, open) : local_[i] != 0 || all_[i].requires_grad();
      if (pending && all_[i].grad().defined()) result.push_back(names_[i]);
    }
    return result;
  }

  void ForgetPending() { std::fill(local_.begin(), local_.end(), 0); }

  void ForgetPending(const std::vector<at::Tensor>& parameters) {
    std::unordered_set<const void*> zeroed;
    for (const at::Tensor& parameter : parameters) zeroed.insert(parameter.unsafeGetTensorImpl());
    for (size_t i = 0; i < all_.size(); ++i) {
      if (local_[i] != 0 && zeroed.count(all_[i].unsafeGetTensorImpl()) != 0) local_[i] = 0;
    }
  }

  void Shadow(bool communicate) {
    if (comm_.size() == 1) return;
    TORCH_CHECK(!options_.static_graph,
                "uneven inputs and static_graph do not go together: turn one off");
    announced_.reset();
    PreparePass();
    if (!communicate) {
      announced_ = !idle_;
    } else if (!idle_) {
      ExchangeZeros();
    }
  }

  void BroadcastModel(int root) {
    std::vector<at::Tensor> model = all_;
    model.insert(model.end(), buffers_.begin(), buffers_.end());
    BroadcastCoalesced(comm_, model, root);
  }

  // Each micro-step of UnevenInputs begins with this, and so does what follows them.
  void set_buffer_root(int rank) {
    buffer_root_ = rank;
    announced_.reset();
  }
  void set_loss_scale(const at::Tensor& scale) {
    const bool counts = options_.comm_hook == CommHook::kPowerSgd ||
                        options_.comm_hook == CommHook::kBatchedPowerSgd;
    if (counts) power_sgd_state_->loss_scale = scale.clone();
  }
  const DataParallelOptions& options() const { return options_; }
  const std::vector<at::Tensor>& parameters() const { return all_; }
  std::string sparse_parameter() const {
    const auto first = std::find(sparse_.begin(), sparse_.end(), true);
    return first == sparse_.end() ? "" : names_[first - sparse_.begin()];
  }

 private:
  Comm& comm_;
  ProgressBoard* const board_;  // may be null
  const DataParallelOptions options_;
  // All parameters, frozen or not.
  std::vector<at::Tensor> all_;
  std::vector<std::string> names_;
  std::vector<bool> sparse_;
  std::vector<std::pair<at::ScalarType, c10::Device>> kinds_;
  std::vector<bool> trains_;  // whether parameter i is in trained_
  // The value of arms_ when a gradient was last added that no armed exchange includes; 0: none.
  // Written inside the backward pass.
  std::vector<uint32_t> local_;
  std::vector<at::Tensor> trained_;
  std::vector<size_t> trained_index_;  // in all_
  // The nodes that accumulate the gradients of trained_, and have the hooks of the exchange.
  std::vector<const torch::autograd::Node*> accumulators_;
  const std::vector<at::Tensor> buffers_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string id_;  // unique in the group's store, the same on all ranks
  const std::shared_ptr<PowerSgdState> power_sgd_state_ = std::make_shared<PowerSgdState>();
  std::shared_ptr<Reducer> reducer_;
  // Without a logger the Reducer crashes when the unused parameters are not those of the previous
  // step.
  std::shared_ptr<c10d::Logger> logger_;
  GradientObservers observers_;
  int buffer_root_ = 0;
  uint64_t changes_ = 0;  // of requires_grad, so far
  uint32_t arms_ = 1;     // exchanges armed so far, plus one
  bool communicate_ = true;
  bool idle_ = false;  // every parameter is frozen at present
  // In a micro-step that ranks without batches mirror, until its first pass: whether they exchange
  // gradients in it.
  std::optional<bool> announced_;
  bool armed_ = false;    // without a Reducer: the value of Reducer::expecting()
  bool open_ = false;     // the first gradient of the armed exchange has arrived
  bool closing_ = false;  // the end of the exchange is queued
  size_t shown_ = 0;      // its buckets that the board has shown as launched
  size_t arrived_ = 0;    // gradients of the armed exchange
  bool delay_enqueued_ = false;

  // Whether the gradient of a parameter in trained_ contains values that were not exchanged.
  // `open`: an armed exchange is not finished. Values added before the last one was armed were
  // exchanged with it, because with find_unused_parameters the Reducer notes uses in all
  // micro-steps of a window. Only the Reducer of a static graph exchanges no more than what the
  // first backward pass used.
  bool IsLocal(size_t i, bool open) const {
    return local_[i] != 0 && (local_[i] == arms_ || open || options_.static_graph);
  }

  // Builds the exchange for the parameters that are trained now.
  void StartExchange() {
    const bool open = reducer_ != nullptr && reducer_->expecting();
    for (size_t i = 0; i < all_.size(); ++i) {
      if (trains_[i] && !IsLocal(i, open)) local_[i] = 0;
    }
    observers_.Clear();
    logger_.reset();
    reducer_.reset();
    trained_.clear();
    trained_index_.clear();
    accumulators_.clear();
    armed_ = open_ = closing_ = delay_enqueued_ = false;
    for (size_t i = 0; i < all_.size(); ++i) {
      trains_[i] = all_[i].requires_grad();
      if (!trains_[i]) continue;
      trained_.push_back(all_[i]);
      trained_index_.push_back(i);
    }
    idle_ = trained_.empty();
    if (idle_) return;
    // The Reducer's hooks are between these observers and those below.
    for (const size_t i : trained_index_) {
      observers_.Add(all_[i],
                     [this, i](const at::Tensor& gradient) { BeforeReducer(i, gradient); });
      // The observer keeps the node alive.
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(all_[i]).get());
    }
    if (group_ != nullptr) MakeReducer();
    for (const size_t i : trained_index_) {
      observers_.Add(all_[i], [this, i](const at::Tensor& gradient) { OnGradient(i, gradient); });
    }
  }

  void MakeReducer() {
    const auto cap = static_cast<int64_t>(options_.bucket_cap_mb * 1024 * 1024);
    std::vector<bool> sparse;
    std::unordered_map<size_t, std::string> names;
    for (size_t t = 0; t < trained_.size(); ++t) {
      sparse.push_back(sparse_[trained_index_[t]]);
      names[t] = names_[trained_index_[t]];
    }
    // Without find_unused the Reducer rebuilds its buckets after the first backward pass, in the
    // order in which gradients arrived, so the first assignment is one bucket per device and dtype.
    std::vector<size_t> limits = {kUnbounded};
    const int64_t first_cap = std::min<int64_t>(c10d::kDefaultFirstBucketBytes, cap);
    if (options_.find_unused_parameters && !options_.static_graph) {
      limits = {static_cast<size_t>(first_cap), static_cast<size_t>(cap)};
    }
    auto [buckets, bucket_limits] =
        c10d::compute_bucket_assignment_by_size(trained_, limits, sparse);
    std::reverse(buckets.begin(), buckets.end());
    reducer_ = std::make_shared<Reducer>(trained_, std::move(buckets), group_, std::move(sparse),
                                         cap, options_.find_unused_parameters,
                                         options_.gradient_as_bucket_view, std::move(names),
                                         first_cap, /*skip_all_reduce_unused_params=*/false,
                                         /*use_python_reducer=*/false, std::vector<int64_t>{});
    reducer_->ShareBuckets(*group_);
    logger_ = std::make_shared<c10d::Logger>(reducer_);
    reducer_->set_logger(logger_);
    if (options_.static_graph) reducer_->set_static_graph();
    if (options_.gradient_hook != nullptr) {
      reducer_->register_comm_hook(MakeGradientHook(options_.gradient_hook, group_));
    } else if (auto hook = MakeCommHook(options_.comm_hook, options_.comm_wrapper,
                                        options_.power_sgd, group_, power_sgd_state_)) {
      reducer_->register_comm_hook(std::move(hook));
    } else if (BackendAverages()) {
      reducer_->register_comm_hook(MakeAverageHook(group_));
    }
  }

  // Whether the backend can average the gradients of all trained parameters; the same on every
  // rank.
  bool BackendAverages() const {
    return std::all_of(trained_index_.begin(), trained_index_.end(),
                       [this](size_t i) {
                         return all_[i].is_cpu() && at::isFloatingType(all_[i].scalar_type()) &&
                                !sparse_[i];
                       }) &&
           IsEngineBackend(*group_->getBackend(c10::DeviceType::CPU));
  }

  // Takes part in an exchange of the others with zeros.
  void ExchangeZeros() {
    if (reducer_ == nullptr) {
      std::vector<at::Tensor> zeros;
      for (const at::Tensor& parameter : trained_) zeros.push_back(at::zeros_like(parameter));
      AllReduceCoalesced(comm_, zeros, ReduceOp::kMean);
      SyncBuffers();
      return;
    }
    std::vector<c10d::GradBucket> buckets =
        reducer_->get_grad_buckets(/*return_zero_tensors=*/true);
    BeginOnBoard();
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> work;
    for (c10d::GradBucket& bucket : buckets) work.push_back(reducer_->run_comm_hook(bucket));
    if (options_.find_unused_parameters) {
      at::Tensor unused = at::zeros_like(reducer_->get_local_used_map_on_device());
      std::vector<at::Tensor> list = {unused};
      group_->allreduce(list)->wait();
    }
    for (size_t b = 0; b < work.size(); ++b) {
      if (board_ != nullptr) reducer_->Show(*board_, b);
      work[b]->waitAndThrow();
    }
    if (board_ != nullptr) board_->EndCollective();
    reducer_->push_rebuilt_params_for_all_indices();
    SyncBuffers();
  }

  bool AllFrozen() const {
    return std::none_of(all_.begin(), all_.end(),
                        [](const at::Tensor& parameter) { return parameter.requires_grad(); });
  }

  // Every rank does this at the start of a micro-step, with or without a batch.
  void PreparePass() {
    if (!AllFrozen()) {
      FinishPrior();
    } else if (reducer_ != nullptr) {
      // Nothing is exchanged, not even the buckets: ranks may or may not use a model that is
      // frozen.
      Guarded([&] { reducer_->check_finalized(); });
    }
    FollowParameters();
  }

  void FinishPrior() {
    if (reducer_ == nullptr) return;
    // The ranks adopt, once, rank 0's assignment of parameters to buckets.
    std::optional<CollectiveOnBoard> rebuild;
    if (board_ != nullptr && reducer_->rebuilds()) {
      rebuild.emplace(*board_, "Broadcast", static_cast<int64_t>(trained_.size()),
                      "bucket indices");
    }
    Guarded([&] {
      if (reducer_->rebuild_buckets()) reducer_->ShareBuckets(*group_);
    });
  }

  // Notices parameters that were frozen, unfrozen, converted or moved since the last forward pass.
  void FollowParameters() {
    bool any = false;
    bool changed = false;
    for (size_t i = 0; i < all_.size(); ++i) {
      const at::Tensor& parameter = all_[i];
      const bool trains = parameter.requires_grad();
      any |= trains;
      changed |= trains != trains_[i];
      TORCH_CHECK(
          parameter.scalar_type() == kinds_[i].first && parameter.device() == kinds_[i].second,
          "parameter '", names_[i], "' is ", parameter.scalar_type(), " on ", parameter.device(),
          " now but was ", kinds_[i].first, " on ", kinds_[i].second,
          " when its gradient exchange was set up: convert and move the model before that");
    }
    // set_() gives a tensor a new accumulator, without hooks: each rank would train alone.
    for (size_t t = 0; t < trained_.size(); ++t) {
      TORCH_CHECK(
          torch::autograd::impl::try_get_grad_accumulator(trained_[t]).get() == accumulators_[t],
          "parameter '", names_[trained_index_[t]],
          "' has been given other memory since its gradient exchange was set up "
          "(torch::load(module), set_(), resize_()), and its gradients would not be exchanged: "
          "load weights before prepare() or with accelerator.load_weights(), or copy_() them");
    }
    // As for the discriminator while a GAN's generator trains: it will be trained again later,
    // unchanged.
    idle_ = !any;
    if (idle_) return;
    CheckAsAnnounced();
    if (!changed) return;
    AgreeOnTrained();
    // All ranks are here, and strides may have changed too.
    VerifySameModel(comm_, all_, names_, sparse_, /*frozen_too=*/false);
    StartExchange();
  }

  // Throws if parameters were frozen or unfrozen since this micro-step was announced.
  void CheckAsAnnounced() const {
    if (!announced_.has_value()) return;
    for (size_t i = 0; i < all_.size(); ++i) {
      TORCH_CHECK(all_[i].requires_grad() == (*announced_ && trains_[i]), "rank ", comm_.rank(),
                  " changed requires_grad of parameter '", names_[i],
                  "' after accumulate() inside join_uneven_inputs(), and the ranks that have run "
                  "out of batches exchange the gradients of before: freeze and unfreeze parameters "
                  "before accumulate()");
    }
  }

  // Throws if the ranks do not all train the same parameters from here on.
  void AgreeOnTrained() {
    std::string mine, toggled;
    for (size_t i = 0; i < all_.size(); ++i) {
      mine += all_[i].requires_grad() ? '1' : '0';
      if (toggled.empty() && all_[i].requires_grad() != trains_[i]) toggled = names_[i];
    }
    ++changes_;
    std::vector<std::string> all;
    if (group_ == nullptr) {
      all = comm_.AllGatherBytes(mine);
    } else {
      // Through the store and not in a collective: a rank on which nothing changed continues to its
      // backward pass, and would run a different operation there.
      const c10::intrusive_ptr<c10d::Store> store = group_->getStore();
      const auto key = [&](uint64_t change, int rank) {
        return "muster/trained/" + id_ + "/" + std::to_string(change) + "/" + std::to_string(rank);
      };
      std::vector<std::string> keys;
      for (int rank = 0; rank < comm_.size(); ++rank) keys.push_back(key(changes_, rank));
      const std::chrono::milliseconds timeout =
          group_->getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
      store->set(keys[comm_.rank()], std::vector<uint8_t>(mine.begin(), mine.end()));
      // If a rank gets here, all ranks have read the keys of two changes ago.
      if (changes_ > 2) store->deleteKey(key(changes_ - 2, comm_.rank()));
      try {
        store->wait(keys, timeout);
      } catch (const c10::Error&) {
        std::string absent;
        for (int rank = 0; rank < comm_.size(); ++rank) {
          if (store->check({keys[rank]})) continue;
          absent += (absent.empty() ? "rank " : ", rank ") + std::to_string(rank);
        }
        TORCH_CHECK(absent.empty(), "rank ", comm_.rank(), " changed requires_grad of parameter '",
                    toggled, "' before this forward pass, but ", absent, " changed none within ",
                    timeout.count(),
                    " ms: freeze and unfreeze the same parameters on every rank at the same step");
      }
      for (const std::string& each : keys) {
        const std::vector<uint8_t> bytes = store->get(each);
        all.emplace_back(bytes.begin(), bytes.end());
      }
    }
    for (int rank = 1; rank < comm_.size(); ++rank) {
      for (size_t i = 0; i < all_.size(); ++i) {
        TORCH_CHECK(all[rank][i] == all[0][i], "the ranks train different parameters: '", names_[i],
                    "' is ", all[0][i] == '1' ? "trained" : "frozen", " on rank 0 and ",
                    all[rank][i] == '1' ? "trained" : "frozen", " on rank ", rank,
                    "; freeze and unfreeze the same parameters on every rank at the same step");
      }
    }
  }

  // Makes the next backward pass through the model reduce.
  void Arm(const std::vector<at::Tensor>& outputs) {
    ++arms_;
    open_ = closing_ = false;
    shown_ = arrived_ = 0;
    if (reducer_ == nullptr) {
      armed_ = true;
      return;
    }
    Guarded([&] { reducer_->prepare_for_backward(outputs); });
  }

  void CheckLayout(size_t i, const at::Tensor& gradient) const {
    if (!gradient.defined() || gradient.is_sparse() == sparse_[i]) return;
    TORCH_CHECK(sparse_[i], "parameter '", names_[i],
                "' got a sparse gradient, but its exchange was set up for a dense one: use a "
                "torch::nn::Embedding or EmbeddingBag with sparse(true), or a dense gradient");
    TORCH_CHECK(false, "parameter '", names_[i],
                "' belongs to a sparse embedding but got a dense gradient: do not use it in other "
                "layers too, or make the embedding dense (sparse(false))");
  }

  // Called in the backward pass after a gradient was added to that of parameter i, and before the
  // Reducer learns of it.
  void BeforeReducer(size_t i, const at::Tensor& gradient) {
    // The Reducer's message about layouts would name no parameter.
    CheckLayout(i, gradient);
    // This gradient completes the last bucket; next the pass waits for that bucket.
    if (reducer_ != nullptr && reducer_->expecting() && ++arrived_ == trained_.size()) {
      StartNextHere();
    }
  }

  // The same after the Reducer, to detect the last gradient. Both are called for every parameter in
  // every backward pass: keep them at nanoseconds.
  void OnGradient(size_t i, const at::Tensor& gradient) {
    if (!(reducer_ != nullptr ? reducer_->expecting() : armed_)) {
      if (gradient.defined()) local_[i] = arms_;
      return;
    }
    local_[i] = 0;
    if (!open_) {
      open_ = true;
      if (reducer_ == nullptr) {
        AtEndOfBackward([this] { ReduceWithoutReducer(); });
      } else if (board_ != nullptr) {
        BeginOnBoard();
        AtEndOfBackward([this] { AwaitBuckets(); });
      }
    }
    if (reducer_ == nullptr) return;
    const size_t launched = reducer_->launched();
    if (launched == shown_) return;
    shown_ = launched;
    const size_t buckets = reducer_->num_buckets();
    // Once all buckets are launched, the pass waits for the first one.
    if (board_ != nullptr) reducer_->Show(*board_, launched < buckets ? launched : 0);
    if (launched == buckets && !closing_) {
      closing_ = true;
      // Right after the Reducer's callback, which waits for the buckets.
      AtEndOfBackward([this] { CloseExchange(); });
    }
  }

  // Shows the exchange as one collective on the board, with the bucket that is filled or waited
  // for.
  void BeginOnBoard() {
    if (board_ == nullptr) return;
    board_->BeginCollective(options_.gradient_hook != nullptr ? "gradient_hook" : "AllReduce", 0,
                            "");
    reducer_->Show(*board_, 0);
  }

  // Runs right before the Reducer's own wait, which does not report what it waits for. (If the
  // first gradient launches the last bucket, the Reducer runs first; nothing is left to wait for
  // then.)
  void AwaitBuckets() {
    if (reducer_->launched() == reducer_->num_buckets()) reducer_->AwaitBuckets(*board_);
  }

  // The last part of an exchange: afterwards gradients and buffers of all ranks are equal.
  void CloseExchange() {
    if (board_ != nullptr && reducer_ != nullptr) board_->EndCollective();
    SyncBuffers();
  }

  void SyncBuffers() {
    if (!options_.broadcast_buffers || buffers_.empty()) return;
    // Does not count as a change in place, because another forward pass that read the buffers, as
    // BatchNorm does, may not have run backward yet.
    std::vector<at::Tensor> data;
    data.reserve(buffers_.size());
    for (const at::Tensor& buffer : buffers_) data.push_back(buffer.variable_data());
    BroadcastCoalesced(comm_, data, buffer_root_);
  }

  static std::vector<at::Tensor> ThroughSink(std::vector<at::Tensor> outputs) {
    torch::autograd::variable_list live;
    for (const at::Tensor& output : outputs) {
      if (output.defined() && output.requires_grad()) live.push_back(output);
    }
    if (live.empty()) return outputs;
    live = Sink::apply(at::TensorList(live));
    size_t next = 0;
    for (at::Tensor& output : outputs) {
      if (output.defined() && output.requires_grad()) output = live[next++];
    }
    return outputs;
  }

  // The first backward pass of a static graph only counts gradients; without this, nothing would be
  // reduced in it and the ranks would drift apart.
  void DelayFirstReduction(const std::vector<at::Tensor>& outputs) {
    auto queued = std::make_shared<bool>(false);
    std::weak_ptr<Reducer> weak = reducer_;
    for (const at::Tensor& output : outputs) {
      if (!output.defined() || !output.requires_grad()) continue;
      output.register_hook([this, queued, weak](const at::Tensor&) {
        if (*queued) return;
        *queued = true;
        AtEndOfBackward([this, weak] {
          const auto reducer = weak.lock();
          if (reducer == nullptr) return;
          delay_enqueued_ = true;
          reducer->delay_all_reduce();
          CloseExchange();
        });
      });
    }
  }

  void ReduceWithoutReducer() {
    std::vector<at::Tensor> grads;
    for (size_t t = 0; t < trained_.size(); ++t) {
      at::Tensor& grad = trained_[t].mutable_grad();
      // Every rank must bring the same tensors: a parameter that was not used here brings zeros.
      if (!grad.defined()) {
        grad = at::zeros_like(trained_[t]);
      } else if (grad.is_sparse()) {
        grad = grad.to_dense();
      }
      grads.push_back(grad);
    }
    AllReduceCoalesced(comm_, grads, ReduceOp::kMean);
    for (size_t t = 0; t < trained_.size(); ++t) {
      if (sparse_[trained_index_[t]]) trained_[t].mutable_grad() = grads[t].to_sparse(1);
    }
    armed_ = false;
    ForgetPending();
    CloseExchange();
  }

  // Rewords the Reducer's error about parameters that got no gradient.
  template <typename Fn>
  void Guarded(Fn fn) {
    try {
      fn();
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      if (text.find("Expected to have finished reduction") == std::string::npos) throw;
      std::string missing;
      std::smatch match;
      if (std::regex_search(
              text, match,
              std::regex("indices which did not receive grad for rank [0-9]+: ([0-9 ]+)"))) {
        std::istringstream indices(match[1].str());
        for (size_t i; indices >> i;) {
          if (i >= trained_index_.size()) continue;
          missing += (missing.empty() ? "" : ", ") + names_[trained_index_[i]];
        }
      }
      TORCH_CHECK(
          false, "rank ", comm_.rank(), ": parameters ", missing.empty() ? "of the model" : missing,
          " got no gradient in the last backward pass, so their averages were never finished. Use "
          "all "
          "parameters in the loss, set requires_grad(false) on those that are not trained, or set "
          "find_unused_parameters");
    }
  }
};

DataParallel::DataParallel(Comm& comm, std::vector<at::Tensor> parameters,
                           std::vector<std::string> names, std::vector<at::Tensor> buffers,
                           const DataParallelOptions& options, std::vector<bool> sparse)
    : impl_(std::make_unique<Impl>(comm, std::move(parameters), std::move(names),
                                   std::move(buffers), options, std::move(sparse))) {}
DataParallel::~DataParallel() = default;

void DataParallel::BeforeForward(bool communicate) { impl_->BeforeForward(communicate); }
std::vector<at::Tensor> DataParallel::PassOutputs(std::vector<at::Tensor> outputs) {
  return impl_->PassOutputs(std::move(outputs));
}
void DataParallel::ArmBackward() { impl_->ArmBackward(); }
void DataParallel::ArmAgain() { impl_->ArmAgain(); }
std::vector<std::string> DataParallel::UnexchangedGradients() {
  return impl_->UnexchangedGradients();
}
void DataParallel::ForgetPending() { impl_->ForgetPending(); }
void DataParallel::ForgetPending(const std::vector<at::Tensor>& parameters) {
  impl_->ForgetPending(parameters);
}
void DataParallel::Shadow(bool communicate) { impl_->Shadow(communicate); }
void DataParallel::set_buffer_root(int rank) { impl_->set_buffer_root(rank); }
void DataParallel::set_loss_scale(const at::Tensor& scale) { impl_->set_loss_scale(scale); }
void DataParallel::BroadcastModel(int root) { impl_->BroadcastModel(root); }
std::string DataParallel::sparse_parameter() const { return impl_->sparse_parameter(); }
const DataParallelOptions& DataParallel::options() const { return impl_->options(); }
const std::vector<at::Tensor>& DataParallel::parameters() const { return impl_->parameters(); }

}  // namespace muster
