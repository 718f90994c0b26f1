#include "worker/bigmodel/dispatch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_strided.h"
#include "ATen/ops/from_blob.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/size_pair.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/units.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "torch/nn/module.h"
#include "worker/bigmodel/arena.h"
#include "worker/bigmodel/divided_model.h"
#include "worker/bigmodel/empty_weights.h"
#include "worker/bigmodel/map_checks.h"
#include "worker/bigmodel/max_memory.h"
#include "worker/bigmodel/module_description.h"
#include "worker/bigmodel/offload_ring.h"
#include "worker/bigmodel/unit_plan.h"
#include "worker/bigmodel/weight_readers.h"
#include "worker/bigmodel/weight_source.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/mapped_file.h"
#include "worker/checkpoint/optional_tensors.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/shared_elements.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/collective/nccl.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kMostUnitBytes = 64 * kMiB;
// A smaller unit is not worth a request to the disk.
constexpr uint64_t kLeastUnitBytes = kMiB / 16;
constexpr uint64_t kRingBytes = 256 * kMiB;
constexpr uint64_t kMostRingBytes = 1024 * kMiB;
// The memory of each reading thread, besides the ring.
constexpr uint64_t kScratchBytes = 2 * kMiB;
constexpr size_t kShownNames = 20;
// A pinned tensor of this size has pages of its own, which are rounded up to 2 MiB.
constexpr uint64_t kOwnPages = 4 * kMiB;
// A ring should hold the units in use and the next ones.
constexpr uint64_t kUnitsInRing = 4;
constexpr char kOffloadFile[] = "offload.safetensors";
// Precedes the number of a process in the name under which it keeps an earlier model's file until
// its own is in use.
constexpr char kEarlierInfix[] = ".earlier.";
constexpr char kOtherWays[] =
    "name another folder, or load a checkpoint by load_checkpoint_and_dispatch(), whose files are "
    "used in place";

enum class Place {
  kResident,  // always on its device
  kHost,      // in host memory, and on the main device when it is used
  kDisk,      // in a file, and on the main device when it is used
};

// A tensor of the module, with all of its names.
struct Item {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;  // tensors that share its memory
  bool is_buffer = false;
  Place place = Place::kResident;
  c10::Device device = c10::Device(c10::kCPU);  // where operators find it
  // Whether the map places it on a GPU. Otherwise it is placed where there is room for it to run.
  bool is_placed_on_gpu = false;
  // The source of an offloaded item, once it is known.
  std::shared_ptr<const WeightSource> source;
  size_t index = 0;
  at::ScalarType type = at::kFloat;

  const at::Tensor& tensor() const { return tensors[0]; }
  bool offloaded() const { return place != Place::kResident; }
  OffloadedTensor Offloaded() const {
    return {.name = names[0], .tensor = tensor(), .source = source, .index = index, .type = type};
  }
  // Whether it takes no memory of a ring.
  bool IsMapped() const { return source != nullptr && Offloaded().IsMapped(); }
};

std::string NameOf(const c10::Device& device) {
  return device.is_cpu() ? "cpu" : absl::StrCat(std::max<int>(device.index(), 0));
}

c10::Device DeviceOf(const std::string& name) {
  int number = 0;
  if (!absl::SimpleAtoi(name, &number)) return c10::Device(c10::kCPU);
  return c10::Device(GpuType(), static_cast<c10::DeviceIndex>(number));
}

bool IsGpu(const std::string& device) {
  int number = 0;
  return absl::SimpleAtoi(device, &number);
}

uint64_t BytesOf(const Item& item) {
  return static_cast<uint64_t>(item.tensor().numel()) * c10::elementSize(item.type);
}

void PlaceAll(const Item& item, const at::Tensor& value) {
  for (const at::Tensor& tensor : item.tensors) PlaceTensor(tensor, value);
}

at::Tensor EmptyFor(const Item& item, at::ScalarType type, const c10::Device& device) {
  return at::empty(item.tensor().sizes(), at::TensorOptions().dtype(type).device(device));
}

// Returns pinned memory in pages of its own; undefined if there is none.
at::Tensor EmptyInPinnedPages(const at::IntArrayRef sizes, at::ScalarType type, uint64_t bytes,
                              const HostPinning& pinning) {
  auto memory = std::make_shared<AlignedMemory>();
  if (!memory->Grow(bytes).ok()) return {};
  memory->Pin(pinning);
  void* const data = memory->data();
  at::Tensor tensor = at::for_blob(data, sizes)
                          .options(at::TensorOptions().dtype(type))
                          .deleter([memory](void*) {})
                          .make_tensor();
  return tensor.is_pinned() ? tensor : at::Tensor();
}

// Returns memory on the host; for a device, memory that the device can read directly.
at::Tensor EmptyOnHost(const Item& item, at::ScalarType type, const c10::Device& device) {
  const at::IntArrayRef sizes = item.tensor().sizes();
  const uint64_t bytes = static_cast<uint64_t>(item.tensor().numel()) * c10::elementSize(type);
  // LibTorch rounds pinned memory up to a power of two: up to twice what the plan counts.
  const HostPinning* const cuda = device.is_cuda() ? HostPinning::Cuda() : nullptr;
  // Without this, CUDA creates a context on the thread's current GPU, which may be another one.
  const c10::OptionalDeviceGuard guard(device.is_cuda() ? std::optional(device) : std::nullopt);
  if (cuda != nullptr && bytes >= kOwnPages) {
    at::Tensor tensor = EmptyInPinnedPages(sizes, type, bytes, *cuda);
    if (tensor.defined()) return tensor;
  }
  return at::empty(sizes, at::TensorOptions().dtype(type).pinned_memory(!device.is_cpu()));
}

