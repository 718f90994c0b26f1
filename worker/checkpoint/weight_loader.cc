#include "worker/checkpoint/weight_loader.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "ATen/MemoryOverlap.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/shape_text.h"
#include "worker/checkpoint/shared_elements.h"
#include "worker/checkpoint/some_names.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/checkpoint/tensor_uploads.h"
#include "worker/checkpoint/transfer.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/checkpoint/weight_fills.h"
#include "worker/checkpoint/weight_match.h"

namespace muster {
namespace {

constexpr size_t kShownNames = 20;

std::string Description(const StoredTensor& tensor) {
  return absl::StrCat(ShapeText(tensor.shape), " ", SafetensorsTypeName(tensor.type));
}

std::string Description(const at::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "] ",
                      c10::toString(tensor.scalar_type()));
}

uint64_t BytesAs(const at::Tensor& tensor, at::ScalarType type) {
  return static_cast<uint64_t>(tensor.numel()) * c10::elementSize(type);
}

// The source of weights: files, or tensors in memory.
class Source {
 public:
  virtual ~Source() = default;
  virtual const std::string& where() const = 0;
  virtual size_t size() const = 0;
  virtual const StoredTensor& tensor(size_t i) const = 0;
  virtual absl::StatusOr<at::Tensor> Read(size_t i) const = 0;
  virtual bool has_values() const { return true; }
  // Whether two are names of one tensor in the source.
  virtual bool AreOne(size_t i, size_t j) const = 0;
  // Whether their bytes would be the same if both had the type `type`.
  virtual absl::StatusOr<bool> AreEqual(size_t i, size_t j, at::ScalarType type) const;
  // Null if they are in memory.
  virtual const WeightFiles* files() const { return nullptr; }
};

class FileSource final : public Source {
 public:
  // Borrows `files`.
  explicit FileSource(const WeightFiles& files) : files_(files) {}
  const std::string& where() const override { return files_.path(); }
  size_t size() const override { return files_.entries().size(); }
  const StoredTensor& tensor(size_t i) const override { return files_.entries()[i].tensor; }
  absl::StatusOr<at::Tensor> Read(size_t i) const override {
    return ReadWeight(files_, files_.entries()[i]);
  }
  bool AreOne(size_t i, size_t j) const override {
    return files_.StorageOf(files_.entries()[i]) == files_.StorageOf(files_.entries()[j]);
  }
  const WeightFiles* files() const override { return &files_; }

 private:
  const WeightFiles& files_;
};

class MemorySource final : public Source {
 public:
  static absl::StatusOr<std::unique_ptr<Source>> Make(const std::string& where,
                                                      NamedTensors tensors) {
    auto source = std::make_unique<MemorySource>(where, std::move(tensors));
    for (const auto& [name, tensor] : source->tensors_) {
      const absl::StatusOr<SafetensorsType> type = ToSafetensorsType(tensor.scalar_type());
      if (!type.ok()) {
        return absl::Status(
            type.status().code(),
            absl::StrCat(where, ": tensor \"", Printable(name), "\": ", type.status().message()));
      }
      StoredTensor stored{.name = name, .type = *type};
      stored.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
      source->stored_.push_back(std::move(stored));
    }
    return source;
  }
  MemorySource(std::string where, NamedTensors tensors)
      : where_(std::move(where)), tensors_(std::move(tensors)) {}
  const std::string& where() const override { return where_; }
  size_t size() const override { return stored_.size(); }
  const StoredTensor& tensor(size_t i) const override { return stored_[i]; }
  absl::StatusOr<at::Tensor> Read(size_t i) const override { return tensors_[i].second; }
  bool AreOne(size_t i, size_t j) const override {
    return TensorIdentity(tensors_[i].second) == TensorIdentity(tensors_[j].second);
  }

 private:
  const std::string where_;
  const NamedTensors tensors_;
  std::vector<StoredTensor> stored_;
};

// What is known of weights that the caller reads itself.
class ShapeSource final : public Source {
 public:
  // Borrows `weights`.
  explicit ShapeSource(const WeightShapes& weights) : weights_(weights) {}
  const std::string& where() const override { return weights_.where; }
  size_t size() const override { return weights_.tensors.size(); }
  const StoredTensor& tensor(size_t i) const override { return weights_.tensors[i]; }
  absl::StatusOr<at::Tensor> Read(size_t /*i*/) const override {
    return absl::InternalError("only shapes are known");
  }
  bool has_values() const override { return false; }
  bool AreOne(size_t /*i*/, size_t /*j*/) const override { return false; }
  absl::StatusOr<bool> AreEqual(size_t i, size_t j, at::ScalarType type) const override {
    return weights_.are_equal(i, j, type);
  }

