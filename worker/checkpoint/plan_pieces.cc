#include "worker/checkpoint/plan_pieces.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/text.h"
#include "worker/checkpoint/direct_pieces.h"

namespace muster {
namespace {

std::vector<int64_t> VersionsOf(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version()));
  }
  return versions;
}

}  // namespace

std::optional<PlanPieces> PlanPieces::Of(const SafetensorsPlan& plan) {
  PlanPieces file(plan);
  file.pieces_.emplace_back(plan.layout.prefix);
  for (size_t i = 0; i < plan.sources.size(); ++i) {
    const SafetensorsEntry& entry = plan.layout.tensors[i];
    if (entry.begin == entry.end) continue;
    const at::Tensor& source = plan.sources[i];
    if (!source.is_cpu() || !source.is_contiguous() || source.is_conj() || source.is_neg()) {
      return std::nullopt;
    }
    file.pieces_.emplace_back(static_cast<const char*>(source.const_data_ptr()),
                              entry.end - entry.begin);
  }
  file.versions_ = VersionsOf(plan.sources);
  return file;
}

absl::StatusOr<DirectFileWritten> PlanPieces::Write(const std::string& path, absl::string_view rule,
                                                    const DirectFileOptions& options) const {
  absl::StatusOr<DirectFileWritten> written = WriteDirectPieces(path, pieces_, options);
  const std::vector<int64_t> after = VersionsOf(plan_->sources);
  const auto changed = std::mismatch(versions_.begin(), versions_.end(), after.begin()).first;
  if (written.ok() && changed != versions_.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "tensor \"", Printable(plan_->layout.tensors[changed - versions_.begin()].name), "\" of ",
        BaseName(path), " changed while it was saved: ", rule));
  }
  return written;
}

}  // namespace muster
