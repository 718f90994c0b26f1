#include "worker/checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/from_blob.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "c10/core/ScalarType.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/checkpoint/transfer.h"

namespace muster {
namespace {

constexpr std::pair<SafetensorsType, at::ScalarType> kTypes[] = {
    {SafetensorsType::kBool, at::kBool},
    {SafetensorsType::kU8, at::kByte},
    {SafetensorsType::kI8, at::kChar},
    {SafetensorsType::kF8E5M2, at::kFloat8_e5m2},
    {SafetensorsType::kF8E4M3, at::kFloat8_e4m3fn},
    {SafetensorsType::kF8E8M0, at::kFloat8_e8m0fnu},
    {SafetensorsType::kF8E4M3Fnuz, at::kFloat8_e4m3fnuz},
    {SafetensorsType::kF8E5M2Fnuz, at::kFloat8_e5m2fnuz},
    {SafetensorsType::kI16, at::kShort},
    {SafetensorsType::kU16, at::kUInt16},
    {SafetensorsType::kF16, at::kHalf},
    {SafetensorsType::kBF16, at::kBFloat16},
    {SafetensorsType::kI32, at::kInt},
    {SafetensorsType::kU32, at::kUInt32},
    {SafetensorsType::kF32, at::kFloat},
    {SafetensorsType::kC64, at::kComplexFloat},
    {SafetensorsType::kF64, at::kDouble},
    {SafetensorsType::kI64, at::kLong},
    {SafetensorsType::kU64, at::kUInt64},
};

// Messages name the tensor.
absl::StatusOr<at::ScalarType> ToScalarTypeOf(const SafetensorsEntry& entry,
                                              const std::string& path) {
  const absl::StatusOr<at::ScalarType> type = ToScalarType(entry.type);
  if (type.ok()) return type;
  return absl::Status(type.status().code(), absl::StrCat(PlaceOfTensor(path, entry.name),
                                                         "dtype: ", type.status().message()));
}

}  // namespace

absl::StatusOr<at::ScalarType> ToScalarType(SafetensorsType type) {
  for (const auto& [ours, torchs] : kTypes) {
    if (ours == type) return torchs;
  }
  return absl::UnimplementedError(
      absl::StrCat("the type ", SafetensorsTypeName(type), " can be listed but not loaded"));
}

absl::StatusOr<SafetensorsType> ToSafetensorsType(at::ScalarType type) {
  for (const auto& [ours, torchs] : kTypes) {
    if (torchs == type) return ours;
  }
  return absl::UnimplementedError(
      absl::StrCat("safetensors files cannot hold the type ", c10::toString(type)));
}

struct SafetensorsReader::File {
  explicit File(int descriptor) : fd(descriptor) {}
  ~File() {
    if (base != nullptr) munmap(base, size);
    close(fd);
  }

  // Maps the file at the first call.
  absl::StatusOr<char*> MappedData(const std::string& path) const {
    MutexLock lock(&mu);
    if (base == nullptr) {
      // Map without reserving memory for changes to all of it, which a machine may not have: few
      // are made.
      void* const address =
          mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
      if (address == MAP_FAILED) {
        return ReadError(errno, absl::StrCat("cannot map ", path));
      }
      base = static_cast<char*>(address);
    }
    return base;
  }

  const int fd;
  size_t size = 0;
  mutable Mutex mu;
  mutable char* base ABSL_GUARDED_BY(mu) = nullptr;
};

SafetensorsReader::SafetensorsReader(std::string path, SafetensorsHeader header,
                                     std::shared_ptr<const File> file)
    : path_(std::move(path)), header_(std::move(header)), file_(std::move(file)) {}

absl::StatusOr<SafetensorsReader> SafetensorsReader::Open(const std::string& path) {
  // Refuse a pipe that has the name of a file, rather than wait for it.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ReadError(errno, absl::StrCat("cannot open ", path));
  auto file = std::make_shared<File>(fd);
  MUSTER_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(fd, path));
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return ReadError(errno, absl::StrCat("cannot examine ", path));
  }
  file->size = info.st_size;
  if (file->size != 8 + header.header_bytes + header.data_bytes) {
    return absl::AbortedError(absl::StrCat(path, ": the file changed while it was opened"));
  }
  return SafetensorsReader(path, std::move(header), std::move(file));
}