 private:
  const WeightShapes& weights_;
};

using OneCopy = MatchedWeight;

// Returns why a tensor of the file cannot go into this one; empty if it can.
std::string WhyNot(const StoredTensor& stored, const at::Tensor& target, at::ScalarType type,
                   bool may_be_empty) {
  const std::string both =
      absl::StrCat(Description(stored), " in the file, ", Description(target), " here");
  const absl::StatusOr<at::ScalarType> from = ToScalarType(stored.type);
  if (!from.ok()) return absl::StrCat(both, ": ", from.status().message());
  if (target.layout() != at::kStrided) return absl::StrCat(both, ", which is not dense");
  if (target.is_meta() && !may_be_empty)
    return absl::StrCat(both, ", on the meta device: give it memory first");
  const bool convertible =
      *from == type || (c10::isFloatingType(*from) && c10::isFloatingType(type));
  return SameShape(stored.shape, target.sizes()) && convertible ? "" : both;
}

absl::StatusOr<bool> Source::AreEqual(size_t i, size_t j, at::ScalarType type) const {
  if (AreOne(i, j)) return true;
  MUSTER_ASSIGN_OR_RETURN(const at::Tensor first, Read(i));
  MUSTER_ASSIGN_OR_RETURN(const at::Tensor second, Read(j));
  return AreSameWeights(PlaceOfTensor(where(), tensor(i).name), tensor(j).name, first, second,
                        type);
}

// Gives a tensor of the model memory of another type or layout, which `make` returns.
absl::Status GiveMemory(const std::string& name, at::Tensor target, at::ScalarType type,
                        absl::FunctionRef<at::Tensor()> make) {
  return WithMemory(
      absl::StrCat("tensor \"", Printable(name), "\" of the model, ", Description(target), ": "),
      BytesAs(target, type),
      absl::StrCat("as ", c10::toString(type),
                   ": load into a smaller dtype, leave weights in their files "
                   "(load_checkpoint_and_dispatch), or take a machine with more memory"),
      [&] { target.set_data(make()); });
}

// Gives the target memory for its value.
absl::Status Prepare(const OneCopy& copy, const std::string& name, const at::Tensor& target) {
  const bool overlaps = at::has_internal_overlap(target) == at::MemOverlap::Yes;
  // The old memory is freed before the new values arrive.
  if (!overlaps && target.scalar_type() == copy.type) return absl::OkStatus();
  return GiveMemory(name, target, copy.type, [&] {
    const at::TensorOptions options = target.options().dtype(copy.type);
    return overlaps ? at::empty(target.sizes(), options) : at::empty_like(target, options);
  });
}

struct WeightPlan {
  // Determines what goes where; copies nothing.
  absl::Status Match(const LoadWeightsOptions& options);
  absl::Status Copy() const;

  struct Chosen {
    absl::flat_hash_map<std::string, size_t> places;  // in targets, by name
    std::map<size_t, size_t> sources;  // by position in targets: position in the source
    std::vector<std::string> twice;    // targets that several tensors of the source name
    bool any_begins = false;           // a name begins with options.prefix
  };
  // Finds the tensor of the source for each target by its name.
  Chosen Choose(const LoadWeightsOptions& options);
  // Plans what each target gets, a tensor with several names once.
  absl::Status PlanCopies(const Chosen& chosen);
  // Removes copies whose elements others would replace.
  absl::Status CompareShared(const Chosen& chosen);
  // Checks whether `options` allow what does not fit.
  absl::Status Verdict(const Chosen& chosen, const LoadWeightsOptions& options) const;

