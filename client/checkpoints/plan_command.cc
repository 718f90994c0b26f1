#include "client/checkpoints/plan_command.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "client/checkpoints/model_tree.h"
#include "client/cli/command_line.h"
#include "worker/bigmodel/device_map.h"
#include "worker/bigmodel/map_checks.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/weight_files.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

struct Request {
  std::string path;
  std::string mode = "auto";
  DeviceLimits limits;
  bool user_set = false;
  DeviceMapOptions map;
  std::optional<std::string> dtype;
  bool default_blocks = true;  // map.no_split is to be found in the model
};

struct DeviceShare {
  std::string device;
  std::optional<int64_t> limit;
  int64_t bytes = 0;
  std::vector<std::string> parts;
};

struct Plan {
  PlannedModel model;
  std::map<std::string, int64_t> sizes;
  DeviceMap map;
  std::vector<DeviceShare> shares;
  // Where operators run, and what must have room there besides its share.
  std::string main;
  int64_t offloaded = 0;
  std::string largest;  // tensor of those that are not on their device all the time
  int64_t largest_bytes = 0;
};

// The type names of Accelerate and of safetensors.
absl::StatusOr<std::optional<std::string>> TypeOf(const std::string& name) {
  static const auto& types = *new std::map<std::string, std::string>{
      {"float32", "F32"}, {"float16", "F16"}, {"bfloat16", "BF16"}, {"float64", "F64"}};
  if (name.empty()) return std::optional<std::string>();
  const auto found = types.find(name);
  if (found != types.end()) return std::optional(found->second);
  return absl::InvalidArgumentError(
      absl::StrCat("--dtype ", name, ": write float32, float16, bfloat16 or float64"));
}

absl::StatusOr<Request> RequestOf(const CommandLine& line) {
  Request request;
  request.path = line.words[0];
  if (line.Has("device_map")) request.mode = line.Get("device_map");
  const std::set<std::string> modes = {"auto", "balanced", "balanced_low_0", "sequential"};
  if (!modes.contains(request.mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--device_map ", request.mode, ": write auto, balanced, balanced_low_0 or sequential"));
  }
  request.user_set = line.Has("max_memory");
  if (request.user_set) {
    const absl::StatusOr<DeviceLimits> limits = ParseMaxMemory(line.Get("max_memory"));
    if (!limits.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--max_memory: ", limits.status().message()));
    }
    request.limits = *limits;
  } else {
    request.limits = {{"cpu", static_cast<double>(MemoryLeft())}};
  }
  MUSTER_ASSIGN_OR_RETURN(request.dtype, TypeOf(line.Get("dtype")));
  if (line.Has("no_split")) {
    request.default_blocks = false;
    request.map.no_split = absl::StrSplit(line.Get("no_split"), ',', absl::SkipWhitespace());
    request.map.no_split.erase("none");
  }
  request.map.offload_buffers = true;
  return request;
}

// Of config.json beside the weights; empty if it does not say.
std::string ModelType(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(JoinPath(path, "config.json"));
  if (!text.ok()) return "";
  const auto json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("model_type")) return "";
  return json["model_type"].is_string() ? json["model_type"].get<std::string>() : "";
}

absl::StatusOr<PlannedModel> ReadModel(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const WeightFiles files, WeightFiles::Open(path));
  std::vector<PlannedTensor> tensors;
  std::map<std::string, std::vector<std::string>> names;  // by storage
  for (const WeightFiles::Entry& entry : files.entries()) {
    PlannedTensor tensor{.name = entry.tensor.name,
                         .dtype = std::string(SafetensorsTypeName(entry.tensor.type)),
                         .shape = {}};
    tensor.shape.assign(entry.tensor.shape.begin(), entry.tensor.shape.end());
    tensors.push_back(std::move(tensor));
    const std::string storage = files.StorageOf(entry);
    if (!storage.empty()) names[storage].push_back(entry.tensor.name);
  }
  if (tensors.empty()) return absl::NotFoundError(absl::StrCat(path, " holds no tensors"));
  PlannedModel model = TreeOf(tensors, ModelType(path));
  for (const auto& [storage, group] : names) {
    if (group.size() > 1) model.tied.push_back(group);
  }
  return model;
}

void FillShares(const DeviceLimits& limits, Plan& plan) {
  for (const auto& [device, limit] : limits) {
    if (device != "disk") plan.shares.push_back({device, static_cast<int64_t>(limit), 0, {}});
  }
  plan.shares.push_back({"disk", std::nullopt, 0, {}});
  plan.main = plan.shares[0].device;
  for (const auto& entry : plan.map.devices) {
    const std::string &name = entry.first, &device = entry.second;
    const auto share = std::find_if(plan.shares.begin(), plan.shares.end(),
                                    [&](const auto& other) { return other.device == device; });
    const auto size = plan.sizes.find(name);
    share->bytes += size == plan.sizes.end() ? 0 : size->second;
    share->parts.push_back(name.empty() ? "the whole model" : name);
  }
  const auto moves = [&](const std::string& device) {
    return device == "disk" || (device == "cpu" && plan.main != "cpu");
  };
  for (const DeviceShare& share : plan.shares) {
    if (moves(share.device)) plan.offloaded += share.bytes;
  }
  VisitModules(plan.model, [&](const std::string& path, const PlannedModule& module) {
    for (const PlannedTensor& tensor : module.parameters) {
      const std::string name = path.empty() ? tensor.name : absl::StrCat(path, ".", tensor.name);
      const std::string* const device = FindDevice(plan.map.devices, name);
      const auto size = plan.sizes.find(name);
      if (device == nullptr || !moves(*device) || size == plan.sizes.end()) continue;
      if (size->second <= plan.largest_bytes) continue;
      plan.largest = name;
      plan.largest_bytes = size->second;
    }
  });
}

