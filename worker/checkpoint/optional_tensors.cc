#include "worker/checkpoint/optional_tensors.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "torch/nn/module.h"

namespace muster {

std::set<std::string> OptionalTensorsOf(const torch::nn::Module& root) {
  std::set<std::string> names;
  // Not named_modules(), which needs a module that a shared_ptr holds.
  root.apply([&names](const std::string& path, const torch::nn::Module& module) {
    const auto* const optional = dynamic_cast<const HasOptionalTensors*>(&module);
    if (optional == nullptr) return;
    for (const std::string& name : optional->OptionalTensors()) {
      names.insert(path.empty() ? name : absl::StrCat(path, ".", name));
    }
  });
  return names;
}

void RemoveOptional(const torch::nn::Module& root, const std::set<std::string>& given,
                    NamedTensors* targets) {
  const std::set<std::string> optional = OptionalTensorsOf(root);
  std::erase_if(*targets, [&](const auto& target) {
    return optional.contains(target.first) && !given.contains(target.first);
  });
}

std::set<std::string> NamesInModel(const std::vector<std::string>& in_files,
                                   const std::string& prefix,
                                   const std::function<std::string(const std::string&)>& rename) {
  std::set<std::string> names;
  for (const std::string& in_file : in_files) {
    if (!absl::StartsWith(in_file, prefix)) continue;
    const std::string name = in_file.substr(prefix.size());
    names.insert(rename == nullptr ? name : rename(name));
  }
  return names;
}

}  // namespace muster