  std::unique_ptr<Source> source;
  NamedTensors targets;
  std::optional<at::ScalarType> dtype;
  bool may_be_empty = false;  // targets may be on the meta device
  std::vector<OneCopy> copies;
  LoadedWeights report;
};

WeightPlan::Chosen WeightPlan::Choose(const LoadWeightsOptions& options) {
  Chosen result;
  for (size_t i = 0; i < targets.size(); ++i) result.places.emplace(targets[i].first, i);

  for (size_t from = 0; from < source->size(); ++from) {
    const std::string& in_file = source->tensor(from).name;
    std::string name = in_file;
    const bool begins = absl::StartsWith(name, options.prefix);
    result.any_begins = result.any_begins || begins;
    if (begins) name = name.substr(options.prefix.size());
    if (begins && options.rename != nullptr) name = options.rename(name);
    if (!begins || name.empty()) {
      report.ignored.push_back(in_file);
      continue;
    }
    const auto place = result.places.find(name);
    if (place == result.places.end()) {
      report.unexpected.push_back(in_file);
    } else if (!result.sources.emplace(place->second, from).second) {
      result.twice.push_back(absl::StrCat(name, " (from ",
                                          source->tensor(result.sources[place->second]).name,
                                          " and ", in_file, ")"));
    }
  }
  return result;
}

absl::Status WeightPlan::PlanCopies(const Chosen& chosen) {
  // The first of several names of one tensor, by identity.
  absl::flat_hash_map<std::string, const OneCopy*> by_identity;
  absl::flat_hash_set<std::string> present;
  copies.reserve(chosen.sources.size());
  for (const auto& [place, from] : chosen.sources) {
    const auto& [name, target] = targets[place];
    const at::ScalarType type =
        dtype.has_value() && target.is_floating_point() ? *dtype : target.scalar_type();
    const std::string identity = TensorIdentity(target);
    present.insert(identity);
    if (const std::string why = WhyNot(source->tensor(from), target, type, may_be_empty);
        !why.empty()) {
      report.mismatched.push_back(absl::StrCat(name, " (", why, ")"));
      continue;
    }
    const auto tied = by_identity.find(identity);
    if (tied != by_identity.end()) {
      MUSTER_ASSIGN_OR_RETURN(const bool equal, source->AreEqual(tied->second->from, from, type));
      if (!equal) {
        report.mismatched.push_back(absl::StrCat(name, " (the same tensor as ",
                                                 targets[tied->second->target].first,
                                                 " here, but another one in the file)"));
        continue;
      }
      report.loaded.push_back(name);
      continue;
    }
    copies.push_back({.target = place, .from = from, .type = type});
    by_identity.emplace(identity, &copies.back());
    report.loaded.push_back(name);
  }
  for (const auto& [name, target] : targets) {
    if (!chosen.sources.contains(chosen.places.at(name)) &&
        !present.contains(TensorIdentity(target))) {
      report.missing.push_back(name);
    }
  }
  return absl::OkStatus();
}

absl::Status WeightPlan::CompareShared(const Chosen& chosen) {
  // A caller that reads parts compares only names, and has no views here.
  if (!source->has_values()) return absl::OkStatus();
  // Compare only views of the same elements: if others overlap, the later one wins.
  const auto memory = [&](const OneCopy& copy) {
    const at::Tensor& target = targets[copy.target].second;
    // A target whose type changes gets memory of its own.
    const bool keeps = HasMemory(target) && target.scalar_type() == copy.type;
    return std::make_pair(keeps ? target.const_data_ptr() : nullptr, target.numel());
  };
  absl::flat_hash_map<std::pair<const void*, int64_t>, int> views;
  for (const OneCopy& copy : copies) ++views[memory(copy)];
  std::vector<size_t> places;
  NamedTensors into;
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto here = memory(copies[i]);
    if (here.first == nullptr || views[here] < 2) continue;
    places.push_back(i);
    into.push_back(targets[copies[i].target]);
  }
  MUSTER_ASSIGN_OR_RETURN(std::vector<size_t> replaced,
                          ElementsReplaced(source->where(), into, [&](size_t i) {
                            return source->Read(copies[places[i]].from);
                          }));
  std::sort(replaced.begin(), replaced.end(), std::greater<>());
  for (const size_t i : replaced) {
    const std::string identity = TensorIdentity(into[i].second);
    std::vector<std::string> loaded;
    for (std::string& name : report.loaded) {
      const at::Tensor& target = targets[chosen.places.at(name)].second;
      if (TensorIdentity(target) != identity) {
        loaded.push_back(std::move(name));
      } else {
        report.mismatched.push_back(absl::StrCat(name, " (", kElementsReplaced, ")"));
      }
    }
    report.loaded = std::move(loaded);
    copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(places[i]));
  }
  return absl::OkStatus();
}

