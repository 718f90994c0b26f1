#include "muster/internal/incoming_weights.h"

#include <algorithm>
#include <optional>
#include <set>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/text.h"
#include "muster/internal/full_state.h"
#include "muster/internal/model_source.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/checkpoint/tensor_uploads.h"
#include "worker/checkpoint/transfer.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/checkpoint/weight_fills.h"
#include "worker/checkpoint/weight_match.h"
#include "worker/parallel/paged_storage.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/guard.h"

namespace muster::internal {
namespace {

// Elements that are compared at a time.
constexpr int64_t kComparedAtATime = int64_t{1} << 20;
// For a fingerprint: the bytes at either end of a tensor, and the number of tensors.
constexpr uint64_t kSampledBytes = 64;
constexpr size_t kSampledTensors = 2048;

// The fingerprint of IncomingWeights for what is read from files of any library.
IncomingWeights::Fingerprint FingerprintOf(const WeightFiles& files, const MatchedEntries& match) {
  // Each text is preceded by its length, so that different lists never give the same text.
  std::string tensors, values;
  const auto add = [&](const std::string& text) {
    absl::StrAppend(&tensors, text.size(), ":", text);
  };
  std::vector<std::string> unexpected = match.report.unexpected;  // in the order of the files
  std::sort(unexpected.begin(), unexpected.end());
  const std::vector<std::string>* const lists[] = {&match.report.loaded, &unexpected,
                                                   &match.report.mismatched};
  for (const std::vector<std::string>* const list : lists) {
    absl::StrAppend(&tensors, list->size(), " ");
    for (const std::string& name : *list) add(name);
  }
  for (const MatchedWeight& one : match.matches) {
    const StoredTensor& tensor = files.entries()[one.from].tensor;
    add(tensor.name);
    add(absl::StrCat(SafetensorsTypeName(tensor.type), " ", absl::StrJoin(tensor.shape, ","), " ",
                     absl::StrJoin(tensor.strides, ","), " ", tensor.extent_bytes));
  }
  const auto sample = [&](const WeightEntry& entry, uint64_t begin, uint64_t bytes) {
    const WeightEntry part = {.tensor = {.name = entry.tensor.name,
                                         .type = entry.tensor.type,
                                         .begin = entry.tensor.begin + begin,
                                         .extent_bytes = bytes},
                              .file = entry.file};
    const size_t at = values.size();
    values.resize(at + bytes);
    ThrowIfError(files.Read(part, values.data() + at));
  };
  const size_t count = match.matches.size();
  const size_t sampled = std::min(count, kSampledTensors);
  for (size_t i = 0; i < sampled; ++i) {
    const WeightEntry& entry = files.entries()[match.matches[i * count / sampled].from];
    const uint64_t bytes = entry.tensor.extent_bytes;
    if (bytes == 0) continue;
    sample(entry, 0, std::min(bytes, kSampledBytes));
    if (bytes <= kSampledBytes) continue;
    const uint64_t last = std::min(bytes - kSampledBytes, kSampledBytes);
    sample(entry, bytes - last, last);
  }
  return {.tensors = DigestBytes(tensors).xxh3, .values = DigestBytes(values).xxh3};
}

// Whether `a`, a tensor whose errors begin with `place`, and `b`, which is called `other`, are
// equal when converted to `type`.
bool AreSame(const std::string& place, const std::string& other, const at::Tensor& a,
             const at::Tensor& b, at::ScalarType type) {
  const absl::StatusOr<bool> same = AreSameWeights(place, other, a, b, type);
  ThrowIfError(same.status());
  return *same;
}

class WholeTensors final : public IncomingWeights {
 public:
  WholeTensors(ModelSlot& model, std::string where, NamedTensors weights, LoadWeightsOptions rules)
      : model_(model),
        where_(std::move(where)),
        weights_(std::move(weights)),
        rules_(std::move(rules)) {}
  std::string Compare() override {
    NamedTensors wanted = WantedOf(model_, weights_, TensorsOf(model_.source()), rules_);
    absl::StatusOr<MatchedWeights> matched =
        MatchedWeights::Match(where_, std::move(weights_), std::move(wanted), rules_);
    ThrowIfError(matched.status());
    matched_ = *std::move(matched);
    return "";
  }
  void Decide(const std::vector<std::string>& /*equal*/) override {}
  void Store() override { ThrowIfError(matched_->Copy()); }
  const LoadedWeights& report() const override { return matched_->report(); }

