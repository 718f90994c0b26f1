#include "worker/checkpoint/state_dict.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/json.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/file_plans.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/shared_elements.h"
#include "worker/checkpoint/some_names.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/checkpoint/tensor_uploads.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr char kScalarsKey[] = "muster.scalars";
constexpr size_t kShownNames = 8;

std::string Shown(absl::string_view name) { return absl::StrCat("\"", Printable(name), "\""); }

const char* TypeName(const StateDict::Scalar& value) {
  constexpr const char* kNames[] = {"a boolean", "an integer", "a number", "text"};
  return kNames[value.index()];
}

absl::Status WrongType(absl::string_view name, const StateDict::Scalar& value, const char* wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("state ", Shown(name), " is ", TypeName(value), ", not ", wanted));
}

// Returns the text for a number that JSON lacks.
std::string NonFiniteText(double value) {
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

absl::StatusOr<Json> ScalarsToJson(const StateDict& state, const std::string& path) {
  Json object = Json::object();
  for (const auto& [name, scalar] : state.scalars()) {
    Json value;
    if (const auto* number = std::get_if<double>(&scalar)) {
      value = std::isfinite(*number) ? Json(*number) : Json(NonFiniteText(*number));
    } else {
      std::visit([&value](const auto& plain) { value = plain; }, scalar);
    }
    const auto* const text = std::get_if<std::string>(&scalar);
    if (!IsValidUtf8(name) || (text != nullptr && !IsValidUtf8(*text))) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": state ", Shown(name), " is not UTF-8"));
    }
    object[name] = std::move(value);
  }
  return object;
}

absl::Status ScalarsFromJson(const Json& object, absl::string_view source, StateDict* state) {
  if (!object.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": \"scalars\" is not an object"));
  }
  for (const auto& [name, value] : object.items()) {
    if (value.is_boolean()) {
      state->SetBool(name, value.get<bool>());
    } else if (value.is_number_float()) {
      state->SetDouble(name, value.get<double>());
    } else if (value.is_string()) {
      state->SetText(name, value.get<std::string>());
    } else if (value.is_number_integer() &&
               !(value.is_number_unsigned() &&
                 value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()})) {
      state->SetInt(name, value.get<int64_t>());
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          source, ": state ", Shown(name), " is neither a boolean, a 64-bit number nor text"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDigest(const std::string& path, const FileDigest& found,
                         const std::optional<FileDigest>& expected) {
  if (!expected.has_value() || found == *expected) return absl::OkStatus();
  if (found.bytes != expected->bytes) {
    return absl::DataLossError(absl::StrCat(path, ": has ", found.bytes,
                                            " bytes, but the manifest says ", expected->bytes,
                                            "; use an earlier checkpoint"));
  }
  return absl::DataLossError(absl::StrCat(path, ": is damaged: its contents have the digest ",
                                          found.xxh3, ", but the manifest says ", expected->xxh3,
                                          "; use an earlier checkpoint"));
}

absl::StatusOr<StateDict> ParseJsonState(absl::string_view text, const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const Json json, ParseJson(text, path));
  StateDict state;
  if (!json.is_object() || !json.contains("scalars")) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": has no \"scalars\""));
  }
  MUSTER_RETURN_IF_ERROR(ScalarsFromJson(json["scalars"], path, &state));
  if (json.contains("metadata")) {
    for (const auto& [key, value] : json["metadata"].items()) {
      if (!value.is_string()) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ": metadata ", Shown(key), " is not text"));
      }
      state.SetMetadata(key, value.get<std::string>());
    }
  }
  return state;
}

absl::StatusOr<StateDict> ReadJsonState(const std::string& path,
                                        const std::optional<FileDigest>& expected) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(path));
  MUSTER_RETURN_IF_ERROR(CheckDigest(path, DigestBytes(text), expected));
  return ParseJsonState(text, path);
}

absl::StatusOr<StateDict> StateOf(NamedTensors tensors,
                                  const std::optional<SafetensorsMetadata>& metadata,
                                  const std::string& path) {
  StateDict state;
  for (auto& [name, tensor] : tensors) state.SetTensor(name, std::move(tensor));
  if (!metadata.has_value()) return state;
  for (const auto& [key, value] : *metadata) {
    if (key == kScalarsKey) {
      const std::string source = absl::StrCat(path, ": metadata ", kScalarsKey);
      MUSTER_ASSIGN_OR_RETURN(const Json scalars, ParseJson(value, source));
      MUSTER_RETURN_IF_ERROR(ScalarsFromJson(scalars, source, &state));
    } else {
      state.SetMetadata(key, value);
    }
  }
  return state;
}

std::string Description(const at::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "] ",
                      c10::toString(tensor.scalar_type()));
}

}  // namespace

