#include <string>
#include <vector>

#include "base/units.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"
#include "worker/bigmodel/device_map.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

std::vector<PlannedTensor> TensorsOf(const Json& tree, const char* part) {
  std::vector<PlannedTensor> tensors;
  for (const Json& tensor : tree.value(part, Json::array())) {
    tensors.push_back({tensor.at("name"), tensor.at("dtype"), tensor.at("shape")});
  }
  return tensors;
}

PlannedModule ModuleOf(const Json& tree) {
  PlannedModule module;
  module.name = tree.value("name", "");
  module.class_name = tree.at("class");
  module.parameters = TensorsOf(tree, "params");
  module.buffers = TensorsOf(tree, "buffers");
  for (const Json& child : tree.value("children", Json::array())) {
    module.children.push_back(ModuleOf(child));
  }
  return module;
}

DeviceLimits LimitsOf(const Json& in) {
  DeviceLimits limits;
  for (const Json& entry : in.at("max_memory")) {
    const Json& device = entry.at(0);
    const Json& limit = entry.at(1);
    limits.push_back({device.is_string() ? device.get<std::string>() : device.dump(),
                      limit.is_string()
                          ? static_cast<double>(ValueOf(ParseMemorySize(limit.get<std::string>())))
                          : limit.get<double>()});
  }
  return limits;
}

void FillSizes(const Json& in, SizeOptions* options) {
  if (!in.at("dtype").is_null()) options->dtype = in["dtype"].get<std::string>();
  if (!in.at("special_dtypes").is_null()) options->special_dtypes = in["special_dtypes"];
}

template <typename Options>
void FillClasses(const Json& in, Options* options) {
  if (in.at("no_split_module_classes").is_null()) return;
  for (const Json& name : in["no_split_module_classes"]) options->no_split.insert(name);
}

Json DeviceJson(const std::string& device) {
  return device[0] >= '0' && device[0] <= '9' ? Json(std::stoi(device)) : Json(device);
}

Json InferAutoDeviceMapCase(const Json& in) {
  const PlannedModel model = {ModuleOf(in.at("tree")), in.at("tied")};
  DeviceMapOptions options;
  FillSizes(in, &options);
  FillClasses(in, &options);
  options.offload_buffers = in.at("offload_buffers");
  options.fallback_allocation = in.at("fallback_allocation");
  options.clean_result = in.at("clean_result");
  const DeviceMap map = ValueOf(InferDeviceMap(model, LimitsOf(in), options));
  Json out = {{"device_map", Json::array()}, {"buffer_warning", map.buffers_do_not_fit}};
  for (const auto& [name, device] : map.devices) {
    out["device_map"].push_back({name, DeviceJson(device)});
  }
  return out;
}

Json BalancedMemoryCase(const Json& in) {
  const PlannedModel model = {ModuleOf(in.at("tree")), in.at("tied")};
  BalanceOptions options;
  FillSizes(in, &options);
  FillClasses(in, &options);
  options.low_zero = in.at("low_zero");
  options.user_set = in.at("user_set");
  Json out = {{"max_memory", Json::array()}};
  for (const auto& [device, limit] : ValueOf(BalanceMemory(model, LimitsOf(in), options))) {
    const auto whole = static_cast<int64_t>(limit);
    out["max_memory"].push_back(
        {DeviceJson(device), static_cast<double>(whole) == limit ? Json(whole) : Json(limit)});
  }
  return out;
}

}  // namespace

std::map<std::string, Handler> BigModelHandlers() {
  return {{"infer_auto_device_map", InferAutoDeviceMapCase},
          {"balanced_memory", BalancedMemoryCase}};
}

}  // namespace muster::conformance