 private:
  ModelSlot& model_;
  const std::string where_;
  NamedTensors weights_;
  const LoadWeightsOptions rules_;
  std::optional<MatchedWeights> matched_;
};

NamedTensors NamesOf(const WeightFiles& files) {
  NamedTensors names;
  for (const WeightEntry& entry : files.entries())
    names.emplace_back(entry.tensor.name, at::Tensor());
  return names;
}

class WholeFiles final : public IncomingWeights {
 public:
  WholeFiles(ModelSlot& model, WeightFiles files, LoadWeightsOptions rules)
      : model_(model), files_(std::move(files)), rules_(std::move(rules)) {}
  std::string Compare() override {
    wanted_ = WantedOf(model_, NamesOf(files_), TensorsOf(model_.source()), rules_);
    absl::StatusOr<MatchedEntries> match = MatchEntries(files_, wanted_, rules_);
    ThrowIfError(match.status());
    match_ = *std::move(match);
    return "";
  }
  void Decide(const std::vector<std::string>& /*equal*/) override {}
  void Store() override { ThrowIfError(LoadWeights(files_, wanted_, rules_).status()); }
  const LoadedWeights& report() const override { return match_.report; }
  Fingerprint FingerprintHere() const override { return FingerprintOf(files_, match_); }

 private:
  ModelSlot& model_;
  const WeightFiles files_;
  const LoadWeightsOptions rules_;
  NamedTensors wanted_;
  MatchedEntries match_;
};

// Weights from files of any library.
class FileShards final : public IncomingShards {
 public:
  FileShards(ModelSlot& model, WeightFiles files, LoadWeightsOptions rules)
      : IncomingShards(model, files.path(), std::move(rules)), files_(std::move(files)) {
    for (const WeightEntry& entry : files_.entries()) tensors_.push_back(entry.tensor);
  }
  Fingerprint FingerprintHere() const override { return FingerprintOf(files_, match_); }

 private:
  const WeightEntry& EntryOf(size_t i) const { return files_.entries()[i]; }

  // Elements [first, first + count) of a contiguous tensor, as if the file had them as a tensor.
  WeightEntry PartOf(size_t i, int64_t first, int64_t count) const {
    const WeightEntry& entry = EntryOf(i);
    const uint64_t width = SafetensorsTypeBits(entry.tensor.type) / 8;
    return {.tensor = {.name = entry.tensor.name,
                       .type = entry.tensor.type,
                       .shape = {static_cast<uint64_t>(count)},
                       .begin = entry.tensor.begin + static_cast<uint64_t>(first) * width,
                       .extent_bytes = static_cast<uint64_t>(count) * width},
            .file = entry.file};
  }

  at::Tensor Read(const WeightEntry& entry) const {
    absl::StatusOr<at::Tensor> read = ReadWeight(files_, entry);
    ThrowIfError(read.status());
    return *std::move(read);
  }

  // Whether the part of the tensor that this rank needs is one range of the file.
  bool IsRange(size_t i) const {
    const StoredTensor& tensor = EntryOf(i).tensor;
    if (!tensor.strides.empty() || !ParameterOf(tensor.name)->is_contiguous()) return false;
    // A dimension of one element may have any stride, and then the part is no contiguous range.
    const std::string& name = FirstNameOf(tensor.name);
    const auto [begin, end] = model_.sharded()->PartRange(name);
    return end - begin == model_.sharded()->PartSize(name);
  }

  bool AreSame(size_t first, size_t second, const at::Tensor& a, const at::Tensor& b,
               at::ScalarType type) const {
    const WeightEntry& entry = EntryOf(first);
    return internal::AreSame(PlaceOfTensor(files_.FileOf(entry), entry.tensor.name),
                             EntryOf(second).tensor.name, a, b, type);
  }

  bool AreEqual(size_t first, size_t second, at::ScalarType type) override {
    if (files_.StorageOf(EntryOf(first)) == files_.StorageOf(EntryOf(second))) return true;
    if (ParameterOf(EntryOf(first).tensor.name) == nullptr) {
      return AreSame(first, second, Read(EntryOf(first)), Read(EntryOf(second)), type);
    }
    const ShardedModel& sharded = *model_.sharded();
    const std::string& name = FirstNameOf(EntryOf(first).tensor.name);
    if (!IsRange(first) || !IsRange(second)) {
      const at::Tensor mine = sharded.PartOf(name, Read(EntryOf(first)));
      const at::Tensor other = sharded.PartOf(name, Read(EntryOf(second)));
      return AreSame(first, second, mine, other, type);
    }
    const auto [begin, end] = sharded.PartRange(name);
    for (int64_t at = begin; at < end; at += kComparedAtATime) {
      const int64_t some = std::min(kComparedAtATime, end - at);
      const at::Tensor mine = Read(PartOf(first, at, some));
      if (!AreSame(first, second, mine, Read(PartOf(second, at, some)), type)) return false;
    }
    return true;
  }

