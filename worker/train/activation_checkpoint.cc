#include "worker/train/activation_checkpoint.h"

#include <exception>
#include <map>
#include <optional>
#include <string>

#include "ATen/autocast_mode.h"
#include "ATen/core/grad_mode.h"
#include "base/mutex.h"
#include "c10/core/Storage.h"
#include "c10/core/TensorImpl.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/saved_variable_hooks.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/activation_policy.h"
#include "worker/train/activation_store.h"
#include "worker/train/autocast.h"
#include "worker/train/autograd_engine.h"
#include "worker/train/seed.h"
#include "worker/train/thread_states.h"

namespace muster {
namespace activation_internal {
namespace {

// Thrown by the second run through the function when everything that is needed has been computed.
// Not a std::exception, which functions and TorchScript catch.
struct AllIsThere {};

// The autocast settings for one type of device.
struct AutocastState {
  explicit AutocastState(c10::DeviceType type) : device(type) {
    options.cache_enabled = at::autocast::is_autocast_cache_enabled();
    if (!at::autocast::is_autocast_enabled(type)) return;
    precision = at::autocast::get_autocast_dtype(type) == at::kHalf ? MixedPrecision::kFp16
                                                                    : MixedPrecision::kBf16;
  }

  c10::DeviceType device;
  MixedPrecision precision = MixedPrecision::kNo;
  AutocastOptions options;
};

bool SameKind(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device() &&
         a.layout() == b.layout();
}

// Copies without changing the version counter of `to`: tensors that autograd has saved from it hold
// the same values before and after a second run.
void Overwrite(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  to.variable_data().copy_(from);
}

// Compares tensors of one kind; NaN equals NaN.
bool SameValues(const at::Tensor& a, const at::Tensor& b) {
  if (a.layout() == at::kSparse) {
    return a._indices().equal(b._indices()) && SameValues(a._values(), b._values());
  }
  if (!a.is_floating_point()) return a.equal(b);
  return (a.eq(b).logical_or_(a.ne(a).logical_and_(b.ne(b)))).all().item<bool>();
}

// Inference tensors have no version.
int64_t VersionOf(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

// A buffer before the first run, and the facts that show whether it may have changed.
struct BufferBefore {
  explicit BufferBefore(const at::Tensor& buffer)
      : buffer(buffer), values(buffer.detach().clone()), version(VersionOf(buffer)) {
    if (buffer.has_storage()) memory = buffer.storage();
  }

  bool MayHaveChanged() const {
    if (!SameKind(buffer, values)) return true;
    // To compare buffers on another device, the host would wait for all that is queued there.
    if (buffer.device().is_cpu()) return !SameValues(buffer, values);
    if (VersionOf(buffer) != version || !buffer.has_storage() ||
        buffer.storage().unsafeGetStorageImpl() != memory.unsafeGetStorageImpl()) {
      return true;
    }
    // LibTorch counts neither the changes of running statistics nor those through data(). Small
    // buffers are assumed to have changed: that is harmless, since a second run starts from the
    // same values.
    constexpr size_t kSmall = size_t{64} << 10;
    const bool statistics = buffer.dim() == 1 && buffer.is_floating_point();
    return buffer.is_non_overlapping_and_dense() && (statistics || buffer.nbytes() <= kSmall);
  }

  at::Tensor buffer;
  at::Tensor values;
  int64_t version;
  c10::Storage memory;  // kept so that no other memory has its address
};

}  // namespace

// One call of activation_checkpoint(). It lives as long as the graph that the call made.
class Region : public std::enable_shared_from_this<Region> {
 public:
  // A tensor that autograd saved.
  struct Slot {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    c10::Device device;
    std::optional<int64_t> version;  // in the first run; absent: part of a buffer
    // The value that the second run of backward pass `pass` has computed, until that pass has used
    // it, and its version when it was saved.
    at::Tensor value;
    int pass = -1;
    int64_t value_version = 0;
    bool other_version = false;  // than in the first run
  };

  // `selection`: the module's, if a policy has selected it; may be null.
  Region(Rerun rerun, std::shared_ptr<Selection> selection)
      : rerun_(std::move(rerun)),
        selection_(std::move(selection)),
        store_(selection_ == nullptr ? nullptr : selection_->store),
        rng_(SaveRngState()),
        thread_states_(SaveThreadStates()),
        autocast_{AutocastState(c10::kCPU), AutocastState(c10::kCUDA)} {
    for (const at::Tensor& input : rerun_.inputs) {
      input_versions_.push_back(input.defined() ? VersionOf(input) : 0);
    }
    for (const at::Tensor& parameter : rerun_.parameters) {
      parameter_versions_.push_back(VersionOf(parameter));
    }
    for (const at::Tensor& buffer : rerun_.buffers) before_.emplace_back(buffer);
    if (selection_ != nullptr) ++selection_->live;
  }
  ~Region() {
    if (selection_ != nullptr) --selection_->live;
  }

