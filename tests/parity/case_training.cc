#include "tests/parity/case_training.h"

#include <array>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "muster/checkpoint.h"
#include "tests/parity/case_model.h"
#include "worker/train/schedule_config.h"

namespace muster::parity {
namespace {

using Json = nlohmann::json;

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

}  // namespace

AcceleratorOptions TrainingOptions(const Json& in, const std::string& sharding) {
  AcceleratorOptions options;
  options.mixed_precision = in.value("mixed_precision", "no");
  options.gradient_accumulation_steps = in.value("gradient_accumulation_steps", int64_t{1});
  options.data_loader.split_batches = in.value("split_batches", false);
  options.data_loader.even_batches = in.value("even_batches", true);
  // Hybrid sharding is in pairs if there are several.
  const int64_t processes = in.value("num_processes", int64_t{1});
  options.sharding = ParseSharding(sharding, processes > 2 && processes % 2 == 0 ? 2 : processes);
  // The two places where Accelerate's numbers are not Muster's default.
  options.accumulation.short_window = ShortWindow::kLikeAccelerate;
  options.scheduler_units = SchedulerUnits::kProcesses;
  return options;
}

Trained TrainCase(Accelerator& accelerator, const Json& in, const std::string& data_root) {
  const std::filesystem::path root = data_root;
  const auto path = [&](const char* field) { return root / in.at(field).get<std::string>(); };
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
  return {.out = std::move(out), .weights = accelerator.get_state_dict(model)};
}

}  // namespace muster::parity