// Runs `code`, which gives the item memory of this type, as Guard() does. Errors name the item.
absl::Status GiveMemory(const Item& item, at::ScalarType type, absl::FunctionRef<void()> code) {
  const absl::Status given = Guard([&] {
    ThrowIfError(WithMemory(
        "", static_cast<uint64_t>(item.tensor().numel()) * c10::elementSize(type),
        absl::StrCat("as ", c10::toString(type),
                     ": leave more of the weights in their files by a smaller max_memory, load "
                     "into a smaller dtype, or take a machine with more memory"),
        code));
  });
  if (given.ok()) return given;
  return absl::Status(given.code(), absl::StrCat("tensor \"", Printable(item.names[0]),
                                                 "\" of the model: ", given.message()));
}

// The file of weights that were in memory, in a folder that may not exist yet. Unless Keep() is
// called, removes what was created of both, and restores the file of an earlier model, which may be
// in use.
class OffloadFile {
 public:
  explicit OffloadFile(const std::string& folder)
      : path_(JoinPath(folder, kOffloadFile)),
        earlier_(absl::StrCat(path_, kEarlierInfix, static_cast<int64_t>(getpid()))) {
    for (std::string each = folder; each != "." && !PathExists(each); each = ParentPath(each)) {
      absent_.push_back(each);
    }
  }
  ~OffloadFile() {
    if (is_kept_) {
      if (has_earlier_) (void)unlink(earlier_.c_str());
      return;
    }
    const bool has_path = is_written_ && !IsReplaced();
    if (has_earlier_) {
      // If both names lead to one file, rename() leaves both.
      if (has_path || !PathExists(path_)) {
        (void)std::rename(earlier_.c_str(), path_.c_str());
      } else {
        (void)unlink(earlier_.c_str());
      }
    } else if (has_path) {
      (void)unlink(path_.c_str());
    }
    // Remove the deepest folders first. A folder into which another process has put files stays.
    for (const std::string& folder : absent_) (void)rmdir(folder.c_str());
  }
  OffloadFile(const OffloadFile&) = delete;
  OffloadFile& operator=(const OffloadFile&) = delete;

  const std::string& path() const { return path_; }
  // Whether another process has replaced the file that Write() wrote. If not, every earlier open of
  // the name got that file.
  bool IsReplaced() const {
    const absl::StatusOr<SafetensorsReader> file = SafetensorsReader::Open(path_);
    return file.ok() ? file->header().metadata != metadata_ : absl::IsNotFound(file.status());
  }
  void Keep() { is_kept_ = true; }

