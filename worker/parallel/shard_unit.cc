#include "worker/parallel/shard_unit.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_foreach_copy.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/empty_strided.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "c10/core/CPUAllocator.h"
#include "c10/util/Exception.h"
#include "c10/util/accumulate.h"
#include "c10/util/strides.h"
#include "worker/parallel/meeting.h"
#include "worker/parallel/same_model.h"

namespace muster {
namespace {

// Kernels work best on tensors that begin at a cache line.
constexpr int64_t kAlignment = 64;

class GradientsElsewhere : public Page {
 public:
  void Require(bool, const char* op) override {
    TORCH_CHECK(false, op,
                " uses the gradient of a sharded model's parameter, of which each process has a "
                "part at the optimizer: clip by accelerator.clip_grad_norm_() or "
                "clip_grad_value_(), zero by optimizer.zero_grad(), and read "
                "optimizer.handle().parameters()[i].grad()");
  }
};

class GradientsUsed : public Page {
 public:
  void Require(bool, const char* op) override {
    TORCH_CHECK(false, op,
                " uses a gradient that is gone: the optimizer has used it inside of the backward "
                "pass (options.sharding.optimizer_in_backward). What needs gradients after "
                "backward() needs a program without this option");
  }
};

// A tensor whose uses ask a page of class `P`.
template <typename P>
at::Tensor MakeMark() {
  const at::Tensor flat = at::zeros({1}, at::kFloat);
  new PageRegistration(flat, new P);  // never destroyed
  return PagedView(flat, {1}, {1}, 0);
}

int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// In elements.
int64_t AlignmentOf(const std::vector<NamedParameter>& parameters) {
  return std::max<int64_t>(kAlignment / static_cast<int64_t>(parameters[0].tensor.element_size()),
                           1);
}

// Parts of at least this size fill whole pages, so that ranks can share them; that takes at most a
// sixty-fourth more.
constexpr int64_t kPagedPartBytes = 64 * kSharedPartPage;

// The elements in the part of each of `ranks` ranks. The same whether they share memory or not, so
// that the borders of parts, and hence sums over parts, are the same.
int64_t PartOfEach(const std::vector<NamedParameter>& parameters, int ranks) {
  const int64_t align = AlignmentOf(parameters);
  int64_t total = 0;
  for (const NamedParameter& parameter : parameters) {
    total += RoundUp(parameter.tensor.numel(), align);
  }
  const int64_t part = (total + ranks - 1) / ranks;
  const auto size = static_cast<int64_t>(parameters[0].tensor.element_size());
  return RoundUp(part, part * size < kPagedPartBytes ? align : kSharedPartPage / size);
}

// Whether the memory of a 1-D tensor can be freed and allocated again: no other tensor uses it, and
// it is from LibTorch's allocator.
bool OwnsItsMemory(const at::Tensor& flat) {
  const c10::Storage& storage = flat.storage();
  c10::Allocator* const allocator = storage.unsafeGetStorageImpl()->allocator();
  return storage.use_count() == 1 && storage.nbytes() == flat.nbytes() &&
         (flat.is_cpu() ? allocator == c10::GetCPUAllocator() : allocator != nullptr);
}

}  // namespace

template <typename Fn>
void ShardUnit::Named(const char* doing, Fn collective) const {
  try {
    collective();
  } catch (c10::Error& error) {
    error.add_context(c10::str("while ", doing, " unit '", name_, "' of the sharded model"));
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, error.what(), ", while ", doing, " unit '", name_, "' of the sharded model");
  }
}

