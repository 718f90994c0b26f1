#include "worker/checkpoint/weight_files.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/file_identity.h"
#include "base/home_path.h"
#include "base/mutex.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/for_each.h"
#include "worker/checkpoint/run_folder.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shape_text.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/streamed_file.h"

namespace muster {
namespace {

constexpr uint64_t kPartBytes = uint64_t{8} << 20;
// The bytes that a thread of ReadAll() reads at a time, so that what it copies is still in the
// processor's cache.
constexpr uint64_t kPieceBytes = uint64_t{1} << 20;

absl::StatusOr<std::string> FindInFolder(const std::string& folder) {
  for (const char* const name : {"model.safetensors", "model.safetensors.index.json",
                                 "pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    std::string path = JoinPath(folder, name);
    if (PathExists(path)) return path;
  }
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(folder));
  for (const char* const ending : {".index.json", ".safetensors"}) {
    std::vector<std::string> fitting;
    for (const std::string& name : names) {
      // Files that file managers and editors leave, such as "._model.safetensors", are not models.
      if (!absl::StartsWith(name, ".") && absl::EndsWith(name, ending)) fitting.push_back(name);
    }
    if (fitting.size() == 1) return JoinPath(folder, fitting[0]);
    if (fitting.size() > 1) {
      return absl::InvalidArgumentError(absl::StrCat(folder, " holds ", fitting.size(), " files *",
                                                     ending, " (", fitting[0], ", ", fitting[1],
                                                     ", ...): name one of them"));
    }
  }
  return absl::NotFoundError(absl::StrCat(
      folder,
      " holds no weights: neither model.safetensors nor pytorch_model.bin, nor an index of shards "
      "(*.index.json)",
      CheckpointsInPlaceOfWeights(folder)));
}

// "format" in the header of safetensors: the library whose layout the tensors have. Those of
// TensorFlow and Flax have kernels that are transposed, and square ones would fit in silence.
absl::Status CheckFormat(const SafetensorsHeader& header, const std::string& file) {
  if (!header.metadata.has_value()) return absl::OkStatus();
  const auto found = header.metadata->find("format");
  if (found == header.metadata->end()) return absl::OkStatus();
  const std::string& format = found->second;
  if (format == "pt" || format == "mlx") return absl::OkStatus();
  if (format == "tf" || format == "flax") {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": holds the weights of ", format == "tf" ? "a TensorFlow" : "a Flax",
                     " model (\"format\": \"", format,
                     "\"), in another layout than PyTorch's: load them in ", "transformers with ",
                     format == "tf" ? "from_tf" : "from_flax", "=True and save them from there"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(file, ": its header says \"format\": \"", Printable(format),
                   "\", which is not \"pt\" (PyTorch's): if its tensors are laid out as PyTorch's ",
                   "are, write it again with {\"format\": \"pt\"}"));
}

absl::StatusOr<std::vector<StoredTensor>> ReadTensors(const ByteSource& source) {
  std::string beginning(std::min<uint64_t>(source.size(), 16), '\0');
  MUSTER_RETURN_IF_ERROR(source.Read(0, beginning.data(), beginning.size()));
  if (LooksLikeTorchFile(beginning)) return ReadTorchFile(source);
  const auto read = [&](uint64_t offset, char* to, size_t bytes) {
    return source.Read(offset, to, bytes);
  };
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                          ReadSafetensorsHeader(source.size(), read, source.name()));
  MUSTER_RETURN_IF_ERROR(CheckFormat(header, source.name()));
  std::vector<StoredTensor> tensors;
  tensors.reserve(header.tensors.size());
  for (const SafetensorsEntry& entry : header.tensors) {
    tensors.push_back({.name = entry.name,
                       .type = entry.type,
                       .shape = entry.shape,
                       .begin = 8 + header.header_bytes + entry.begin,
                       .extent_bytes = entry.end - entry.begin});
  }
  return tensors;
}

}  // namespace

absl::Status WeightFiles::Add(const std::string& file, const std::vector<std::string>* wanted,
                              const std::string& index) {
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<ByteSource> source, OpenFileSource(file));
  MUSTER_ASSIGN_OR_RETURN(std::vector<StoredTensor> tensors, ReadTensors(*source));
  absl::flat_hash_set<absl::string_view> expected;
  if (wanted != nullptr) expected.insert(wanted->begin(), wanted->end());
  absl::flat_hash_set<std::string> found;
  for (StoredTensor& tensor : tensors) {
    if (wanted != nullptr && !expected.contains(tensor.name)) continue;
    found.insert(tensor.name);
    places_.emplace(tensor.name, entries_.size());
    entries_.push_back({.tensor = std::move(tensor), .file = sources_.size()});
  }
  if (wanted != nullptr) {
    for (const std::string& name : *wanted) {
      if (found.contains(name)) continue;
      // Not NOT_FOUND, because nothing is missing that a download could add.
      return absl::InvalidArgumentError(absl::StrCat(index, ": places tensor \"", Printable(name),
                                                     "\" in ", file, ", which does not hold it"));
    }
  }
  sources_.push_back(std::move(source));
  return absl::OkStatus();
}

