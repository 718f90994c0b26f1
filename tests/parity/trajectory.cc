// Rebuilds the run that a golden `training` case describes and trains through the public API. The
// last line that rank 0 prints is one JSON object with the case's `out` fields.
//
//   muster launch --num_processes N --cpu -- trajectory --case FILE --data_root DIR
//   --output_dir DIR [--sharding NAME]
//
// FILE holds one case (an object with "in", or the "in" object itself); paths in it are relative to
// DIR of --data_root.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "tests/parity/case_model.h"
#include "worker/train/schedule_config.h"

namespace muster::parity {
namespace {

using Json = nlohmann::json;

struct Flags {
  std::string case_file, data_root = ".", output_dir = ".", sharding = "no_shard";
  bool gpu = false;
};

std::unique_ptr<OptimizerHandle> MakeOptimizer(const Json& o, std::vector<at::Tensor> parameters) {
  const std::string type = o.at("type");
  const double lr = o.at("lr");
  const std::array<double, 2> betas = o.value("betas", std::array<double, 2>{0.9, 0.999});
  if (type == "sgd") {
    return std::make_unique<FusedSGD>(parameters,
                                      SGDOptions{.lr = lr,
                                                 .momentum = o.value("momentum", 0.0),
                                                 .dampening = o.value("dampening", 0.0),
                                                 .weight_decay = o.value("weight_decay", 0.0),
                                                 .nesterov = o.value("nesterov", false)});
  }
  if (type == "adam") {
    return std::make_unique<FusedAdam>(parameters,
                                       AdamOptions{.lr = lr,
                                                   .betas = betas,
                                                   .eps = o.value("eps", 1e-8),
                                                   .weight_decay = o.value("weight_decay", 0.0)});
  }
  if (type == "adamw") {
    return std::make_unique<FusedAdamW>(
        parameters, AdamWOptions{.lr = lr,
                                 .betas = betas,
                                 .eps = o.value("eps", 1e-8),
                                 .weight_decay = o.value("weight_decay", 1e-2)});
  }
  TORCH_CHECK(false, "optimizer: unknown type \"", type, "\"");
}

void LoadWeights(torch::nn::Module& model, const std::map<std::string, at::Tensor>& weights) {
  at::NoGradGuard no_grad;
  for (auto& parameter : model.named_parameters()) {
    const auto it = weights.find(parameter.key());
    TORCH_CHECK(it != weights.end(), "the initial weights have no tensor ", parameter.key());
    parameter.value().copy_(it->second);
  }
}

at::Tensor Loss(const std::string& kind, const at::Tensor& out, const at::Tensor& target) {
  if (kind == "mse") return at::mse_loss(out, target);
  TORCH_CHECK(kind == "cross_entropy", "loss: unknown kind \"", kind, "\"");
  return at::cross_entropy_loss(out.reshape({-1, out.size(-1)}), target.reshape({-1}));
}

absl::Status Train(Accelerator& accelerator, const Json& in, const Flags& flags) {
  const auto path = [&](const char* field) {
    return flags.data_root + "/" + in.at(field).get<std::string>();
  };
  CaseModel net(in.at("model"));
  LoadWeights(*net, LoadTensors(path("initial_weights")));
  const std::map<std::string, at::Tensor> data = LoadTensors(path("data"));
  std::unique_ptr<OptimizerHandle> inner = MakeOptimizer(in.at("optimizer"), net->parameters());
  TensorDataset dataset(data.at("x"), data.at("y"));
  const int64_t batch_size = in.at("batch_size");
  auto [model, optimizer, loader] = accelerator.prepare(
      net, *inner, batches(dataset, batch_size).drop_last(in.at("drop_last").get<bool>()));
  std::optional<AcceleratedScheduler> scheduler;
  if (!in.at("scheduler").is_null()) {
    scheduler = accelerator.prepare_scheduler(optimizer, MakeLrSchedule(in.at("scheduler")));
  }

  Json out = {{"sync", Json::array()}, {"lr", Json::array()}, {"grad_norm", Json::array()}};
  Json losses = Json::array();
  for (int64_t epoch : accelerator.epochs(in.at("epochs"))) {
    (void)epoch;
    for (auto& [x, y] : loader) {
      auto scope = accelerator.accumulate();
      out["lr"].push_back(optimizer.lr());
      out["sync"].push_back(accelerator.sync_gradients());
      const at::Tensor loss = Loss(in.at("loss"), model(x), y);
      losses.push_back(loss.item<double>());
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) {
        const double limit = in.at("clip_norm").is_null() ? std::numeric_limits<double>::infinity()
                                                          : in.at("clip_norm").get<double>();
        out["grad_norm"].push_back(
            accelerator.clip_grad_norm_(model->parameters(), limit).item<double>());
      }
      optimizer.step();
      if (scheduler.has_value()) scheduler->step();
      optimizer.zero_grad();
    }
  }
  out["final_lr"] = optimizer.lr();
  out["loss"] = Json::array();
  for (const std::string& one : accelerator.gather_object(losses.dump())) {
    out["loss"].push_back(Json::parse(one));
  }
  const std::map<std::string, at::Tensor> weights = accelerator.get_state_dict(model);
  if (accelerator.is_main_process()) {
    const std::string file = std::filesystem::absolute(flags.output_dir + "/final.safetensors");
    if (absl::Status s = SaveTensors(file, weights); !s.ok()) return s;
    out["final_weights"] = file;
    std::printf("%s\n", out.dump().c_str());
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> ReadCase(const std::string& file) {
  std::ifstream stream(file);
  if (!stream.good()) return absl::NotFoundError("--case " + file + ": cannot be read");
  Json json = Json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    return absl::InvalidArgumentError("--case " + file + ": not a JSON object");
  return json.contains("in") ? json["in"] : json;
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Trains what a golden training case describes.");
  app.add_option("--case", flags.case_file, "JSON file with one case")->required();
  app.add_option("--data_root", flags.data_root, "folder that the case's paths start from");
  app.add_option("--output_dir", flags.output_dir, "where final.safetensors is written");
  app.add_option("--sharding", flags.sharding, "no_shard, zero1, zero2, zero3 or hybrid");
  app.add_flag("--gpu", flags.gpu, "on GPUs; default: on the CPU");
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<Json> in = ReadCase(flags.case_file);
  if (!in.ok()) {
    std::fprintf(stderr, "trajectory: %s\n", in.status().ToString().c_str());
    return 2;
  }
  std::error_code ignored;
  std::filesystem::create_directories(flags.output_dir, ignored);

  AcceleratorOptions options;
  options.cpu = !flags.gpu;
  options.mixed_precision = in->value("mixed_precision", "no");
  options.gradient_accumulation_steps = in->value("gradient_accumulation_steps", int64_t{1});
  options.data_loader.split_batches = in->value("split_batches", false);
  options.data_loader.even_batches = in->value("even_batches", true);
  // Hybrid sharding is in pairs, where there are several.
  const int64_t processes = in->value("num_processes", int64_t{1});
  options.sharding =
      ParseSharding(flags.sharding, processes > 2 && processes % 2 == 0 ? 2 : processes);
  // The two places where Accelerate's numbers are not Muster's default.
  options.accumulation.short_window = ShortWindow::kLikeAccelerate;
  options.scheduler_units = SchedulerUnits::kProcesses;
  return run(argc, argv, options, [&](Accelerator& accelerator, const Arguments&) {
    return Train(accelerator, *in, flags);
  });
}

}  // namespace
}  // namespace muster::parity

int main(int argc, char** argv) { return muster::parity::Main(argc, argv); }