ShardUnit::ShardUnit(std::string name, std::vector<NamedParameter> parameters, Comm& comm,
                     bool frees, std::optional<at::ScalarType> gathered_as,
                     std::optional<at::ScalarType> reduced_as,
                     std::function<void(ShardUnit&, bool, const char*)> use, StoredUnit stored,
                     Comm* reshard)
    : name_(std::move(name)),
      comm_(comm),
      frees_(frees),
      use_(std::move(use)),
      reshard_(frees ? reshard : nullptr),
      stored_({.shards = frees ? stored.shards : StoredPart(), .gradients = stored.gradients}) {
  at::NoGradGuard no_grad;
  TORCH_CHECK(!parameters.empty(), "unit '", name_, "' has no parameters");
  at::TensorOptions options = parameters[0].tensor.options().requires_grad(false);
  dtype_ = parameters[0].tensor.scalar_type();
  // Sums in half types are rounded, so parameters of these types need another type most of all.
  // Gradients of fp64 parameters must not be reduced in a lower one.
  reduced_as_ = dtype_ == at::kDouble ? dtype_ : reduced_as.value_or(dtype_);
  if (dtype_ == at::kFloat) options = options.dtype(gathered_as.value_or(dtype_));
  const int64_t align = AlignmentOf(parameters);
  part_ = PartOfEach(parameters, comm_.size());
  int64_t total = 0;
  for (NamedParameter& parameter : parameters) {
    Slice slice;
    slice.sizes = parameter.tensor.sizes().vec();
    slice.strides = GradientStrides(parameter.tensor);
    slice.offset = total;
    total += RoundUp(parameter.tensor.numel(), align);
    slice.name = std::move(parameter.name);
    slice.tensor = std::move(parameter.tensor);
    slices_.push_back(std::move(slice));
  }
  Share(options);
  const bool whole = shared_.has_value() && shared_->whole.defined();
  flat_ = whole ? shared_->whole : at::zeros({part_ * comm_.size()}, options);
  master_ = OwnSlot(flat_);
  if (separate()) {
    at::Tensor full = at::zeros({flat_.numel()}, options.dtype(dtype_));
    for (Slice& slice : slices_) View(full, slice).copy_(slice.tensor);
    const at::Tensor mine = full.narrow(0, part_ * comm_.rank(), part_);
    master_ = shared_.has_value() ? shared_->mine.copy_(mine) : mine.clone();
    flat_.copy_(full);
  } else {
    for (Slice& slice : slices_) View(flat_, slice).copy_(slice.tensor);
  }
  registration_.emplace(flat_, this);
  if (stored_.shards.store != nullptr) {
    part_page_ = std::make_shared<StoredPage>(
        master_, *stored_.shards.store, stored_.shards.place, *stored_.shards.among,
        c10::str("this process's part of unit '", name_, "' of the sharded model"));
  }
  for (Slice& slice : slices_) {
    // From here on the module's tensor is a view of the flat buffer.
    slice.tensor.set_data(PagedView(flat_, slice.sizes, slice.strides, slice.offset));
    const int64_t numel = slice.tensor.numel();
    const int64_t mine = part_ * comm_.rank();
    const int64_t begin = std::clamp<int64_t>(mine - slice.offset, 0, numel);
    const int64_t end = std::clamp<int64_t>(mine + part_ - slice.offset, begin, numel);
    slice.begin = begin;
    const int64_t at = begin == end ? 0 : slice.offset + begin - mine;
    // The shard has a version of its own, which shows when an optimizer has written it.
    slice.shard = stored_.shards.store == nullptr
                      ? master_.narrow(0, at, end - begin).variable_data()
                      : PagedView(master_, {end - begin}, {1}, at);
    slice.shard.requires_grad_(slice.tensor.requires_grad());
  }
  FreePart();
}

void ShardUnit::Share(const at::TensorOptions& options) {
  const at::ScalarType gathered = c10::typeMetaToScalarType(options.dtype());
  const at::TensorOptions of_shards = options.dtype(dtype_);
  const int64_t bytes = part_ * static_cast<int64_t>(of_shards.dtype().itemsize());
  // Small parts take no pages of their own.
  if (bytes < kPagedPartBytes || !options.device().is_cpu() || stored_.shards.store != nullptr) {
    return;
  }
  shared_ = ShareParts(comm_, part_, of_shards, /*whole=*/!frees_ && gathered == dtype_);
  in_place_ = shared_.has_value() && frees_ && gathered == dtype_;
}

uint64_t ShardUnit::PartBytes(const std::vector<NamedParameter>& parameters, int ranks) {
  return static_cast<uint64_t>(PartOfEach(parameters, ranks)) * parameters[0].tensor.element_size();
}

