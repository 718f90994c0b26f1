#include "worker/bigmodel/offload_ring.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
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

// The alignment at which kernels are fastest, and give the same results as on LibTorch's own
// memory.
constexpr uint64_t kAlignment = 64;
// The most bytes that are read ahead.
constexpr uint64_t kAheadBytes = uint64_t{128} << 20;
constexpr size_t kUnitsAhead = 2;
// For this time, pages of a file that were in memory are assumed to be there still: asking for them
// at each use would take a tenth of a pass.
constexpr absl::Duration kPagesStay = absl::Seconds(1);
// Smaller tensors are not worth a gap that saves a copy.
constexpr uint64_t kWorthAGap = uint64_t{1} << 20;

uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// The bytes of a mapped file that are loaded at a time, so that large pages are loaded whole, and
// several threads have work.
constexpr uint64_t kLoadedBytes = uint64_t{4} << 20;

uint64_t BytesOf(const OffloadedTensor& tensor) {
  return static_cast<uint64_t>(tensor.tensor.numel()) * c10::elementSize(tensor.type);
}

// Returns the offset of a tensor that follows `end` bytes of a unit.
uint64_t OffsetAfter(uint64_t end, const OffloadedTensor& tensor, const at::Device& device) {
  const uint64_t remainder = tensor.source->Remainder(tensor.index);
  const bool in_place = device.is_cpu() && tensor.source->type(tensor.index) == tensor.type &&
                        remainder % kAlignment == 0 && BytesOf(tensor) >= kWorthAGap;
  if (!in_place) return RoundUp(end, kAlignment);
  const uint64_t block = end / kDirectAlignment * kDirectAlignment;
  return block + remainder >= end ? block + remainder : block + kDirectAlignment + remainder;
}

// Whether all of its tensors are mapped, in one file.
bool IsMapped(const OffloadedUnit& unit) {
  return !unit.tensors.empty() && unit.tensors[0].IsMapped();
}

// Returns the bytes that a unit takes of the ring.
uint64_t RingBytesOf(const OffloadedUnit& unit, const at::Device& device) {
  uint64_t end = 0;
  if (IsMapped(unit)) return end;
  for (const OffloadedTensor& tensor : unit.tensors) {
    end = OffsetAfter(end, tensor, device) + BytesOf(tensor);
  }
  return end;
}

