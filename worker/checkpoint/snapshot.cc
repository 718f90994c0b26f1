#include "worker/checkpoint/snapshot.h"

#include <cstring>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/checkpoint/direct_file.h"

namespace muster {

absl::StatusOr<char*> Snapshot::Append(const std::string& name, size_t bytes) {
  const size_t end = files_.empty() ? 0 : files_.back().offset + files_.back().bytes;
  const size_t offset = (end + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
  if (const absl::Status grown = memory_.Grow(offset + bytes); !grown.ok()) {
    return absl::Status(grown.code(), absl::StrCat("cannot copy ", name,
                                                   " for an asynchronous save: ", grown.message(),
                                                   "; save synchronously"));
  }
  files_.push_back({.name = name, .offset = offset, .bytes = bytes});
  return memory_.data() + offset;
}

absl::Status Snapshot::AddTensors(const std::string& name, const SafetensorsPlan& plan) {
  MUSTER_ASSIGN_OR_RETURN(char* const to, Append(name, plan.file_bytes()));
  CopySafetensors(plan, to);
  return absl::OkStatus();
}

absl::Status Snapshot::Add(const std::string& name, const NamedTensors& tensors,
                           WriteSafetensorsOptions options) {
  options.data_alignment = kDirectAlignment;
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsPlan plan, PlanSafetensors(name, tensors, options));
  return AddTensors(name, plan);
}

absl::Status Snapshot::Add(const std::string& name, const StateDict& state, SharedTensors shared) {
  MUSTER_ASSIGN_OR_RETURN(const StateFile file,
                          PlanStateDict(name, state, shared, kDirectAlignment));
  if (const auto* const plan = std::get_if<SafetensorsPlan>(&file)) return AddTensors(name, *plan);
  const std::string& text = std::get<std::string>(file);
  MUSTER_ASSIGN_OR_RETURN(char* const to, Append(name, text.size()));
  std::memcpy(to, text.data(), text.size());
  return absl::OkStatus();
}

uint64_t Snapshot::bytes() const {
  uint64_t bytes = 0;
  for (const File& file : files_) bytes += file.bytes;
  return bytes;
}

}  // namespace muster