void ShardUnit::CheckNotUpdated(const at::Tensor& tensor, const char* op) const {
  const int64_t at = tensor.storage_offset();
  for (const Slice& slice : slices_) {
    TORCH_CHECK(
        !slice.updated || at < slice.offset || at >= slice.offset + slice.tensor.numel(), op,
        " uses parameter '", slice.name,
        "' in a backward pass after the optimizer has updated it "
        "(options.sharding.optimizer_in_backward), which it does once the parameter has its "
        "gradient: a use without a gradient (detach()) comes later. Leave the option out");
  }
}

void ShardUnit::FreePart() {
  if (part_page_ != nullptr) part_page_->Free();
}

bool ShardUnit::part_is_present() const { return part_page_ == nullptr || part_page_->present(); }

bool ShardUnit::gradients_are_present() const {
  return gradients_page_ != nullptr && gradients_page_->present();
}

void ShardUnit::ForgetUnusedGradients() {
  if (gradients_page_ == nullptr || gradients_page_->used() || gradients_page_->pins() > 0) return;
  // Another thread may still be writing the page: its place is free only afterwards.
  if (!gradients_page_->Free()) return;
  gradients_page_ = nullptr;
}

int64_t ShardUnit::full_bytes() const {
  return flat_.numel() * static_cast<int64_t>(flat_.element_size());
}

at::Tensor ShardUnit::View(const at::Tensor& flat, const Slice& slice) const {
  return flat.as_strided(slice.sizes, slice.strides, flat.storage_offset() + slice.offset);
}

at::Tensor ShardUnit::ReshardSlot(const at::Tensor& flat) const {
  const int64_t part = flat.numel() / reshard_->size();
  return flat.narrow(0, part * reshard_->rank(), part);
}

void ShardUnit::AwaitShards() {
  Named("gathering",
        [&] { MeetAt(comm_, c10::str("the gather of unit '", name_, "' (number ", index, ")")); });
}

void ShardUnit::GatherInto(at::Tensor& full) {
  if (shared_.has_value() && !kept_.defined()) {
    AwaitShards();
    const int64_t own = comm_.rank();
    for (int64_t r = 0; r < comm_.size(); ++r) {
      if (r == own && !separate()) continue;  // it is where the shards are
      full.narrow(0, part_ * r, part_).copy_(shared_->all.narrow(0, part_ * r, part_));
    }
    return AwaitShards();
  }
  if (kept_.defined()) {
    ReshardSlot(full).copy_(kept_);
    return Named("gathering", [&] { reshard_->AllGatherParts(full); });
  }
  if (stored_.shards.store != nullptr) {
    part_page_->CopyTo(OwnSlot(full));
  } else if (separate()) {
    OwnSlot(full).copy_(master_);
  }
  Named("gathering", [&] { comm_.AllGatherParts(full); });
}

void ShardUnit::Attach() {
  if (gathered_) return;
  c10::DataPtr memory(
      shared_->all.data_ptr(), new at::Tensor(shared_->all),
      [](void* all) { delete static_cast<at::Tensor*>(all); }, flat_.device());
  flat_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  attached_ = gathered_ = allocated_ = true;
  written_ = false;
}

void ShardUnit::Detach() {
  if (attached_) FreeFlat();
}

void ShardUnit::Gather() {
  Detach();
  if (gathered_) return;
  // All gathers use the queue's memory: with two pools, one would keep what the other has freed.
  if (queue_ != nullptr && queue_->on_stream()) StartGather();
  if (coming_ != nullptr) {
    const std::shared_ptr<Coming> coming = std::exchange(coming_, nullptr);
    queue_->Wait(coming->ticket);
    return Arrive(*coming);
  }
  at::NoGradGuard no_grad;
  if (!allocated_) {
    Named("allocating memory for", [&] { AllocateMemory(flat_); });
    allocated_ = true;
  }
  GatherInto(flat_);
  gathered_ = true;
  written_ = false;
}

void ShardUnit::StartGather() {
  if (present()) return;
  const auto coming = std::make_shared<Coming>();
  coming->ticket = queue_->Submit([this, state = coming.get()] {
    const at::NoGradGuard no_grad;
    // Operators must not find the memory before the values are in it.
    at::Tensor full = flat_;
    if (frees_) {
      Named("allocating memory for", [&] { full = at::empty({flat_.numel()}, flat_.options()); });
    }
    GatherInto(full);
    state->full = std::move(full);
  });
  coming_ = coming;
}

