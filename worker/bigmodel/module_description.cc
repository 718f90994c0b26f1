#include "worker/bigmodel/module_description.h"

#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "torch/nn/module.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {
namespace {

class Describer {
 public:
  absl::Status Describe(const torch::nn::Module& module, const std::string& path,
                        PlannedModule* planned) {
    planned->class_name = ShortClassName(module.name());
    MUSTER_RETURN_IF_ERROR(
        Add(module.named_parameters(/*recurse=*/false), path, true, &planned->parameters));
    MUSTER_RETURN_IF_ERROR(
        Add(module.named_buffers(/*recurse=*/false), path, false, &planned->buffers));
    for (const auto& child : module.named_children()) {
      PlannedModule& part = planned->children.emplace_back();
      part.name = child.key();
      MUSTER_RETURN_IF_ERROR(Describe(*child.value(), absl::StrCat(path, child.key(), "."), &part));
    }
    return absl::OkStatus();
  }

  std::vector<std::vector<std::string>> Tied() const {
    std::vector<std::vector<std::string>> tied;
    for (const void* const tensor : in_order_) {
      const std::vector<std::string>& names = names_.at(tensor);
      if (names.size() > 1) tied.push_back(names);
    }
    return tied;
  }

 private:
  absl::Status Add(const torch::OrderedDict<std::string, at::Tensor>& tensors,
                   const std::string& path, bool parameters, std::vector<PlannedTensor>* planned) {
    for (const auto& item : tensors) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined()) continue;
      const std::string name = absl::StrCat(path, item.key());
      absl::StatusOr<std::string> type = PlannedType(tensor.scalar_type());
      if (!type.ok()) {
        return absl::Status(type.status().code(),
                            absl::StrCat(name, ": ", type.status().message()));
      }
      planned->push_back({item.key(), *std::move(type), tensor.sizes().vec()});
      if (!parameters) continue;
      std::vector<std::string>& names = names_[tensor.unsafeGetTensorImpl()];
      if (names.empty()) in_order_.push_back(tensor.unsafeGetTensorImpl());
      names.push_back(name);
    }
    return absl::OkStatus();
  }

  std::map<const void*, std::vector<std::string>> names_;
  std::vector<const void*> in_order_;
};

}  // namespace

absl::StatusOr<std::string> PlannedType(at::ScalarType type) {
  MUSTER_ASSIGN_OR_RETURN(const SafetensorsType stored, ToSafetensorsType(type));
  return std::string(SafetensorsTypeName(stored));
}

absl::StatusOr<std::map<std::string, std::string>> PlannedTypes(
    const torch::nn::Module& module, const std::map<std::string, at::ScalarType>& types) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : TensorsOf(module)) names.insert(name);
  std::map<std::string, std::string> planned;
  for (const auto& [name, type] : types) {
    if (!names.contains(name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("special_dtypes names \"", Printable(name),
                       "\", which is no parameter or buffer of the model: write the full name of "
                       "one, as in \"",
                       names.empty() ? "layer.weight" : *names.begin(), "\""));
    }
    absl::StatusOr<std::string> text = PlannedType(type);
    if (!text.ok()) {
      return absl::Status(text.status().code(),
                          absl::StrCat("special_dtypes, ", name, ": ", text.status().message()));
    }
    planned[name] = *std::move(text);
  }
  return planned;
}

std::string ShortClassName(absl::string_view name) {
  const absl::string_view plain = name.substr(0, name.find('<'));
  const size_t scope = plain.rfind("::");
  if (scope != absl::string_view::npos) name = name.substr(scope + 2);
  if (name.size() > 4 && absl::EndsWith(name, "Impl")) name.remove_suffix(4);
  return std::string(name);
}

std::set<std::string> ShortClassNames(const std::set<std::string>& names) {
  std::set<std::string> all;
  for (const std::string& name : names) all.insert(ShortClassName(name));
  return all;
}

absl::StatusOr<PlannedModel> DescribeModule(const torch::nn::Module& module) {
  Describer describer;
  PlannedModel model;
  MUSTER_RETURN_IF_ERROR(describer.Describe(module, "", &model.root));
  model.tied = describer.Tied();
  return model;
}

std::vector<std::pair<std::string, at::Tensor>> TensorsOf(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& part : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : part) {
      if (item.value().defined()) tensors.emplace_back(item.key(), item.value());
    }
  }
  return tensors;
}

}  // namespace muster