absl::StatusOr<at::Tensor> SafetensorsReader::Allocate(const SafetensorsEntry& entry) const {
  MUSTER_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarTypeOf(entry, path_));
  const std::string place = PlaceOfTensor(path_, entry.name);
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, TensorSizes(entry.shape, place));
  return NewTensor(sizes, type, place);
}

absl::Status SafetensorsReader::ReadInto(const SafetensorsEntry& entry,
                                         const at::Tensor& tensor) const {
  char* to = static_cast<char*>(tensor.data_ptr());
  uint64_t left = entry.end - entry.begin;
  uint64_t at = 8 + header_.header_bytes + entry.begin;
  while (left > 0) {
    const ssize_t n = pread(file_->fd, to, std::min(left, uint64_t{1} << 30), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ReadError(errno, absl::StrCat("cannot read ", path_));
    if (n == 0) {
      return absl::DataLossError(
          absl::StrCat(path_, ": the file became shorter while it was read"));
    }
    to += n;
    at += n;
    left -= n;
  }
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> SafetensorsReader::Read(absl::string_view name) const {
  const SafetensorsEntry* const entry = header_.Find(name);
  if (entry == nullptr) {
    return absl::NotFoundError(absl::StrCat(PlaceOfTensor(path_, name), "is not in the file"));
  }
  MUSTER_ASSIGN_OR_RETURN(at::Tensor tensor, Allocate(*entry));
  MUSTER_RETURN_IF_ERROR(ReadInto(*entry, tensor));
  return tensor;
}

absl::StatusOr<at::Tensor> SafetensorsReader::Map(absl::string_view name) const {
  const SafetensorsEntry* const entry = header_.Find(name);
  if (entry == nullptr || entry->begin == entry->end) return Read(name);
  MUSTER_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarTypeOf(*entry, path_));
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes,
                          TensorSizes(entry->shape, PlaceOfTensor(path_, name)));
  const uint64_t offset = 8 + header_.header_bytes + entry->begin;
  if (offset % c10::elementSize(type) != 0) return Read(name);
  MUSTER_ASSIGN_OR_RETURN(char* const base, file_->MappedData(path_));
  return at::from_blob(
      base + offset, sizes, [file = file_](void*) {}, at::TensorOptions().dtype(type));
}