void ShardUnit::Arrive(const Coming& coming) {
  if (frees_) TakeMemory(flat_, coming.full);
  allocated_ = gathered_ = true;
  written_ = false;
  if (queue_->on_stream()) brought_ = coming.ticket;
}

void ShardUnit::NoteUse() {
  if (brought_ != nullptr) queue_->Wait(brought_);
}

void ShardUnit::Settle() {
  if (coming_ == nullptr) return;
  const std::shared_ptr<Coming> coming = std::exchange(coming_, nullptr);
  if (queue_->WaitQuietly(coming->ticket)) Arrive(*coming);
}

void ShardUnit::Free() {
  if (!frees_) return;
  Settle();
  kept_.reset();
  FreeFlat();
}

void ShardUnit::FreeUntilBackward() {
  if (reshard_ == nullptr || in_place_) return Free();
  Settle();
  if (gathered_ && !kept_.defined()) {
    const at::NoGradGuard no_grad;
    const at::Tensor slot = ReshardSlot(flat_);
    kept_ = Allocate(slot.numel(), slot.options()).copy_(slot);
  }
  FreeFlat();
}

void ShardUnit::FreeFlat() {
  attached_ = false;
  if (!allocated_) return;
  FreeMemory(flat_);
  allocated_ = gathered_ = false;
  brought_ = nullptr;
}

void ShardUnit::Expire() {
  if (whole_) return;  // the shards are the values
  Settle();
  gathered_ = false;
  Free();
}

at::Tensor ShardUnit::OwnSlot(const at::Tensor& flat) const {
  return flat.narrow(0, part_ * comm_.rank(), part_);
}

std::vector<at::Tensor> ShardUnit::Values() {
  std::vector<at::Tensor> parts;
  for (const Slice& slice : slices_) parts.push_back(slice.shard);
  return Assemble(parts, dtype_);
}

std::vector<at::Tensor> ShardUnit::Values(const std::vector<bool>& wanted) {
  at::NoGradGuard no_grad;
  // The ranks' parts of these slices are moved together: each rank's share has the size of the
  // largest one.
  struct Piece {
    size_t slice;
    int64_t begin, size;  // in the slice
    int rank;
    int64_t at;  // in the rank's share
  };
  std::vector<Piece> pieces;
  std::vector<int64_t> used(static_cast<size_t>(comm_.size()), 0);
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (!wanted[i]) continue;
    const int64_t offset = slices_[i].offset;
    const int64_t numel = c10::multiply_integers(slices_[i].sizes);
    for (int rank = 0; rank < comm_.size(); ++rank) {
      const int64_t begin = std::clamp<int64_t>(part_ * rank - offset, 0, numel);
      const int64_t end = std::clamp<int64_t>(part_ * (rank + 1) - offset, begin, numel);
      if (begin == end) continue;
      pieces.push_back({i, begin, end - begin, rank, used[rank]});
      used[rank] += end - begin;
    }
  }
  std::vector<at::Tensor> values(slices_.size());
  const int64_t share = *std::max_element(used.begin(), used.end());
  const at::TensorOptions options = master_.options().dtype(dtype_);
  at::Tensor shares = at::zeros({share * comm_.size()}, options);
  const auto in_shares = [&](const Piece& piece) {
    return shares.narrow(0, share * piece.rank + piece.at, piece.size);
  };
  for (const Piece& piece : pieces) {
    if (piece.rank == comm_.rank()) in_shares(piece).copy_(slices_[piece.slice].shard);
  }
  if (share > 0) comm_.AllGatherParts(shares);
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (wanted[i]) values[i] = at::empty_strided(slices_[i].sizes, slices_[i].strides, options);
  }
  for (const Piece& piece : pieces) {
    const at::Tensor& value = values[piece.slice];
    value.as_strided({value.numel()}, {1})
        .narrow(0, piece.begin, piece.size)
        .copy_(in_shares(piece));
  }
  return values;
}

