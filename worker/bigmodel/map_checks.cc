#include "worker/bigmodel/map_checks.h"

#include <algorithm>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/size_option.h"
#include "base/size_pair.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster {
namespace {

constexpr size_t kShownNames = 10;

void Visit(const PlannedModule& module, const std::string& name,
           absl::FunctionRef<void(const std::string&, const PlannedModule&)> visit) {
  visit(name, module);
  for (const PlannedModule& child : module.children)
    Visit(child, JoinName(name, child.name), visit);
}

std::string SomeNames(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kShownNames);
  std::string text =
      absl::StrJoin(names.begin(), names.begin() + shown, ", ",
                    [](std::string* out, const std::string& name) { *out += Printable(name); });
  if (names.size() > shown) absl::StrAppend(&text, " and ", names.size() - shown, " more");
  return text;
}

}  // namespace

absl::StatusOr<DeviceLimits> ParseMaxMemory(absl::string_view text) {
  DeviceLimits limits;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::vector<std::string> sides = absl::StrSplit(part, '=');
    if (sides.size() != 2) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", part, "\" is not a limit of a device: write DEVICE=SIZE, as in 0=20GB,cpu=30GB"));
    }
    const std::string device(absl::StripAsciiWhitespace(sides[0]));
    const absl::StatusOr<int64_t> bytes = ParseSizeOption(sides[1]);
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("device ", device, ": ", bytes.status().message()));
    }
    limits.emplace_back(device, static_cast<double>(*bytes));
  }
  return OrderDevices(limits);
}

const std::string* FindDevice(const DeviceEntries& devices, absl::string_view name) {
  const std::string* found = nullptr;
  size_t length = 0;
  for (const auto& [entry, device] : devices) {
    const bool covers = entry.empty() || name == entry ||
                        (absl::StartsWith(name, entry) && name[entry.size()] == '.');
    if (!covers || (found != nullptr && entry.size() < length)) continue;
    found = &device;
    length = entry.size();
  }
  return found;
}

void VisitModules(
    const PlannedModel& model,
    absl::FunctionRef<void(const std::string& name, const PlannedModule& module)> visit) {
  Visit(model.root, "", visit);
}

namespace {

void SetType(PlannedModule& module, const std::string& dtype) {
  for (auto* const part : {&module.parameters, &module.buffers}) {
    for (PlannedTensor& tensor : *part) {
      if (tensor.dtype[0] == 'F' || tensor.dtype == "BF16") tensor.dtype = dtype;
    }
  }
  for (PlannedModule& child : module.children) SetType(child, dtype);
}

}  // namespace

void VisitTensorNames(const PlannedModel& model,
                      absl::FunctionRef<void(const std::string& name)> visit) {
  VisitModules(model, [&](const std::string& path, const PlannedModule& module) {
    for (const auto* const tensors : {&module.parameters, &module.buffers}) {
      for (const PlannedTensor& tensor : *tensors) {
        visit(path.empty() ? tensor.name : absl::StrCat(path, ".", tensor.name));
      }
    }
  });
}

std::optional<std::string> FirstGpu(const PlannedModel& model, const DeviceEntries& devices) {
  std::optional<std::string> first;
  VisitTensorNames(model, [&](const std::string& name) {
    const std::string* const device = FindDevice(devices, name);
    int number = 0;
    if (!first.has_value() && device != nullptr && absl::SimpleAtoi(*device, &number)) {
      first = *device;
    }
  });
  return first;
}

void SetFloatingType(PlannedModel& model, const std::string& dtype) { SetType(model.root, dtype); }

