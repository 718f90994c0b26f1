#include "worker/parallel/ddp.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <regex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/zeros_like.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/reducer.hpp"
#include "worker/parallel/coalesce.h"

namespace muster {
namespace {

constexpr size_t kUnbounded = std::numeric_limits<size_t>::max();

// Joins all outputs in one node of the graph, so that outputs left out of the loss pass undefined
// gradients on and every parameter behind them is heard of.
struct Sink : public torch::autograd::Function<Sink> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                at::TensorList outputs) {
    context->set_materialize_grads(false);
    // Copies, since a view from a function of several outputs may not be changed in place.
    torch::autograd::variable_list copies;
    for (const at::Tensor& output : outputs) copies.push_back(output.clone());
    return copies;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list grads) {
    return grads;
  }
};

std::string Describe(const at::Tensor& tensor, const std::string& name) {
  std::ostringstream out;
  out << name << '\n' << tensor.sizes() << ' ' << tensor.scalar_type();
  if (!tensor.requires_grad()) out << " without gradient";
  return out.str();
}

std::vector<std::string> SplitRecords(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find('\0', begin)) != std::string::npos; begin = end + 1) {
    parts.push_back(text.substr(begin, end - begin));
  }
  return parts;
}

// Throws the same error on every rank if their models differ.
void VerifyModels(Comm& comm, const std::vector<at::Tensor>& parameters,
                  const std::vector<std::string>& names) {
  std::string mine;
  for (size_t i = 0; i < parameters.size(); ++i) mine += Describe(parameters[i], names[i]) + '\0';
  const std::string digest =
      std::to_string(parameters.size()) + " " + std::to_string(std::hash<std::string>()(mine));
  const std::vector<std::string> digests = comm.AllGatherBytes(digest);
  if (std::all_of(digests.begin(), digests.end(), [&](const auto& d) { return d == digests[0]; })) {
    return;
  }
  const std::vector<std::string> all = comm.AllGatherBytes(mine);
  const std::vector<std::string> first = SplitRecords(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const std::vector<std::string> other = SplitRecords(all[rank]);
    for (size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
      if (first[i] == other[i]) continue;
      const auto name = [](const std::string& record) {
        return record.substr(0, record.find('\n'));
      };
      const auto what = [](const std::string& record) {
        return record.substr(record.find('\n') + 1);
      };
      TORCH_CHECK(false, "the models of the ranks differ: parameter ", i, " is '", name(first[i]),
                  "' ", what(first[i]), " on rank 0 but '", name(other[i]), "' ", what(other[i]),
                  " on rank ", rank, "; build the same model on every rank");
    }
    TORCH_CHECK(first.size() == other.size(), "the models of the ranks differ: rank 0 has ",
                first.size(), " parameters and rank ", rank, " has ", other.size(),
                "; build the same model on every rank");
  }
}

}  // namespace

class DataParallel::Impl {
 public:
  Impl(Comm& comm, std::vector<at::Tensor> parameters, std::vector<std::string> names,
       std::vector<at::Tensor> buffers, const DataParallelOptions& options)
      : comm_(comm), options_(options), buffers_(std::move(buffers)) {
    TORCH_CHECK(parameters.size() == names.size(), "got ", names.size(), " names for ",
                parameters.size(), " parameters");
    TORCH_CHECK(options.bucket_cap_mb > 0, "bucket_cap_mb must be above 0, got ",
                options.bucket_cap_mb);
    std::unordered_set<const void*> seen;
    for (size_t i = 0; i < parameters.size(); ++i) {
      TORCH_CHECK(parameters[i].defined(), "parameter '", names[i], "' is undefined");
      if (!seen.insert(parameters[i].unsafeGetTensorImpl()).second) continue;
      all_.push_back(parameters[i]);
      if (parameters[i].requires_grad()) {
        trained_.push_back(parameters[i]);
        trained_names_.push_back(names[i]);
      }
      names_.push_back(std::move(names[i]));
    }
    if (comm_.size() == 1) return;
    VerifyModels(comm_, all_, names_);
    if (options_.init_sync) BroadcastModel(0);
    c10d::ProcessGroup* group = comm_.process_group();
    if (group == nullptr || trained_.empty()) return;
    group_ = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(group);
    MakeReducer();
  }

