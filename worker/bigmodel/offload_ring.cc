#include "worker/bigmodel/offload_ring.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/units.h"
#include "c10/core/CPUAllocator.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/bigmodel/empty_weights.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

// Where kernels are at their best, and give the same results as on LibTorch's own memory.
constexpr uint64_t kAlignment = 64;
// Of what is read ahead.
constexpr uint64_t kAheadBytes = uint64_t{128} << 20;
constexpr size_t kUnitsAhead = 2;
// Smaller tensors are not worth a gap that spares a copy.
constexpr uint64_t kWorthAGap = uint64_t{1} << 20;

uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

uint64_t BytesOf(const OffloadedTensor& tensor) {
  return static_cast<uint64_t>(tensor.tensor.numel()) * c10::elementSize(tensor.type);
}

// Where a tensor goes that comes after `end` bytes of a unit.
uint64_t OffsetAfter(uint64_t end, const OffloadedTensor& tensor, const at::Device& device) {
  const uint64_t remainder = tensor.source->Remainder(tensor.index);
  const bool in_place = device.is_cpu() && tensor.source->type(tensor.index) == tensor.type &&
                        remainder % kAlignment == 0 && BytesOf(tensor) >= kWorthAGap;
  if (!in_place) return RoundUp(end, kAlignment);
  const uint64_t block = end / kDirectAlignment * kDirectAlignment;
  return block + remainder >= end ? block + remainder : block + kDirectAlignment + remainder;
}

std::vector<int64_t> ContiguousStrides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

// A tensor of bytes without memory.
at::Tensor WithoutMemory(uint64_t bytes, const at::Device& device) {
  at::Tensor flat = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device),
                       /*allocator=*/nullptr, /*resizable=*/false);
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(std::move(storage), flat.key_set(), flat.dtype());
  impl->set_sizes_contiguous({static_cast<int64_t>(bytes)});
  return at::Tensor(std::move(impl));
}

}  // namespace

class OffloadRing::Unit final : public Page {
 public:
  Unit(OffloadRing& ring, OffloadedUnit unit, size_t number, const at::Device& device)
      : name(std::move(unit.name)),
        number(number),
        tensors(std::move(unit.tensors)),
        ring_(ring),
        device_(device) {
    for (const OffloadedTensor& tensor : tensors) {
      offsets.push_back(OffsetAfter(bytes, tensor, device));
      bytes = offsets.back() + BytesOf(tensor);
      source_bytes += tensor.source->bytes(tensor.index);
    }
    flat_ = WithoutMemory(bytes, device);
    registration_.emplace(flat_, this);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::vector<int64_t> sizes = tensors[i].tensor.sizes().vec();
      const auto width = static_cast<int64_t>(c10::elementSize(tensors[i].type));
      PlaceTensor(tensors[i].tensor,
                  PagedView(flat_, tensors[i].type, sizes, ContiguousStrides(sizes),
                            static_cast<int64_t>(offsets[i]) / width));
    }
  }

  void Require(bool, const char*) override { ring_.Use(*this); }

  void Allow(const at::Tensor& tensor, bool write, const char* op) override {
    TORCH_CHECK(!write, op, " writes weight '", NameOf(tensor),
                "', which is offloaded and would be read again without the change: keep its module "
                "on a device, or load the model without a device map");
    TORCH_CHECK(!at::GradMode::is_enabled() || !tensor.requires_grad(), op, " uses weight '",
                NameOf(tensor),
                "', which is offloaded and requires a gradient; offloaded weights are for "
                "inference: run it under torch::NoGradGuard, or freeze the weight by "
                "requires_grad_(false)");
  }

  // Shows the tensors their memory; null: they have none.
  void Show(char* memory) {
    if (shown_ == memory) return;
    shown_ = memory;
    flat_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(memory, device_));
  }

  const std::string name;
  const size_t number;
  const std::vector<OffloadedTensor> tensors;
  std::vector<uint64_t> offsets;
  uint64_t bytes = 0, source_bytes = 0;

  // Guarded by the ring's lock.
  State state = State::kAway;
  std::optional<uint64_t> slot;  // in the arena
  at::Tensor overflow;           // else
  char* memory = nullptr;
  size_t pieces = 0;                             // on their way
  absl::Status status;                           // of the last reading
  StreamFences::Fence arrival;                   // behind its copies
  std::map<c10::StreamId, c10::Stream> streams;  // that have used it since it came

 private:
  // Of the weight that `used` is a view of.
  const std::string& NameOf(const at::Tensor& used) const {
    const uint64_t at = static_cast<uint64_t>(used.storage_offset()) * used.element_size();
    const auto after = std::upper_bound(offsets.begin(), offsets.end(), at);
    return tensors[static_cast<size_t>(std::max<ptrdiff_t>(after - offsets.begin() - 1, 0))].name;
  }

  OffloadRing& ring_;
  const at::Device device_;
  at::Tensor flat_;
  char* shown_ = nullptr;
  std::optional<PageRegistration> registration_;
};