void StateDict::SetTensor(absl::string_view name, at::Tensor tensor) {
  const auto [place, added] = places_.emplace(std::string(name), tensors_.size());
  if (added) {
    tensors_.emplace_back(std::string(name), std::move(tensor));
  } else {
    tensors_[place->second].second = std::move(tensor);
  }
}

void StateDict::SetBool(absl::string_view name, bool value) { scalars_[std::string(name)] = value; }
void StateDict::SetInt(absl::string_view name, int64_t value) {
  scalars_[std::string(name)] = value;
}
void StateDict::SetDouble(absl::string_view name, double value) {
  scalars_[std::string(name)] = value;
}
void StateDict::SetText(absl::string_view name, absl::string_view value) {
  scalars_[std::string(name)] = std::string(value);
}
void StateDict::SetMetadata(absl::string_view key, absl::string_view value) {
  metadata_[std::string(key)] = std::string(value);
}

absl::StatusOr<at::Tensor> StateDict::GetTensor(absl::string_view name) const {
  const auto place = places_.find(std::string(name));
  if (place == places_.end()) {
    return absl::NotFoundError(absl::StrCat("state has no tensor ", Shown(name)));
  }
  return tensors_[place->second].second;
}

namespace {

absl::StatusOr<StateDict::Scalar> Find(const std::map<std::string, StateDict::Scalar>& scalars,
                                       absl::string_view name) {
  const auto found = scalars.find(std::string(name));
  if (found == scalars.end()) {
    return absl::NotFoundError(absl::StrCat("state has no value ", Shown(name)));
  }
  return found->second;
}

}  // namespace

absl::StatusOr<bool> StateDict::GetBool(absl::string_view name) const {
  MUSTER_ASSIGN_OR_RETURN(const Scalar value, Find(scalars_, name));
  if (const bool* plain = std::get_if<bool>(&value)) return *plain;
  return WrongType(name, value, "a boolean");
}

absl::StatusOr<int64_t> StateDict::GetInt(absl::string_view name) const {
  MUSTER_ASSIGN_OR_RETURN(const Scalar value, Find(scalars_, name));
  if (const int64_t* plain = std::get_if<int64_t>(&value)) return *plain;
  return WrongType(name, value, "an integer");
}

absl::StatusOr<double> StateDict::GetDouble(absl::string_view name) const {
  MUSTER_ASSIGN_OR_RETURN(const Scalar value, Find(scalars_, name));
  if (const double* plain = std::get_if<double>(&value)) return *plain;
  if (const int64_t* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
  if (const std::string* text = std::get_if<std::string>(&value)) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (*text == "inf") return kInfinity;
    if (*text == "-inf") return -kInfinity;
    if (*text == "nan") return std::numeric_limits<double>::quiet_NaN();
  }
  return WrongType(name, value, "a number");
}

absl::StatusOr<std::string> StateDict::GetText(absl::string_view name) const {
  MUSTER_ASSIGN_OR_RETURN(const Scalar value, Find(scalars_, name));
  if (const std::string* plain = std::get_if<std::string>(&value)) return *plain;
  return WrongType(name, value, "text");
}

void StateDict::Merge(absl::string_view prefix, const StateDict& part) {
  for (const auto& [name, tensor] : part.tensors_) {
    SetTensor(absl::StrCat(prefix, ".", name), tensor);
  }
  for (const auto& [name, value] : part.scalars_) scalars_[absl::StrCat(prefix, ".", name)] = value;
}

StateDict StateDict::Sub(absl::string_view prefix) const {
  const std::string start = absl::StrCat(prefix, ".");
  StateDict part;
  for (const auto& [name, tensor] : tensors_) {
    if (absl::StartsWith(name, start)) part.SetTensor(name.substr(start.size()), tensor);
  }
  for (const auto& [name, value] : scalars_) {
    if (absl::StartsWith(name, start)) part.scalars_[name.substr(start.size())] = value;
  }
  return part;
}

namespace {

absl::StatusOr<std::string> EncodeJsonState(const std::string& path, const StateDict& state) {
  MUSTER_ASSIGN_OR_RETURN(Json scalars, ScalarsToJson(state, path));
  if (!state.tensors().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a .json file cannot hold the tensor ",
                                                   Shown(state.tensors().front().first),
                                                   "; name it .safetensors"));
  }
  Json json = {{"scalars", std::move(scalars)}};
  for (const auto& [key, value] : state.metadata()) {
    if (!IsValidUtf8(key) || !IsValidUtf8(value)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": metadata ", Shown(key), " is not UTF-8"));
    }
    json["metadata"][key] = value;
  }
  return json.dump(1) + "\n";
}