  // Removes files that killed processes have kept of earlier models.
  void RemoveLeftovers() const {
    const std::string folder = ParentPath(path_);
    const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
    if (!names.ok()) return;
    for (const std::string& name : *names) {
      if (!absl::StartsWith(name, absl::StrCat(kOffloadFile, kEarlierInfix))) continue;
      const std::string path = JoinPath(folder, name);
      const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
      // Its process may be on another machine, so the number tells nothing; the lock does.
      if (file.get() < 0 || flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
      (void)unlink(path.c_str());
    }
  }

  // Writes the file completely or not at all. The file is needed only as long as this process, so a
  // power failure does not matter. It is synced, because some disks report only then that they are
  // full; its folder is not.
  absl::Status Write(const NamedTensors& tensors) {
    absl::Status written;
    MUSTER_RETURN_IF_ERROR(Guard([&] { written = WriteOrThrow(tensors); }));
    is_written_ = written.ok();
    return written;
  }

 private:
  absl::Status WriteOrThrow(const NamedTensors& tensors) {
    MUSTER_ASSIGN_OR_RETURN(
        const SafetensorsPlan plan,
        PlanSafetensors(path_, tensors,
                        {.metadata = metadata_,
                         .shared = SharedTensors::kWriteAll,
                         // Aligned so that operators take it from a mapping like LibTorch's own
                         // memory.
                         .data_alignment = kDirectAlignment}));
    MUSTER_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path_));
    MUSTER_RETURN_IF_ERROR(
        StreamSafetensors(plan, [&file](absl::string_view part) { return file.Append(part); }));
    MUSTER_RETURN_IF_ERROR(file.Sync());
    MUSTER_RETURN_IF_ERROR(NameEarlier());
    return file.Publish();
  }

  // Gives an earlier file a second name, so that it outlives the first.
  absl::Status NameEarlier() {
    struct stat info = {};
    // If something else has the name, the publication reports it.
    if (lstat(path_.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return absl::OkStatus();
    (void)unlink(earlier_.c_str());
    // Lock it before it gets the name, because RemoveLeftovers() removes files that are not locked.
    earlier_lock_ = OwnedFd(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (earlier_lock_.get() >= 0) (void)flock(earlier_lock_.get(), LOCK_SH);
    // On file systems without links, it has no name for a moment.
    if (link(path_.c_str(), earlier_.c_str()) != 0 &&
        std::rename(path_.c_str(), earlier_.c_str()) != 0) {
      return absl::ErrnoToStatus(
          errno, absl::StrCat("cannot keep ", path_, " of an earlier model until it is replaced"));
    }
    has_earlier_ = true;
    return absl::OkStatus();
  }

  const std::string path_, earlier_;
  std::vector<std::string> absent_;
  OwnedFd earlier_lock_;
  // Distinguishes the file from others.
  const SafetensorsMetadata metadata_ = {{"offload", RandomHex()}};
  bool has_earlier_ = false, is_written_ = false, is_kept_ = false;
};

}  // namespace

// Brings a model to its devices, step by step.
class Dispatcher {
 public:
  Dispatcher(torch::nn::Module& module, const DispatchOptions& options)
      : module_(module), options_(options) {}

  // `keep_on_host`: what the map places on the CPU is offloaded even if that is the main device.
  absl::Status Prepare(const DeviceEntries& map, bool keep_on_host);
  absl::Status Load(const std::string& path, const LoadCheckpointOptions& options);
  // Moves what is in memory to the devices of the map.
  absl::Status Distribute();
  absl::StatusOr<DispatchedModel> Finish();

 private:
  struct Reading;
  absl::Status SetMain(const DeviceEntries& map, const PlannedModel& model);
  // Returns where operators find each tensor, by name.
  std::map<std::string, c10::Device> DevicesOf(const DeviceEntries& map,
                                               const PlannedModel& model) const;
  void SetPlace(const std::string& device, bool keep_on_host, Item& item) const;
  // Lets offloaded parts run on a GPU whose limit leaves room for their ring.
  void KeepLimits();
  // Checks that what is to be used from mapped files runs on the CPU.
  absl::Status CheckMmap() const;
  // Returns the tensors to be loaded, without buffers that keep their values.
  NamedTensors Targets(const WeightFiles& files, const LoadCheckpointOptions& options,
                       std::vector<std::string>* kept) const;
  // Checks that tensors that the files lack have values already, because nothing can give them
  // values later.
  absl::Status CheckValues(const std::string& path, const NamedTensors& targets,
                           const MatchedEntries& matched) const;
  // Sets optional tensors that are not among `targets` and have no values to zeros.
  absl::Status MakeOptional(const NamedTensors& targets);
  absl::Status Read(const std::shared_ptr<const WeightFiles>& files,
                    const std::vector<Reading>& readings);
  // Checks that the ring that the caller asks for holds each offloaded tensor.
  absl::Status CheckRing() const;
  absl::Status WriteToDisk(const std::vector<Item*>& items);
  uint64_t RingBytes(const c10::Device& device, uint64_t offloaded) const;
  std::vector<OffloadedUnit> Units(const c10::Device& device, uint64_t ring_bytes) const;
  // Makes rings for offloaded tensors, on each device where they run.
  absl::Status MakeRings(const std::map<c10::DeviceIndex, uint64_t>& offloaded);
  bool HasSeveralDevices() const;
  // Lets operators move between the devices of the model, if it has several.
  void Divide();

  torch::nn::Module& module_;
  const DispatchOptions options_;
  std::vector<Item> items_;
  std::map<std::string, size_t> by_name_;
  std::optional<OffloadFile> offload_file_;
  DispatchedModel result_;
};

// A tensor whose values are now read from an entry of the files.
struct Dispatcher::Reading {
  Item* item;
  size_t entry;
  at::Tensor to;
};

absl::Status Dispatcher::SetMain(const DeviceEntries& map, const PlannedModel& model) {
  // The GPU whose weights take the inputs.
  const std::optional<std::string> first = FirstGpu(model, map);
  if (!options_.main_device.has_value()) {
    if (first.has_value()) result_.main_device_ = DeviceOf(*first);
    return absl::OkStatus();
  }
  result_.main_device_ = *options_.main_device;
  if (result_.main_device_.is_cuda()) MUSTER_RETURN_IF_ERROR(LoadCuda());
  if (!result_.main_device_.is_cpu() && !result_.main_device_.has_index()) {
    MUSTER_RETURN_IF_ERROR(Guard([&] {
      result_.main_device_ = c10::impl::VirtualGuardImpl(result_.main_device_.type()).getDevice();
    }));
  }
  if (!first.has_value() || !result_.main_device_.is_cpu()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the device map places weights on GPU ", *first,
                   ", and the main device is the CPU, from where nothing moves to a GPU: leave the "
                   "main device out, or use only \"cpu\" and \"disk\" in the map"));
}

std::map<std::string, c10::Device> Dispatcher::DevicesOf(const DeviceEntries& map,
                                                         const PlannedModel& model) const {
  std::map<std::string, c10::Device> devices;
  // Offloaded parts run where the part before them does, so that hidden states stay there, if
  // KeepLimits() finds room.
  c10::Device before = result_.main_device_;
  VisitTensorNames(model, [&](const std::string& name) {
    const std::string& named = *FindDevice(map, name);
    const c10::Device device = IsGpu(named) ? DeviceOf(named) : before;
    devices.emplace(name, device);
    if (!options_.main_device.has_value()) before = device;
  });
  return devices;
}

void Dispatcher::SetPlace(const std::string& device, bool keep_on_host, Item& item) const {
  const bool may_go = !item.is_buffer || options_.offload_buffers;
  if (device == "disk" && may_go) {
    item.place = Place::kDisk;
  } else if (device == "cpu" && may_go && (keep_on_host || !item.device.is_cpu())) {
    item.place = Place::kHost;
  }
}