  // The first run: records that `tensor` was saved, but not the tensor.
  std::shared_ptr<Slot> Save(const at::Tensor& tensor) {
    auto slot = std::make_shared<Slot>(Slot{.sizes = tensor.sizes().vec(),
                                            .dtype = tensor.scalar_type(),
                                            .device = tensor.device(),
                                            .version = std::nullopt,
                                            .value = {}});
    // Versions are the same in each run, except for buffers that the function writes.
    if (!IsOfBuffer(tensor)) slot->version = VersionOf(tensor);
    slots_.push_back(slot);
    return slot;
  }
  void EndFirstRun() {
    in_first_run_ = false;
    if (slots_.empty() && selection_ != nullptr) selection_->leaves_no_trace = true;
    // A second run needs the buffers as they were before the first.
    for (BufferBefore& before : before_) {
      if (!before.MayHaveChanged()) continue;
      buffers_.emplace_back(std::move(before.buffer), std::move(before.values));
    }
    before_.clear();
    const std::map<std::string, at::Tensor> now = SaveRngState();
    std::erase_if(rng_, [&](const auto& state) { return state.second.equal(now.at(state.first)); });
    for (size_t i = 0; i < rerun_.inputs.size(); ++i) {
      const at::Tensor& input = rerun_.inputs[i];
      if (!input.defined() || VersionOf(input) == input_versions_[i]) continue;
      broken_ = c10::str("activation_checkpoint: the function changes tensor ", i,
                         " of the inputs, of shape ", input.sizes(),
                         ", in place, and the backward pass needs the values before; clone() it "
                         "first");
    }
    // An input that leads to this region would keep it alive.
    if (!broken_.empty()) {
      rerun_ = {};
    } else if (!slots_.empty()) {
      ParkInputs();
    }
  }

  // Call it if an exception has ended the first run.
  void GiveUp() {
    in_first_run_ = false;
    broken_ =
        "activation_checkpoint: the function has thrown an exception, so that there is no "
        "backward pass through what it had computed before";
    rerun_ = {};
    before_.clear();
  }

  // The second run: the next tensor that autograd saves.
  void Recall(const at::Tensor& tensor) {
    const size_t place = next_++;
    TORCH_CHECK(place < slots_.size(), kOtherTensors, "the first run saved ", slots_.size(),
                " tensors and the second saves more");
    // LibTorch does not count changes of running statistics, so their values are compared.
    if (!tensor.requires_grad() && tensor.dim() == 1 && tensor.is_floating_point() &&
        !IsOfBuffer(tensor)) {
      seen_.emplace_back(tensor, tensor.detach().clone());
    }
    if (const std::shared_ptr<Slot> slot = slots_[place].lock()) {
      TORCH_CHECK(tensor.sizes() == at::IntArrayRef(slot->sizes) &&
                      tensor.scalar_type() == slot->dtype && tensor.device() == slot->device,
                  kOtherTensors, "tensor ", place, " was ", slot->dtype, " ",
                  at::IntArrayRef(slot->sizes), " on ", slot->device, " in the first run and is ",
                  tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device(),
                  " in the second");
      slot->other_version = slot->version.has_value() && *slot->version != VersionOf(tensor);
      slot->value_version = VersionOf(tensor);
      slot->value = tensor.detach();
      slot->pass = pass_;
      --wanted_;
    }
    if (wanted_ == 0) throw AllIsThere();
  }

  // Called in the backward pass.
  at::Tensor Value(Slot& slot) {
    TORCH_CHECK(!in_first_run_,
                "activation_checkpoint: the function runs a backward pass through its own "
                "operations before it has returned; take this part out of the function");
    // The threads of two devices may ask at the same time.
    MutexLock lock(&mu_);
    const int pass = torch::autograd::get_current_graph_task_id();
    if (!slot.value.defined() || slot.pass != pass) RunAgain(pass);
    TORCH_CHECK(!slot.other_version && VersionOf(slot.value) == slot.value_version,
                "activation_checkpoint: a tensor that the backward pass needs, ", slot.dtype, " ",
                at::IntArrayRef(slot.sizes),
                ", was changed in place: a parameter between the forward pass and its backward "
                "pass (call backward() before optimizer.step()), or what the function has computed "
                "by an operator in it that writes to it");
    // Each node asks once for each tensor; if it asks again, the tensor is computed again.
    return std::move(slot.value);
  }

 private:
  static constexpr char kOtherTensors[] =
      "activation_checkpoint: the function did not do the same when the backward pass ran it "
      "again: ";

  bool IsOfBuffer(const at::Tensor& tensor) const {
    for (const at::Tensor& buffer : rerun_.buffers) {
      if (buffer.has_storage() && tensor.has_storage() && tensor.is_alias_of(buffer)) return true;
    }
    return false;
  }