// Returns the options for writing the tensors of `state`: its scalars and metadata become metadata
// of the file.
absl::StatusOr<WriteSafetensorsOptions> SafetensorsOptions(const std::string& path,
                                                           const StateDict& state,
                                                           SharedTensors shared) {
  if (!absl::EndsWith(path, ".safetensors")) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a state file ends in .safetensors or .json"));
  }
  MUSTER_ASSIGN_OR_RETURN(const Json scalars, ScalarsToJson(state, path));
  WriteSafetensorsOptions options{.shared = shared};
  if (!state.metadata().empty()) options.metadata = state.metadata();
  if (!scalars.empty()) {
    if (!options.metadata.has_value()) options.metadata.emplace();
    if (!options.metadata->emplace(kScalarsKey, scalars.dump()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": the metadata key ", kScalarsKey, " is reserved"));
    }
  }
  return options;
}

}  // namespace

absl::StatusOr<FileDigest> WriteStateDict(const std::string& path, const StateDict& state,
                                          SharedTensors shared) {
  if (absl::EndsWith(path, ".json")) {
    MUSTER_ASSIGN_OR_RETURN(const std::string text, EncodeJsonState(path, state));
    MUSTER_RETURN_IF_ERROR(WriteFileAtomically(path, text));
    return DigestBytes(text);
  }
  MUSTER_ASSIGN_OR_RETURN(const WriteSafetensorsOptions options,
                          SafetensorsOptions(path, state, shared));
  return WriteSafetensors(path, state.tensors(), options);
}

absl::StatusOr<PlannedStateFile> PlanStateDict(const std::string& path, const StateDict& state,
                                               SharedTensors shared, uint64_t data_alignment,
                                               FilePlans* plans) {
  if (absl::EndsWith(path, ".json")) return EncodeJsonState(path, state);
  MUSTER_ASSIGN_OR_RETURN(WriteSafetensorsOptions options, SafetensorsOptions(path, state, shared));
  options.data_alignment = data_alignment;
  return PlanFile(plans, path, state.tensors(), options);
}

absl::StatusOr<StateDict> ReadStateDict(const std::string& path,
                                        const std::optional<FileDigest>& expected,
                                        const BlockDigests& blocks) {
  if (absl::EndsWith(path, ".json")) return ReadJsonState(path, expected);
  absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::Open(path);
  if (!reader.ok()) {
    // A damaged header is noticed before the digest can be compared: report damage, not a foreign
    // file.
    if (expected.has_value() && absl::IsInvalidArgument(reader.status())) {
      return absl::DataLossError(
          absl::StrCat(reader.status().message(), "; use an earlier checkpoint"));
    }
    return reader.status();
  }
  NamedTensors tensors;
  if (blocks.empty()) {
    FileDigest found;
    MUSTER_ASSIGN_OR_RETURN(tensors, reader->ReadAll(expected ? &found : nullptr));
    if (expected.has_value()) MUSTER_RETURN_IF_ERROR(CheckDigest(path, found, expected));
  } else {
    MUSTER_ASSIGN_OR_RETURN(tensors, reader->ReadAllBlocks(blocks));
  }
  return StateOf(std::move(tensors), reader->header().metadata, path);
}

absl::StatusOr<StateDict> ParseStateDict(absl::string_view bytes, const std::string& path) {
  if (absl::EndsWith(path, ".json")) return ParseJsonState(bytes, path);
  uint64_t header_bytes = 0;
  if (bytes.size() >= sizeof(header_bytes)) {
    std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
    bytes.remove_prefix(sizeof(header_bytes));
  }
  if (header_bytes == 0 || header_bytes > bytes.size()) {
    return absl::DataLossError(absl::StrCat(path, ": the header does not fit into the file"));
  }
  const absl::string_view data = bytes.substr(header_bytes);
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                          ParseSafetensorsHeader(bytes.substr(0, header_bytes), data.size(), path));
  NamedTensors tensors;
  for (const SafetensorsEntry& entry : header.tensors) {
    const std::string place = PlaceOfTensor(path, entry.name);
    const absl::StatusOr<at::ScalarType> type = ToScalarType(entry.type);
    if (!type.ok()) {
      return absl::Status(type.status().code(),
                          absl::StrCat(place, "dtype: ", type.status().message()));
    }
    MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, TensorSizes(entry.shape, place));
    MUSTER_ASSIGN_OR_RETURN(at::Tensor tensor, NewTensor(sizes, *type, place));
    if (entry.end > entry.begin) {
      std::memcpy(tensor.data_ptr(), data.data() + entry.begin, entry.end - entry.begin);
    }
    tensors.emplace_back(entry.name, std::move(tensor));
  }
  return StateOf(std::move(tensors), header.metadata, path);
}