void Dispatcher::KeepLimits() {
  const bool is_open = !options_.main_device.has_value() && !result_.main_device_.is_cpu();
  if (!is_open || options_.max_memory.empty()) return;
  struct Gpu {
    double room = std::numeric_limits<double>::infinity();
    uint64_t offloaded = 0, largest = 0;
  };
  std::map<c10::DeviceIndex, Gpu> gpus;
  // Devices that the map does not name have room as well.
  for (const auto& [name, limit] : options_.max_memory) {
    const c10::Device device = DeviceOf(name);
    if (!device.is_cpu() && device.index() < CountGpus()) gpus[device.index()].room = limit;
  }
  for (const Item& item : items_) {
    if (item.device.is_cpu()) continue;
    Gpu& gpu = gpus[item.device.index()];
    const uint64_t bytes = BytesOf(item);
    if (item.offloaded()) {
      gpu.offloaded += bytes;
      gpu.largest = std::max(gpu.largest, bytes);
    } else {
      gpu.room -= static_cast<double>(bytes);
    }
  }
  for (auto& [index, gpu] : gpus) {
    const uint64_t needed =
        options_.ring_bytes.value_or(std::min(gpu.offloaded, kUnitsInRing * gpu.largest));
    if (gpu.offloaded == 0 || gpu.room >= static_cast<double>(needed)) continue;
    // A plan keeps room on its first GPU.
    const auto main = gpus.find(result_.main_device_.index());
    auto to = main == gpus.end() ? gpus.find(index) : main;
    for (auto other = gpus.begin(); other != gpus.end(); ++other) {
      if (to->second.room >= static_cast<double>(needed)) break;
      if (other->second.room > to->second.room) to = other;
    }
    if (to->first == index) continue;
    const c10::Device device(result_.main_device_.type(), to->first);
    for (Item& item : items_) {
      if (item.device.is_cpu() || item.device.index() != index || item.is_placed_on_gpu) continue;
      item.device = device;
      // It is a buffer that stays with its module.
      if (!item.offloaded()) to->second.room -= static_cast<double>(BytesOf(item));
    }
    to->second.offloaded += std::exchange(gpu.offloaded, 0);
    to->second.largest = std::max(to->second.largest, gpu.largest);
  }
}

// More threads read no faster, and a process may not get them.
constexpr int kMaxReaders = 1024;

absl::Status Dispatcher::Prepare(const DeviceEntries& map, bool keep_on_host) {
  if (options_.readers < 1 || options_.readers > kMaxReaders) {
    return absl::InvalidArgumentError(
        absl::StrCat("readers is ", options_.readers,
                     ": it is the number of threads that read weights; write 1 to ", kMaxReaders,
                     ", or leave it out"));
  }
  MUSTER_ASSIGN_OR_RETURN(const PlannedModel model, DescribeModule(module_));
  MUSTER_RETURN_IF_ERROR(CheckDeviceMap(model, map));
  MUSTER_RETURN_IF_ERROR(CheckDevicesAreThere(map));
  MUSTER_RETURN_IF_ERROR(SetMain(map, model));
  const std::map<std::string, c10::Device> devices = DevicesOf(map, model);
  result_.device_map_ = map;
  std::map<std::string, size_t> places;
  std::set<const void*> buffers;
  for (const at::Tensor& buffer : module_.buffers()) buffers.insert(buffer.unsafeGetTensorImpl());
  for (const auto& [name, tensor] : TensorsOf(module_)) {
    if (tensor.layout() != at::kStrided) {
      return absl::UnimplementedError(
          absl::StrCat(name, " is not dense: such tensors cannot be placed by a device map"));
    }
    // Its memory, by which ties are found, does not exist, or will not.
    if (IsPaged(tensor)) {
      return absl::FailedPreconditionError(absl::StrCat(
          name,
          " is offloaded or sharded already: construct the model again, or keep the placement "
          "that it has"));
    }
    const auto [place, is_new] = places.emplace(TensorIdentity(tensor), items_.size());
    if (is_new) items_.emplace_back();
    Item& item = items_[place->second];
    by_name_[name] = place->second;
    item.names.push_back(name);
    const bool known = std::any_of(item.tensors.begin(), item.tensors.end(),
                                   [&](const at::Tensor& other) { return other.is_same(tensor); });
    if (!known) item.tensors.push_back(tensor);
    if (!is_new) continue;
    item.is_buffer = buffers.contains(tensor.unsafeGetTensorImpl());
    item.type = tensor.scalar_type();
    item.device = devices.at(name);
    item.is_placed_on_gpu = IsGpu(*FindDevice(map, name));
    SetPlace(*FindDevice(map, name), keep_on_host, item);
  }
  return absl::OkStatus();
}

NamedTensors Dispatcher::Targets(const WeightFiles& files, const LoadCheckpointOptions& options,
                                 std::vector<std::string>* kept) const {
  std::vector<std::string> names;
  for (const WeightEntry& entry : files.entries()) names.push_back(entry.tensor.name);
  const std::set<std::string> in_files =
      NamesInModel(names, options.weights.prefix, options.weights.rename);
  NamedTensors tensors = TensorsOf(module_), targets;
  RemoveOptional(module_, in_files, &tensors);
  for (const auto& [name, tensor] : tensors) {
    const Item& item = items_[by_name_.at(name)];
    const bool has_values = item.is_buffer && !tensor.is_meta();
    if (options.keep_buffers && has_values && !in_files.contains(name)) {
      kept->push_back(name);
      continue;
    }
    targets.emplace_back(name, tensor);
  }
  return targets;
}

