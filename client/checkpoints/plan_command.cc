#include "client/checkpoints/plan_command.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/json.h"
#include "base/machine.h"
#include "base/memory_left.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/units.h"
#include "client/checkpoints/model_headers.h"
#include "client/checkpoints/model_tree.h"
#include "client/cli/command_line.h"
#include "worker/bigmodel/device_map.h"
#include "worker/bigmodel/map_checks.h"
#include "worker/models/generation_memory.h"
#include "worker/models/model_config.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

// The same as in `muster generate`.
constexpr int64_t kNewTokens = 256;

struct Request {
  DeviceLimits limits;
  bool user_set = true;
  std::string kind = "auto";  // the kind of map
  std::optional<std::set<std::string>> no_split;
  std::optional<std::string> dtype;
  bool offload_buffers = false;
  // The generation that is requested, if any option for it is given.
  std::optional<models::GenerationShape> generation;
  bool has_new_tokens = false;  // else as many as fit, up to the folder's default
  bool has_beams = false;       // else those of the folder
};

struct Plan {
  Request request = {};
  DeviceLimits limits = {};  // after balancing
  DeviceMap map = {};
  std::map<std::string, int64_t> sizes = {};
  std::set<std::string> no_split = {};
  // The largest module that is kept together.
  std::string largest = {};
  int64_t largest_bytes = 0;
  // The device on which operators run; what is brought there when it is used, and its largest
  // tensor.
  std::string main_device = {};
  int64_t offloaded = 0;
  std::string largest_offloaded = {};
  int64_t largest_offloaded_bytes = 0;
  // The type of the first weight.
  std::string dtype = {};
  // The memory of the requested generation.
  models::GenerationMemory generation = {};
};

// A row of the table.
struct Share {
  std::string device = {};
  std::optional<int64_t> limit = {};
  int64_t bytes = 0;
  std::vector<std::string> parts = {};
};

// Returns the limits of this machine's own memory.
absl::StatusOr<DeviceLimits> FoundLimits(const Machine& machine) {
  if (machine.usable_gpus > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this machine has ", machine.usable_gpus, machine.usable_gpus == 1 ? " GPU" : " GPUs",
        ", and only a program with CUDA can query its memory: write --max_memory 0=SIZE,cpu=SIZE"));
  }
  return DeviceLimits{{"cpu", static_cast<double>(MemoryLeft())}};
}

absl::StatusOr<std::string> ParseDtype(const std::string& text) {
  static const auto& types = *new std::map<std::string, std::string>{
      {"float64", "F64"},
      {"float32", "F32"},
      {"float16", "F16"},
      {"bfloat16", "BF16"},
      {"fp64", "F64"},
      {"fp32", "F32"},
      {"fp16", "F16"},
      {"bf16", "BF16"},
      {"float8_e4m3", "F8_E4M3"},
      {"float8_e5m2", "F8_E5M2"},
  };
  const auto found = types.find(text);
  if (found != types.end()) return found->second;
  return absl::InvalidArgumentError(absl::StrCat(
      "--dtype ", text, ": write float32, bfloat16, float16, float64, float8_e4m3 or float8_e5m2"));
}

// Sets a number of the requested generation, if the option is given.
absl::Status SetNumber(const CommandLine& line, const std::string& option, int64_t least,
                       Request* request, int64_t models::GenerationShape::*number) {
  // Larger than any model or memory.
  constexpr int64_t kMost = int64_t{1} << 40;
  if (!line.Has(option)) return absl::OkStatus();
  if (!request->generation.has_value()) {
    request->generation = models::GenerationShape{.new_tokens = kNewTokens};
  }
  int64_t& to = (*request->generation).*number;
  if (absl::SimpleAtoi(line.Get(option), &to) && to >= least && to <= kMost) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("--", option, " ", Printable(line.Get(option)),
                                                 ": write a number from ", least, " to ", kMost));
}