absl::StatusOr<StateDict> MapStateDict(const std::string& memory, const std::string& path) {
  const absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::Open(memory);
  if (!reader.ok()) return Renamed(reader.status(), memory, path);
  NamedTensors tensors;
  for (const SafetensorsEntry& entry : reader->header().tensors) {
    absl::StatusOr<at::Tensor> tensor = reader->Map(entry.name);
    if (!tensor.ok()) return Renamed(tensor.status(), memory, path);
    tensors.emplace_back(entry.name, *std::move(tensor));
  }
  return StateOf(std::move(tensors), reader->header().metadata, path);
}

namespace {

struct Copy {
  absl::string_view name;
  at::Tensor to, from;
};

}  // namespace

absl::Status LoadTensors(const NamedTensors& source, const NamedTensors& targets,
                         absl::string_view what, const LoadTensorsOptions& options) {
  absl::flat_hash_map<absl::string_view, const at::Tensor*> by_name;
  for (const auto& [name, tensor] : source) by_name[name] = &tensor;
  absl::flat_hash_set<absl::string_view> wanted;
  std::vector<std::string> missing, unexpected, different;
  std::vector<Copy> copies;
  // Indexes of `copies`, by the beginning of the target's memory.
  absl::flat_hash_map<const void*, std::vector<size_t>> by_memory;
  const bool compares = !options.shapes_only && !options.values_checked;
  // Null if it has none, as on the meta device.
  const auto memory_of = [](const at::Tensor& tensor) -> const void* {
    return tensor.numel() > 0 && tensor.has_storage() ? tensor.const_data_ptr() : nullptr;
  };
  const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
    return a.is_same(b) || (memory_of(a) != nullptr && memory_of(a) == memory_of(b) &&
                            a.sizes() == b.sizes() && a.strides() == b.strides());
  };
  for (const auto& [name, target] : targets) {
    wanted.insert(name);
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      bool tied = false;
      for (const auto& [other_name, other] : targets) {
        tied = tied || (by_name.contains(other_name) && same(target, other));
      }
      if (!tied) missing.push_back(name);
      continue;
    }
    const at::Tensor& tensor = *found->second;
    const bool convertible = tensor.scalar_type() == target.scalar_type() ||
                             (tensor.is_floating_point() && target.is_floating_point());
    if (tensor.sizes() != target.sizes() || !convertible) {
      different.push_back(absl::StrCat(name, " (", Description(tensor), " in the file, ",
                                       Description(target), " here)"));
      continue;
    }
    if (memory_of(target) != nullptr && !options.shapes_only) {
      auto& there = by_memory[memory_of(target)];
      const auto tied = std::find_if(there.begin(), there.end(),
                                     [&](size_t other) { return same(copies[other].to, target); });
      if (tied != there.end()) {
        const Copy& other = copies[*tied];
        if (!compares) continue;
        // Otherwise the last one would win.
        MUSTER_ASSIGN_OR_RETURN(const bool is_same,
                                AreSameWeights(PlaceOfTensor(what, name), other.name, other.from,
                                               tensor, target.scalar_type()));
        if (!is_same) {
          different.push_back(absl::StrCat(name, " (the same tensor as ", other.name,
                                           " here, but another one in the file)"));
        }
        continue;
      }
      there.push_back(copies.size());
    }
    copies.push_back({.name = name, .to = target, .from = tensor});
  }
  if (compares) {
    NamedTensors into;
    for (const Copy& copy : copies) into.emplace_back(copy.name, copy.to);
    MUSTER_ASSIGN_OR_RETURN(
        const std::vector<size_t> replaced,
        ElementsReplaced(what, into,
                         [&](size_t i) -> absl::StatusOr<at::Tensor> { return copies[i].from; }));
    for (const size_t i : replaced) {
      different.push_back(absl::StrCat(copies[i].name, " (", kElementsReplaced, ")"));
    }
  }
  for (const auto& [name, tensor] : source) {
    if (!wanted.contains(name)) unexpected.push_back(name);
  }
  std::vector<std::string> wrong;
  if (!missing.empty() && !options.allow_missing) {
    wrong.push_back(absl::StrCat("missing: ", SomeNames(missing, kShownNames)));
  }
  if (!unexpected.empty() && !options.allow_unexpected) {
    wrong.push_back(absl::StrCat("unexpected: ", SomeNames(unexpected, kShownNames)));
  }
  if (!different.empty())
    wrong.push_back(absl::StrCat("different: ", SomeNames(different, kShownNames)));
  if (!wrong.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the tensors do not fit this model: ", absl::StrJoin(wrong, "; ")));
  }
  if (options.missing != nullptr) *options.missing = SomeNames(missing, kShownNames);
  if (options.check_only || options.shapes_only) return absl::OkStatus();
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (const Copy& copy : copies) pairs.emplace_back(copy.to, copy.from);
  return CopyTensors(pairs);
}

}  // namespace muster