absl::Status Dispatcher::Load(const std::string& path, const LoadCheckpointOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(WeightFiles opened, WeightFiles::Open(path));
  if (options.parts != nullptr) MUSTER_RETURN_IF_ERROR(opened.Divide(options.parts));
  const auto files = std::make_shared<const WeightFiles>(std::move(opened));
  std::vector<std::string> kept;
  const NamedTensors targets = Targets(*files, options, &kept);
  MUSTER_ASSIGN_OR_RETURN(MatchedEntries matched, MatchEntries(*files, targets, options.weights));
  MUSTER_RETURN_IF_ERROR(CheckValues(path, targets, matched));
  result_.loaded_ = std::move(matched.report);
  result_.loaded_.missing.insert(result_.loaded_.missing.end(), kept.begin(), kept.end());
  MUSTER_RETURN_IF_ERROR(MakeOptional(targets));
  std::vector<Item*> on_disk;
  std::vector<size_t> entries;
  for (const MatchedWeight& match : matched.matches) {
    Item& item = items_[by_name_.at(targets[match.target].first)];
    item.type = match.type;
    if (item.place != Place::kDisk) continue;
    on_disk.push_back(&item);
    entries.push_back(match.from);
  }
  // Check this before anything changes.
  MUSTER_RETURN_IF_ERROR(CheckMmap());
  MUSTER_ASSIGN_OR_RETURN(const auto source, OpenWeightSource(files, entries, options_.mmap));
  for (size_t i = 0; i < on_disk.size(); ++i) {
    on_disk[i]->source = source;
    on_disk[i]->index = i;
  }
  for (Item& item : items_) {
    // Values that no file has (a table that the constructor computes) stay where they are.
    const bool is_here = item.source == nullptr && !item.tensor().is_meta();
    if (item.place == Place::kDisk && is_here && options_.offload_folder.empty()) {
      item.place = Place::kResident;
    }
  }
  KeepLimits();
  std::vector<Reading> readings;
  for (const MatchedWeight& match : matched.matches) {
    Item& item = items_[by_name_.at(targets[match.target].first)];
    if (item.place == Place::kDisk) continue;
    at::Tensor to;
    const at::Tensor& old = item.tensor();
    const bool fits = item.place == Place::kResident && old.device() == item.device &&
                      old.scalar_type() == item.type && old.is_contiguous();
    MUSTER_RETURN_IF_ERROR(GiveMemory(item, item.type, [&] {
      if (fits) {
        to = old.detach();
        return;
      }
      // Free the old memory before the new memory is allocated.
      if (!old.is_meta()) PlaceAll(item, EmptyFor(item, item.type, at::kMeta));
      to = item.place == Place::kHost ? EmptyOnHost(item, item.type, item.device)
                                      : EmptyFor(item, item.type, item.device);
    }));
    readings.push_back({&item, match.from, to});
  }
  MUSTER_RETURN_IF_ERROR(Read(files, readings));
  for (const Reading& reading : readings) {
    Item& item = *reading.item;
    if (item.place == Place::kHost) {
      item.source = HostWeightSource({item.names[0]}, {reading.to});
    } else if (!reading.to.is_alias_of(item.tensor())) {
      PlaceAll(item, reading.to);
    }
  }
  if (!options.weights.dtype.has_value()) return absl::OkStatus();
  // A table of the constructor is rounded no more than in an ordinary construction.
  std::set<const Item*> keep_type;
  for (const std::string& name : kept) keep_type.insert(&items_[by_name_.at(name)]);
  for (Item& item : items_) {
    const at::Tensor& tensor = item.tensor();
    if (item.source != nullptr || !tensor.is_floating_point()) continue;
    if (keep_type.contains(&item)) continue;
    item.type = *options.weights.dtype;
    if (tensor.scalar_type() == item.type) continue;
    MUSTER_RETURN_IF_ERROR(
        GiveMemory(item, item.type, [&] { PlaceAll(item, tensor.detach().to(item.type)); }));
  }
  return absl::OkStatus();
}

absl::Status Dispatcher::CheckValues(const std::string& path, const NamedTensors& targets,
                                     const MatchedEntries& matched) const {
  std::set<size_t> filled;
  for (const MatchedWeight& match : matched.matches) {
    filled.insert(by_name_.at(targets[match.target].first));
  }
  std::vector<std::string> without;
  for (const auto& [name, tensor] : targets) {
    if (tensor.is_meta() && !filled.contains(by_name_.at(name))) without.push_back(name);
  }
  if (without.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": the weights do not fit this model: neither the files nor the model have values for ",
      absl::StrJoin(without.begin(), without.begin() + std::min(without.size(), kShownNames), ", "),
      without.size() > kShownNames ? absl::StrCat(" and ", without.size() - kShownNames, " more")
                                   : "",
      ": add them to the files, map other names to them by `rename`, or construct the model "
      "without init_empty_weights(), so that they keep the values of its constructor"));
}

absl::Status Dispatcher::MakeOptional(const NamedTensors& targets) {
  NamedTensors left_out = TensorsOf(module_);
  std::set<std::string> loaded;
  for (const auto& [name, unused] : targets) loaded.insert(name);
  std::erase_if(left_out, [&](const auto& tensor) { return loaded.contains(tensor.first); });
  const std::set<std::string> optional = OptionalTensorsOf(module_);
  for (const auto& [name, tensor] : left_out) {
    const Item& item = items_[by_name_.at(name)];
    if (!optional.contains(name) || !item.tensor().is_meta()) continue;
    MUSTER_RETURN_IF_ERROR(GiveMemory(
        item, item.type, [&] { PlaceAll(item, EmptyFor(item, item.type, item.device).zero_()); }));
  }
  return absl::OkStatus();
}