// Sorts the tensors by their order in the file.
OffloadedUnit InOrder(OffloadedUnit unit) {
  if (!IsMapped(unit)) return unit;
  std::stable_sort(unit.tensors.begin(), unit.tensors.end(),
                   [](const OffloadedTensor& a, const OffloadedTensor& b) {
                     return a.source->Mapped(a.index).begin < b.source->Mapped(b.index).begin;
                   });
  return unit;
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

// Returns a tensor of bytes without memory.
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
        is_mapped(IsMapped(unit)),
        tensors(InOrder(std::move(unit)).tensors),
        ring_(ring),
        device_(device) {
    uint64_t end = 0;
    for (const OffloadedTensor& tensor : tensors) {
      if (is_mapped) {
        offsets.push_back(tensor.source->Mapped(tensor.index).begin - MappedBegin());
        bytes += BytesOf(tensor);
      } else {
        offsets.push_back(OffsetAfter(end, tensor, device));
      }
      // Mapped tensors may overlap, or be empty.
      end = std::max(end, offsets.back() + BytesOf(tensor));
    }
    if (!is_mapped) bytes = end;
    // For a mapped file, includes the bytes between the tensors.
    flat_ = WithoutMemory(end, device);
    registration_.emplace(flat_, this);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::vector<int64_t> sizes = tensors[i].tensor.sizes().vec();
      const auto width = static_cast<int64_t>(c10::elementSize(tensors[i].type));
      PlaceTensor(tensors[i].tensor,
                  PagedView(flat_, tensors[i].type, sizes, ContiguousStrides(sizes),
                            static_cast<int64_t>(offsets[i]) / width));
    }
    if (is_mapped) {
      // The memory is only read: Allow() refuses operators that would write.
      memory = const_cast<char*>(tensors[0].source->Mapped(tensors[0].index).file->data()) +
               MappedBegin();
      Show(memory);
    }
  }

  bool holds_offloaded_weights() const override { return true; }

  // Whether all of a mapped unit is in memory.
  bool IsInMemory() const {
    return std::all_of(tensors.begin(), tensors.end(), [](const OffloadedTensor& tensor) {
      const WeightSource::MappedPlace place = tensor.source->Mapped(tensor.index);
      return place.file->IsInMemory(place.begin, BytesOf(tensor));
    });
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

  // Gives the tensors their memory; null: they have none.
  void Show(char* memory) {
    if (shown_ == memory) return;
    shown_ = memory;
    flat_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(memory, device_));
  }

  const std::string name;
  const size_t number;
  const bool is_mapped;
  const std::vector<OffloadedTensor> tensors;
  std::vector<uint64_t> offsets;
  uint64_t bytes = 0;

  // Guarded by the ring's lock.
  State state = State::kAway;
  std::optional<uint64_t> slot;                  // offset in the arena
  at::Tensor overflow;                           // memory outside of the arena
  char* memory = nullptr;                        // never changes for a mapped unit
  absl::Time asked = absl::InfinitePast();       // the last query of a mapped unit's pages
  size_t pieces = 0;                             // pieces being read
  absl::Status status;                           // status of the last reading
  StreamFences::Fence arrival;                   // after its copies
  std::map<c10::StreamId, c10::Stream> streams;  // streams that have used it since it arrived

 private:
  // Returns where the tensors of a mapped unit begin in its file, or a smaller offset: a multiple
  // of the size of each type.
  uint64_t MappedBegin() const {
    const OffloadedTensor& first = tensors[0];
    return first.source->Mapped(first.index).begin / kAlignment * kAlignment;
  }

  // Returns the name of the weight of which `used` is a view.
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
    uint64_t largest = 0, all = 0;
    bool has_mapped = false;
    for (const OffloadedUnit& unit : plan.units) {
      const uint64_t bytes = RingBytesOf(unit, plan.options.device);
      largest = std::max(largest, bytes);
      all += RoundUp(bytes, Arena::kUnit);
      has_mapped = has_mapped || IsMapped(unit);
    }
    uint64_t bytes = std::max(plan.options.bytes, largest);
    if (has_mapped) bytes = std::min(bytes, all);
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
      const Unit& added = *units_.back();
      stats_.offloaded_bytes += added.bytes;
      if (added.is_mapped) stats_.mapped_bytes += added.bytes;
    }
  });
}

OffloadRing::~OffloadRing() {
  readers_.reset();
  MutexLock lock(&mu_);
  // The module's tensors outlive the memory; data_ptr() throws from now on.
  for (const auto& unit : units_) unit->Show(nullptr);
  // Wait: memory that a device still reads or writes must not be given to others.
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
    // The kernel may take back its pages from now on.
    if (current_ != nullptr && current_->is_mapped && current_->state == State::kHere) {
      current_->state = State::kAway;
    }
    current_ = &unit;
    order_.Note(unit.number);
    coming_ = order_.Coming();
    std::fill(distances_.begin(), distances_.end(), units_.size());
    for (size_t i = 0; i < coming_.size(); ++i) distances_[coming_[i]] = i;
    ++stats_.uses;
  }
  // Its pages may have been evicted since it was loaded ahead, or since this unit's last operator.
  if (unit.is_mapped && unit.state == State::kHere &&
      options_.clock->Now() - unit.asked > kPagesStay) {
    unit.state = State::kAway;
  }
  if (unit.state == State::kAway) {
    ++stats_.waits;
    BringNow(unit);
  }
  // This only reads ahead, so an error is tried again, and reported, at the use.
  if (turned && options_.prefetch) (void)Guard([this] { Prefetch(); });
  while (unit.state == State::kComing) changed_.Wait(&mu_);
  // No other thread can have evicted it, because this one has pinned it.
  if (unit.state == State::kAway) ThrowIfError(unit.status);
  if (fences_ != nullptr) {
    const c10::Stream stream = fences_->Current();
    if (!unit.streams.contains(stream.id())) {
      // The host does not wait for the copies: the operator does, in its stream.
      if (unit.arrival != nullptr) fences_->Wait(stream, unit.arrival);
      unit.streams.emplace(stream.id(), stream);
    }
  }
  // Check even after it was loaded ahead; all of a unit is in one file.
  if (unit.is_mapped) ThrowIfError(unit.tensors[0].source->CheckUnchanged(unit.tensors[0].index));
  unit.Show(unit.memory);
}