void ShardUnit::KeepOwnPart() {
  at::NoGradGuard no_grad;
  if (!separate() || !gathered_) return;
  const at::Tensor written = OwnSlot(flat_);
  if (stored_.shards.store != nullptr) {
    if (!written_) {
      // They may have been written through a pointer, which no operator reports. Reading costs less
      // than writing unchanged values.
      const at::Tensor before = at::empty_like(written);
      part_page_->CopyTo(before);
      if (at::equal(before, written)) return;
    }
    part_page_->Require(/*write=*/true, "summon_full_params");
  }
  written_ = false;
  if (flat_.scalar_type() == dtype_) {
    master_.copy_(written);
    return;
  }
  // Elements that were not written keep the bits that the gathered dtype lacks.
  const at::Tensor same = written.eq(master_.to(written.scalar_type()));
  master_.copy_(at::where(same, master_, written.to(dtype_)));
}

const at::Tensor& ShardUnit::GradientMark() {
  static const at::Tensor& mark = *new at::Tensor(MakeMark<GradientsElsewhere>());
  return mark;
}

const at::Tensor& ShardUnit::UsedGradientMark() {
  static const at::Tensor& mark = *new at::Tensor(MakeMark<GradientsUsed>());
  return mark;
}

bool ShardUnit::HasPending(const Slice& slice) {
  const at::Tensor& grad = slice.tensor.grad();
  return slice.pending.defined() || (grad.defined() && !grad.is_same(GradientMark()));
}

void ShardUnit::Mark(Slice& slice) {
  if (!slice.tensor.requires_grad()) return;
  slice.tensor.mutable_grad() = GradientMark();
  slice.marked = true;
}

void ShardUnit::DropZeroed(Slice& slice) {
  slice.marked = false;
  TORCH_CHECK(!slice.pending.defined(), "the gradient of parameter '", slice.name,
              "' in this accumulation window is gone: something other than the prepared optimizer "
              "has zeroed it (model->zero_grad()); use zero_grad() of what prepare() returned, "
              "which waits for the end of the window");
  slice.shard.mutable_grad().reset();
}

void ShardUnit::GradientArrives(size_t index) {
  Slice& slice = slices_[index];
  at::Tensor& grad = slice.tensor.mutable_grad();
  if (grad.is_same(GradientMark())) {
    grad.reset();
    slice.marked = false;
  } else if (slice.marked && !grad.defined()) {
    DropZeroed(slice);
  }
}

void ShardUnit::KeepPending(size_t index) {
  Slice& slice = slices_[index];
  at::Tensor& grad = slice.tensor.mutable_grad();
  if (!grad.defined() || grad.is_same(GradientMark())) return;
  slice.used = true;
  const at::NoGradGuard no_grad;
  if (slice.pending.defined()) {
    slice.pending.add_(grad);
  } else {
    slice.pending = grad.detach().to(reduced_as_);
  }
  Mark(slice);
}

int64_t ShardUnit::gradient_bytes() const {
  return flat_.numel() * static_cast<int64_t>(c10::elementSize(reduced_as_));
}

at::Tensor ShardUnit::Allocate(int64_t numel, const at::TensorOptions& options) const {
  at::Tensor made;
  const auto allocate = [&] { made = at::empty({numel}, options); };
  if (queue_ != nullptr) {
    queue_->Allocate(allocate);
  } else {
    allocate();
  }
  return made;
}