absl::Status Dispatcher::Read(const std::shared_ptr<const WeightFiles>& files,
                              const std::vector<Reading>& readings) {
  std::vector<size_t> entries;
  for (const Reading& reading : readings) {
    if (files->entries()[reading.entry].tensor.strides.empty()) entries.push_back(reading.entry);
  }
  MUSTER_ASSIGN_OR_RETURN(const auto source, OpenWeightSource(files, entries));
  std::vector<WeightPiece> pieces;
  size_t index = 0;
  for (const Reading& reading : readings) {
    const WeightEntry& entry = files->entries()[reading.entry];
    if (entry.tensor.strides.empty()) {
      const auto more = PiecesOf(*source, index++, static_cast<char*>(reading.to.data_ptr()),
                                 reading.item->type, reading.to.device());
      pieces.insert(pieces.end(), more.begin(), more.end());
      continue;
    }
    MUSTER_ASSIGN_OR_RETURN(const at::Tensor whole, ReadWeight(*files, entry));
    MUSTER_RETURN_IF_ERROR(Guard([&] { reading.to.copy_(whole); }));
  }
  std::optional<WeightReaders> readers;
  MUSTER_RETURN_IF_ERROR(Guard([&] { readers.emplace(options_.readers); }));
  return readers->Fill(pieces);
}

absl::Status Dispatcher::Distribute() {
  std::vector<Item*> to_disk;
  for (Item& item : items_) {
    if (item.source != nullptr) continue;
    if (item.tensor().is_meta()) {
      return absl::FailedPreconditionError(absl::StrCat(
          item.names[0], " has no values: load a checkpoint by load_checkpoint_and_dispatch()"));
    }
    if (item.place == Place::kDisk) to_disk.push_back(&item);
  }
  KeepLimits();
  // An early failure must change neither the module nor the folder, whose file may belong to
  // another model.
  MUSTER_RETURN_IF_ERROR(CheckMmap());
  MUSTER_RETURN_IF_ERROR(CheckRing());
  if (!to_disk.empty()) MUSTER_RETURN_IF_ERROR(WriteToDisk(to_disk));
  for (Item& item : items_) {
    const at::Tensor& tensor = item.tensor();
    if (item.source != nullptr || tensor.is_meta()) continue;
    MUSTER_RETURN_IF_ERROR(GiveMemory(item, tensor.scalar_type(), [&] {
      if (item.place == Place::kResident) {
        if (tensor.device() != item.device) PlaceAll(item, tensor.detach().to(item.device));
        return;
      }
      at::Tensor host = tensor.detach();
      if (!host.is_cpu() || !host.is_contiguous() || (!item.device.is_cpu() && !host.is_pinned())) {
        host = EmptyOnHost(item, tensor.scalar_type(), item.device).copy_(tensor.detach());
      }
      item.source = HostWeightSource({item.names[0]}, {host});
    }));
  }
  return absl::OkStatus();
}

absl::Status Dispatcher::CheckMmap() const {
  if (!options_.mmap) return absl::OkStatus();
  for (const Item& item : items_) {
    if (item.place != Place::kDisk || item.device.is_cpu()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "mmap is for weights that run on the CPU, and ", item.names[0], " runs on GPU ",
        NameOf(item.device), ", to which it is copied: leave mmap out"));
  }
  return absl::OkStatus();
}

absl::Status Dispatcher::CheckRing() const {
  if (!options_.ring_bytes.has_value()) return absl::OkStatus();
  for (const Item& item : items_) {
    const uint64_t bytes = BytesOf(item);
    const bool has_values = item.source != nullptr || !item.tensor().is_meta();
    if (!item.offloaded() || !has_values || bytes <= *options_.ring_bytes) continue;
    // Weights that are written to the disk now can be mapped.
    const bool will_be_mapped =
        options_.mmap && item.place == Place::kDisk && item.source == nullptr;
    if (item.IsMapped() || will_be_mapped) continue;
    const SizePair texts =
        HumanBytesApart(static_cast<int64_t>(*options_.ring_bytes), static_cast<int64_t>(bytes));
    return absl::InvalidArgumentError(absl::StrCat("the ring of ", texts.first, " is smaller than ",
                                                   item.names[0], ", which takes ", texts.second,
                                                   ": raise ring_bytes"));
  }
  return absl::OkStatus();
}

absl::Status Dispatcher::WriteToDisk(const std::vector<Item*>& items) {
  if (options_.offload_folder.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the device map sends ", items[0]->names[0],
        " to the disk, and its values are in memory only: name an offload_folder, or load a "
        "checkpoint by load_checkpoint_and_dispatch(), whose files are used in place"));
  }
  NamedTensors tensors;
  uint64_t bytes = 0;
  for (const Item* const item : items) {
    tensors.emplace_back(item->names[0], item->tensor().detach());
    bytes += item->tensor().nbytes();
  }
  const auto source = [&]() -> absl::StatusOr<std::shared_ptr<const WeightSource>> {
    offload_file_.emplace(options_.offload_folder);
    MUSTER_RETURN_IF_ERROR(MakeDirectories(options_.offload_folder));
    offload_file_->RemoveLeftovers();
    MUSTER_RETURN_IF_ERROR(CheckDiskSpace(options_.offload_folder, bytes));
    MUSTER_RETURN_IF_ERROR(offload_file_->Write(tensors));
    MUSTER_ASSIGN_OR_RETURN(WeightFiles opened, WeightFiles::Open(offload_file_->path()));
    const auto files = std::make_shared<const WeightFiles>(std::move(opened));
    const bool is_replaced = offload_file_->IsReplaced();
    std::vector<size_t> entries;
    for (const Item* const item : items) {
      const WeightEntry* const entry = files->Find(item->names[0]);
      if (is_replaced || entry == nullptr) {
        return absl::AbortedError(absl::StrCat("another process has replaced ",
                                               offload_file_->path(),
                                               ": give each process its own folder"));
      }
      entries.push_back(static_cast<size_t>(entry - files->entries().data()));
    }
    return OpenWeightSource(files, entries, options_.mmap);
  }();
  if (!source.ok()) {
    // The check of the space already says what to do.
    if (absl::StrContains(source.status().message(), kOtherWays)) return source.status();
    return absl::Status(
        source.status().code(),
        absl::StrCat("cannot offload ", HumanBytes(static_cast<int64_t>(bytes)), " to ",
                     options_.offload_folder, ": ", source.status().message(), ": ", kOtherWays));
  }
  for (size_t i = 0; i < items.size(); ++i) {
    items[i]->source = *source;
    items[i]->index = i;
  }
  return absl::OkStatus();
}