void OffloadRing::BringNow(Unit& unit) {
  // Other threads that need it wait, too.
  unit.state = State::kComing;
  const absl::Status found = Guard([&] { FindMemory(unit); });
  if (!found.ok()) return GiveUp(unit, found);
  Start(unit, /*urgent=*/true);
}

void OffloadRing::FindMemory(Unit& unit) {
  if (unit.is_mapped) return;
  for (;;) {
    unit.slot = arena_.Take(unit.bytes);
    if (unit.slot.has_value()) return;
    if (Unit* const victim = FindVictim(0)) {
      Evict(*victim);
      continue;
    }
    const bool some_come = std::any_of(units_.begin(), units_.end(), [&](const auto& other) {
      return other.get() != &unit && !other->is_mapped && other->pieces > 0 && other->pins() == 0;
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
  // Read ahead only as far as keeps the disk busy: the rest of the ring may stay there until its
  // turn, so that a ring for half of a model reads half of it in a pass.
  const uint64_t enough = std::min(kAheadBytes, std::max(arena_.bytes(), options_.bytes) / 2);
  uint64_t ahead = 0;
  for (size_t i = 0; i < coming_.size() && (i < kUnitsAhead || ahead < enough); ++i) {
    Unit& unit = *units_[coming_[i]];
    ahead += unit.bytes;
    if (unit.state != State::kAway) continue;
    while (!unit.is_mapped && !(unit.slot = arena_.Take(unit.bytes)).has_value()) {
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
    if (unit->is_mapped || unit->state != State::kHere || unit->pins() > 0 ||
        unit.get() == current_)
      continue;
    if (distances_[unit->number] < distance) continue;
    if (found == nullptr || distances_[unit->number] > distances_[found->number]) {
      found = unit.get();
    }
  }
  return found;
}

void OffloadRing::Evict(Unit& unit) {
  // If there is no fence, the unit stays where it is.
  for (const auto& [id, stream] : unit.streams) {
    pending_.insert_or_assign(id, fences_->After(stream));
  }
  unit.state = State::kAway;
  unit.status = absl::OkStatus();
  Free(unit);
}

void OffloadRing::Free(Unit& unit) {
  // A mapped unit's memory is the file's.
  if (unit.is_mapped) return;
  unit.Show(nullptr);
  unit.memory = nullptr;
  if (unit.slot.has_value()) {
    arena_.Give(*unit.slot);
  } else if (unit.overflow.defined()) {
    overflow_ -= unit.bytes;
    if (fences_ != nullptr && !options_.device.is_cpu()) {
      // Its allocator gives the memory to others at once, except for uses that it knows.
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
  unit.asked = options_.clock->Now();
  if (!unit.is_mapped) {
    unit.memory =
        unit.slot.has_value() ? base_ + *unit.slot : static_cast<char*>(unit.overflow.data_ptr());
  }
  const absl::Status begun = Guard([&] {
    std::vector<WeightReaders::Task> tasks = unit.is_mapped ? LoadingTasks(unit) : TasksFor(unit);
    unit.pieces = tasks.size();
    if (tasks.empty()) {
      unit.state = State::kHere;
    } else {
      readers_->Submit(std::move(tasks), urgent);
    }
  });
  // If nothing has begun, nothing would report its end.
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
            // Set the device permanently, as the thread is the ring's: code that records or waits
            // for an event restores the thread's previous device, and CUDA would take memory for
            // that device.
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

std::vector<WeightReaders::Task> OffloadRing::LoadingTasks(Unit& unit) {
  std::vector<WeightReaders::Task> tasks;
  if (unit.IsInMemory()) return tasks;
  for (const OffloadedTensor& tensor : unit.tensors) {
    const uint64_t begin = tensor.source->Mapped(tensor.index).begin;
    const uint64_t end = begin + BytesOf(tensor);
    for (uint64_t at = begin; at < end;) {
      const uint64_t next = std::min(end, at / kLoadedBytes * kLoadedBytes + kLoadedBytes);
      tasks.push_back([this, &unit, &tensor, from = at - begin, bytes = next - at](ReadScratch&) {
        PieceIsDone(unit, tensor.source->LoadPages(tensor.index, from, bytes), /*bytes=*/0);
      });
      at = next;
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