absl::StatusOr<NamedTensors> SafetensorsReader::ReadAll(FileDigest* digest) const {
  NamedTensors tensors;
  tensors.reserve(header_.tensors.size());
  std::vector<size_t> order(header_.tensors.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    MUSTER_ASSIGN_OR_RETURN(at::Tensor tensor, Allocate(header_.tensors[i]));
    tensors.emplace_back(header_.tensors[i].name, std::move(tensor));
  }
  // The ranges have no holes, so in this order they make up the file.
  std::sort(order.begin(), order.end(), [this](size_t a, size_t b) {
    return std::tie(header_.tensors[a].begin, header_.tensors[a].end) <
           std::tie(header_.tensors[b].begin, header_.tensors[b].end);
  });
  Digester digester;
  if (digest != nullptr) {
    std::string prefix(8 + header_.header_bytes, '\0');
    size_t done = 0;
    while (done < prefix.size()) {
      const ssize_t n = pread(file_->fd, prefix.data() + done, prefix.size() - done, done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ReadError(errno, absl::StrCat("cannot read ", path_));
      if (n == 0) return absl::DataLossError(absl::StrCat(path_, ": cannot read the header again"));
      done += n;
    }
    digester.Update(prefix);
  }
  for (const size_t i : order) {
    const SafetensorsEntry& entry = header_.tensors[i];
    MUSTER_RETURN_IF_ERROR(ReadInto(entry, tensors[i].second));
    if (digest != nullptr && entry.end > entry.begin) {
      digester.Update(absl::string_view(static_cast<const char*>(tensors[i].second.data_ptr()),
                                        entry.end - entry.begin));
    }
  }
  if (digest != nullptr) *digest = digester.Finish();
  return tensors;
}

absl::StatusOr<NamedTensors> SafetensorsReader::ReadAllBlocks(const BlockDigests& blocks) const {
  // Read all of it into one piece of memory, in huge pages, of which tensors are parts: a page
  // fault for each 4 KiB, and a copy, would take longer than a fast disk.
  const auto memory = std::make_shared<AlignedMemory>();
  if (const absl::Status grown = memory->Grow(DirectAlignedUp(file_->size)); !grown.ok()) {
    return absl::Status(grown.code(), absl::StrCat(path_, ": ", grown.message()));
  }
  DirectFileOptions options{.in_flight = ReadingThreads()};
  options.place = [&](uint64_t offset) {
    char* const block = memory->data() + offset;
#ifdef MADV_POPULATE_WRITE
    // Populate in the threads that read, rather than page by page under direct I/O as older kernels
    // do.
    (void)madvise(block, std::min(blocks.block_bytes, DirectAlignedUp(file_->size - offset)),
                  MADV_POPULATE_WRITE);
#endif
    return block;
  };
  MUSTER_RETURN_IF_ERROR(ReadDirectFile(
      path_, file_->size, blocks, std::nullopt,
      [](uint64_t, absl::string_view) { return absl::OkStatus(); }, options));
  NamedTensors tensors;
  tensors.reserve(header_.tensors.size());
  for (const SafetensorsEntry& entry : header_.tensors) {
    char* const data = memory->data() + 8 + header_.header_bytes + entry.begin;
    MUSTER_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarTypeOf(entry, path_));
    if (entry.begin < entry.end &&
        reinterpret_cast<uintptr_t>(data) % c10::elementSize(type) == 0) {
      MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes,
                              TensorSizes(entry.shape, PlaceOfTensor(path_, entry.name)));
      tensors.emplace_back(entry.name, at::from_blob(
                                           data, sizes, [memory](void*) {}, type));
      continue;
    }
    MUSTER_ASSIGN_OR_RETURN(at::Tensor tensor, Allocate(entry));
    if (entry.begin < entry.end) std::memcpy(tensor.data_ptr(), data, entry.end - entry.begin);
    tensors.emplace_back(entry.name, std::move(tensor));
  }
  return tensors;
}

NamedTensors WithoutSharedTensors(const NamedTensors& tensors) {
  // Tensors by where they begin; few begin at the same place.
  absl::flat_hash_map<const void*, std::vector<const at::Tensor*>> seen;
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.device() == b.device() && a.scalar_type() == b.scalar_type() &&
           a.sizes() == b.sizes() && a.strides() == b.strides() &&
           // They may be views of one memory that read it differently.
           a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
  };
  NamedTensors kept;
  kept.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
        tensor.numel() > 0) {
      std::vector<const at::Tensor*>& others = seen[tensor.const_data_ptr()];
      if (std::any_of(others.begin(), others.end(),
                      [&](const at::Tensor* other) { return same(*other, tensor); })) {
        continue;
      }
      others.push_back(&tensor);
    }
    kept.emplace_back(name, tensor);
  }
  return kept;
}

absl::StatusOr<std::vector<SafetensorsEntry>> DescribeTensors(const std::string& path,
                                                              const NamedTensors& tensors) {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta()) {
      return absl::InvalidArgumentError(
          absl::StrCat(PlaceOfTensor(path, name), !tensor.defined()  ? "is undefined"
                                                  : tensor.is_meta() ? "has no data (it is on meta)"
                                                                     : "is sparse"));
    }
    const absl::StatusOr<SafetensorsType> type = ToSafetensorsType(tensor.scalar_type());
    if (!type.ok()) {
      return absl::Status(type.status().code(),
                          absl::StrCat(PlaceOfTensor(path, name), type.status().message()));
    }
    SafetensorsEntry entry{.name = name, .type = *type};
    entry.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
    entries.push_back(std::move(entry));
  }
  return entries;
}

