#include "client/checkpoints/estimate_command.h"

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/units.h"
#include "client/checkpoints/memory_estimate.h"
#include "client/checkpoints/model_headers.h"
#include "client/cli/command_line.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

bool IsFloating(const std::string& type) {
  return type[0] == 'F' || type == "BF16" || type == "C64";
}

std::vector<EstimatedTensor> Estimated(const ModelTensors& model) {
  std::vector<EstimatedTensor> tensors;
  std::set<std::string> seen;
  for (size_t i = 0; i < model.tensors.size(); ++i) {
    const TreeTensor& tensor = model.tensors[i];
    // A tied tensor has several names and exists once.
    if (!tensor.storage.empty() && !seen.insert(tensor.storage).second) continue;
    tensors.push_back({.name = tensor.name,
                       .elements = 1,
                       .bytes = model.bytes[i],
                       .floating = IsFloating(tensor.dtype)});
    for (const int64_t size : tensor.shape) tensors.back().elements *= size;
  }
  return tensors;
}

// Returns the number that a flag has; `fallback` if it is not given.
absl::StatusOr<int64_t> NumberOf(const CommandLine& line, const std::string& flag, int64_t fallback,
                                 int64_t max) {
  if (!line.Has(flag)) return fallback;
  int64_t number = 0;
  if (!absl::SimpleAtoi(line.Get(flag), &number) || number < 1 || number > max) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " ", line.Get(flag), ": write a number from 1 to ", max));
  }
  return number;
}

struct Request {
  std::vector<std::string> dtypes;
  int64_t processes = 1;
  int64_t group_size = 1;
  int64_t state_bytes = 8;
  EstimatedOffload offload;
};

absl::StatusOr<Request> RequestOf(const CommandLine& line) {
  constexpr int64_t kMostProcesses = 1'000'000;
  Request request;
  const std::string dtypes = line.Has("dtypes") ? line.Get("dtypes") : "float32,float16,int8,int4";
  request.dtypes = absl::StrSplit(dtypes, ',', absl::SkipWhitespace());
  if (request.dtypes.empty()) {
    return absl::InvalidArgumentError(
        "--dtypes has no type: write float32, for example, or leave it out");
  }
  MUSTER_ASSIGN_OR_RETURN(request.processes, NumberOf(line, "num_processes", 1, kMostProcesses));
  MUSTER_ASSIGN_OR_RETURN(request.group_size,
                          NumberOf(line, "group_size", request.processes, request.processes));
  if (request.processes % request.group_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--group_size ", request.group_size, " does not divide --num_processes ", request.processes,
        ": each copy of the model needs the same number of processes"));
  }
  static const auto& states =
      *new std::map<std::string, int64_t>{{"adam", 8}, {"momentum", 4}, {"sgd", 0}};
  const std::string optimizer = line.Has("optimizer") ? line.Get("optimizer") : "adam";
  const auto found = states.find(optimizer);
  if (found == states.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--optimizer ", optimizer, ": write adam, momentum or sgd"));
  }
  request.state_bytes = found->second;
  for (const auto& [name, to] : {std::pair("offload_optimizer", &request.offload.optimizer),
                                 std::pair("offload_gradients", &request.offload.gradients),
                                 std::pair("offload_parameters", &request.offload.parameters)}) {
    if (!line.Has(name)) continue;
    const std::string place = line.Get(name);
    if (place != "cpu" && place != "disk") {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " ", place, ": write cpu or disk"));
    }
    *to = place == "cpu" ? EstimatedOffload::Place::kCpu : EstimatedOffload::Place::kDisk;
  }
  request.offload.optimizer_in_backward = line.Get("optimizer_in_backward") == "true";
  return request;
}

void PrintText(const std::string& path, const ModelSize& size,
               const std::vector<DtypeEstimate>& dtypes,
               const std::vector<StrategyEstimate>& strategies, const Request& request,
               std::ostream& out) {
  const auto bytes = [](int64_t amount) { return amount < 0 ? "-" : HumanBytes(amount); };
  out << path << ": " << size.tensors << (size.tensors == 1 ? " tensor, " : " tensors, ")
      << size.elements << " parameters; the largest part is "
      << (size.largest.empty() ? "the model itself" : Printable(size.largest)) << "\n\n";
  std::vector<std::vector<std::string>> rows = {
      {"type", "largest part", "to load", "to train with Adam"}};
  for (const DtypeEstimate& row : dtypes) {
    rows.push_back({row.dtype, bytes(row.largest), bytes(row.total), bytes(row.training)});
  }
  out << Table(rows) << "\nTraining in float32, each of " << request.processes
      << (request.processes == 1 ? " process" : " processes") << ":\n\n";
  rows = {{"sharding", "parameters", "gradients", "states", "at the peak", "in all"}};
  using Place = EstimatedOffload::Place;
  const auto goes_to = [&](Place place) {
    return request.offload.optimizer == place || request.offload.gradients == place ||
           request.offload.parameters == place;
  };
  const bool offloads = goes_to(Place::kCpu) || goes_to(Place::kDisk);
  if (offloads) {
    rows[0].push_back(!goes_to(Place::kCpu)    ? "on the disk"
                      : !goes_to(Place::kDisk) ? "in the CPU's memory"
                                               : "elsewhere");
  }
  for (const StrategyEstimate& row : strategies) {
    rows.push_back({row.strategy, bytes(row.parameters), bytes(row.gradients), bytes(row.states),
                    bytes(row.gathered), bytes(row.total())});
    if (offloads) rows.back().push_back(bytes(row.offloaded));
  }
  out << Table(rows) << "\nActivations come on top; so does what the libraries need.\n";
}

}  // namespace

int RunEstimateMemoryCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster estimate-memory",
      .summary = "Prints what a model takes to load and to train, before anything is allocated.",
      .usage = "PATH [OPTIONS]",
      .details =
          "PATH is a folder, an index or a file of safetensors or torch.save, or a checkpoint; "
          "only headers are read,\nof Muster's models config.json alone if files are missing. "
          "It assumes the default units of sharding: the entries of module lists (layers.0, "
          "layers.1, ...).",
      .options =
          {{.name = "dtypes",
            .value_name = "LIST",
            .help = "Types to load in (default float32,float16,int8,int4; bfloat16)"},
           {.name = "num_processes",
            .value_name = "N",
            .help = "Processes that divide the model in training (default 1)"},
           {.name = "group_size",
            .value_name = "N",
            .help = "With --sharding hybrid: number of processes that share one copy, those of a "
                    "machine"},
           {.name = "optimizer",
            .value_name = "adam|momentum|sgd",
            .help = "Adam has two states for each parameter, momentum one (default adam)",
            .values = {"adam", "momentum", "sgd"}},
           {.name = "offload_optimizer",
            .value_name = "cpu|disk",
            .help =
                "Where optimizer states are kept between steps; cpu applies to training on GPUs",
            .values = {"cpu", "disk"}},
           {.name = "offload_gradients",
            .value_name = "cpu|disk",
            .help = "Where reduced gradients are kept until the step (not with no_shard); cpu "
                    "applies to training on GPUs",
            .values = {"cpu", "disk"}},
           {.name = "offload_parameters",
            .value_name = "cpu|disk",
            .help = "Where parts of parameters and their gradients are kept between uses (zero3, "
                    "hybrid); cpu applies to training on GPUs",
            .values = {"cpu", "disk"}},
           {.name = "optimizer_in_backward",
            .help = "The optimizer updates inside the backward pass, so that the gradients of only "
                    "a few units exist at a time"},
           IgnoreSettingsOption(),
           OutputOption({"text", "json"})},
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const auto wrong = [&](const std::string& text) {
    return Fail(spec, context, absl::InvalidArgumentError(text), kExitUsage);
  };
  const std::string format = line.Has("output") ? line.Get("output") : "text";
  if (line.words.empty()) return wrong(absl::StrCat("write ", spec.name, " ", spec.usage));
  const absl::StatusOr<Request> request = RequestOf(line);
  if (!request.ok()) return Fail(spec, context, request.status(), kExitUsage);
  const absl::StatusOr<ModelTensors> model = ReadModelTensors(line.words[0], IgnoredSettings(line));
  if (!model.ok()) return FailCall(spec, context, model.status());
  const ModelSize size = SizeOf(Estimated(*model));
  std::vector<DtypeEstimate> dtypes;
  for (const std::string& dtype : request->dtypes) {
    const absl::StatusOr<DtypeEstimate> estimate = EstimateDtype(size, dtype);
    if (!estimate.ok()) return Fail(spec, context, estimate.status(), kExitUsage);
    dtypes.push_back(*estimate);
  }
  const std::vector<StrategyEstimate> strategies = EstimateStrategies(
      size, request->processes, request->group_size, request->state_bytes, request->offload);
  if (format == "text") {
    if (!model->note.empty()) context.out << model->note << "\n";
    PrintText(line.words[0], size, dtypes, strategies, *request, context.out);
    return kExitOk;
  }
  ordered_json json = {{"path", line.words[0]},
                       {"tensors", size.tensors},
                       {"parameters", size.elements},
                       {"largest_part", size.largest},
                       {"dtypes", ordered_json::array()},
                       {"num_processes", request->processes},
                       {"sharding", ordered_json::array()}};
  if (!model->note.empty()) json["note"] = model->note;
  for (const DtypeEstimate& row : dtypes) {
    json["dtypes"].push_back(
        {{"dtype", row.dtype},
         {"largest_part", row.largest},
         {"total", row.total},
         {"training", row.training < 0 ? ordered_json() : ordered_json(row.training)}});
  }
  for (const StrategyEstimate& row : strategies) {
    json["sharding"].push_back({{"strategy", row.strategy},
                                {"parameters", row.parameters},
                                {"gradients", row.gradients},
                                {"states", row.states},
                                {"gathered", row.gathered},
                                {"offloaded", row.offloaded},
                                {"total", row.total()}});
  }
  context.out << Dump(json);
  return kExitOk;
}

}  // namespace muster::client