OffloadRing::OffloadRing(const OffloadRingOptions& options, uint64_t bytes, size_t units)
    : options_(options),
      own_fences_(options.fences == nullptr ? StreamFences::Of(options.device) : nullptr),
      fences_(options.fences == nullptr ? own_fences_.get() : options.fences),
      arena_(RoundUp(bytes, Arena::kUnit)),
      order_(units),
      distances_(units) {}

absl::StatusOr<std::unique_ptr<OffloadRing>> OffloadRing::Make(std::vector<OffloadedUnit> units,
                                                               const OffloadRingOptions& options) {
  std::vector<Plan> plans;
  plans.push_back({std::move(units), options});
  MUSTER_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<OffloadRing>> rings,
                          MakeAll(std::move(plans)));
  return std::move(rings[0]);
}

absl::StatusOr<std::vector<std::unique_ptr<OffloadRing>>> OffloadRing::MakeAll(
    std::vector<Plan> plans) {
  std::vector<std::unique_ptr<OffloadRing>> rings;
  for (const Plan& plan : plans) {
    uint64_t bytes = plan.options.bytes;
    for (const OffloadedUnit& unit : plan.units) {
      uint64_t end = 0;
      for (const OffloadedTensor& tensor : unit.tensors) {
        end = OffsetAfter(end, tensor, plan.options.device) + BytesOf(tensor);
      }
      bytes = std::max(bytes, end);
    }
    rings.emplace_back(new OffloadRing(plan.options, bytes, plan.units.size()));
    MUSTER_RETURN_IF_ERROR(rings.back()->Prepare(plan.units.size()));
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    MUSTER_RETURN_IF_ERROR(rings[i]->AddUnits(std::move(plans[i].units)));
  }
  return rings;
}

absl::Status OffloadRing::Prepare(size_t units) {
  MutexLock lock(&mu_);
  stats_.ring_bytes = arena_.bytes();
  absl::Status grown;
  if (options_.device.is_cpu()) {
    grown = memory_.Grow(arena_.bytes());
    if (!grown.ok()) grown = absl::ResourceExhaustedError(grown.message());
  } else {
    grown = Guard([&] {
      device_memory_ = at::empty({static_cast<int64_t>(arena_.bytes())},
                                 at::TensorOptions().dtype(at::kByte).device(options_.device));
    });
  }
  if (!grown.ok()) {
    return absl::Status(grown.code(), absl::StrCat("no memory for the weights that are in use, ",
                                                   HumanBytes(arena_.bytes()), " of ", units,
                                                   " offloaded parts: ", grown.message()));
  }
  base_ = options_.device.is_cpu() ? memory_.data() : static_cast<char*>(device_memory_.data_ptr());
  if (fences_ != nullptr) MUSTER_RETURN_IF_ERROR(Guard([this] { FollowQueuedOperators(); }));
  return Guard([&] { readers_.emplace(std::max(options_.readers, 1)); });
}

absl::Status OffloadRing::AddUnits(std::vector<OffloadedUnit> units) {
  MutexLock lock(&mu_);
  return Guard([&] {
    const at::NoGradGuard no_grad;
    for (OffloadedUnit& unit : units) {
      units_.push_back(
          std::make_unique<Unit>(*this, std::move(unit), units_.size(), options_.device));
      stats_.offloaded_bytes += units_.back()->bytes;
    }
  });
}

OffloadRing::~OffloadRing() {
  readers_.reset();
  MutexLock lock(&mu_);
  // The module's tensors outlive the memory; data_ptr() throws from now on.
  for (const auto& unit : units_) unit->Show(nullptr);
  // What a device still reads or writes must not be given to others.
  if (fences_ == nullptr || options_.device.is_cpu()) return;
  try {
    c10::impl::VirtualGuardImpl(options_.device.type())
        .synchronizeDevice(fences_->Copies().device_index());
  } catch (const c10::Error&) {  // the device is lost, and what it read with it
  }
}