  void Fill(const std::vector<Copy>& shards, const std::vector<Copy>& buffers) override {
    const at::NoGradGuard no_grad;
    const ShardedModel& sharded = *model_.sharded();
    std::vector<WeightEntry> parts;
    parts.reserve(shards.size());
    std::vector<WeightFill> fills;
    for (const Copy& copy : shards) {
      if (copy.to.numel() == 0) continue;
      if (!IsRange(copy.from)) {
        at::Tensor(copy.to).copy_(sharded.PartOf(copy.name, Read(EntryOf(copy.from))));
        continue;
      }
      const auto [begin, end] = sharded.PartRange(copy.name);
      parts.push_back(PartOf(copy.from, begin, end - begin));
      // An offloaded tensor has memory only while an operator uses it.
      if (!IsPaged(copy.to) && IsFillable(parts.back(), copy.to.detach())) {
        fills.push_back({.from = &parts.back(), .to = copy.to.detach()});
      } else {
        at::Tensor(copy.to).copy_(Read(parts.back()));
      }
    }
    ThrowIfError(FillWeights(files_, fills));
    for (const Copy& copy : buffers) at::Tensor(copy.to).copy_(Read(EntryOf(copy.from)));
  }

  const WeightFiles files_;
};

}  // namespace

IncomingWeights::Fingerprint IncomingWeights::FingerprintHere() const {
  return {.tensors = DigestBytes(absl::StrJoin(report().loaded, "\n")).xxh3, .values = ""};
}

std::unique_ptr<IncomingWeights> IncomingTensors(ModelSlot& model, const std::string& where,
                                                 NamedTensors weights,
                                                 const LoadWeightsOptions& rules) {
  return std::make_unique<WholeTensors>(model, where, std::move(weights), rules);
}

std::unique_ptr<IncomingWeights> IncomingFiles(ModelSlot& model, const std::string& path,
                                               const LoadWeightsOptions& rules) {
  absl::StatusOr<WeightFiles> files = OpenWeights(path, rules);
  ThrowIfError(files.status());
  if (model.sharded() != nullptr) {
    return std::make_unique<FileShards>(model, *std::move(files), rules);
  }
  return std::make_unique<WholeFiles>(model, *std::move(files), rules);
}

IncomingShards::IncomingShards(ModelSlot& model, std::string where, LoadWeightsOptions rules)
    : model_(model),
      where_(std::move(where)),
      rules_(std::move(rules)),
      buffers_(model.source().buffers()) {
  for (const auto& [name, parameter] : model.source().parameters()) parameters_[name] = parameter;
}

std::string IncomingShards::InModel(const std::string& in_file) const {
  if (!absl::StartsWith(in_file, rules_.prefix)) return "";
  const std::string name = in_file.substr(rules_.prefix.size());
  return rules_.rename == nullptr ? name : rules_.rename(name);
}

const at::Tensor* IncomingShards::ParameterOf(const std::string& in_file) const {
  const auto it = parameters_.find(InModel(in_file));
  return it == parameters_.end() ? nullptr : &it->second;
}

bool IncomingShards::IsBuffer(const std::string& in_file) const {
  const std::string name = InModel(in_file);
  return std::any_of(buffers_.begin(), buffers_.end(),
                     [&](const auto& buffer) { return buffer.first == name; });
}

const std::string& IncomingShards::FirstNameOf(const std::string& in_file) const {
  const std::string name = InModel(in_file);
  return FirstName(*model_.sharded(), name, parameters_.at(name));
}

MatchedEntries IncomingShards::Match(std::vector<bool>* equal) {
  // If there are no answers yet, ask for them, and continue as if all were equal.
  std::string answers;
  size_t asked = 0;
  absl::StatusOr<MatchedEntries> match = MatchShapes(
      {.where = where_,
       .tensors = tensors_,
       .are_equal = [&](size_t first, size_t second, at::ScalarType type) -> absl::StatusOr<bool> {
         if (equal != nullptr) return equal->at(asked++);
         bool same = false;
         const absl::Status status = Guard([&] { same = AreEqual(first, second, type); });
         if (!status.ok()) return status;
         answers += same ? '1' : '0';
         return true;
       }},
      wanted_, rules_);
  ThrowIfError(match.status());
  if (equal == nullptr) equal_here_ = std::move(answers);
  return *std::move(match);
}

std::string IncomingShards::Compare() {
  std::map<std::string, at::Tensor> shapes;  // tied weights are one tensor
  NamedTensors wanted, names;
  for (const auto& [name, parameter] : model_.source().parameters()) {
    const std::string& first = FirstName(*model_.sharded(), name, parameter);
    const at::Tensor shard = model_.sharded()->ShardOf(parameter);
    wanted.emplace_back(
        name, shapes.emplace(first, ShapeOf(parameter, shard.scalar_type())).first->second);
  }
  for (const auto& [name, buffer] : buffers_) wanted.emplace_back(name, buffer.detach());
  for (const StoredTensor& tensor : tensors_) names.emplace_back(tensor.name, at::Tensor());
  wanted_ = WantedOf(model_, names, std::move(wanted), rules_);
  match_ = Match(nullptr);
  return equal_here_;
}

void IncomingShards::Decide(const std::vector<std::string>& equal) {
  std::vector<bool> all(equal_here_.size(), true);
  bool any = false;
  for (const std::string& one : equal) {
    TORCH_CHECK(one.size() == all.size(), where_, ": ", one.size(),
                " tensors come under a second name on another process, and ", all.size(), " here");
    for (size_t i = 0; i < all.size(); ++i) {
      if (one[i] == '1') continue;
      all[i] = false;
      any = true;
    }
  }
  if (any) match_ = Match(&all);
}

void IncomingShards::Store() {
  std::map<std::string, size_t> from;
  std::vector<Copy> buffers;
  for (const MatchedWeight& match : match_.matches) {
    const auto& [name, target] = wanted_[match.target];
    const auto parameter = parameters_.find(name);
    if (parameter == parameters_.end()) {
      buffers.push_back({match.from, name, target});
    } else {
      from.emplace(FirstName(*model_.sharded(), name, parameter->second), match.from);
    }
  }
  // LoadParts() decides which shards these are, in its order; Fill() provides their values.
  std::map<std::string, at::Tensor> parts;
  for (const auto& [name, unused] : from) parts.emplace(name, at::Tensor());
  model_.sharded()->LoadParts(parts, [&](const auto& pairs) {
    std::vector<Copy> shards;
    auto it = from.begin();
    for (const auto& [shard, unused] : pairs) {
      shards.push_back({it->second, it->first, shard});
      ++it;
    }
    Fill(shards, buffers);
  });
}

std::vector<FileRange> CheckpointShards::Ranges(const SafetensorsHeader& header) const {
  std::vector<FileRange> ranges = {{.begin = 0, .end = 8 + header.header_bytes}};
  for (const SafetensorsEntry& entry : header.tensors) {
    const at::Tensor* const parameter = ParameterOf(entry.name);
    if (parameter != nullptr && SameShape(entry.shape, parameter->sizes())) {
      ranges.push_back(
          RangeOf(header, entry, model_.sharded()->PartRange(FirstNameOf(entry.name))));
    } else if (IsBuffer(entry.name)) {
      ranges.push_back(AllOf(header, entry));
    }
  }
  return ranges;
}

void CheckpointShards::Take(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    const absl::StatusOr<SafetensorsType> type = ToSafetensorsType(tensor.scalar_type());
    ThrowIfError(type.status());
    tensors_.push_back(
        {.name = name, .type = *type, .shape = {tensor.sizes().begin(), tensor.sizes().end()}});
    const at::Tensor* const parameter = ParameterOf(name);
    if (parameter != nullptr && tensor.sizes() == parameter->sizes()) {
      values_.push_back(model_.sharded()->KeptPartOf(FirstNameOf(name), tensor));
    } else {
      values_.push_back(IsBuffer(name) ? tensor.clone() : at::Tensor());
    }
  }
}

bool CheckpointShards::AreEqual(size_t first, size_t second, at::ScalarType type) {
  if (values_checked_) return true;
  return AreSame(
      absl::StrCat("tensor \"", Printable(tensors_[first].name), "\" of the checkpoint: "),
      tensors_[second].name, values_[first], values_[second], type);
}

void CheckpointShards::Fill(const std::vector<Copy>& shards, const std::vector<Copy>& buffers) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const Copy& copy : shards) copies.emplace_back(copy.to, values_[copy.from]);
  const at::NoGradGuard no_grad;
  ThrowIfError(CopyTensors(copies));
  for (const Copy& copy : buffers) at::Tensor(copy.to).copy_(values_[copy.from]);
}

}  // namespace muster::internal