absl::Status SetGeneration(const CommandLine& line, Request* request) {
  using Shape = models::GenerationShape;
  MUSTER_RETURN_IF_ERROR(SetNumber(line, "prompt_tokens", 1, request, &Shape::prompt_tokens));
  MUSTER_RETURN_IF_ERROR(SetNumber(line, "max_new_tokens", 1, request, &Shape::new_tokens));
  MUSTER_RETURN_IF_ERROR(SetNumber(line, "batch_size", 1, request, &Shape::rows));
  MUSTER_RETURN_IF_ERROR(SetNumber(line, "num_beams", 1, request, &Shape::times));
  MUSTER_RETURN_IF_ERROR(
      SetNumber(line, "prefill_chunk_size", 0, request, &Shape::prefill_chunk_size));
  request->has_new_tokens = line.Has("max_new_tokens");
  request->has_beams = line.Has("num_beams");
  return absl::OkStatus();
}

absl::StatusOr<Request> RequestOf(const CommandLine& line, const Machine& machine) {
  Request request;
  if (line.Has("max_memory")) {
    const absl::StatusOr<DeviceLimits> limits = ParseMaxMemory(line.Get("max_memory"));
    if (!limits.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--max_memory: ", limits.status().message()));
    }
    request.limits = *limits;
  } else {
    MUSTER_ASSIGN_OR_RETURN(request.limits, FoundLimits(machine));
    request.user_set = false;
  }
  if (line.Has("device_map")) request.kind = line.Get("device_map");
  static const auto& kinds =
      *new std::set<std::string>{"auto", "balanced", "balanced_low_0", "sequential"};
  if (!kinds.contains(request.kind)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device_map ", request.kind, ": write ", absl::StrJoin(kinds, ", ")));
  }
  if (line.Has("dtype")) {
    MUSTER_ASSIGN_OR_RETURN(request.dtype, ParseDtype(line.Get("dtype")));
  }
  if (line.Has("no_split")) {
    request.no_split.emplace();
    const std::string text = line.Get("no_split");
    for (const absl::string_view name : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
      if (text != "none") request.no_split->insert(TreeClass(name));
    }
  }
  request.offload_buffers = line.Get("offload_buffers") == "true";
  MUSTER_RETURN_IF_ERROR(SetGeneration(line, &request));
  return request;
}

void FindOffloaded(const PlannedModel& model, Plan& plan) {
  // A GPU that holds nothing computes nothing, either.
  plan.main_device = FirstGpu(model, plan.map.devices).value_or("cpu");
  VisitTensorNames(model, [&](const std::string& name) {
    const std::string* const device = FindDevice(plan.map.devices, name);
    const auto size = plan.sizes.find(name);
    if (device == nullptr || size == plan.sizes.end()) return;
    if (*device != "disk" && (*device != "cpu" || plan.main_device == "cpu")) return;
    plan.offloaded += size->second;
    if (size->second <= plan.largest_offloaded_bytes) return;
    plan.largest_offloaded_bytes = size->second;
    plan.largest_offloaded = name;
  });
}

// The type of the model's first weight.
std::string TypeOf(const PlannedModel& model) {
  std::string type;
  VisitModules(model, [&](const std::string&, const PlannedModule& module) {
    for (const PlannedTensor& tensor : module.parameters) {
      if (type.empty()) type = tensor.dtype;
    }
  });
  return type;
}

// Returns the bytes of an element that is computed: of --dtype or, without it, of the type in which
// `muster generate` computes on a CPU, which has no arithmetic for float16. `of_config`: the type
// that config.json names.
int64_t ElementBytes(const Plan& plan, const std::string& of_config) {
  if (plan.request.dtype.has_value()) {
    const std::string& type = *plan.request.dtype;
    return type == "F64" ? 8 : type == "F16" || type == "BF16" ? 2 : 4;
  }
  const bool is_narrow = of_config.empty() ? plan.dtype == "BF16" : of_config == "bfloat16";
  return is_narrow ? 2 : 4;
}