absl::StatusOr<WeightFiles> WeightFiles::Open(const std::string& given) {
  const std::string path = WithHome(given);
  std::vector<std::pair<std::string, std::optional<std::string>>> opened;  // with their index
  const auto open_all = [&]() -> absl::StatusOr<WeightFiles> {
    std::string start = path;
    if (IsFolder(path)) {
      MUSTER_ASSIGN_OR_RETURN(start, FindInFolder(path));
    }
    WeightFiles files;
    files.path_ = path;
    if (!absl::EndsWith(start, ".json")) {
      MUSTER_RETURN_IF_ERROR(files.Add(start, nullptr, ""));
      return files;
    }
    opened.emplace_back(start, FileIdentityAt(start));
    MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(start));
    MUSTER_ASSIGN_OR_RETURN(const auto map, ParseShardIndex(text, start));
    std::map<std::string, std::vector<std::string>> by_file;
    for (const auto& [name, file] : map) by_file[file].push_back(name);
    for (const auto& [file, names] : by_file) {
      const std::string shard = JoinPath(ParentPath(start), file);
      opened.emplace_back(shard, FileIdentityAt(shard));
      const absl::Status added = files.Add(shard, &names, start);
      if (absl::IsNotFound(added) && !PathExists(shard)) {
        return absl::NotFoundError(
            absl::StrCat(start, ": places tensors in ", shard,
                         ", which does not exist: copy or download it, too"));
      }
      MUSTER_RETURN_IF_ERROR(added);
    }
    return files;
  };
  // Check the tensors: shards of two saves may have the same names and tensors, and nothing else
  // would show a mixture.
  absl::StatusOr<WeightFiles> files = absl::UnknownError("not opened");
  const bool together = RetryUntilUnchanged([&] {
    opened.clear();
    files = open_all();
    return std::all_of(opened.begin(), opened.end(),
                       [](const auto& file) { return FileIdentityAt(file.first) == file.second; });
  });
  if (together) return files;
  return absl::UnavailableError(
      absl::StrCat(path,
                   ": another process keeps replacing its files while they are opened: open them "
                   "when it has ended, or name a copy"));
}

const WeightFiles::Entry* WeightFiles::Find(absl::string_view name) const {
  const auto found = places_.find(std::string_view(name.data(), name.size()));
  return found == places_.end() ? nullptr : &entries_[found->second];
}

std::vector<std::string> WeightFiles::Files() const {
  std::vector<std::string> paths;
  for (const auto& source : sources_) paths.push_back(source->name());
  return paths;
}

absl::Status WeightFiles::Divide(
    const std::function<std::vector<std::string>(const std::string&)>& parts) {
  std::vector<Entry> entries;
  for (const Entry& entry : entries_) {
    const StoredTensor& whole = entry.tensor;
    std::vector<std::string> names = parts(whole.name);
    if (names.empty()) {
      entries.push_back(entry);
      continue;
    }
    const uint64_t count = names.size();
    const bool fits = whole.shape.size() == 3 && whole.strides.empty() && BytesOf(entry) > 0 &&
                      whole.shape[0] * whole.shape[1] % count == 0;
    if (!fits) {
      return absl::InvalidArgumentError(
          absl::StrCat(FileOf(entry), ": tensor \"", Printable(whole.name), "\" of shape ",
                       ShapeText(whole.shape), " should be ", count,
                       " matrices of one size, one below the other",
                       whole.strides.empty() ? "" : "; it is stored transposed"));
    }
    const std::vector<uint64_t> shape = {whole.shape[0] * whole.shape[1] / count, whole.shape[2]};
    const uint64_t bytes = whole.extent_bytes / count;
    for (uint64_t i = 0; i < count; ++i) {
      entries.push_back({.tensor = {.name = std::move(names[i]),
                                    .type = whole.type,
                                    .shape = shape,
                                    .begin = whole.begin + i * bytes,
                                    .extent_bytes = bytes},
                         .file = entry.file});
    }
  }
  entries_ = std::move(entries);
  places_.clear();
  for (size_t i = 0; i < entries_.size(); ++i) places_.emplace(entries_[i].tensor.name, i);
  return absl::OkStatus();
}

absl::Status WeightFiles::Read(const Entry& entry, char* to) const {
  return sources_[entry.file]->Read(entry.tensor.begin, to, entry.tensor.extent_bytes);
}

absl::StatusOr<size_t> WeightFiles::Fetch(const Entry& entry, uint64_t begin, size_t bytes,
                                          char* block) const {
  const uint64_t at = entry.tensor.begin + begin;
  const StreamedFile* const file = StreamedFileOf(entry);
  if (file == nullptr) {
    MUSTER_RETURN_IF_ERROR(sources_[entry.file]->Read(at, block, bytes));
    return 0;
  }
  const absl::StatusOr<size_t> fetched = file->Fetch(at, bytes, block);
  if (!fetched.ok()) return Named(entry, fetched.status());
  return fetched;
}

