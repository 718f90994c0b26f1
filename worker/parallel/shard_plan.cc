// GCC 12 takes what <regex> moves for uninitialized when it builds for sanitizers.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "worker/parallel/shard_plan.h"

#include <algorithm>
#include <limits>
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

// The innermost of the modules `names` around `name`, excluding itself; empty: there is none.
std::string OuterOf(const std::string& name, const std::set<std::string>& names) {
  for (size_t dot = name.rfind('.'); dot != std::string::npos && dot > 0;
       dot = name.rfind('.', dot - 1)) {
    std::string prefix = name.substr(0, dot);
    if (names.count(prefix) > 0) return prefix;
  }
  return "";
}

// The names of the modules of `options.no_split` that are not inside another one.
std::set<std::string> KeptTogether(const Modules& modules, const ShardingOptions& options) {
  std::set<std::string> kept, types;
  for (const auto& item : modules) types.insert(ShortName(item.value()->name()));
  for (const std::string& wanted : options.no_split) {
    bool found = false;
    for (const auto& item : modules) {
      if (item.key() != wanted && ShortName(item.value()->name()) != ShortName(wanted)) continue;
      kept.insert(item.key());
      found = true;
    }
    TORCH_CHECK(found, "options.sharding.no_split: the model has no module of class or name '",
                wanted, "'; its classes are ", Join(types));
  }
  std::set<std::string> outermost;
  for (const std::string& name : kept) {
    if (OuterOf(name, kept).empty()) outermost.insert(name);
  }
  return outermost;
}

// Replaces the units inside each of `kept` by that module.
void KeepTogether(const Modules& modules, const ShardingOptions& options,
                  const std::set<std::string>& kept, std::set<std::string>* units) {
  for (const std::string& name : options.unit_names) {
    const std::string outer = OuterOf(name, kept);
    TORCH_CHECK(outer.empty(), "options.sharding.unit_names: '", name, "' is inside of '", outer,
                "', which options.sharding.no_split keeps undivided: leave one of them out");
  }
  for (const std::string& type : options.unit_types) {
    std::string inside;
    bool outside = false;
    for (const auto& item : modules) {
      if (ShortName(item.value()->name()) != ShortName(type)) continue;
      const std::string outer = OuterOf(item.key(), kept);
      outside = outside || outer.empty();
      if (!outer.empty()) inside = outer;
    }
    TORCH_CHECK(outside, "options.sharding.unit_types: all modules of class '", type,
                "' are inside of others, as '", inside,
                "', which options.sharding.no_split keeps undivided: leave one of them out");
  }
  std::set<std::string> outer_units;
  for (const std::string& name : *units) {
    const std::string outer = OuterOf(name, kept);
    outer_units.insert(outer.empty() ? name : outer);
  }
  *units = std::move(outer_units);
}

// Visits children before parents; returns the number of elements that are in no unit so far.
int64_t MatchBySize(const torch::nn::Module& module, const std::string& name, int64_t least,
                    const std::set<std::string>& kept, std::set<std::string>* units) {
  int64_t elements = 0;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    elements += parameter.value().numel();
  }
  const bool is_kept = kept.count(name) > 0;
  for (const auto& child : module.named_children()) {
    elements += MatchBySize(*child.value(), name.empty() ? child.key() : name + "." + child.key(),
                            is_kept ? std::numeric_limits<int64_t>::max() : least, kept, units);
  }
  // A list is never called as a whole; the model itself forms the rest.
  if (elements < least || (IsList(module) && !is_kept) || name.empty()) return elements;
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
  // Without the model itself, which forms the rest.
  const Modules modules = module.named_modules("", /*include_self=*/false);
  const std::set<std::string> kept = KeptTogether(modules, options);
  std::set<std::string> units;
  if (options.min_unit_parameters > 0) {
    MatchBySize(module, "", options.min_unit_parameters, kept, &units);
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
  KeepTogether(modules, options, kept, &units);
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
  const std::string unit = OuterOf(parameter, units);
  return unit.empty() ? kRest : unit;
}

// The `names` that match the pattern `options.sharding.<option>`; empty: none.
std::set<std::string> Matching(const std::string& pattern, const std::set<std::string>& names,
                               const char* option, const char* what) {
  std::set<std::string> matching;
  if (pattern.empty()) return matching;
  std::regex expression;
  try {
    expression = std::regex(pattern);
  } catch (const std::regex_error& error) {
    TORCH_CHECK(false, "options.sharding.", option, ": '", pattern, "' is no regular expression (",
                error.what(), ")");
  }
  for (const std::string& name : names) {
    if (std::regex_match(name, expression)) matching.insert(name);
  }
  TORCH_CHECK(!matching.empty(), "options.sharding.", option, ": no ", what, "'s name is '",
              pattern, "'; the model has ", Join(names));
  return matching;
}

std::set<std::string> IgnoredModules(const torch::nn::Module& module,
                                     const ShardingOptions& options) {
  std::set<std::string> modules;
  if (options.ignored_modules.empty()) return modules;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    modules.insert(item.key());
  }
  return Matching(options.ignored_modules, modules, "ignored_modules", "module");
}

// The parameters that are not divided.
std::unordered_set<const void*> Ignored(const torch::nn::Module* module,
                                        const std::vector<NamedParameter>& parameters,
                                        const ShardingOptions& options) {
  std::set<std::string> modules, names;
  if (module != nullptr) modules = IgnoredModules(*module, options);
  for (const NamedParameter& parameter : parameters) names.insert(parameter.name);
  names = Matching(options.ignored_parameters, names, "ignored_parameters", "parameter");
  std::unordered_set<const void*> ignored;
  bool any_of_modules = false;
  for (const NamedParameter& parameter : parameters) {
    const bool of_module = !OuterOf(parameter.name, modules).empty();
    any_of_modules = any_of_modules || of_module;
    if (of_module || names.count(parameter.name) > 0) {
      ignored.insert(parameter.tensor.unsafeGetTensorImpl());
    }
  }
  TORCH_CHECK(any_of_modules || modules.empty(),
              "options.sharding.ignored_modules: ", Join(modules), " have no parameters");
  return ignored;
}

std::string KindOf(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " on ", tensor.device());
}

}  // namespace

std::set<std::string> InIgnoredModules(const torch::nn::Module& module,
                                       const std::vector<std::string>& names,
                                       const ShardingOptions& options) {
  const std::set<std::string> modules = IgnoredModules(module, options);
  std::set<std::string> inside;
  for (const std::string& name : names) {
    if (!OuterOf(name, modules).empty()) inside.insert(name);
  }
  return inside;
}

std::vector<PlannedUnit> PlanUnits(torch::nn::Module* module,
                                   const std::vector<NamedParameter>& parameters,
                                   const ShardingOptions& options) {
  std::set<std::string> names;
  if (module != nullptr) {
    names = UnitModules(*module, options);
  } else {
    TORCH_CHECK(options.unit_types.empty() && options.unit_names.empty() &&
                    options.min_unit_parameters == 0 && options.no_split.empty() &&
                    options.ignored_modules.empty(),
                "options.sharding: a TorchScript model is one unit; leave out unit_types, "
                "unit_names, min_unit_parameters, no_split and ignored_modules");
  }
  const std::unordered_set<const void*> ignored = Ignored(module, parameters, options);
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
    const bool is_ignored = ignored.count(parameter.tensor.unsafeGetTensorImpl()) > 0;
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
  for (PlannedUnit& unit : units) unit.whole = unit.name == kIgnored;
  return units;
}

}  // namespace muster