// The sizes of a generation in the folder's generation_config.json or, without that file, in
// config.json, as in older folders, which has no number of tokens: the defaults of `muster
// generate`.
struct FolderDefaults {
  std::optional<int64_t> new_tokens = {};
  std::optional<int64_t> num_beams = {};
  std::optional<int64_t> num_return_sequences = {};
  bool do_sample = false;
};

absl::StatusOr<FolderDefaults> ReadFolderDefaults(const std::string& folder) {
  constexpr int64_t kMaxBytes = int64_t{16} << 20;
  std::string path = JoinPath(folder, "generation_config.json");
  absl::StatusOr<std::string> text = ReadRegularFile(path, kMaxBytes);
  const bool in_config = absl::IsNotFound(text.status());
  if (in_config) {
    path = JoinPath(folder, "config.json");
    text = ReadRegularFile(path, kMaxBytes);
  }
  MUSTER_RETURN_IF_ERROR(text.status());
  MUSTER_ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(*text, path));
  FolderDefaults defaults;
  if (!json.is_object()) return defaults;
  // `muster generate` reports the invalid value.
  const auto take = [&json](const char* name, std::optional<int64_t>* to) {
    const auto value = json.find(name);
    constexpr uint64_t kMost = uint64_t{1} << 40;
    if (value == json.end() || !value->is_number_unsigned()) return;
    const auto number = value->get<uint64_t>();
    if (number >= 1 && number <= kMost) *to = static_cast<int64_t>(number);
  };
  if (!in_config) take("max_new_tokens", &defaults.new_tokens);
  take("num_beams", &defaults.num_beams);
  take("num_return_sequences", &defaults.num_return_sequences);
  defaults.do_sample = json.value("do_sample", nlohmann::json()) == true;
  return defaults;
}

// Adds the memory of the requested generation to the plan, from the model's config.
absl::Status PlanGeneration(const std::string& path, const models::ModelConfig& config,
                            Plan& plan) {
  models::GenerationShape& shape = *plan.request.generation;
  if (std::holds_alternative<models::BertConfig>(config)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path,
                     ": BERT does not generate text: leave out --prompt_tokens and the other "
                     "options of a generation"));
  }
  MUSTER_ASSIGN_OR_RETURN(const FolderDefaults defaults, ReadFolderDefaults(FolderOf(path)));
  const int64_t room = models::ContextLength(config) - shape.prompt_tokens;
  if (!plan.request.has_new_tokens) {
    const int64_t wanted = defaults.new_tokens.value_or(kNewTokens);
    shape.new_tokens = std::max<int64_t>(1, std::min(room, wanted));
  }
  if (!plan.request.has_beams) shape.times = defaults.num_beams.value_or(1);
  shape.times = std::max(shape.times, defaults.num_return_sequences.value_or(1));
  shape.do_sample = defaults.do_sample;
  if (shape.new_tokens > room) {
    return absl::InvalidArgumentError(absl::StrCat("--prompt_tokens ", shape.prompt_tokens, " and ",
                                                   shape.new_tokens, " new ones are more than the ",
                                                   models::ContextLength(config),
                                                   " positions of the model: lower one of them"));
  }
  shape.element_bytes = ElementBytes(plan, models::Common(config).dtype);
  plan.generation = models::PlanGenerationMemory(config, shape);
  return absl::OkStatus();
}

