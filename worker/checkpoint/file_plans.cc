#include "worker/checkpoint/file_plans.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace muster {

bool FilePlans::Fits(const File& file, const NamedTensors& tensors) {
  return std::equal(
      file.given.begin(), file.given.end(), tensors.begin(), tensors.end(),
      [](const SafetensorsEntry& entry, const auto& named) {
        const auto& [name, tensor] = named;
        if (entry.name != name || !tensor.defined() || tensor.layout() != at::kStrided ||
            tensor.is_meta()) {
          return false;
        }
        const at::IntArrayRef sizes = tensor.sizes();
        if (!std::equal(entry.shape.begin(), entry.shape.end(), sizes.begin(), sizes.end(),
                        [](uint64_t a, int64_t b) { return a == static_cast<uint64_t>(b); })) {
          return false;
        }
        const absl::StatusOr<SafetensorsType> type = ToSafetensorsType(tensor.scalar_type());
        return type.ok() && *type == entry.type;
      });
}

absl::StatusOr<SafetensorsPlan> FilePlans::Plan(const std::string& path,
                                                const NamedTensors& tensors,
                                                const WriteSafetensorsOptions& options) {
  const NamedTensors kept =
      options.shared == SharedTensors::kKeepFirst ? WithoutSharedTensors(tensors) : tensors;
  const std::string name = BaseName(path);
  const auto known = files_.find(name);
  if (known == files_.end() || !Fits(known->second, kept)) {
    if (known != files_.end()) files_.erase(known);
    File file;
    MUSTER_ASSIGN_OR_RETURN(file.given, DescribeTensors(path, kept));
    WriteSafetensorsOptions all = options;
    all.shared = SharedTensors::kWriteAll;
    MUSTER_ASSIGN_OR_RETURN(SafetensorsPlan plan, PlanSafetensors(path, kept, all));
    absl::flat_hash_map<absl::string_view, size_t> places;
    for (size_t i = 0; i < kept.size(); ++i) places[kept[i].first] = i;
    for (const SafetensorsEntry& entry : plan.layout.tensors) {
      file.order.push_back(places.at(entry.name));
    }
    file.layout = plan.layout;
    ++made_;
    files_.insert_or_assign(name, std::move(file));
    return plan;
  }
  File& file = known->second;
  file.used = true;
  absl::StatusOr<std::string> prefix =
      SafetensorsPrefix(options.metadata, file.layout.entries, options.data_alignment);
  if (!prefix.ok()) {
    return absl::Status(prefix.status().code(),
                        absl::StrCat(path, ": ", prefix.status().message()));
  }
  ++reused_;
  SafetensorsPlan plan{.layout = {.prefix = *std::move(prefix),
                                  .entries = "",
                                  .tensors = file.layout.tensors,
                                  .data_bytes = file.layout.data_bytes},
                       .sources = {}};
  plan.sources.reserve(file.order.size());
  for (const size_t i : file.order) plan.sources.push_back(kept[i].second.detach());
  return plan;
}

absl::StatusOr<SafetensorsPlan> PlanFile(FilePlans* plans, const std::string& path,
                                         const NamedTensors& tensors,
                                         const WriteSafetensorsOptions& options) {
  return plans == nullptr ? PlanSafetensors(path, tensors, options)
                          : plans->Plan(path, tensors, options);
}

void FilePlans::BeginSave() {
  std::erase_if(files_, [](const auto& file) { return !file.second.used; });
  for (auto& [name, file] : files_) file.used = false;
}

}  // namespace muster