absl::Status WeightFiles::ReadAll(const std::vector<Reading>& readings, int threads) const {
  struct Piece {
    const Reading* reading;
    uint64_t begin, end;  // range in the extent
  };
  std::vector<Piece> pieces;
  for (const Reading& reading : readings) {
    const StoredTensor& tensor = reading.entry->tensor;
    const uint64_t width = std::max(SafetensorsTypeBits(tensor.type) / 8, 1);
    // All but the first begin where a block of the disk does.
    const uint64_t remainder = tensor.begin % kDirectAlignment;
    const uint64_t first = kPieceBytes - (remainder % width == 0 ? remainder : 0);
    for (uint64_t begin = 0; begin < tensor.extent_bytes;) {
      const uint64_t end = std::min(tensor.extent_bytes, begin == 0 ? first : begin + kPieceBytes);
      pieces.push_back({&reading, begin, end});
      begin = end;
    }
  }
  Mutex mu;
  std::vector<AlignedMemory> idle;
  return ForEach(pieces.size(), {.threads = threads}, [&](uint64_t i) {
    AlignedMemory scratch;
    {
      MutexLock lock(&mu);
      if (!idle.empty()) {
        scratch = std::move(idle.back());
        idle.pop_back();
      }
    }
    const Piece& piece = pieces[i];
    const absl::Status read = ReadPiece(*piece.reading, piece.begin, piece.end, scratch);
    MutexLock lock(&mu);
    idle.push_back(std::move(scratch));
    return read;
  });
}

absl::Status WeightFiles::ReadPiece(const Reading& reading, uint64_t begin, uint64_t end,
                                    AlignedMemory& scratch) const {
  const Entry& entry = *reading.entry;
  const uint64_t at = entry.tensor.begin + begin;
  const size_t bytes = end - begin;
  if (reading.to == nullptr) {
    MUSTER_RETURN_IF_ERROR(scratch.Grow(StreamedFile::RoomFor(at, bytes)));
    MUSTER_ASSIGN_OR_RETURN(const size_t offset, Fetch(entry, begin, bytes, scratch.data()));
    return Named(entry, reading.take(begin, absl::string_view(scratch.data() + offset, bytes)));
  }
  const StreamedFile* const file = StreamedFileOf(entry);
  if (file == nullptr) return sources_[entry.file]->Read(at, reading.to + begin, bytes);
  return Named(entry, file->Read(at, bytes, reading.to + begin, scratch));
}

absl::Status WeightFiles::Named(const Entry& entry, const absl::Status& status) const {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(FileOf(entry), ": tensor \"", Printable(entry.tensor.name),
                                   "\": ", status.message()));
}

uint64_t WeightFiles::BytesOf(const Entry& entry) {
  const absl::StatusOr<uint64_t> bytes = SafetensorsBytes(entry.tensor.type, entry.tensor.shape);
  return bytes.ok() ? *bytes : 0;
}

std::string WeightFiles::StorageOf(const Entry& entry) const {
  if (entry.tensor.extent_bytes == 0) return "";
  return absl::StrCat(
      entry.file, ":", entry.tensor.begin, ":", SafetensorsTypeName(entry.tensor.type), ":",
      absl::StrJoin(entry.tensor.shape, ","), ":", absl::StrJoin(entry.tensor.strides, ","));
}

absl::Status WeightFiles::Stream(const Entry& entry,
                                 absl::FunctionRef<absl::Status(absl::string_view)> sink) const {
  const StoredTensor& tensor = entry.tensor;
  if (tensor.extent_bytes == 0) return absl::OkStatus();
  if (tensor.strides.empty()) {
    std::string part;
    for (uint64_t done = 0; done < tensor.extent_bytes; done += part.size()) {
      part.resize(std::min(kPartBytes, tensor.extent_bytes - done));
      MUSTER_RETURN_IF_ERROR(
          sources_[entry.file]->Read(tensor.begin + done, part.data(), part.size()));
      MUSTER_RETURN_IF_ERROR(sink(part));
    }
    return absl::OkStatus();
  }
  AlignedMemory extent;
  if (const absl::Status grown = extent.Grow(tensor.extent_bytes); !grown.ok()) {
    return absl::Status(grown.code(),
                        absl::StrCat(FileOf(entry), ": tensor \"", Printable(tensor.name),
                                     "\": ", grown.message()));
  }
  MUSTER_RETURN_IF_ERROR(Read(entry, extent.data()));
  const size_t width = SafetensorsTypeBits(tensor.type) / 8;
  const size_t dimensions = tensor.shape.size();
  std::vector<uint64_t> place(dimensions, 0);
  uint64_t at = 0;
  std::string part;
  const uint64_t elements = BytesOf(entry) / width;
  for (uint64_t i = 0; i < elements; ++i) {
    part.append(extent.data() + at * width, width);
    if (part.size() >= kPartBytes) {
      MUSTER_RETURN_IF_ERROR(sink(part));
      part.clear();
    }
    for (size_t d = dimensions; d > 0; --d) {
      at += tensor.strides[d - 1];
      if (++place[d - 1] < tensor.shape[d - 1]) break;
      at -= tensor.strides[d - 1] * tensor.shape[d - 1];
      place[d - 1] = 0;
    }
  }
  return part.empty() ? absl::OkStatus() : sink(part);
}

}  // namespace muster