absl::StatusOr<Plan> PlanOf(PlannedModel model, const Request& request) {
  if (request.dtype.has_value()) SetFloatingType(model, *request.dtype);
  Plan plan{.request = request, .limits = request.limits};
  plan.no_split = request.no_split.has_value() ? *request.no_split : LayerClasses(model);
  DeviceMapOptions options;
  options.no_split = plan.no_split;
  options.offload_buffers = request.offload_buffers;
  MUSTER_ASSIGN_OR_RETURN(plan.sizes, ModuleSizes(model, options));
  MUSTER_RETURN_IF_ERROR(CheckUndivided(model, request.limits, options, "--no_split"));
  VisitModules(model, [&](const std::string& name, const PlannedModule& module) {
    const auto size = plan.sizes.find(name);
    if (!plan.no_split.contains(module.class_name) || size == plan.sizes.end()) return;
    if (size->second <= plan.largest_bytes) return;
    plan.largest = name;
    plan.largest_bytes = size->second;
  });
  if (request.kind != "sequential") {
    BalanceOptions balance;
    balance.no_split = options.no_split;
    balance.counted_whole = ExpertLists(model);
    balance.low_zero = request.kind == "balanced_low_0";
    balance.user_set = request.user_set;
    MUSTER_ASSIGN_OR_RETURN(plan.limits, BalanceMemory(model, request.limits, balance));
  }
  MUSTER_ASSIGN_OR_RETURN(plan.map, InferDeviceMap(model, plan.limits, options));
  FindOffloaded(model, plan);
  plan.dtype = TypeOf(model);
  return plan;
}

std::vector<Share> SharesOf(const Plan& plan) {
  std::vector<Share> shares;
  for (const auto& [device, limit] : plan.limits) {
    shares.push_back({.device = device});
    if (device != "disk") shares.back().limit = static_cast<int64_t>(limit);
  }
  for (const auto& entry : plan.map.devices) {
    const std::string &name = entry.first, &device = entry.second;
    auto share = std::find_if(shares.begin(), shares.end(),
                              [&](const Share& other) { return other.device == device; });
    if (share == shares.end()) share = shares.insert(shares.end(), Share{.device = device});
    const auto size = plan.sizes.find(name);
    share->bytes += size == plan.sizes.end() ? 0 : size->second;
    share->parts.push_back(name.empty() ? "the whole model" : name);
  }
  return shares;
}

// Shortens "layers.0", "layers.1", "layers.2" to "layers.0-2".
std::string InShort(const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < names.size();) {
    const size_t dot = names[i].rfind('.');
    const std::string before = dot == std::string::npos ? "" : names[i].substr(0, dot + 1);
    int64_t number = 0;
    size_t end = i + 1;
    if (dot != std::string::npos && absl::SimpleAtoi(names[i].substr(dot + 1), &number)) {
      while (end < names.size() &&
             names[end] == absl::StrCat(before, number + static_cast<int64_t>(end - i))) {
        ++end;
      }
    }
    const std::string name = Printable(names[i]);
    parts.push_back(end == i + 1 ? name : absl::StrCat(name, "-", number + (end - i) - 1));
    i = end;
  }
  return absl::StrJoin(parts, ", ");
}

// Returns the GPUs of the plan that this machine does not have: the plan may be for another one.
std::vector<std::string> Absent(const Plan& plan, const Machine& machine) {
  std::vector<std::string> absent;
  for (const auto& [device, limit] : plan.limits) {
    int number = 0;
    if (absl::SimpleAtoi(device, &number) && number >= machine.usable_gpus) {
      absent.push_back(device);
    }
  }
  return absent;
}

