#include "worker/bigmodel/offloaded_weights.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/bigmodel/unit_order.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

// Lists of names in messages stop here.
constexpr size_t kNamesShown = 8;
// Units that are read ahead.
constexpr size_t kAhead = 2;
// Tensors begin at multiples of so many bytes, as wide registers like it.
constexpr int64_t kAlignment = 64;

std::string Names(const std::vector<std::string>& names) {
  std::vector<std::string> shown(
      names.begin(), names.begin() + static_cast<int64_t>(std::min(names.size(), kNamesShown)));
  if (names.size() > kNamesShown) {
    shown.push_back(absl::StrCat("and ", names.size() - kNamesShown, " more"));
  }
  return absl::StrJoin(shown, ", ");
}

std::string Sizes(at::IntArrayRef sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

// A tensor of the model and where its values are.
struct Part {
  std::string name;
  at::Tensor target;
  const WeightEntry* entry = nullptr;
  int64_t offset = 0;  // in the unit, in elements
};

class Store;

// Tensors of one type that are in memory together.
class Unit final : public Page {
 public:
  Unit(std::string name, at::ScalarType dtype, size_t index, Store& store)
      : name(std::move(name)), dtype(dtype), index(index), store_(store) {}

  void Require(bool write, const char* op) override;

  enum class State { kAway, kReading, kThere };

  const std::string name;
  const at::ScalarType dtype;
  const size_t index;
  std::vector<Part> parts;
  int64_t elements = 0;
  int64_t bytes = 0;
  at::Tensor flat;
  std::optional<PageRegistration> registration;
  // Guarded by the store's mutex.
  State state = State::kAway;
  absl::Status error;

 private:
  Store& store_;
};

// All units, the memory that they share, and the thread that reads ahead.
class Store {
 public:
  Store(WeightFiles files, const OffloadOptions& options)
      : files_(std::move(files)), options_(options) {}
  ~Store() {
    {
      MutexLock lock(&mu_);
      stops_ = true;
      changed_.SignalAll();
    }
    if (reader_.joinable()) reader_.join();
  }
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  const WeightFiles& files() const { return files_; }
  std::deque<Unit>& units() { return units_; }

  // After the last unit and its parts were added.
  void Start();
  void Require(Unit& unit, bool write, const char* op);
  OffloadFigures figures() const {
    MutexLock lock(&mu_);
    return figures_;
  }

 private:
  absl::Status Read(const Unit& unit) const;
  // Makes memory for `unit`, which is away; false if that takes units that are used before it, or
  // are in use.
  bool MakeRoom(Unit& unit, bool is_needed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Unit* Farthest(size_t beyond) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropSpare() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReadAhead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Finish(Unit& unit, absl::Status read) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RunReader();

  struct Spare {
    c10::DataPtr memory;
    int64_t bytes = 0;
  };

  const WeightFiles files_;
  const OffloadOptions options_;
  std::deque<Unit> units_;
  std::thread reader_;
  mutable Mutex mu_;
  CondVar changed_;
  bool stops_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Unit*> to_read_ ABSL_GUARDED_BY(mu_);
  std::optional<UnitOrder> order_ ABSL_GUARDED_BY(mu_);
  std::vector<Spare> spare_ ABSL_GUARDED_BY(mu_);
  OffloadFigures figures_ ABSL_GUARDED_BY(mu_);
};

void Unit::Require(bool write, const char* op) { store_.Require(*this, write, op); }

void Store::Start() {
  MutexLock lock(&mu_);
  order_.emplace(units_.size());
  figures_.num_units = static_cast<int64_t>(units_.size());
  for (Unit& unit : units_) figures_.total_bytes += unit.bytes;
  if (options_.prefetch) reader_ = std::thread([this] { RunReader(); });
}

// The unit's values into its memory, which is there.
absl::Status Store::Read(const Unit& unit) const {
  auto* const memory = static_cast<char*>(unit.flat.storage().mutable_data());
  const auto element = static_cast<int64_t>(c10::elementSize(unit.dtype));
  for (const Part& part : unit.parts) {
    const absl::StatusOr<at::ScalarType> stored = ToScalarType(part.entry->tensor.type);
    if (!stored.ok()) return stored.status();
    char* const to = memory + part.offset * element;
    if (*stored == unit.dtype && part.entry->tensor.strides.empty()) {
      if (part.entry->tensor.extent_bytes == 0) continue;
      MUSTER_RETURN_IF_ERROR(files_.Read(*part.entry, to));
      continue;
    }
    absl::StatusOr<at::Tensor> values = absl::UnknownError("");
    MUSTER_RETURN_IF_ERROR(Guard([&] {
      values = ReadWeight(files_, *part.entry);
      if (!values.ok()) return;
      const at::NoGradGuard no_grad;
      at::from_blob(to, part.target.sizes(), at::TensorOptions().dtype(unit.dtype)).copy_(*values);
    }));
    if (!values.ok()) return values.status();
  }
  return absl::OkStatus();
}

void Store::DropSpare() {
  figures_.resident_bytes -= spare_.back().bytes;
  spare_.pop_back();
}

// Of the units that could go, the one that is used last; null if none is used after more than
// `beyond` others.
Unit* Store::Farthest(size_t beyond) {
  Unit* farthest = nullptr;
  size_t distance = beyond;
  for (Unit& unit : units_) {
    if (unit.state != Unit::State::kThere || unit.pins() > 0) continue;
    const size_t of_this = order_->Distance(unit.index);
    if (of_this <= distance) continue;
    farthest = &unit;
    distance = of_this;
  }
  return farthest;
}

bool Store::MakeRoom(Unit& unit, bool is_needed) {
  const size_t beyond = is_needed ? 0 : order_->Distance(unit.index);
  const auto fitting = [&] {
    return std::find_if(spare_.begin(), spare_.end(),
                        [&](const Spare& spare) { return spare.bytes == unit.bytes; });
  };
  while (true) {
    if (const auto found = fitting(); found != spare_.end()) {
      GiveMemory(unit.flat, std::move(found->memory));
      spare_.erase(found);
      return true;
    }
    if (figures_.resident_bytes + unit.bytes <= options_.memory_bytes) {
      AllocateMemory(unit.flat);
      figures_.resident_bytes += unit.bytes;
      figures_.peak_bytes = std::max(figures_.peak_bytes, figures_.resident_bytes);
      return true;
    }
    Unit* const goes = Farthest(beyond);
    if (goes != nullptr) {
      goes->state = Unit::State::kAway;
      spare_.push_back({TakeMemory(goes->flat), goes->bytes});
    } else if (!spare_.empty()) {
      DropSpare();
    } else {
      return false;
    }
    // Memory of other sizes is no use to this unit: the oldest goes first.
    if (fitting() == spare_.end() && !spare_.empty()) {
      std::rotate(spare_.begin(), spare_.begin() + 1, spare_.end());
      DropSpare();
    }
  }
}

void Store::Finish(Unit& unit, absl::Status read) {
  if (read.ok()) {
    unit.state = Unit::State::kThere;
    ++figures_.num_reads;
    figures_.bytes_read += unit.bytes;
  } else {
    unit.state = Unit::State::kAway;
    figures_.resident_bytes -= unit.bytes;
    FreeMemory(unit.flat);
  }
  unit.error = std::move(read);
  changed_.SignalAll();
}

void Store::ReadAhead() {
  if (!options_.prefetch) return;
  for (size_t ahead = 1; ahead <= kAhead; ++ahead) {
    const std::optional<size_t> next = order_->Next(ahead);
    if (!next.has_value()) continue;
    Unit& unit = units_[*next];
    if (unit.state != Unit::State::kAway) continue;
    if (!MakeRoom(unit, /*is_needed=*/false)) return;
    unit.state = Unit::State::kReading;
    ++figures_.num_prefetched;
    to_read_.push_back(&unit);
    changed_.SignalAll();
  }
}

void Store::Require(Unit& unit, bool write, const char* op) {
  TORCH_CHECK(
      !write, op, ": a tensor of \"", unit.name,
      "\", whose weights are offloaded to their files, cannot be written: train adapters, or "
      "load the model whole");
  bool is_mine = false;
  {
    MutexLock lock(&mu_);
    // set_data() compares types with an operator while the units are being made.
    if (!order_.has_value()) return;
    order_->Use(unit.index);
    while (unit.state == Unit::State::kReading) changed_.Wait(&mu_);
    if (unit.state == Unit::State::kAway) {
      // An error of reading ahead is passed on once; the next use tries again.
      ThrowIfError(std::exchange(unit.error, absl::OkStatus()));
      TORCH_CHECK(MakeRoom(unit, /*is_needed=*/true), op, ": \"", unit.name, "\" of ", unit.bytes,
                  " bytes does not fit into the ", options_.memory_bytes,
                  " bytes for offloaded weights beside the other weights that the operator uses: "
                  "raise memory_bytes");
      unit.state = Unit::State::kReading;
      is_mine = true;
    }
    // While this thread reads or computes, the other reads what comes next.
    ReadAhead();
  }
  if (!is_mine) return;
  const absl::Status read = Read(unit);
  {
    MutexLock lock(&mu_);
    Finish(unit, read);
    unit.error = absl::OkStatus();
  }
  ThrowIfError(read);
}

void Store::RunReader() {
  while (true) {
    Unit* unit = nullptr;
    {
      MutexLock lock(&mu_);
      while (to_read_.empty() && !stops_) changed_.Wait(&mu_);
      if (stops_) return;
      unit = to_read_.front();
      to_read_.pop_front();
    }
    absl::Status read = Read(*unit);
    MutexLock lock(&mu_);
    Finish(*unit, std::move(read));
  }
}

// The parts of the model, by what the files have for them.
absl::StatusOr<std::vector<Part>> Match(const WeightFiles& files, const NamedTensors& targets,
                                        const OffloadOptions& options) {
  std::map<std::string, Part> wanted;
  for (const auto& [name, tensor] : targets) {
    if (!tensor.is_cpu()) {
      return absl::UnimplementedError(
          absl::StrCat("\"", name, "\" is on ", tensor.device().str(),
                       "; weights are offloaded for models on the CPU alone"));
    }
    wanted.emplace(name, Part{.name = name, .target = tensor});
  }
  std::vector<std::string> unexpected, different, missing;
  for (const WeightEntry& entry : files.entries()) {
    const std::string& in_file = entry.tensor.name;
    const std::string name = options.rename == nullptr ? in_file : options.rename(in_file);
    if (name.empty()) continue;
    const auto found = wanted.find(name);
    if (found == wanted.end()) {
      unexpected.push_back(in_file);
      continue;
    }
    const std::vector<int64_t> shape(entry.tensor.shape.begin(), entry.tensor.shape.end());
    if (found->second.target.sizes() != at::IntArrayRef(shape)) {
      different.push_back(absl::StrCat(in_file, " (", Sizes(shape), " in the file, ",
                                       Sizes(found->second.target.sizes()), " in the model)"));
    }
    found->second.entry = &entry;
  }
  std::vector<Part> parts;
  // In the order of the model.
  for (const auto& [name, tensor] : targets) {
    const Part& part = wanted.at(name);
    if (part.entry == nullptr) missing.push_back(name);
    parts.push_back(part);
  }
  if (!options.strict) unexpected.clear();
  if (missing.empty() && unexpected.empty() && different.empty()) return parts;
  const auto list = [](const char* what, const std::vector<std::string>& names) {
    return names.empty() ? "" : absl::StrCat("; ", what, ": ", Names(names));
  };
  return absl::InvalidArgumentError(
      absl::StrCat(files.path(), ": not the weights of the model", list("missing", missing),
                   list("unexpected", unexpected), list("different", different)));
}

// Divides the parts among units and lays them out.
absl::Status MakeUnits(std::vector<Part> parts, const OffloadOptions& options, Store* store) {
  std::map<std::pair<std::string, at::ScalarType>, Unit*> by_name;
  for (Part& part : parts) {
    const at::ScalarType dtype = part.target.scalar_type();
    Unit*& unit = by_name[{UnitOf(part.name), dtype}];
    if (unit == nullptr) {
      const size_t index = store->units().size();
      unit = &store->units().emplace_back(UnitOf(part.name), dtype, index, *store);
    }
    const auto step =
        std::max<int64_t>(1, kAlignment / static_cast<int64_t>(c10::elementSize(dtype)));
    part.offset = (unit->elements + step - 1) / step * step;
    unit->elements = part.offset + part.target.numel();
    unit->bytes = unit->elements * static_cast<int64_t>(c10::elementSize(dtype));
    unit->parts.push_back(std::move(part));
  }
  for (const Unit& unit : store->units()) {
    if (unit.bytes > options.memory_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the weights of \"", unit.name, "\" are ", unit.bytes, " bytes; memory_bytes is ",
          options.memory_bytes, ": it must be at least that, and twice that to read ahead"));
    }
  }
  return absl::OkStatus();
}