at::Tensor ShardUnit::TakeGradients(const at::Tensor& buffer) {
  // The next gather reuses this memory after the reduction.
  at::Tensor full = buffer.defined() ? buffer.narrow(0, 0, gradient_bytes()).view(reduced_as_)
                                     : Allocate(flat_.numel(), flat_.options().dtype(reduced_as_));
  int64_t written = 0;
  // They are copied together, which is one kernel on a GPU.
  std::vector<at::Tensor> to, from;
  std::vector<std::pair<at::Tensor, at::Tensor>> sums;
  for (Slice& slice : slices_) {
    at::Tensor& grad = slice.tensor.mutable_grad();
    if (slice.marked && !grad.defined()) DropZeroed(slice);
    TORCH_CHECK(slice.updated || !slice.shard.grad().is_same(UsedGradientMark()),
                "the gradient of parameter '", slice.name,
                "' is to be added to the one of the step before, which is gone: "
                "options.sharding.optimizer_in_backward needs optimizer.zero_grad() after each "
                "optimizer.step()");
    // Zero the gap between the parameters.
    if (slice.offset > written) full.narrow(0, written, slice.offset - written).zero_();
    written = slice.offset + slice.tensor.numel();
    at::Tensor part = View(full, slice);
    // The parameter is frozen: AddGradients() would drop the gradients of earlier micro-steps. As
    // in a unit that is wholly frozen, they wait for a pass that trains the parameter, and an
    // earlier step throws.
    if (!slice.tensor.requires_grad()) {
      part.zero_();
      continue;
    }
    const bool arrived = grad.defined() && !grad.is_same(GradientMark());
    slice.used = slice.used || arrived || slice.pending.defined();
    const bool copied = slice.pending.defined() || (arrived && grad.layout() == at::kStrided);
    if (copied) {
      to.push_back(part);
      from.push_back(slice.pending.defined() ? slice.pending : grad);
    } else {
      part.zero_();
    }
    if (arrived && (slice.pending.defined() || !copied)) sums.emplace_back(std::move(part), grad);
    slice.pending.reset();
    Mark(slice);
  }
  if (full.numel() > written) full.narrow(0, written, full.numel() - written).zero_();
  if (!to.empty()) at::_foreach_copy_(to, from);
  for (auto& [part, grad] : sums) part.add_(grad);
  return full;
}

namespace {

// Returns the factor of gradients before they are summed in `dtype`, if the total factor is
// `factor`. In fp16 the sum over many ranks overflows where their mean does not, and small parts of
// a mean underflow where their sum does not: so each side gets half of the factor, as a power of
// two, as in FSDP.
double FactorBeforeSum(at::ScalarType dtype, double factor) {
  if (dtype != at::kHalf) return 1;
  return std::exp2(-std::ceil(std::log2(1 / factor) / 2));
}

}  // namespace

void ShardUnit::StartReduction(double factor, Comm* replicas, const at::Tensor& buffer) {
  const at::NoGradGuard no_grad;
  const auto reduction = std::make_shared<Reduction>();
  reduction->full = TakeGradients(buffer);
  const auto reduce = [this, state = reduction.get(), factor, replicas] {
    const at::NoGradGuard without_graph;
    const double before = FactorBeforeSum(reduced_as_, factor);
    if (before != 1) state->full.mul_(before);
    Named("reducing the gradients of",
          [&] { state->mine = comm_.ReduceScatter(state->full, ReduceOp::kSum); });
    state->full.reset();
    if (replicas != nullptr) {
      Named("reducing the gradients of", [&] { replicas->AllReduce(state->mine, ReduceOp::kSum); });
    }
    // Compute in the wider of the two types, so that the mean is rounded once.
    const bool narrows = c10::elementSize(reduced_as_) > c10::elementSize(dtype_);
    if (!narrows) state->mine = state->mine.to(dtype_);
    if (factor != before) state->mine.mul_(factor / before);
    state->mine = state->mine.to(dtype_);
  };
  if (queue_ == nullptr) {
    reduce();
  } else {
    reduction->ticket = queue_->Submit(reduce);
  }
  reduction_ = reduction;
}

at::Tensor ShardUnit::FinishReduction() {
  if (reduction_ == nullptr) return {};
  const std::shared_ptr<Reduction> reduction = std::exchange(reduction_, nullptr);
  if (reduction->ticket != nullptr) queue_->Wait(reduction->ticket);
  return std::move(reduction->mine);
}

void ShardUnit::SettleReduction() {
  if (reduction_ == nullptr) return;
  const std::shared_ptr<Reduction> reduction = std::exchange(reduction_, nullptr);
  const bool done = reduction->ticket == nullptr || queue_->WaitQuietly(reduction->ticket);
  // Skip what may fail: the program is about to zero the gradients, or to begin again.
  if (done) AddGradients(std::move(reduction->mine), /*in_memory=*/true);
}

