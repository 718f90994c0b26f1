#include "worker/parallel/shard_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "c10/util/Exception.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"

namespace muster {
namespace {

constexpr char kRest[] = "(rest)";
constexpr char kIgnored[] = "(ignored)";

using Modules = torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>;

// "muster::parity::(anonymous namespace)::BlockImpl" is "Block".
std::string ShortName(std::string type) {
  const size_t colons = type.rfind("::");
  if (colons != std::string::npos) type = type.substr(colons + 2);
  constexpr char kImpl[] = "Impl";
  const size_t impl = type.size() - std::min(type.size(), sizeof(kImpl) - 1);
  if (impl > 0 && type.compare(impl, std::string::npos, kImpl) == 0) type.resize(impl);
  return type;
}

std::string Join(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void MatchTypes(const Modules& modules, const std::vector<std::string>& wanted,
                const std::string& option, std::set<std::string>* units) {
  std::set<std::string> types;
  for (const auto& item : modules) types.insert(ShortName(item.value()->name()));
  for (const std::string& type : wanted) {
    bool found = false;
    for (const auto& item : modules) {
      if (ShortName(item.value()->name()) != ShortName(type)) continue;
      units->insert(item.key());
      found = true;
    }
    TORCH_CHECK(found, option, ": the model has no module of class '", type, "'; it has ",
                Join(types));
  }
}

void Match(const Modules& modules, const ShardingOptions& options, std::set<std::string>* units) {
  MatchTypes(modules, options.unit_types, "options.sharding.unit_types", units);
  std::set<std::string> names;
  for (const auto& item : modules) names.insert(item.key());
  for (const std::string& wanted : options.unit_names) {
    TORCH_CHECK(names.count(wanted) > 0, "options.sharding.unit_names: the model has no module '",
                wanted, "'; it has ", Join(names));
    units->insert(wanted);
  }
}

bool IsList(const torch::nn::Module& module) {
  return module.as<torch::nn::ModuleList>() != nullptr ||
         module.as<torch::nn::Sequential>() != nullptr;
}

// Children before parents; returns the elements in no unit so far.
int64_t MatchBySize(const torch::nn::Module& module, const std::string& name, int64_t least,
                    std::set<std::string>* units) {
  int64_t elements = 0;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    elements += parameter.value().numel();
  }
  for (const auto& child : module.named_children()) {
    elements += MatchBySize(*child.value(), name.empty() ? child.key() : name + "." + child.key(),
                            least, units);
  }
  // A list is never called as a whole; the model itself is the rest.
  if (elements < least || IsList(module) || name.empty()) return elements;
  units->insert(name);
  return 0;
}

}  // namespace

std::set<std::string> UnitModules(const torch::nn::Module& module, const ShardingOptions& options) {
  TORCH_CHECK(options.min_unit_parameters >= 0, "options.sharding.min_unit_parameters is ",
              options.min_unit_parameters, "; it must be 0 or more");
  const int rules = (options.unit_types.empty() ? 0 : 1) + (options.unit_names.empty() ? 0 : 1) +
                    (options.min_unit_parameters == 0 ? 0 : 1);
  TORCH_CHECK(
      rules <= 1,
      "options.sharding: unit_types, unit_names and min_unit_parameters exclude each other");
  // Without the model itself, which is the rest.
  const Modules modules = module.named_modules("", /*include_self=*/false);
  std::set<std::string> units;
  if (options.min_unit_parameters > 0) {
    MatchBySize(module, "", options.min_unit_parameters, &units);
    TORCH_CHECK(!units.empty(), "options.sharding.min_unit_parameters: no module has ",
                options.min_unit_parameters, " parameters");
  } else if (rules > 0) {
    Match(modules, options, &units);
  } else {
    const auto add = [&](const torch::nn::Module& list, const std::string& prefix) {
      if (!IsList(list)) return;
      for (const auto& child : list.named_children()) units.insert(prefix + child.key());
    };
    add(module, "");
    for (const auto& item : modules) add(*item.value(), item.key() + ".");
  }
  return units;
}

std::set<std::string> ModulesOfTypes(const torch::nn::Module& module,
                                     const std::vector<std::string>& types,
                                     const std::string& option) {
  std::set<std::string> names;
  MatchTypes(module.named_modules("", /*include_self=*/false), types, option, &names);
  return names;
}

namespace {

// The innermost unit around `parameter`, "a.b.weight"; "(rest)" if there is none.
std::string UnitOf(const std::string& parameter, const std::set<std::string>& units) {
  for (size_t dot = parameter.rfind('.'); dot != std::string::npos && dot > 0;
       dot = parameter.rfind('.', dot - 1)) {
    const std::string prefix = parameter.substr(0, dot);
    if (units.count(prefix) > 0) return prefix;
  }
  return kRest;
}

// The names of the modules that are not divided; those in them are not named.
std::set<std::string> IgnoredModules(const torch::nn::Module& module, const std::string& pattern) {
  std::set<std::string> ignored;
  if (pattern.empty()) return ignored;
  std::regex expression;
  try {
    expression = std::regex(pattern);
  } catch (const std::regex_error& error) {
    TORCH_CHECK(false, "options.sharding.ignored_modules: '", pattern,
                "' is no regular expression (", error.what(), ")");
  }
  std::set<std::string> names;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    names.insert(item.key());
    if (std::regex_match(item.key(), expression)) ignored.insert(item.key());
  }
  TORCH_CHECK(!ignored.empty(), "options.sharding.ignored_modules: no module's name is '", pattern,
              "'; the model has ", Join(names));
  return ignored;
}

std::string KindOf(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " on ", tensor.device());
}

}  // namespace