void PrintText(const std::string& path, const Plan& plan, const Machine& machine,
               std::ostream& out) {
  const int64_t total = plan.sizes.at("");
  out << path << ": " << HumanBytes(total)
      << (plan.request.dtype.has_value() ? absl::StrCat(" as ", *plan.request.dtype) : "");
  if (!plan.largest.empty()) {
    out << "; kept whole: " << Printable(absl::StrJoin(plan.no_split, ", ")) << " (up to "
        << HumanBytes(plan.largest_bytes) << ", " << Printable(plan.largest) << ")";
  }
  out << "\n\n";
  std::vector<std::vector<std::string>> rows = {{"device", "may hold", "holds"}};
  std::vector<std::string> parts = {"parts"};
  for (const Share& share : SharesOf(plan)) {
    rows.push_back({share.device, share.limit.has_value() ? HumanBytes(*share.limit) : "-",
                    HumanBytes(share.bytes)});
    parts.push_back(share.parts.empty() ? "nothing" : InShort(share.parts));
  }
  const std::vector<std::string> lines = absl::StrSplit(Table(rows), '\n', absl::SkipEmpty());
  for (size_t i = 0; i < lines.size(); ++i) out << lines[i] << "   " << parts[i] << "\n";
  if (plan.offloaded == 0) {
    out << "\nAll weights stay on their devices.\n";
  } else {
    out << "\n"
        << HumanBytes(plan.offloaded) << " come to device " << plan.main_device
        << " when they are used, through the room that its share leaves; the largest tensor of "
           "them is "
        << Printable(plan.largest_offloaded) << " with " << HumanBytes(plan.largest_offloaded_bytes)
        << ".\n";
  }
  if (plan.request.generation.has_value()) {
    const models::GenerationShape& shape = *plan.request.generation;
    out << "\nGenerating " << shape.new_tokens << " tokens after "
        << (shape.rows == 1 ? "a prompt" : absl::StrCat(shape.rows, " prompts")) << " of "
        << shape.prompt_tokens
        << (shape.times == 1 ? "" : absl::StrCat(", ", shape.times, " sequences for each"))
        << ", takes beside the weights: keys and values " << HumanBytes(plan.generation.cache)
        << ", activations at most " << HumanBytes(plan.generation.activations)
        << " (as on a CPU).\n";
  }
  if (plan.map.buffers_do_not_fit) {
    out << "\nThe buffers of modules that are not on a GPU fit on none: --offload_buffers leaves "
           "them where their modules are.\n";
  }
  const std::vector<std::string> absent = Absent(plan, machine);
  if (absent.empty()) return;
  out << "\nThis machine has no GPU " << absl::StrJoin(absent, ", ")
      << ": the plan is for another one.\n";
}

std::string JsonOf(const std::string& path, const std::string& note, const Plan& plan,
                   const Machine& machine) {
  ordered_json json = {{"path", path},
                       {"bytes", plan.sizes.at("")},
                       {"dtype", plan.request.dtype.has_value() ? ordered_json(*plan.request.dtype)
                                                                : ordered_json()},
                       {"no_split", plan.no_split},
                       {"largest_undivided", plan.largest},
                       {"largest_undivided_bytes", plan.largest_bytes},
                       {"main_device", plan.main_device},
                       {"offloaded", plan.offloaded},
                       {"largest_offloaded", plan.largest_offloaded},
                       {"largest_offloaded_bytes", plan.largest_offloaded_bytes},
                       {"devices", ordered_json::array()},
                       {"device_map", ordered_json::object()},
                       {"buffers_do_not_fit", plan.map.buffers_do_not_fit},
                       {"absent_gpus", Absent(plan, machine)}};
  if (plan.request.generation.has_value()) {
    const models::GenerationShape& shape = *plan.request.generation;
    json["generation"] = {{"batch_size", shape.rows},
                          {"prompt_tokens", shape.prompt_tokens},
                          {"max_new_tokens", shape.new_tokens},
                          {"sequences_per_prompt", shape.times},
                          {"prefill_chunk_size", shape.prefill_chunk_size},
                          {"cache", plan.generation.cache},
                          {"activations", plan.generation.activations}};
  }
  if (!note.empty()) json["note"] = note;
  for (const Share& share : SharesOf(plan)) {
    json["devices"].push_back(
        {{"device", share.device},
         {"limit", share.limit.has_value() ? ordered_json(*share.limit) : ordered_json()},
         {"bytes", share.bytes}});
  }
  for (const auto& [name, device] : plan.map.devices) json["device_map"][name] = device;
  return Dump(json);
}

