#include "worker/checkpoint/model_files.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/run_folder.h"
#include "worker/checkpoint/shard_plan.h"

namespace muster {
namespace {

// Returns the file or index with which a folder's model begins.
absl::StatusOr<std::string> FindInFolder(const std::string& folder) {
  const std::string single = JoinPath(folder, absl::StrCat(kModelStem, kModelExtension));
  if (PathExists(single)) return single;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(folder));
  std::vector<std::string> indexes;
  for (const std::string& name : names) {
    // Ignore hidden files, as everywhere weights are looked for.
    if (!absl::StartsWith(name, ".") && absl::EndsWith(name, ".index.json")) {
      indexes.push_back(name);
    }
  }
  if (indexes.size() == 1) return JoinPath(folder, indexes[0]);
  if (indexes.empty()) {
    return absl::NotFoundError(
        absl::StrCat(folder, " holds neither model.safetensors nor an index (*.index.json)",
                     CheckpointsInPlaceOfWeights(folder)));
  }
  return absl::InvalidArgumentError(absl::StrCat(folder, " holds ", indexes.size(), " indexes (",
                                                 indexes[0], ", ", indexes[1],
                                                 ", ...); name one of them"));
}

}  // namespace

absl::Status SaveModelFiles(const std::string& dir, const NamedTensors& tensors,
                            int64_t max_shard_bytes) {
  const NamedTensors kept = WithoutSharedTensors(tensors);
  MUSTER_ASSIGN_OR_RETURN(const std::vector<SafetensorsEntry> entries, DescribeTensors(dir, kept));
  MUSTER_ASSIGN_OR_RETURN(const std::unique_ptr<ModelFolderWriter> writer,
                          ModelFolderWriter::Begin(dir, entries, max_shard_bytes));
  for (const auto& [name, tensor] : kept) {
    MUSTER_RETURN_IF_ERROR(WriteTensor(*writer, name, tensor));
  }
  return writer->Finish();
}

absl::Status WriteTensor(ModelFolderWriter& writer, const std::string& name,
                         const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
  return writer.Write(
      name, 0, absl::string_view(static_cast<const char*>(plain.data_ptr()), plain.nbytes()));
}

absl::StatusOr<ModelFiles> ModelFiles::Open(const std::string& path) {
  std::string start = path;
  if (IsFolder(path)) {
    MUSTER_ASSIGN_OR_RETURN(start, FindInFolder(path));
  }
  ModelFiles files;
  files.path_ = path;
  if (!absl::EndsWith(start, ".json")) {
    MUSTER_ASSIGN_OR_RETURN(SafetensorsReader reader, SafetensorsReader::Open(start));
    for (const SafetensorsEntry& entry : reader.header().tensors) {
      files.places_.emplace_back(entry.name, 0);
    }
    files.readers_.push_back(std::move(reader));
    return files;
  }
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(start));
  MUSTER_ASSIGN_OR_RETURN(const auto map, ParseShardIndex(text, start));
  std::map<std::string, size_t> opened;
  for (const auto& [name, file] : map) {
    const auto [place, is_new] = opened.emplace(file, files.readers_.size());
    if (is_new) {
      MUSTER_ASSIGN_OR_RETURN(SafetensorsReader reader,
                              SafetensorsReader::Open(JoinPath(ParentPath(start), file)));
      files.readers_.push_back(std::move(reader));
    }
    if (files.readers_[place->second].header().Find(name) == nullptr) {
      return absl::NotFoundError(absl::StrCat(start, ": places tensor \"", Printable(name),
                                              "\" in ", file, ", which does not hold it"));
    }
    files.places_.emplace_back(name, place->second);
  }
  return files;
}

std::vector<std::string> ModelFiles::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, reader] : places_) names.push_back(name);
  return names;
}

const SafetensorsReader* ModelFiles::ReaderOf(absl::string_view name) const {
  const auto found =
      std::lower_bound(places_.begin(), places_.end(), name,
                       [](const std::pair<std::string, size_t>& place, absl::string_view wanted) {
                         return place.first < wanted;
                       });
  return found != places_.end() && found->first == name ? &readers_[found->second] : nullptr;
}

absl::StatusOr<at::Tensor> ModelFiles::Read(absl::string_view name) const {
  if (const SafetensorsReader* reader = ReaderOf(name)) return reader->Read(name);
  return absl::NotFoundError(
      absl::StrCat(path_, ": tensor \"", Printable(name), "\": is in none of the files"));
}

absl::StatusOr<at::Tensor> ModelFiles::Map(absl::string_view name) const {
  if (const SafetensorsReader* reader = ReaderOf(name)) return reader->Map(name);
  return Read(name);
}

const SafetensorsEntry* ModelFiles::Find(absl::string_view name) const {
  const SafetensorsReader* const reader = ReaderOf(name);
  return reader == nullptr ? nullptr : reader->header().Find(name);
}

}  // namespace muster