  void BeforeForward(bool communicate) {
    // The Reducer learns a static graph from the first backward pass, which must be one that it
    // reduces. Reducing early does no harm: the mean of a mean is the mean.
    if (options_.static_graph && !delay_enqueued_) communicate = true;
    communicate_ = communicate;
    if (comm_.size() == 1 || !c10::GradMode::is_enabled()) return;
    StartIteration(communicate);
    if (reducer_ != nullptr && communicate) reducer_->prepare_for_forward();
  }

  std::vector<at::Tensor> PassOutputs(std::vector<at::Tensor> outputs) {
    if (comm_.size() == 1 || !c10::GradMode::is_enabled()) return outputs;
    if (!communicate_ || trained_.empty()) return outputs;
    if (reducer_ == nullptr) {
      ReduceAtEndOfBackward(outputs);
      return outputs;
    }
    Guarded([&] {
      reducer_->prepare_for_backward(options_.find_unused_parameters && !options_.static_graph
                                         ? outputs
                                         : std::vector<at::Tensor>{});
    });
    const bool first_static = options_.static_graph && !delay_enqueued_;
    if ((options_.find_unused_parameters && !options_.static_graph) || first_static) {
      outputs = ThroughSink(std::move(outputs));
    }
    if (first_static) DelayFirstReduction(outputs);
    return outputs;
  }

  void ArmBackward() {
    communicate_ = true;
    if (reducer_ != nullptr) Guarded([&] { reducer_->prepare_for_backward({}); });
  }

  void Shadow(bool communicate) {
    if (comm_.size() == 1) return;
    TORCH_CHECK(!options_.static_graph,
                "uneven inputs and static_graph do not go together: turn one off");
    StartIteration(communicate);
    if (!communicate || trained_.empty()) return;
    if (reducer_ == nullptr) {
      std::vector<at::Tensor> zeros;
      for (const at::Tensor& parameter : trained_) zeros.push_back(at::zeros_like(parameter));
      AllReduceCoalesced(comm_, zeros, ReduceOp::kMean);
      return;
    }
    std::vector<c10d::GradBucket> buckets =
        reducer_->get_grad_buckets(/*return_zero_tensors=*/true);
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> work;
    for (c10d::GradBucket& bucket : buckets) work.push_back(reducer_->run_comm_hook(bucket));
    if (options_.find_unused_parameters) {
      at::Tensor unused = at::zeros_like(reducer_->get_local_used_map_on_device());
      std::vector<at::Tensor> list = {unused};
      group_->allreduce(list)->wait();
    }
    for (const auto& future : work) future->waitAndThrow();
    reducer_->push_rebuilt_params_for_all_indices();
  }

  void BroadcastModel(int root) {
    std::vector<at::Tensor> model = all_;
    model.insert(model.end(), buffers_.begin(), buffers_.end());
    BroadcastCoalesced(comm_, model, root);
  }

  void set_buffer_root(int rank) { buffer_root_ = rank; }
  const DataParallelOptions& options() const { return options_; }
  const std::vector<at::Tensor>& parameters() const { return all_; }

 private:
  Comm& comm_;
  const DataParallelOptions options_;
  std::vector<at::Tensor> all_, trained_;
  std::vector<std::string> names_, trained_names_;
  const std::vector<at::Tensor> buffers_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<c10d::Reducer> reducer_;
  int buffer_root_ = 0;
  bool communicate_ = true;
  bool sync_buffers_ = true;
  bool delay_enqueued_ = false;

  void MakeReducer() {
    const auto cap = static_cast<int64_t>(options_.bucket_cap_mb * 1024 * 1024);
    const std::vector<bool> sparse(trained_.size(), false);
    // Without find_unused the Reducer rebuilds its buckets after the first backward pass in the
    // order that gradients came in, so that the first assignment is one bucket per device and
    // dtype.
    std::vector<size_t> limits = {kUnbounded};
    const int64_t first_cap = std::min<int64_t>(c10d::kDefaultFirstBucketBytes, cap);
    if (options_.find_unused_parameters && !options_.static_graph) {
      limits = {static_cast<size_t>(first_cap), static_cast<size_t>(cap)};
    }
    auto [buckets, bucket_limits] =
        c10d::compute_bucket_assignment_by_size(trained_, limits, sparse);
    std::reverse(buckets.begin(), buckets.end());
    std::unordered_map<size_t, std::string> names;
    for (size_t i = 0; i < trained_names_.size(); ++i) names[i] = trained_names_[i];
    reducer_ = std::make_shared<c10d::Reducer>(
        trained_, std::move(buckets), group_, sparse, cap, options_.find_unused_parameters,
        options_.gradient_as_bucket_view, std::move(names), first_cap,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
        std::vector<int64_t>{});
    if (options_.static_graph) reducer_->set_static_graph();
    if (auto hook =
            MakeCommHook(options_.comm_hook, options_.comm_wrapper, options_.power_sgd, group_)) {
      reducer_->register_comm_hook(std::move(hook));
    }
  }