CommandSpec Spec() {
  return {
      .name = "muster plan",
      .summary = "Prints where the parts of a model go, before anything is allocated.",
      .usage = "PATH [OPTIONS]",
      .details =
          "PATH is a folder, an index or a file of safetensors or torch.save; only headers and the "
          "config files are read,\nof Muster's models config.json alone if files are missing. "
          "It finds modules by the names of tensors: --no_split takes names of lists (layers, "
          "experts), or module\nclasses of Muster's models (LlamaDecoderLayer). In a program, "
          "muster::infer_auto_device_map plans its own modules.\nWith --prompt_tokens, "
          "--max_new_tokens, --batch_size or --num_beams it also prints the "
          "memory\nthat `muster generate` needs in addition to the weights. --max_memory limits "
          "only the weights.",
      .options = {{.name = "max_memory",
                   .value_name = "LIST",
                   .help = "What each device may hold: 0=20GB,cpu=30GB. The rest goes to the disk "
                           "(default: the free memory of this machine, if it has no GPU)"},
                  {.name = "dtype",
                   .value_name = "TYPE",
                   .help = "Type to load in: float32, bfloat16, ... (default: as it is stored)"},
                  {.name = "no_split",
                   .value_name = "LIST",
                   .help = "Modules that stay together on one device (default: the layers; none)"},
                  {.name = "device_map",
                   .value_name = "KIND",
                   .help = "How to divide among GPUs: auto (the same as balanced), balanced_low_0 "
                           "or sequential",
                   .values = {"auto", "balanced", "balanced_low_0", "sequential"}},
                  {.name = "offload_buffers",
                   .help = "Buffers of modules that are not on a GPU stay there"},
                  {.name = "prompt_tokens",
                   .value_name = "N",
                   .help = "Plan a generation: tokens of the longest prompt (default: 1)"},
                  {.name = "max_new_tokens",
                   .value_name = "N",
                   .help = "Tokens to generate (default: those of generation_config.json, or 256; "
                           "at most what the model has room for)"},
                  {.name = "batch_size",
                   .value_name = "N",
                   .help = "Prompts of the same length at a time (default: 1)"},
                  {.name = "num_beams",
                   .value_name = "N",
                   .help = "Beams of a beam search (default: those of generation_config.json, or "
                           "1)"},
                  {.name = "prefill_chunk_size",
                   .value_name = "N",
                   .help = "The most tokens of a prompt that are read in one pass; 0: all "
                           "(default: 2048)"},
                  IgnoreSettingsOption(),
                  OutputOption({"text", "json"})},
      .max_words = 1};
}

}  // namespace

int RunPlanCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = Spec();
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::string format = line.Has("output") ? line.Get("output") : "text";
  const auto fail = [&](const absl::Status& status, int code) {
    return Fail(spec, context, status, code);
  };
  if (line.words.empty()) {
    return fail(absl::InvalidArgumentError(absl::StrCat("write ", spec.name, " ", spec.usage)),
                kExitUsage);
  }
  const Machine machine = ReadMachine(context.variables);
  const absl::StatusOr<Request> request = RequestOf(line, machine);
  if (!request.ok()) return fail(request.status(), kExitUsage);
  const std::string& path = line.words[0];
  absl::StatusOr<ModelTree> tree = ReadModelTree(path, IgnoredSettings(line));
  if (!tree.ok()) return fail(tree.status(), ExitCodeOf(tree.status()));
  absl::StatusOr<Plan> plan = PlanOf(std::move(tree->model), *request);
  if (!plan.ok()) return fail(plan.status(), ExitCodeOf(plan.status()));
  if (request->generation.has_value()) {
    const auto config = ConfigOf(path, IgnoredSettings(line));
    const absl::Status planned =
        config.ok() ? PlanGeneration(path, *config, *plan) : config.status();
    if (!planned.ok()) return fail(planned, ExitCodeOf(planned));
  }
  if (format == "json") {
    context.out << JsonOf(path, tree->note, *plan, machine);
  } else {
    if (!tree->note.empty()) context.out << tree->note << "\n";
    PrintText(path, *plan, machine, context.out);
  }
  return kExitOk;
}

}  // namespace muster::client