uint64_t Dispatcher::RingBytes(const c10::Device& device, uint64_t offloaded) const {
  if (options_.ring_bytes.has_value()) return *options_.ring_bytes;
  uint64_t bytes = kRingBytes;
  const std::string name = NameOf(device);
  for (const auto& [limited, limit] : options_.max_memory) {
    if (limited != name) continue;
    double room = limit;
    // A GPU holds none of the readers' memory.
    if (device.is_cpu()) room -= static_cast<double>(options_.readers * kScratchBytes);
    for (const auto& [other, resident] : result_.resident_) room -= other == name ? resident : 0;
    // A limit may be infinite.
    bytes = static_cast<uint64_t>(std::clamp(room, 0.0, static_cast<double>(kMostRingBytes)));
    // Round down, because the ring rounds up.
    bytes = bytes / Arena::kUnit * Arena::kUnit;
  }
  return std::min(bytes, offloaded);
}

std::vector<OffloadedUnit> Dispatcher::Units(const c10::Device& device, uint64_t ring_bytes) const {
  std::vector<std::pair<std::string, uint64_t>> tensors;
  std::vector<const Item*> items;
  for (const Item& item : items_) {
    if (item.source == nullptr || item.device != device) continue;
    tensors.emplace_back(item.names[0], BytesOf(item));
    items.push_back(&item);
  }
  // Never more than the ring, because a larger unit would make the ring larger than the caller
  // allows.
  const uint64_t most =
      std::min(std::clamp(ring_bytes / kUnitsInRing, kLeastUnitBytes, kMostUnitBytes), ring_bytes);
  std::vector<OffloadedUnit> units;
  for (const UnitPlan& plan : PlanOffloadUnits(tensors, most)) {
    // One unit for each mapped file, and one for what goes through the ring.
    std::map<const MappedFile*, size_t> by_file;
    for (const size_t part : plan.parts) {
      OffloadedTensor tensor = items[part]->Offloaded();
      const MappedFile* const file =
          tensor.IsMapped() ? tensor.source->Mapped(tensor.index).file : nullptr;
      const auto [unit, is_new] = by_file.emplace(file, units.size());
      if (is_new) units.push_back({.name = plan.name, .tensors = {}});
      units[unit->second].tensors.push_back(std::move(tensor));
    }
  }
  return units;
}

absl::Status Dispatcher::MakeRings(const std::map<c10::DeviceIndex, uint64_t>& offloaded) {
  const int rings = static_cast<int>(offloaded.size());
  // The readers of all rings together; each ring has at least one.
  auto readers_of_next = [&, next = 0]() mutable {
    return std::max(options_.readers / rings + (next++ < options_.readers % rings ? 1 : 0), 1);
  };
  std::vector<OffloadRing::Plan> plans;
  for (const auto& [index, bytes] : offloaded) {
    // Devices of a map differ only in the index.
    const auto item = std::find_if(items_.begin(), items_.end(), [index = index](const Item& each) {
      return each.source != nullptr && each.device.index() == index;
    });
    const uint64_t ring_bytes = RingBytes(item->device, bytes);
    plans.push_back({.units = Units(item->device, ring_bytes),
                     .options = {.device = item->device,
                                 .bytes = ring_bytes,
                                 .readers = readers_of_next(),
                                 .prefetch = options_.prefetch}});
  }
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    auto made = OffloadRing::MakeAll(std::move(plans));
    ThrowIfError(made.status());
    result_.rings_ = *std::move(made);
  }));
  return Guard([&] {
    // Move further tensors that share the memory of one.
    for (const Item& item : items_) {
      for (size_t i = 1; item.source != nullptr && i < item.tensors.size(); ++i) {
        PlaceTensor(item.tensors[i], item.tensor());
      }
    }
  });
}

bool Dispatcher::HasSeveralDevices() const {
  return std::any_of(items_.begin(), items_.end(),
                     [&](const Item& item) { return item.device != items_[0].device; });
}

void Dispatcher::Divide() {
  if (!HasSeveralDevices()) return;
  std::vector<at::Tensor> parameters, buffers;
  for (const Item& item : items_) {
    for (const at::Tensor& tensor : item.tensors) {
      if (!tensor.is_meta()) (item.is_buffer ? buffers : parameters).push_back(tensor);
    }
  }
  result_.divided_ = std::make_unique<DividedModel>(parameters, buffers);
}

absl::StatusOr<DispatchedModel> Dispatcher::Finish() {
  std::map<std::string, double> resident;
  // Includes tensors without elements, which need a device, too.
  std::map<c10::DeviceIndex, uint64_t> offloaded;
  for (const Item& item : items_) {
    const uint64_t bytes = BytesOf(item);
    if (item.source != nullptr) {
      offloaded[item.device.index()] += bytes;
    } else if (!item.tensor().is_meta()) {
      resident[NameOf(item.device)] += static_cast<double>(bytes);
    }
  }
  result_.resident_.assign(resident.begin(), resident.end());
  // Register first, because rings change the module.
  if (HasSeveralDevices()) MUSTER_RETURN_IF_ERROR(Guard([] { DividedModel::Register(); }));
  MUSTER_RETURN_IF_ERROR(MakeRings(offloaded));
  MUSTER_RETURN_IF_ERROR(Guard([&] { Divide(); }));
  if (offload_file_.has_value()) offload_file_->Keep();
  return std::move(result_);
}