void ShardUnit::AbandonReduction() {
  if (reduction_ == nullptr) return;
  const std::shared_ptr<Reduction> reduction = std::exchange(reduction_, nullptr);
  if (reduction->ticket != nullptr) queue_->WaitQuietly(reduction->ticket);
}

void ShardUnit::AddGradients(at::Tensor mine, bool in_memory) {
  const at::NoGradGuard no_grad;
  const int64_t first = part_ * comm_.rank();
  ForgetUnusedGradients();
  const StoredPart& place = stored_.gradients;
  const bool stored = place.store != nullptr && !in_memory;
  // The place is taken while a tensor has the gradients there: those of other parameters of this
  // unit, or gradients of an earlier step that the program has kept. New gradients then stay in
  // memory.
  const bool has_place = stored && gradients_page_ == nullptr;
  if (has_place && !OwnsItsMemory(mine)) mine = mine.clone();
  bool any = false;
  for (Slice& slice : slices_) {
    if (!slice.tensor.requires_grad() || slice.shard.numel() == 0) continue;
    if (slice.updated) continue;  // it has no new gradient
    const int64_t at = slice.offset + slice.begin - first;
    const at::Tensor part = mine.narrow(0, at, slice.shard.numel());
    at::Tensor& grad = slice.shard.mutable_grad();
    if (grad.defined()) {
      grad.add_(part);
      continue;
    }
    any = true;
    slice.fresh = true;
    if (has_place) {
      grad = PagedView(mine, {slice.shard.numel()}, {1}, at);
    } else {
      // Not a view, because Optimizer::zero_grad() could not detach it. If the gradients of the
      // other parameters are in the store, the copy does not keep the memory for theirs.
      grad = stored ? part.clone() : part.variable_data();
    }
  }
  if (!has_place || !any) return;
  gradients_page_ = std::make_shared<StoredPage>(
      std::move(mine), *place.store, place.place, *place.among,
      c10::str("the gradients of this process's part of unit '", name_, "' of the sharded model"));
  place.among->Came(gradients_page_);
}

std::vector<at::Tensor> ShardUnit::Assemble(const std::vector<at::Tensor>& parts,
                                            at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  at::Tensor full = at::zeros({part_ * comm_.size()}, master_.options().dtype(dtype));
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (!parts[i].defined() || parts[i].numel() == 0) continue;
    full.narrow(0, slices_[i].offset + slices_[i].begin, slices_[i].shard.numel())
        .copy_(parts[i].reshape({-1}));
  }
  comm_.AllGatherParts(full);
  std::vector<at::Tensor> tensors;
  for (const Slice& slice : slices_) tensors.push_back(View(full, slice));
  return tensors;
}

at::Tensor ShardUnit::PartOf(size_t index, const at::Tensor& full) const {
  at::NoGradGuard no_grad;
  const Slice& slice = slices_[index];
  TORCH_CHECK(full.sizes() == at::IntArrayRef(slice.sizes), "parameter '", slice.name,
              "' has shape ", at::IntArrayRef(slice.sizes), ", but the tensor for it has ",
              full.sizes());
  // In the parameter's order of memory. From a mapped file this reads only the part that is taken.
  at::Tensor ordered = full;
  if (full.strides() != at::IntArrayRef(slice.strides)) {
    ordered = at::empty_strided(slice.sizes, slice.strides, full.options());
    ordered.copy_(full);
  }
  return ordered.as_strided({full.numel()}, {1}, ordered.storage_offset())
      .narrow(0, slice.begin, slice.shard.numel());
}

std::pair<int64_t, int64_t> ShardUnit::PartRange(size_t index) const {
  const Slice& slice = slices_[index];
  const int64_t size = slice.shard.numel();
  if (size == 0) return {0, 0};
  // For another order of memory PartOf() copies the whole tensor.
  const int64_t all = c10::multiply_integers(slice.sizes);
  if (!c10::is_contiguous_strides(slice.sizes, slice.strides)) return {0, all};
  return {slice.begin, slice.begin + size};
}

void ShardUnit::SetValues(const std::vector<at::Tensor>& full) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (full[i].defined()) slices_[i].shard.copy_(PartOf(i, full[i]));
  }
  Expire();
}

}  // namespace muster
