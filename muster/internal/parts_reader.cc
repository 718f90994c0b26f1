#include "muster/internal/parts_reader.h"

#include <algorithm>
#include <set>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "muster/internal/slots.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/shared_files.h"
#include "worker/collective/shm_segment.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/guard.h"

namespace muster::internal {
namespace {

using Ranges = std::map<std::string, std::vector<FileRange>>;

constexpr uint64_t kBytesAtATime = uint64_t{512} << 20;

}  // namespace

PartsReader::PartsReader(Comm& comm, StateReader& reader, const Models& models)
    : comm_(comm), reader_(reader) {
  int copies = 0;  // of the model with the most copies, each divided among ranks of its own
  for (const auto& model : models) {
    if (model->sharded() == nullptr) continue;
    copies = std::max(copies, comm.size() / model->sharded()->shard_comm().size());
  }
  if (copies == 0) return;
  const std::vector<std::string> all = comm.AllGatherBytes(HostIdentity());
  const size_t hosts = std::set<std::string>(all.begin(), all.end()).size();
  hosts_of_copy_ = std::max<uint64_t>(hosts / static_cast<size_t>(copies), 1);
}

void PartsReader::Read(
    const std::vector<std::string>& names,
    const std::function<std::vector<FileRange>(const SafetensorsHeader&)>& ranges,
    const std::function<void(const std::string&)>& take, absl::Status* mine) {
  for (size_t first = 0; first < names.size();) {
    size_t last = first;
    // The memory that a host may use for the files, if its ranks need equal shares.
    for (uint64_t bytes = 0; last < names.size(); ++last) {
      const ManifestFile* const file = reader_.manifest().Find(names[last]);
      if (file == nullptr) continue;
      bytes += file->digest.bytes / (file->blocks.empty() ? 1 : hosts_of_copy_);
      if (last > first && bytes > kBytesAtATime) break;
      if (!file->blocks.empty() || reader_.in_parts()) bytes_ += file->digest.bytes;
    }
    const std::vector<std::string> some(names.begin() + first, names.begin() + last);
    first = last;
    Ranges wanted;  // empty after an error
    for (const std::string& name : some) wanted[name];
    ThrowIfError(reader_.FetchHeaders(comm_, some));
    if (mine->ok() && !reader_.in_memory()) {
      *mine = Guard([&] {
        for (const std::string& name : some) {
          wanted[name] = IsReadWhole(name) ? std::vector<FileRange>{{.begin = 0, .end = UINT64_MAX}}
                                           : ranges(HeaderOf(name));
        }
      });
    }
    ThrowIfError(reader_.ReadTogether(comm_, some, wanted));
    bytes_read_ += reader_.bytes_read_together();
    bytes_received_ += reader_.bytes_received_together();
    for (const std::string& name : some) {
      if (mine->ok()) *mine = Guard([&] { CheckHeader(name, wanted[name], ranges); });
      if (mine->ok()) *mine = Guard([&] { take(name); });
    }
  }
}

bool PartsReader::IsReadWhole(const std::string& name) const {
  const ManifestFile* const file = reader_.manifest().Find(name);
  return file == nullptr || file->blocks.empty();
}

SafetensorsHeader PartsReader::HeaderOf(const std::string& name) const {
  absl::StatusOr<SafetensorsHeader> header =
      reader_.in_parts() ? reader_.Header(name)
                         : ReadSafetensorsHeader(JoinPath(reader_.dir(), name));
  if (!reader_.in_parts() && absl::IsInvalidArgument(header.status())) {
    ThrowIfError(VerifyCheckpointFile(reader_.dir(), *reader_.manifest().Find(name),
                                      VerifyLevel::kContents));
  }
  ThrowIfError(header.status());
  return *std::move(header);
}

void PartsReader::CheckHeader(
    const std::string& name, const std::vector<FileRange>& wanted,
    const std::function<std::vector<FileRange>(const SafetensorsHeader&)>& ranges) const {
  const std::string path = reader_.PathOfShared(name);
  if (path.empty() || IsReadWhole(name)) return;
  const auto header = ReadSafetensorsHeader(path);
  ThrowIfError(Renamed(header.status(), path, NameOfShared(JoinPath(reader_.dir(), name))));
  const std::vector<FileRange> now = ranges(*header);
  if (std::equal(now.begin(), now.end(), wanted.begin(), wanted.end(),
                 [](const FileRange& a, const FileRange& b) {
                   return a.begin == b.begin && a.end == b.end;
                 })) {
    return;
  }
  ThrowIfError(absl::DataLossError(
      absl::StrCat(JoinPath(reader_.dir(), name), ": changed while it was read")));
}

}  // namespace muster::internal