absl::Status CheckDeviceMap(const PlannedModel& model, const DeviceEntries& devices) {
  std::set<std::string> known, tensors;
  VisitModules(model, [&](const std::string& name, const PlannedModule& module) {
    known.insert(name);
    for (const auto* const part : {&module.parameters, &module.buffers}) {
      for (const PlannedTensor& tensor : *part) tensors.insert(JoinName(name, tensor.name));
    }
  });
  known.insert(tensors.begin(), tensors.end());
  std::set<std::string> entries;
  DeviceLimits used;
  for (const auto& [name, device] : devices) {
    if (!entries.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat("the device map has \"", name, "\" twice"));
    }
    if (!known.contains(name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the device map places \"", name,
                       "\", which is no module, parameter or buffer of the model; its modules are ",
                       SomeNames([&] {
                         std::vector<std::string> names;
                         for (const PlannedModule& child : model.root.children) {
                           names.push_back(child.name);
                         }
                         return names;
                       }())));
    }
    const bool is_new = std::none_of(used.begin(), used.end(),
                                     [&](const auto& entry) { return entry.first == device; });
    if (is_new) used.emplace_back(device, 0);
  }
  MUSTER_RETURN_IF_ERROR(OrderDevices(used).status());
  std::vector<std::string> without;
  for (const std::string& name : tensors) {
    if (FindDevice(devices, name) == nullptr) without.push_back(name);
  }
  if (without.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the device map has no device for ", SomeNames(without),
                   "; add them, or an entry \"\" for all that is left"));
}

absl::Status CheckUndivided(const PlannedModel& model, const DeviceLimits& limits,
                            const DeviceMapOptions& options, absl::string_view no_split_flag) {
  MUSTER_ASSIGN_OR_RETURN(const auto sizes, ModuleSizes(model, options));
  double largest_limit = 0;
  bool limited = false;
  for (const auto& [device, limit] : limits) {
    if (device == "disk") continue;
    limited = true;
    largest_limit = std::max(largest_limit, limit);
  }
  std::set<std::string> classes;
  std::string largest, its_class;
  int64_t bytes = -1;
  std::vector<std::string> tensors;
  VisitModules(model, [&](const std::string& name, const PlannedModule& module) {
    for (const auto* const part : {&module.parameters, &module.buffers}) {
      for (const PlannedTensor& tensor : *part) tensors.push_back(JoinName(name, tensor.name));
    }
    classes.insert(module.class_name);
    const auto size = sizes.find(name);
    if (!options.no_split.contains(module.class_name) || size == sizes.end()) return;
    if (size->second <= bytes) return;
    bytes = size->second;
    largest = name;
    its_class = module.class_name;
  });
  for (const std::string& name : options.no_split) {
    if (classes.contains(name)) continue;
    return absl::InvalidArgumentError(absl::StrCat("no module of the model is of the class ", name,
                                                   ", which is not to be divided; there are ",
                                                   SomeNames({classes.begin(), classes.end()})));
  }
  if (!limited) return absl::OkStatus();
  // A limit may be infinite.
  constexpr double kMostShown = int64_t{1} << 62;
  const auto too_large = [&](int64_t size) {
    const SizePair texts =
        HumanBytesApart(size, static_cast<int64_t>(std::min(largest_limit, kMostShown)));
    return absl::StrCat("takes ", texts.first, ", more than any device has (", texts.second, ")");
  };
  if (bytes > 0 && static_cast<double>(bytes) > largest_limit) {
    std::set<std::string> others = options.no_split;
    others.erase(its_class);
    const std::string way_out =
        no_split_flag.empty()
            ? absl::StrCat("leave ", its_class, " out of no_split, so that it is divided")
            : absl::StrCat("divide it (", no_split_flag, " ",
                           others.empty() ? "none" : absl::StrJoin(others, ","), ")");
    return absl::InvalidArgumentError(absl::StrCat(Printable(its_class), " ", Printable(largest),
                                                   " is not to be divided and ", too_large(bytes),
                                                   ": raise a limit, ", Printable(way_out),
                                                   ", or load it in a smaller type"));
  }
  for (const std::string& name : tensors) {
    const auto size = sizes.find(name);
    if (size == sizes.end() || static_cast<double>(size->second) <= largest_limit) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(Printable(name), " ", too_large(size->second),
                     ": raise a limit, or load it in a smaller type"));
  }
  return absl::OkStatus();
}

}  // namespace muster