absl::Status WeightPlan::Verdict(const Chosen& chosen, const LoadWeightsOptions& options) const {
  std::vector<std::string> wrong;
  if (options.strict && !report.missing.empty()) {
    wrong.push_back(absl::StrCat("missing: ", SomeNames(report.missing, kShownNames)));
  }
  if (options.strict && !report.unexpected.empty()) {
    wrong.push_back(absl::StrCat("unexpected: ", SomeNames(report.unexpected, kShownNames)));
  }
  if (!options.skip_mismatched && !report.mismatched.empty()) {
    wrong.push_back(absl::StrCat("mismatched: ", SomeNames(report.mismatched, kShownNames)));
  }
  if (!chosen.twice.empty())
    wrong.push_back(absl::StrCat("named twice: ", SomeNames(chosen.twice, kShownNames)));
  if (!options.prefix.empty() && !chosen.any_begins) {
    wrong.push_back(absl::StrCat("no name in the file begins with \"", options.prefix, "\""));
  }
  if (!wrong.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        source->where(), ": the weights do not fit this model: ", absl::StrJoin(wrong, "; "),
        report.mismatched.empty() || options.skip_mismatched
            ? ""
            : ": make the model with the shapes of its file, or load the file of this model"));
  }
  return absl::OkStatus();
}

absl::Status WeightPlan::Match(const LoadWeightsOptions& options) {
  dtype = options.dtype;
  // Other types are not for weights; complex ones would be computed with silently.
  if (dtype.has_value() && !c10::isFloatingType(*dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(source->where(), ": the weights cannot become ", c10::toString(*dtype),
                     ": dtype must be a floating-point type, such as BFloat16"));
  }
  const Chosen chosen = Choose(options);
  MUSTER_RETURN_IF_ERROR(PlanCopies(chosen));
  MUSTER_RETURN_IF_ERROR(CompareShared(chosen));
  return Verdict(chosen, options);
}

absl::Status WeightPlan::Copy() const {
  const at::NoGradGuard no_grad;
  // Names of one tensor must stay names of one tensor, even if a type is changed: after set_data()
  // two tensors share memory without knowing of each other.
  std::vector<std::string> identities;
  absl::flat_hash_map<std::string, std::vector<size_t>> names_of;
  for (size_t i = 0; i < targets.size(); ++i) {
    identities.push_back(TensorIdentity(targets[i].second));
    names_of[identities.back()].push_back(i);
  }
  const auto follow = [&](size_t changed) {
    const at::Tensor& tensor = targets[changed].second;
    for (const size_t other : names_of[identities[changed]]) {
      at::Tensor tied = targets[other].second;
      if (other != changed && !tied.is_same(tensor)) tied.set_data(tensor);
    }
  };
  const WeightFiles* const files = source->files();
  std::optional<WeightFills> fills;
  if (files != nullptr) fills.emplace(*files);
  std::vector<std::pair<at::Tensor, at::Tensor>> in_memory;
  for (const OneCopy& copy : copies) {
    const at::Tensor& target = targets[copy.target].second;
    MUSTER_RETURN_IF_ERROR(Prepare(copy, targets[copy.target].first, target));
    follow(copy.target);
    if (files != nullptr && IsFillable(files->entries()[copy.from], target)) {
      fills->Add({.from = &files->entries()[copy.from], .to = target});
      continue;
    }
    if (fills.has_value()) MUSTER_RETURN_IF_ERROR(fills->MakeBefore(target));
    MUSTER_ASSIGN_OR_RETURN(const at::Tensor read, source->Read(copy.from));
    if (files == nullptr) {
      in_memory.emplace_back(target, read);
    } else {
      at::Tensor(target).copy_(read);
    }
  }
  MUSTER_RETURN_IF_ERROR(CopyTensors(in_memory));
  if (fills.has_value()) MUSTER_RETURN_IF_ERROR(fills->Make());
  // Tensors that the file lacks get the type, too, including tied ones and missing ones.
  if (dtype.has_value()) {
    for (size_t i = 0; i < targets.size(); ++i) {
      const at::Tensor& target = targets[i].second;
      if (!target.is_floating_point() || target.scalar_type() == *dtype) continue;
      MUSTER_RETURN_IF_ERROR(GiveMemory(targets[i].first, target, *dtype,
                                        [&target, this] { return target.to(*dtype); }));
      follow(i);
    }
  }
  return absl::OkStatus();
}

}  // namespace

bool SameShape(const std::vector<uint64_t>& stored, at::IntArrayRef sizes) {
  return std::equal(stored.begin(), stored.end(), sizes.begin(), sizes.end(),
                    [](uint64_t a, int64_t b) { return a == static_cast<uint64_t>(b); });
}