std::vector<PlannedUnit> PlanUnits(torch::nn::Module* module,
                                   const std::vector<NamedParameter>& parameters,
                                   const ShardingOptions& options) {
  std::set<std::string> names, ignored;
  if (module != nullptr) {
    names = UnitModules(*module, options);
    ignored = IgnoredModules(*module, options.ignored_modules);
  } else {
    TORCH_CHECK(options.unit_types.empty() && options.unit_names.empty() &&
                    options.min_unit_parameters == 0 && options.ignored_modules.empty(),
                "options.sharding: a TorchScript model is one unit; leave out unit_types, "
                "unit_names, min_unit_parameters and ignored_modules");
  }
  std::unordered_set<const void*> seen;
  std::vector<PlannedUnit> units;
  std::map<std::pair<std::string, std::string>, size_t> places;
  std::vector<std::pair<std::string, const NamedParameter*>> rest;
  const auto add = [&](const std::string& unit, const NamedParameter& parameter) {
    const auto [place, is_new] =
        places.emplace(std::make_pair(unit, KindOf(parameter.tensor)), units.size());
    if (is_new) units.push_back({unit, {}});
    units[place->second].parameters.push_back(parameter);
  };
  for (const NamedParameter& parameter : parameters) {
    if (!seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
    const bool is_ignored = UnitOf(parameter.name, ignored) != kRest;
    const std::string unit = is_ignored ? kIgnored : UnitOf(parameter.name, names);
    if (unit == kRest || is_ignored) {
      rest.emplace_back(unit, &parameter);
    } else {
      add(unit, parameter);
    }
  }
  std::stable_partition(rest.begin(), rest.end(),
                        [](const auto& entry) { return entry.first == kRest; });
  for (const auto& [unit, parameter] : rest) add(unit, *parameter);
  bool any_whole = false;
  for (PlannedUnit& unit : units) {
    unit.whole = unit.name == kIgnored;
    any_whole = any_whole || unit.whole;
  }
  TORCH_CHECK(any_whole || ignored.empty(), "options.sharding.ignored_modules: ", Join(ignored),
              " have no parameters of their own (of tied weights the first name counts)");
  return units;
}

}  // namespace muster