  // What every rank does at the start of a micro-step, whether it has a batch or not.
  void StartIteration(bool communicate) {
    if (reducer_ != nullptr) Guarded([&] { reducer_->rebuild_buckets(); });
    if (sync_buffers_ && options_.broadcast_buffers && !buffers_.empty()) {
      BroadcastCoalesced(comm_, buffers_, buffer_root_);
    }
    sync_buffers_ = communicate;
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

  // Calls `fn` at the end of the backward pass that goes through any of `outputs`, once.
  static void AtEndOfBackward(const std::vector<at::Tensor>& outputs, std::function<void()> fn) {
    auto queued = std::make_shared<bool>(false);
    auto shared = std::make_shared<std::function<void()>>(std::move(fn));
    for (const at::Tensor& output : outputs) {
      if (!output.defined() || !output.requires_grad()) continue;
      output.register_hook([queued, shared](const at::Tensor&) {
        if (*queued) return;
        *queued = true;
        torch::autograd::Engine::get_default_engine().queue_callback([shared] { (*shared)(); });
      });
    }
  }

  // The first backward pass of a static graph only counts gradients; without this, nothing would be
  // reduced in it and the ranks would drift apart.
  void DelayFirstReduction(const std::vector<at::Tensor>& outputs) {
    std::weak_ptr<c10d::Reducer> weak = reducer_;
    AtEndOfBackward(outputs, [this, weak] {
      if (auto reducer = weak.lock()) {
        delay_enqueued_ = true;
        reducer->delay_all_reduce();
      }
    });
  }

  void ReduceAtEndOfBackward(const std::vector<at::Tensor>& outputs) {
    AtEndOfBackward(outputs, [this] {
      std::vector<at::Tensor> grads;
      for (at::Tensor& parameter : trained_) {
        // Every rank must bring the same tensors: a parameter that was not used here brings zeros.
        if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
        grads.push_back(parameter.grad());
      }
      AllReduceCoalesced(comm_, grads, ReduceOp::kMean);
    });
  }

  // Says in our words what the Reducer says about parameters that got no gradient.
  template <typename Fn>
  void Guarded(Fn fn) {
    try {
      fn();
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      if (text.find("Expected to have finished reduction") == std::string::npos) throw;
      std::string missing;
      std::smatch match;
      if (std::regex_search(text, match,
                            std::regex("did not receive grad for rank [0-9]+: ([0-9 ]+)"))) {
        std::istringstream indices(match[1].str());
        for (size_t i; indices >> i;) {
          if (i < trained_names_.size())
            missing += (missing.empty() ? "" : ", ") + trained_names_[i];
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
                           const DataParallelOptions& options)
    : impl_(std::make_unique<Impl>(comm, std::move(parameters), std::move(names),
                                   std::move(buffers), options)) {}
DataParallel::~DataParallel() = default;

void DataParallel::BeforeForward(bool communicate) { impl_->BeforeForward(communicate); }
std::vector<at::Tensor> DataParallel::PassOutputs(std::vector<at::Tensor> outputs) {
  return impl_->PassOutputs(std::move(outputs));
}
void DataParallel::ArmBackward() { impl_->ArmBackward(); }
void DataParallel::Shadow(bool communicate) { impl_->Shadow(communicate); }
void DataParallel::set_buffer_root(int rank) { impl_->set_buffer_root(rank); }
void DataParallel::BroadcastModel(int root) { impl_->BroadcastModel(root); }
const DataParallelOptions& DataParallel::options() const { return impl_->options(); }
const std::vector<at::Tensor>& DataParallel::parameters() const { return impl_->parameters(); }

}  // namespace muster
