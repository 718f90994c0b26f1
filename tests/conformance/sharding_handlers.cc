#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/config/accelerate_launch.h"
#include "client/config/deepspeed_config.h"
#include "client/config/fsdp_config.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;
using Variables = std::map<std::string, std::string>;

void ThrowUnless(const absl::Status& status) {
  if (!status.ok()) throw std::invalid_argument(std::string(status.message()));
}

// Returns `in[field]`, or null.
Json Field(const Json& in, const char* field) { return in.contains(field) ? in[field] : Json(); }

bool BoolOf(const Json& in, const char* field, bool otherwise) {
  return in.contains(field) ? in[field].get<bool>() : otherwise;
}

// Returns what the launcher gives the processes, with the case's own variables added.
Variables ThroughTheLauncher(const Json& in, const Variables& variables) {
  client::AccelerateMachine machine;
  machine.fp8 = true;
  client::AccelerateConfig config;
  const bool has_file = !Field(in, "config").is_null();
  if (has_file) {
    config = ValueOf(client::ParseAccelerateConfig(in["config"].get<std::string>(), "config.yaml"));
  }
  const auto args = in.value("args", std::vector<std::string>());
  const client::AccelerateLaunch launch =
      ValueOf(client::PlanAccelerateLaunch(has_file ? &config : nullptr, args, variables, machine));
  Variables all = variables;
  all.insert(launch.env.begin(), launch.env.end());
  return all;
}

Json FsdpCase(const Json& in) {
  auto variables = in.value("env", Variables());
  auto mixed_precision = in.value("mixed_precision", std::string("no"));
  if (in.contains("config") || in.contains("args")) {
    variables = ThroughTheLauncher(in, variables);
    const auto mode = variables.find("ACCELERATE_MIXED_PRECISION");
    if (mode != variables.end()) mixed_precision = mode->second;
  }
  client::FsdpSettings settings =
      ValueOf(client::ResolveFsdp(Field(in, "plugin"), variables, mixed_precision));
  if (const Json type = Field(in, "state_dict_type"); !type.is_null()) {
    ThrowUnless(client::SetStateDictType(type.get<std::string>(), settings));
  }
  return client::FsdpFields(settings);
}

client::DeepSpeedObjects ObjectsOf(const Json& prepare) {
  client::DeepSpeedObjects objects;
  if (prepare.contains("model")) {
    auto& model = objects.model.emplace();
    const Json& config = prepare["model"];
    model.has_config = !config.is_null();
    if (config.contains("hidden_size")) {
      model.hidden_size = IntOf(config, "hidden_size");
    } else if (config.contains("hidden_sizes")) {
      for (size_t i = 0; i < config["hidden_sizes"].size(); ++i) {
        const int64_t size = IntOf({{"hidden_sizes", config["hidden_sizes"][i]}}, "hidden_sizes");
        model.hidden_size = std::max(model.hidden_size.value_or(0), size);
      }
    }
  }
  if (const Json given = Field(prepare, "optimizer"); !given.is_null()) {
    auto& optimizer = objects.optimizer.emplace();
    optimizer.placeholder = given.value("kind", "") == "dummy";
    optimizer.lr = given.value("lr", optimizer.lr);
    optimizer.weight_decay = given.value("weight_decay", optimizer.weight_decay);
  }
  if (const Json given = Field(prepare, "scheduler"); !given.is_null()) {
    auto& scheduler = objects.scheduler.emplace();
    scheduler.placeholder = given.value("kind", "") == "dummy";
    scheduler.with_callable = BoolOf(given, "with_callable", false);
    if (!Field(given, "total_num_steps").is_null()) {
      scheduler.total_num_steps = IntOf(given, "total_num_steps");
    }
    if (given.contains("warmup_num_steps")) {
      scheduler.warmup_num_steps = IntOf(given, "warmup_num_steps");
    }
  }
  for (const Json& size : prepare.value("dataloaders", Json::array())) {
    objects.batch_sizes.push_back(
        size.is_null() ? std::nullopt
                       : std::optional<int64_t>(IntOf({{"dataloaders", size}}, "dataloaders", 1)));
  }
  return objects;
}

Json DeepSpeedCase(const Json& in) {
  const Json config = Field(in, "config");
  if (in.contains("world")) {
    const auto sizes = ValueOf(client::DeepSpeedBatch(config, IntOf(in, "world", 1)));
    return {{"train_batch_size", sizes.train},
            {"train_micro_batch_size_per_gpu", sizes.micro},
            {"gradient_accumulation_steps", sizes.accumulation}};
  }
  auto variables = in.value("env", Variables());
  const Json accelerator = in.value("accelerator", Json::object());
  client::DeepSpeedContext context;
  const auto mode = variables.find("ACCELERATE_MIXED_PRECISION");
  context.mixed_precision =
      accelerator.value("mixed_precision", mode == variables.end() ? "no" : mode->second);
  if (accelerator.contains("gradient_accumulation_steps")) {
    context.gradient_accumulation_steps = IntOf(accelerator, "gradient_accumulation_steps", 1);
  }
  if (accelerator.contains("num_processes")) {
    context.num_processes = IntOf(accelerator, "num_processes", 1);
  }
  context.split_batches = BoolOf(accelerator, "split_batches", false);
  const bool from_file = in.value("config_from", "") == "file";
  if (from_file) variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = config.dump();
  client::DeepSpeedConfig resolved = ValueOf(client::DeepSpeedConfig::Resolve(
      from_file ? Json() : config, Field(in, "plugin"), variables, context));
  if (const Json process = Field(in, "process"); !process.is_null()) {
    ThrowUnless(resolved.Process(process.value("values", std::map<std::string, Json>()),
                                 BoolOf(process, "must_match", true)));
    return {{"config", resolved.config()}};
  }
  if (const Json prepare = Field(in, "prepare"); !prepare.is_null()) {
    ThrowUnless(resolved.Prepare(ObjectsOf(prepare)));
    return {{"config", resolved.config()},
            {"gradient_accumulation_steps", resolved.gradient_accumulation_steps()},
            {"cpu_optimizer", resolved.cpu_optimizer()}};
  }
  return {{"config", resolved.config()}, {"plugin", resolved.fields()}};
}

}  // namespace

std::map<std::string, Handler> ShardingHandlers() {
  return {{"fsdp_config", FsdpCase}, {"deepspeed_config", DeepSpeedCase}};
}

}  // namespace muster::conformance