  void ParkInputs();
  std::vector<at::Tensor> Inputs() const;
  void RunAgain(int pass);
  void CheckUnchanged() const;

  Rerun rerun_;
  const std::shared_ptr<Selection> selection_;
  const std::shared_ptr<ActivationStore> store_;
  uint64_t group_ = 0;
  // The inputs that are parked, and undefined in rerun_.
  std::vector<std::shared_ptr<ActivationStore::Parked>> parked_;
  std::vector<BufferBefore> before_;  // for the first run, while it runs
  // The state before the first run: random generators and buffers that it may have changed.
  std::map<std::string, at::Tensor> rng_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  const std::vector<int64_t> thread_states_;
  const AutocastState autocast_[2];
  std::vector<int64_t> input_versions_, parameter_versions_;
  bool in_first_run_ = true;
  std::string broken_;  // why no second run is possible
  // In the order in which they were saved; each expires with its node.
  std::vector<std::weak_ptr<Slot>> slots_;

  Mutex mu_;  // guards the slots' values and the following members, all for the second run
  int pass_ = -1;
  size_t next_ = 0;
  size_t wanted_ = 0;
  // Tensors that may be running statistics, with their values when they were saved.
  std::vector<std::pair<at::Tensor, at::Tensor>> seen_;
};

namespace {

// The region whose function this thread runs.
struct Running {
  Region* region = nullptr;
  bool again = false;
};
thread_local Running running;

class RunningScope {
 public:
  explicit RunningScope(Running now) : before_(running) { running = now; }
  ~RunningScope() { running = before_; }
  RunningScope(const RunningScope&) = delete;
  RunningScope& operator=(const RunningScope&) = delete;

 private:
  const Running before_;
};

class DropAndRecompute : public torch::autograd::SavedVariableHooks {
 public:
  explicit DropAndRecompute(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  void call_pack_hook(const at::Tensor& tensor) override { slot_ = region_->Save(tensor); }
  at::Tensor call_unpack_hook() override { return region_->Value(*slot_); }

 private:
  const std::shared_ptr<Region> region_;
  std::shared_ptr<Region::Slot> slot_;
};

// For the second run, whose graph is dropped with it: keeps nothing.
class RecallOnly : public torch::autograd::SavedVariableHooks {
 public:
  explicit RecallOnly(Region& region) : region_(region) {}
  void call_pack_hook(const at::Tensor& tensor) override { region_.Recall(tensor); }
  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(false,
                "activation_checkpoint: the function runs a backward pass through its own "
                "operations; take this part out of the function");
  }