void OffloadRing::Use(Unit& unit) {
  MutexLock lock(&mu_);
  const bool turned = current_ != &unit;
  if (turned) {
    current_ = &unit;
    order_.Note(unit.number);
    coming_ = order_.Coming();
    std::fill(distances_.begin(), distances_.end(), units_.size());
    for (size_t i = 0; i < coming_.size(); ++i) distances_[coming_[i]] = i;
    ++stats_.uses;
  }
  if (unit.state == State::kAway) {
    ++stats_.waits;
    BringNow(unit);
  }
  // Only ahead of time: what fails is tried again, and reported, at the use.
  if (turned && options_.prefetch) (void)Guard([this] { Prefetch(); });
  while (unit.state == State::kComing) changed_.Wait(&mu_);
  // Not away by another thread: this one has pinned it.
  if (unit.state == State::kAway) ThrowIfError(unit.status);
  if (fences_ != nullptr) {
    const c10::Stream stream = fences_->Current();
    if (!unit.streams.contains(stream.id())) {
      // The host does not wait for the copies: the operator does, in its stream.
      if (unit.arrival != nullptr) fences_->Wait(stream, unit.arrival);
      unit.streams.emplace(stream.id(), stream);
    }
  }
  unit.Show(unit.memory);
}

void OffloadRing::BringNow(Unit& unit) {
  // Others that need it wait, too.
  unit.state = State::kComing;
  const absl::Status found = Guard([&] { FindMemory(unit); });
  if (!found.ok()) return GiveUp(unit, found);
  Start(unit, /*urgent=*/true);
}

void OffloadRing::FindMemory(Unit& unit) {
  for (;;) {
    unit.slot = arena_.Take(unit.bytes);
    if (unit.slot.has_value()) return;
    if (Unit* const victim = FindVictim(0)) {
      Evict(*victim);
      continue;
    }
    const bool some_come = std::any_of(units_.begin(), units_.end(), [&](const auto& other) {
      return other.get() != &unit && other->pieces > 0 && other->pins() == 0;
    });
    if (!some_come) break;
    changed_.Wait(&mu_);
  }
  // The units of one operator do not fit together, or there are gaps between them.
  const absl::Status given = Guard([&] {
    ThrowIfError(WithMemory(
        "", unit.bytes,
        absl::StrCat("beside the ring of ", HumanBytes(static_cast<int64_t>(arena_.bytes())),
                     ", in which the weights that are used together with it leave no room: raise "
                     "ring_bytes, or take a machine with more memory"),
        [&] {
          unit.overflow = at::empty({static_cast<int64_t>(unit.bytes)},
                                    at::TensorOptions().dtype(at::kByte).device(options_.device));
        }));
  });
  if (!given.ok()) {
    ThrowIfError(absl::Status(given.code(), absl::StrCat("offloaded part \"", Printable(unit.name),
                                                         "\": ", given.message())));
  }
  overflow_ += unit.bytes;
  if (fences_ != nullptr) FollowQueuedOperators();
  stats_.overflow_bytes = std::max(stats_.overflow_bytes, overflow_);
}

void OffloadRing::FollowQueuedOperators() {
  const c10::Stream stream = fences_->Current();
  pending_.insert_or_assign(stream.id(), fences_->After(stream));
}

void OffloadRing::GiveUp(Unit& unit, const absl::Status& status) {
  unit.pieces = 0;
  unit.status = status;
  unit.state = State::kAway;
  Free(unit);
  changed_.SignalAll();
}

void OffloadRing::Prefetch() {
  // No farther than keeps the disk busy: what else is in the ring may stay there until its turn, so
  // that a ring for half of a model reads half of it in a pass.
  const uint64_t enough = std::min(kAheadBytes, arena_.bytes() / 2);
  uint64_t ahead = 0;
  for (size_t i = 0; i < coming_.size() && (i < kUnitsAhead || ahead < enough); ++i) {
    Unit& unit = *units_[coming_[i]];
    ahead += unit.bytes;
    if (unit.state != State::kAway) continue;
    while (!(unit.slot = arena_.Take(unit.bytes)).has_value()) {
      Unit* const victim = FindVictim(i + 1);
      if (victim == nullptr) return;
      Evict(*victim);
    }
    Start(unit, /*urgent=*/false);
  }
}

OffloadRing::Unit* OffloadRing::FindVictim(size_t distance) {
  Unit* found = nullptr;
  for (const auto& unit : units_) {
    if (unit->state != State::kHere || unit->pins() > 0 || unit.get() == current_) continue;
    if (distances_[unit->number] < distance) continue;
    if (found == nullptr || distances_[unit->number] > distances_[found->number]) {
      found = unit.get();
    }
  }
  return found;
}