absl::StatusOr<SafetensorsPlan> PlanSafetensors(const std::string& path,
                                                const NamedTensors& tensors,
                                                const WriteSafetensorsOptions& options) {
  const NamedTensors kept =
      options.shared == SharedTensors::kKeepFirst ? WithoutSharedTensors(tensors) : tensors;
  MUSTER_ASSIGN_OR_RETURN(std::vector<SafetensorsEntry> entries, DescribeTensors(path, kept));
  absl::flat_hash_map<absl::string_view, const at::Tensor*> by_name;
  for (const auto& [name, tensor] : kept) by_name[name] = &tensor;
  absl::StatusOr<SafetensorsLayout> layout =
      LayOutSafetensors(std::move(entries), options.metadata, options.data_alignment);
  if (!layout.ok()) {
    return absl::Status(layout.status().code(),
                        absl::StrCat(path, ": ", layout.status().message()));
  }
  SafetensorsPlan plan{.layout = *std::move(layout), .sources = {}};
  for (const SafetensorsEntry& entry : plan.layout.tensors) {
    plan.sources.push_back(by_name[entry.name]->detach());
  }
  return plan;
}

namespace {

// Copies from devices that are queued on their current streams and have not ended.
class QueuedCopies {
 public:
  QueuedCopies() = default;
  QueuedCopies(const QueuedCopies&) = delete;
  QueuedCopies& operator=(const QueuedCopies&) = delete;
  // Waits even if a copy could not be queued: the memory to which the others write must not be used
  // again before.
  ~QueuedCopies() {
    try {
      Wait();
    } catch (const c10::Error&) {
      // The exception in flight already reports it.
    }
  }

  void Add(const c10::Device& device) {
    if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
      devices_.push_back(device);
    }
  }
  void Wait() {
    for (const c10::Device& device : std::exchange(devices_, {})) {
      const c10::impl::VirtualGuardImpl guard(device.type());
      guard.synchronizeStream(guard.getStream(device));
    }
  }

 private:
  std::vector<c10::Device> devices_;
};

}  // namespace

void CopySafetensors(const SafetensorsPlan& plan, char* to, absl::FunctionRef<bool(size_t)> skip) {
  const at::NoGradGuard no_grad;
  std::memcpy(to, plan.layout.prefix.data(), plan.layout.prefix.size());
  to += plan.layout.prefix.size();
  QueuedCopies queued;
  for (size_t i = 0; i < plan.sources.size(); ++i) {
    const SafetensorsEntry& entry = plan.layout.tensors[i];
    if (entry.begin == entry.end || skip(i)) continue;
    const at::Tensor& source = plan.sources[i];
    // Wait once for all of them. LibTorch conjugates and negates a copy on the host, after it.
    const bool queues = !source.is_cpu() && !source.is_conj() && !source.is_neg();
    if (queues) queued.Add(source.device());
    at::from_blob(to + entry.begin, source.sizes(), at::TensorOptions().dtype(source.scalar_type()))
        .copy_(source, /*non_blocking=*/queues);
  }
  queued.Wait();
}

absl::Status StreamSafetensors(const SafetensorsPlan& plan,
                               absl::FunctionRef<absl::Status(absl::string_view)> append) {
  MUSTER_RETURN_IF_ERROR(append(plan.layout.prefix));
  for (size_t i = 0; i < plan.sources.size(); ++i) {
    const SafetensorsEntry& entry = plan.layout.tensors[i];
    if (entry.begin == entry.end) continue;
    const at::Tensor tensor =
        plan.sources[i].resolve_conj().resolve_neg().to(at::kCPU).contiguous();
    MUSTER_RETURN_IF_ERROR(append(
        absl::string_view(static_cast<const char*>(tensor.data_ptr()), entry.end - entry.begin)));
  }
  return absl::OkStatus();
}

absl::StatusOr<FileDigest> WriteSafetensors(const std::string& path, const NamedTensors& tensors,
                                            const WriteSafetensorsOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsPlan plan, PlanSafetensors(path, tensors, options));
  MUSTER_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path));
  Digester digester;
  MUSTER_RETURN_IF_ERROR(StreamSafetensors(plan, [&](absl::string_view bytes) {
    digester.Update(bytes);
    return file.Append(bytes);
  }));
  MUSTER_RETURN_IF_ERROR(file.Commit());
  return digester.Finish();
}

}  // namespace muster