 private:
  Region& region_;
};

std::unique_ptr<torch::autograd::SavedVariableHooks> HooksOfSavedTensor() {
  if (running.region == nullptr) return nullptr;
  if (running.again) return std::make_unique<RecallOnly>(*running.region);
  return std::make_unique<DropAndRecompute>(running.region->shared_from_this());
}

}  // namespace

// Parks inputs that the graph has computed, but no parameters or data, which others hold as well.
void Region::ParkInputs() {
  if (store_ == nullptr) return;
  group_ = store_->NewGroup();
  parked_.resize(rerun_.inputs.size());
  for (size_t i = 0; i < rerun_.inputs.size(); ++i) {
    at::Tensor& input = rerun_.inputs[i];
    if (!input.defined() || input.is_leaf() || IsPaged(input)) continue;
    try {
      parked_[i] = store_->Park(input, group_);
    } catch (const std::exception& error) {
      broken_ = c10::str("activation_checkpoint: an input could not be offloaded: ", error.what());
      return;
    }
    if (parked_[i] != nullptr) input = at::Tensor();
  }
}

std::vector<at::Tensor> Region::Inputs() const {
  std::vector<at::Tensor> inputs = rerun_.inputs;
  for (size_t i = 0; i < parked_.size(); ++i) {
    if (parked_[i] == nullptr) continue;
    inputs[i] = store_->Get(parked_[i]).detach();
    // The version of tensors that autograd saves from it is compared with the first run.
    inputs[i].unsafeGetTensorImpl()->set_version_counter(
        c10::VariableVersion(static_cast<uint32_t>(input_versions_[i])));
    inputs[i].requires_grad_();
  }
  if (store_ != nullptr) store_->ReadAhead(group_);
  return inputs;
}

void Region::CheckUnchanged() const {
  TORCH_CHECK(broken_.empty(), broken_);
  for (size_t i = 0; i < rerun_.inputs.size(); ++i) {
    const at::Tensor& input = rerun_.inputs[i];
    TORCH_CHECK(!input.defined() || VersionOf(input) == input_versions_[i],
                "activation_checkpoint: tensor ", i, " of the inputs, of shape ", input.sizes(),
                ", was changed in place after the function had it, and the backward pass needs the "
                "values before; clone() it first");
  }
  for (size_t i = 0; i < rerun_.parameters.size(); ++i) {
    const at::Tensor& parameter = rerun_.parameters[i];
    TORCH_CHECK(VersionOf(parameter) == parameter_versions_[i],
                "activation_checkpoint: a parameter of the module, of shape ", parameter.sizes(),
                ", was changed in place between the forward pass and its backward pass, which "
                "needs the values before; call backward() before optimizer.step()");
  }
}

void Region::RunAgain(int pass) {
  CheckUnchanged();
  const std::vector<at::Tensor> inputs = Inputs();
  pass_ = pass;
  next_ = 0;
  seen_.clear();
  // If a function drops tensors that its first run has kept, the second run does the same.
  std::vector<std::shared_ptr<Slot>> alive;
  for (const std::weak_ptr<Slot>& slot : slots_) {
    if (std::shared_ptr<Slot> one = slot.lock()) alive.push_back(std::move(one));
  }
  wanted_ = alive.size();
  {
    // Generators belong to the process: two second runs must not restore them alternately.
    static Mutex& generators = *new Mutex;
    std::optional<MutexLock> lock;
    if (!rng_.empty()) lock.emplace(&generators);
    std::map<std::string, at::Tensor> rng_now;
    if (!rng_.empty()) rng_now = SaveRngState();
    std::erase_if(rng_now, [this](const auto& state) { return rng_.count(state.first) == 0; });
    // For buffers that have another shape now, such as a growing cache, keep the current memory
    // aside.
    std::vector<std::pair<at::Tensor, bool>> buffers_now;
    for (const auto& [buffer, before] : buffers_) {
      const bool same = SameKind(buffer, before);
      const at::Tensor now = buffer.variable_data();
      buffers_now.emplace_back(same ? now.clone() : now, same);
    }
    const auto restore = [&] {
      RestoreRngState(rng_now);
      for (size_t i = 0; i < buffers_.size(); ++i) {
        const auto& [now, same] = buffers_now[i];
        at::Tensor& buffer = buffers_[i].first;
        same ? Overwrite(buffer, now) : buffer.set_data(now);
      }
    };
    RestoreRngState(rng_);
    for (size_t i = 0; i < buffers_.size(); ++i) {
      auto& [buffer, before] = buffers_[i];
      buffers_now[i].second ? Overwrite(buffer, before) : buffer.set_data(before.clone());
    }
    try {
      const at::AutoGradMode with_gradients(true);
      const AutocastGuard cpu(autocast_[0].precision, autocast_[0].device, autocast_[0].options);
      const AutocastGuard cuda(autocast_[1].precision, autocast_[1].device, autocast_[1].options);
      const ThreadStatesScope states(thread_states_);
      const RunningScope scope({.region = this, .again = true});
      rerun_.function(inputs);
    } catch (const AllIsThere&) {
    } catch (...) {
      restore();
      throw;
    }
    restore();
  }
  TORCH_CHECK(wanted_ == 0, kOtherTensors, "the first run saved ", slots_.size(),
              " tensors and the second only ", next_);
  for (const auto& [tensor, value] : seen_) {
    TORCH_CHECK(SameValues(tensor, value),
                "activation_checkpoint: the function writes a tensor of shape ", tensor.sizes(),
                ", so that running it again changes it twice (as the running statistics of a "
                "BatchNorm); give the module itself: activation_checkpoint(module, inputs...)");
  }
  seen_.clear();
}

RegionScope::RegionScope(Rerun rerun, const torch::nn::Module* module) {
  TORCH_CHECK(InstallAutogradEngine(&HooksOfSavedTensor),
              "activation_checkpoint needs LibTorch's own autograd engine, and this process has "
              "another one (it runs in Python): use torch.utils.checkpoint there");
  region_ = std::make_shared<Region>(std::move(rerun), SelectionOf(module));
  running = {.region = region_.get(), .again = false};
}

void RegionScope::End() {
  running = {};
  region_->EndFirstRun();
  ended_ = true;
}

RegionScope::~RegionScope() {
  running = {};
  if (!ended_) region_->GiveUp();
}

bool NothingToDrop(const torch::nn::Module* module) {
  // A pass without gradients says nothing about how the model is trained: an evaluation may use
  // other blocks.
  if (!at::GradMode::is_enabled()) return true;
  if (const std::shared_ptr<Selection> selection = SelectionOf(module)) {
    selection->called = true;
    if (running.region != nullptr) selection->leaves_no_trace = true;
  }
  return running.region != nullptr;
}

bool IsSelected(const torch::nn::Module* module) { return SelectionOf(module) != nullptr; }

}  // namespace activation_internal
}  // namespace muster