void OffloadRing::Evict(Unit& unit) {
  // A fence that cannot be had leaves the unit where it is.
  for (const auto& [id, stream] : unit.streams) {
    pending_.insert_or_assign(id, fences_->After(stream));
  }
  unit.state = State::kAway;
  unit.status = absl::OkStatus();
  Free(unit);
}

void OffloadRing::Free(Unit& unit) {
  unit.Show(nullptr);
  unit.memory = nullptr;
  if (unit.slot.has_value()) {
    arena_.Give(*unit.slot);
  } else if (unit.overflow.defined()) {
    overflow_ -= unit.bytes;
    if (fences_ != nullptr && !options_.device.is_cpu()) {
      // Its allocator gives it to others at once, but for what it knows of.
      (void)Guard([&] {
        const c10::impl::VirtualGuardImpl guard(options_.device.type());
        const c10::DataPtr& memory = unit.overflow.storage().data_ptr();
        guard.recordDataPtrOnStream(memory, fences_->Copies());
        for (const auto& [id, stream] : unit.streams) guard.recordDataPtrOnStream(memory, stream);
      });
    }
    unit.overflow.reset();
  }
  unit.slot.reset();
  unit.streams.clear();
  unit.arrival.reset();
}

void OffloadRing::Start(Unit& unit, bool urgent) {
  unit.state = State::kComing;
  unit.status = absl::OkStatus();
  unit.memory =
      unit.slot.has_value() ? base_ + *unit.slot : static_cast<char*>(unit.overflow.data_ptr());
  const absl::Status begun = Guard([&] {
    std::vector<WeightReaders::Task> tasks = TasksFor(unit);
    unit.pieces = tasks.size();
    if (tasks.empty()) {
      unit.state = State::kHere;
    } else {
      readers_->Submit(std::move(tasks), urgent);
    }
  });
  // Then nothing has begun, so nothing would report its end.
  if (!begun.ok()) GiveUp(unit, begun);
}

std::vector<WeightReaders::Task> OffloadRing::TasksFor(Unit& unit) {
  std::vector<StreamFences::Fence> fences;
  for (const auto& [stream, fence] : pending_) fences.push_back(fence);
  std::vector<WeightReaders::Task> tasks;
  for (size_t i = 0; i < unit.tensors.size(); ++i) {
    const OffloadedTensor& tensor = unit.tensors[i];
    for (WeightPiece& piece : PiecesOf(*tensor.source, tensor.index, unit.memory + unit.offsets[i],
                                       tensor.type, options_.device)) {
      piece.may_end_later = fences_ != nullptr;
      tasks.push_back([this, &unit, piece, fences](ReadScratch& scratch) {
        absl::Status status;
        const absl::Status waited = Guard([&] {
          std::optional<c10::StreamGuard> on_copies;
          if (fences_ != nullptr) {
            // For good, as the thread is the ring's: what records an event or waits for one puts
            // the thread's device before back, and CUDA would take memory for that on it.
            if (!options_.device.is_cpu()) {
              c10::impl::VirtualGuardImpl(options_.device.type())
                  .uncheckedSetDevice(options_.device);
            }
            const c10::Stream copies = fences_->Copies();
            for (const StreamFences::Fence& fence : fences) fences_->Wait(copies, fence);
            if (!options_.device.is_cpu()) on_copies.emplace(copies);
          }
          status = FillPiece(piece, scratch);
        });
        status.Update(waited);
        PieceIsDone(
            unit, status,
            static_cast<uint64_t>(piece.count) * c10::elementSize(piece.source->type(piece.index)));
      });
    }
  }
  return tasks;
}

void OffloadRing::PieceIsDone(Unit& unit, const absl::Status& status, uint64_t bytes) {
  MutexLock lock(&mu_);
  if (status.ok()) stats_.read_bytes += bytes;
  unit.status.Update(status);
  if (--unit.pieces > 0) return;
  if (fences_ != nullptr && unit.status.ok()) {
    unit.status = Guard([&] { unit.arrival = fences_->After(fences_->Copies()); });
  }
  unit.state = unit.status.ok() ? State::kHere : State::kAway;
  if (!unit.status.ok()) Free(unit);
  changed_.SignalAll();
}

OffloadStats OffloadRing::stats() const {
  MutexLock lock(&mu_);
  return stats_;
}

void OffloadRing::WaitUntilIdle() {
  {
    MutexLock lock(&mu_);
    const auto busy = [](const auto& unit) { return unit->state == State::kComing; };
    while (std::any_of(units_.begin(), units_.end(), busy)) changed_.Wait(&mu_);
  }
  if (fences_ == nullptr || options_.device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(options_.device.type()).synchronizeStream(fences_->Copies());
}

}  // namespace muster