absl::StatusOr<at::Tensor> ReadWeight(const WeightFiles& weights, const WeightFiles::Entry& entry) {
  const StoredTensor& tensor = entry.tensor;
  const std::string place = PlaceOfTensor(weights.FileOf(entry), tensor.name);
  const absl::StatusOr<at::ScalarType> type = ToScalarType(tensor.type);
  if (!type.ok()) {
    return absl::Status(type.status().code(), absl::StrCat(place, type.status().message()));
  }
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, TensorSizes(tensor.shape, place));
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> strides, TensorSizes(tensor.strides, place));
  const bool in_order = strides.empty();
  const auto elements =
      static_cast<int64_t>(tensor.extent_bytes / static_cast<uint64_t>(c10::elementSize(*type)));
  MUSTER_ASSIGN_OR_RETURN(
      const at::Tensor read,
      NewTensor(in_order ? sizes : std::vector<int64_t>{elements}, *type, place));
  MUSTER_RETURN_IF_ERROR(weights.ReadAll(
      {{.entry = &entry, .to = static_cast<char*>(read.data_ptr())}}, ReadingThreads()));
  return in_order ? read : read.as_strided(sizes, strides);
}

struct MatchedWeights::Plan : WeightPlan {};

MatchedWeights::MatchedWeights(std::unique_ptr<Plan> plan) : plan_(std::move(plan)) {}
MatchedWeights::MatchedWeights(MatchedWeights&&) noexcept = default;
MatchedWeights& MatchedWeights::operator=(MatchedWeights&&) noexcept = default;
MatchedWeights::~MatchedWeights() = default;

absl::StatusOr<MatchedWeights> MatchedWeights::Match(const std::string& where, NamedTensors weights,
                                                     NamedTensors targets,
                                                     const LoadWeightsOptions& options) {
  auto plan = std::make_unique<Plan>();
  MUSTER_ASSIGN_OR_RETURN(plan->source, MemorySource::Make(where, std::move(weights)));
  plan->targets = std::move(targets);
  MUSTER_RETURN_IF_ERROR(plan->Match(options));
  return MatchedWeights(std::move(plan));
}

const LoadedWeights& MatchedWeights::report() const { return plan_->report; }
absl::Status MatchedWeights::Copy() { return plan_->Copy(); }

absl::StatusOr<WeightFiles> OpenWeights(const std::string& path,
                                        const LoadWeightsOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(WeightFiles files, WeightFiles::Open(path));
  if (options.parts != nullptr) MUSTER_RETURN_IF_ERROR(files.Divide(options.parts));
  return files;
}

absl::StatusOr<LoadedWeights> LoadWeights(const std::string& path, const NamedTensors& targets,
                                          const LoadWeightsOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(const WeightFiles files, OpenWeights(path, options));
  return LoadWeights(files, targets, options);
}

absl::StatusOr<LoadedWeights> LoadWeights(const WeightFiles& files, const NamedTensors& targets,
                                          const LoadWeightsOptions& options) {
  MatchedWeights::Plan plan;
  plan.source = std::make_unique<FileSource>(files);
  plan.targets = targets;
  MUSTER_RETURN_IF_ERROR(plan.Match(options));
  MUSTER_RETURN_IF_ERROR(plan.Copy());
  return std::move(plan.report);
}

absl::StatusOr<MatchedEntries> MatchShapes(const WeightShapes& weights, const NamedTensors& targets,
                                           const LoadWeightsOptions& options) {
  WeightPlan plan;
  plan.source = std::make_unique<ShapeSource>(weights);
  plan.targets = targets;
  plan.may_be_empty = true;
  MUSTER_RETURN_IF_ERROR(plan.Match(options));
  return MatchedEntries{.matches = std::move(plan.copies), .report = std::move(plan.report)};
}

absl::StatusOr<MatchedEntries> MatchEntries(const WeightFiles& files, const NamedTensors& targets,
                                            const LoadWeightsOptions& options) {
  MatchedWeights::Plan plan;
  plan.source = std::make_unique<FileSource>(files);
  plan.targets = targets;
  plan.may_be_empty = true;
  MUSTER_RETURN_IF_ERROR(plan.Match(options));
  return MatchedEntries{.matches = std::move(plan.copies), .report = std::move(plan.report)};
}

}  // namespace muster