absl::StatusOr<Plan> MakePlan(Request& request) {
  Plan plan;
  MUSTER_ASSIGN_OR_RETURN(plan.model, ReadModel(request.path));
  if (request.dtype.has_value()) SetFloatingType(plan.model, *request.dtype);
  if (request.default_blocks) request.map.no_split = BlockClasses(plan.model);
  MUSTER_RETURN_IF_ERROR(CheckUndivided(plan.model, request.limits, request.map));
  MUSTER_ASSIGN_OR_RETURN(plan.sizes, ModuleSizes(plan.model, request.map));
  DeviceLimits limits = request.limits;
  if (request.mode != "sequential") {
    BalanceOptions balance;
    balance.no_split = request.map.no_split;
    balance.low_zero = request.mode == "balanced_low_0";
    balance.user_set = request.user_set;
    MUSTER_ASSIGN_OR_RETURN(limits, BalanceMemory(plan.model, limits, balance));
  }
  MUSTER_ASSIGN_OR_RETURN(plan.map, InferDeviceMap(plan.model, limits, request.map));
  FillShares(request.limits, plan);
  return plan;
}

void PrintText(const Request& request, const Plan& plan, std::ostream& out) {
  out << request.path << ": " << HumanBytes(plan.sizes.at(""));
  if (request.dtype.has_value()) out << ", loaded in " << *request.dtype;
  out << "; kept whole: "
      << (request.map.no_split.empty() ? "nothing" : absl::StrJoin(request.map.no_split, ", "))
      << "\n\n"
      << absl::StrFormat("  %-6s   %10s   %10s   %s\n", "device", "limit", "holds", "parts");
  for (const DeviceShare& share : plan.shares) {
    if (share.device == "disk" && share.parts.empty()) continue;
    out << absl::StrFormat("  %-6s   %10s   %10s   %s\n", share.device,
                           share.limit.has_value() ? HumanBytes(*share.limit) : "-",
                           HumanBytes(share.bytes), absl::StrJoin(Shortened(share.parts), ", "));
  }
  out << "\n";
  if (plan.offloaded == 0) {
    out << "All weights stay on their devices.\n";
    return;
  }
  out << HumanBytes(plan.offloaded) << " come to device " << plan.main
      << " when they are used, through the room that its share leaves; the largest tensor of "
         "them is "
      << plan.largest << " with " << HumanBytes(plan.largest_bytes) << ".\n";
}

ordered_json ToJson(const Request& request, const Plan& plan) {
  ordered_json json = {
      {"path", request.path},
      {"bytes", plan.sizes.at("")},
      {"dtype", request.dtype.has_value() ? ordered_json(*request.dtype) : ordered_json()},
      {"no_split", request.map.no_split},
      {"main_device", plan.main},
      {"devices", ordered_json::array()},
      {"device_map", ordered_json::object()},
      {"offloaded", plan.offloaded},
      {"largest_offloaded", plan.largest},
      {"largest_offloaded_bytes", plan.largest_bytes}};
  for (const DeviceShare& share : plan.shares) {
    json["devices"].push_back(
        {{"device", share.device},
         {"limit", share.limit.has_value() ? ordered_json(*share.limit) : ordered_json()},
         {"bytes", share.bytes}});
  }
  for (const auto& [name, device] : plan.map.devices) json["device_map"][name] = device;
  return json;
}

CommandSpec Spec() {
  return {.name = "muster plan",
          .summary = "Prints which device each part of a model goes to, before anything is loaded.",
          .usage = "PATH [OPTIONS]",
          .details =
              "PATH is a folder, an index or a file of safetensors or torch.save; only headers are "
              "read.\nFiles do not say in which order modules run: embeddings are taken to come "
              "first, entries of lists\nby their numbers, final norms and heads last.",
          .options = {{.name = "max_memory",
                       .value_name = "LIST",
                       .help = "What each device may hold: 0=20GB,cpu=30GB (default: the memory "
                               "of this machine as cpu); the rest goes to the disk"},
                      {.name = "dtype",
                       .value_name = "TYPE",
                       .help = "Type to load in: float32, float16, bfloat16 (default: as stored)",
                       .values = {"float32", "float16", "bfloat16", "float64"}},
                      {.name = "no_split",
                       .value_name = "LIST",
                       .help = "Classes of modules that stay whole, as LlamaDecoderLayer or "
                               "model.layers.*; none (default: entries of module lists)"},
                      {.name = "device_map",
                       .value_name = "MODE",
                       .help = "auto, balanced, balanced_low_0 or sequential (default auto)",
                       .values = {"auto", "balanced", "balanced_low_0", "sequential"}},
                      OutputOption({"text", "json"})},
          .max_words = 1};
}

}  // namespace

int RunPlanCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = Spec();
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::string format = line.Has("output") ? line.Get("output") : "text";
  if (format != "text" && format != "json") {
    return Fail(
        spec, context,
        absl::InvalidArgumentError(absl::StrCat("--output ", format, ": write text or json")),
        kExitUsage);
  }
  if (line.words.empty()) {
    return Fail(spec, context,
                absl::InvalidArgumentError(absl::StrCat("write ", spec.name, " ", spec.usage)),
                kExitUsage);
  }
  absl::StatusOr<Request> request = RequestOf(line);
  if (!request.ok()) return Fail(spec, context, request.status(), kExitUsage);
  const absl::StatusOr<Plan> plan = MakePlan(*request);
  if (!plan.ok()) return Fail(spec, context, plan.status(), ExitCodeOf(plan.status()));
  if (format == "json") {
    context.out << Dump(ToJson(*request, *plan));
  } else {
    PrintText(*request, *plan, context.out);
  }
  return kExitOk;
}

}  // namespace muster::client