DispatchedModel::DispatchedModel() = default;
DispatchedModel::DispatchedModel(DispatchedModel&&) noexcept = default;
DispatchedModel& DispatchedModel::operator=(DispatchedModel&&) noexcept = default;
DispatchedModel::~DispatchedModel() = default;

OffloadStats DispatchedModel::stats() const {
  OffloadStats all;
  for (const auto& ring : rings_) all += ring->stats();
  return all;
}

absl::StatusOr<DeviceMap> PlanDevices(const torch::nn::Module& module, const std::string& mode,
                                      const DevicePlanOptions& options) {
  const std::set<std::string> modes = {"auto", "balanced", "balanced_low_0", "sequential"};
  if (!modes.contains(mode)) {
    return absl::InvalidArgumentError(absl::StrCat("device map \"", mode,
                                                   "\": write auto, balanced, balanced_low_0 or "
                                                   "sequential, or name a device for each module"));
  }
  MUSTER_ASSIGN_OR_RETURN(PlannedModel model, DescribeModule(module));
  if (options.dtype.has_value()) {
    MUSTER_ASSIGN_OR_RETURN(const std::string type, PlannedType(*options.dtype));
    SetFloatingType(model, type);
  }
  const bool found = options.max_memory.empty();
  MUSTER_ASSIGN_OR_RETURN(DeviceLimits limits,
                          OrderDevices(found ? GetMaxMemory() : options.max_memory));
  MUSTER_RETURN_IF_ERROR(CheckDevicesAreThere(limits));
  DeviceMapOptions map;
  map.no_split = ShortClassNames(options.no_split);
  map.offload_buffers = options.offload_buffers;
  map.fallback_allocation = options.fallback_allocation;
  MUSTER_ASSIGN_OR_RETURN(map.special_dtypes, PlannedTypes(module, options.special_dtypes));
  MUSTER_RETURN_IF_ERROR(CheckUndivided(model, limits, map));
  if (mode != "sequential") {
    BalanceOptions balance;
    balance.no_split = map.no_split;
    balance.special_dtypes = map.special_dtypes;
    balance.counted_whole = ExpertLists(model);
    balance.low_zero = mode == "balanced_low_0";
    balance.user_set = !found;
    MUSTER_ASSIGN_OR_RETURN(limits, BalanceMemory(model, limits, balance));
  }
  return InferDeviceMap(model, limits, map);
}

absl::StatusOr<DispatchedModel> DispatchModel(torch::nn::Module& module,
                                              const DeviceEntries& device_map,
                                              const DispatchOptions& options) {
  Dispatcher dispatcher(module, options);
  MUSTER_RETURN_IF_ERROR(dispatcher.Prepare(device_map, /*keep_on_host=*/false));
  MUSTER_RETURN_IF_ERROR(dispatcher.Distribute());
  return dispatcher.Finish();
}

absl::StatusOr<DispatchedModel> LoadCheckpointAndDispatch(torch::nn::Module& module,
                                                          const std::string& path,
                                                          const DeviceEntries& device_map,
                                                          const LoadCheckpointOptions& options) {
  Dispatcher dispatcher(module, options.dispatch);
  const DeviceEntries all_on_cpu = {{"", "cpu"}};
  MUSTER_RETURN_IF_ERROR(
      dispatcher.Prepare(device_map.empty() ? all_on_cpu : device_map, /*keep_on_host=*/false));
  MUSTER_RETURN_IF_ERROR(dispatcher.Load(path, options));
  MUSTER_RETURN_IF_ERROR(dispatcher.Distribute());
  return dispatcher.Finish();
}

absl::StatusOr<DispatchedModel> CpuOffload(torch::nn::Module& module, c10::Device device,
                                           const DispatchOptions& options) {
  DispatchOptions on_device = options;
  on_device.main_device = device;
  Dispatcher dispatcher(module, on_device);
  MUSTER_RETURN_IF_ERROR(dispatcher.Prepare({{"", "cpu"}}, /*keep_on_host=*/true));
  MUSTER_RETURN_IF_ERROR(dispatcher.Distribute());
  return dispatcher.Finish();
}

absl::StatusOr<DispatchedModel> DiskOffload(torch::nn::Module& module, const std::string& folder,
                                            c10::Device device, const DispatchOptions& options) {
  DispatchOptions on_device = options;
  on_device.main_device = device;
  on_device.offload_folder = folder;
  return DispatchModel(module, {{"", "disk"}}, on_device);
}

absl::Status CheckDiskSpace(const std::string& folder, uint64_t bytes) {
  struct statvfs info;
  if (statvfs(folder.c_str(), &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot examine ", folder));
  }
  const uint64_t left = uint64_t{info.f_bavail} * info.f_frsize;
  if (bytes <= left) return absl::OkStatus();
  const SizePair texts = HumanBytesApart(static_cast<int64_t>(left), static_cast<int64_t>(bytes));
  return absl::ResourceExhaustedError(absl::StrCat(folder, " has ", texts.first,
                                                   " left, and offloading takes ", texts.second,
                                                   ": ", kOtherWays));
}

}  // namespace muster