// Gives the model's tensors the units' memory, which is not there yet.
void Attach(Unit& unit) {
  const at::NoGradGuard no_grad;
  unit.flat = at::empty({0}, at::TensorOptions().dtype(unit.dtype));
  unit.flat.storage().unsafeGetStorageImpl()->set_nbytes(static_cast<size_t>(unit.bytes));
  unit.registration.emplace(unit.flat, &unit);
  for (Part& part : unit.parts) {
    std::vector<int64_t> strides(part.target.dim(), 1);
    for (int64_t i = part.target.dim() - 2; i >= 0; --i) {
      strides[i] = strides[i + 1] * std::max<int64_t>(1, part.target.size(i + 1));
    }
    const std::vector<int64_t> sizes = part.target.sizes().vec();
    part.target.requires_grad_(false);
    part.target.set_data(PagedView(unit.flat, sizes, strides, part.offset));
  }
}

}  // namespace

class OffloadedWeights::Impl {
 public:
  Impl(WeightFiles files, const OffloadOptions& options) : store(std::move(files), options) {}
  Store store;
};

absl::StatusOr<std::unique_ptr<OffloadedWeights>> OffloadedWeights::Create(
    const std::string& path, const NamedTensors& targets, const OffloadOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(WeightFiles files, WeightFiles::Open(path));
  auto impl = std::make_unique<Impl>(std::move(files), options);
  Store& store = impl->store;
  MUSTER_ASSIGN_OR_RETURN(std::vector<Part> parts, Match(store.files(), targets, options));
  MUSTER_RETURN_IF_ERROR(MakeUnits(std::move(parts), options, &store));
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    for (Unit& unit : store.units()) Attach(unit);
    store.Start();
  }));
  return std::unique_ptr<OffloadedWeights>(new OffloadedWeights(std::move(impl)));
}

OffloadedWeights::OffloadedWeights(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
OffloadedWeights::~OffloadedWeights() = default;

OffloadFigures OffloadedWeights::figures() const { return impl_->store.figures(); }

}  // namespace muster
