// Tokens per second of training a GPT-2 on one GPU, and the most memory that it takes: the loop of
// a user, or, with --divide, the sharding engine in a group of one rank over NCCL, which gathers
// and reduces as it does among many (the Accelerator divides nothing for one process).
// bench/run_gpu_train pairs it with PyTorch's FSDP2 and with Accelerate (bench/peers/gpu_train.py),
// which take the same flags and print the same line. With --cpu it runs anywhere.
#include <dlfcn.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "bench/load_average.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "muster/accelerator.h"
#include "muster/data.h"
#include "muster/models.h"
#include "muster/optim.h"
#include "muster/utils.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/comm_stream.h"
#include "worker/collective/comm_thread.h"
#include "worker/collective/nccl.h"
#include "worker/collective/ordered_comm.h"
#include "worker/collective/process_group.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/autocast.h"
#include "worker/train/clip.h"
#include "worker/train/guard.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Flags {
  std::string strategy = "no_shard", precision = "bf16", activation = "gelu_new", model_dir, trace;
  int64_t layers = 12, width = 768, heads = 12, context = 1024, vocab = 50257;
  int64_t batch_size = 8, warmup = 10, steps = 10, blocks = 5;
  double lr = 3e-4, weight_decay = 0.1, clip_norm = 1;
  bool divide = false, overlap = false, optimizer_in_backward = false, cpu = false;
  bool activation_checkpointing = false;
  std::string offload_optimizer = "none", offload_parameters = "none", offload_activations = "none";
};

// Returns the name of a GPU, from its driver, so that no headers are needed.
std::string NameOf(c10::Device device) {
  if (!device.is_cuda()) return "CPU";
  using GetName = int (*)(char*, int, int);
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  const auto get =
      driver == nullptr ? nullptr : reinterpret_cast<GetName>(dlsym(driver, "cuDeviceGetName"));
  char name[128] = {};
  if (get == nullptr || get(name, sizeof(name) - 1, device.index()) != 0) return "GPU";
  return name;
}

c10::DeviceAllocator* AllocatorOf(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  return dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
}

// Returns the peak bytes of tensors on the GPU or, on the CPU, of the process; 0: not known.
int64_t PeakBytes(c10::Device device) {
  if (device.is_cpu()) {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss * 1024;
  }
  c10::DeviceAllocator* const allocator = AllocatorOf(device);
  if (allocator == nullptr) return 0;
  return allocator->getDeviceStats(device.index()).allocated_bytes[0].peak;  // of all pools
}

// Ends the program's loop, and times it: after the warm-up, blocks of steps, each of which ends
// when the device has done all of it.
class Meter {
 public:
  Meter(const Flags& flags, c10::Device device) : flags_(flags), device_(device) {}

  bool goes() const {
    if (static_cast<int64_t>(milliseconds_.size()) < flags_.blocks) return true;
    return !flags_.trace.empty() && traced_ < kTraced;
  }

  // Called after each step. Returns false once there were enough.
  bool Step(const at::Tensor& loss) {
    if (static_cast<int64_t>(milliseconds_.size()) == flags_.blocks) return TraceStep(loss);
    const bool warming = !start_.has_value();
    if (++steps_ < (warming ? flags_.warmup : flags_.steps)) return true;
    losses_.push_back(loss.item<double>());
    Synchronize();
    const Clock::time_point now = Clock::now();
    if (!warming) {
      milliseconds_.push_back(std::chrono::duration<double, std::milli>(now - *start_).count() /
                              static_cast<double>(flags_.steps));
    }
    start_ = now;
    steps_ = 0;
    if (goes() && static_cast<int64_t>(milliseconds_.size()) == flags_.blocks) {
      profile_ = std::make_unique<muster::Profile>(
          muster::ProfileOptions{.output_dir = flags_.trace, .cuda = device_.is_cuda()});
    }
    return goes();
  }

  void Print() const {
    std::vector<double> sorted = milliseconds_;
    std::sort(sorted.begin(), sorted.end());
    const double median = sorted[sorted.size() / 2];
    std::string losses;
    char text[64];
    for (const double loss : losses_) {
      std::snprintf(text, sizeof(text), "%s%.5f", losses.empty() ? "" : ",", loss);
      losses += text;
    }
    std::printf(
        "{\"bench\":\"gpu_train\",\"engine\":\"muster\",\"device\":\"%s\",\"strategy\":\"%s\","
        "\"divided\":%s,\"overlap\":%s,\"offload_optimizer\":\"%s\","
        "\"offload_parameters\":\"%s\",\"activation_checkpointing\":%s,\"offload_activations\":\"%"
        "s\","
        "\"precision\":\"%s\",\"batch_size\":%ld,"
        "\"tokens_per_s\":%.0f,\"ms_per_step\":%.3f,\"fastest_ms\":%.3f,\"slowest_ms\":%.3f,"
        "\"peak_mib\":%.0f,\"losses\":[%s],\"load\":%.2f}\n",
        NameOf(device_).c_str(), flags_.strategy.c_str(), flags_.divide ? "true" : "false",
        flags_.overlap ? "true" : "false", flags_.offload_optimizer.c_str(),
        flags_.offload_parameters.c_str(), flags_.activation_checkpointing ? "true" : "false",
        flags_.offload_activations.c_str(), flags_.precision.c_str(),
        static_cast<long>(flags_.batch_size),
        static_cast<double>(flags_.batch_size * flags_.context) * 1e3 / median, median,
        sorted.front(), sorted.back(), static_cast<double>(PeakBytes(device_)) / (1 << 20),
        losses.c_str(), muster::bench::LoadAverage());
  }

 private:
  static constexpr int kTraced = 3;  // steps

  bool TraceStep(const at::Tensor& loss) {
    if (++traced_ < kTraced) return true;
    loss.item<double>();
    Synchronize();
    muster::ThrowIfError(profile_->Stop().status());
    return false;
  }

  void Synchronize() const {
    if (device_.is_cpu()) return;
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  }

  const Flags& flags_;
  const c10::Device device_;
  int64_t steps_ = 0;
  std::optional<Clock::time_point> start_;
  std::vector<double> milliseconds_, losses_;
  std::unique_ptr<muster::Profile> profile_;
  int traced_ = 0;
};

muster::models::TextModel MakeNet(const Flags& flags) {
  namespace models = muster::models;
  models::Gpt2Config config;
  config.architecture = models::Architecture::kGpt2LMHeadModel;
  config.vocab_size = flags.vocab;
  config.max_positions = flags.context;
  config.tie_word_embeddings = true;
  config.hidden_size = flags.width;
  config.inner_size = 4 * flags.width;
  config.num_layers = flags.layers;
  config.num_heads = flags.heads;
  config.activation =
      flags.activation == "gelu_new" ? models::Activation::kGeluNew : models::Activation::kGeluTanh;
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0;
  if (flags.model_dir.empty()) return models::MakeModel(config);
  absl::StatusOr<models::TextModel> loaded = muster::load_text_model(flags.model_dir);
  muster::ThrowIfError(loaded.status());
  return *std::move(loaded);
}

// Returns as many batches as a pass has before it begins again: [rows, context].
at::Tensor Rows(const Flags& flags) {
  const int64_t rows = 8 * flags.batch_size;
  return (at::arange(rows * flags.context, at::kLong) * 7919)
      .remainder(flags.vocab)
      .view({rows, flags.context});
}

muster::AdamWOptions AdamW(const Flags& flags) {
  return {.lr = flags.lr, .betas = {0.9, 0.95}, .weight_decay = flags.weight_decay};
}

void Train(muster::Accelerator& accelerator, const Flags& flags, Meter& meter) {
  muster::models::TextModel net = MakeNet(flags);
  net->train();
  muster::FusedAdamW adamw(net->parameters(), AdamW(flags));
  auto [model, optimizer, loader] = accelerator.prepare(
      net, adamw,
      muster::batches(muster::TensorDataset<at::Tensor>(Rows(flags)), flags.batch_size)
          .pin_memory());
  while (meter.goes()) {
    for (auto& batch : loader) {
      auto scope = accelerator.accumulate();
      const at::Tensor& ids = batch.value();
      const at::Tensor loss =
          model(muster::models::TextBatch{.input_ids = ids, .labels = ids}).loss;
      accelerator.backward(loss);
      if (flags.clip_norm > 0) accelerator.clip_grad_norm_(model.parameters(), flags.clip_norm);
      optimizer.step();
      optimizer.zero_grad();
      if (!meter.Step(loss)) break;
    }
  }
}

// Trains with the parts that the Accelerator uses if there are several processes.
void TrainDivided(muster::Accelerator& accelerator, const Flags& flags, Meter& meter) {
  const c10::Device device = accelerator.device();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = muster::MakeGlooGroup(store, {.single_host = true});
  if (device.is_cuda()) {
    muster::ThrowIfError(muster::AddNcclBackend(group, store, device, std::chrono::minutes(1)));
  }
  std::unique_ptr<muster::Comm> comm = muster::MakeC10dComm(group);
  std::shared_ptr<muster::CommQueue> queue;
  if (flags.overlap) {
    if (device.is_cuda()) {
      queue = std::make_shared<muster::CommStream>(device);
    } else {
      queue = std::make_shared<muster::CommThread>();
    }
    comm = muster::MakeOrderedComm(std::move(comm), queue);
  }
  const muster::MixedPrecision precision = muster::ParseMixedPrecision(flags.precision);
  muster::ShardingOptions options = muster::ParseSharding(flags.strategy, 1);
  options.overlap = flags.overlap;
  // Parameters are gathered in bf16, and gradients reduced in fp32.
  if (precision == muster::MixedPrecision::kBf16) options.parameter_dtype = at::kBFloat16;

  muster::models::TextModel net = MakeNet(flags);
  net->train();
  net->to(device);
  std::vector<muster::NamedParameter> named;
  for (const auto& item : net->named_parameters()) named.push_back({item.key(), item.value()});
  muster::ShardedModel model(*comm, *comm, nullptr, net.get(), named, {}, options,
                             /*broadcast_buffers=*/true, queue);
  muster::FusedAdamW adamw(model.shards(), AdamW(flags));
  auto loader = accelerator.prepare(
      muster::batches(muster::TensorDataset<at::Tensor>(Rows(flags)), flags.batch_size)
          .pin_memory());
  while (meter.goes()) {
    for (auto& batch : loader) {
      const at::Tensor& ids = batch.value();
      at::Tensor loss;
      model.BeginForward(/*communicate=*/true);
      {
        const muster::AutocastGuard autocast(precision, device.type(), {.cache_enabled = false});
        loss = net->forward({.input_ids = ids, .labels = ids}).loss;
      }
      model.EndForward();
      loss.backward();
      if (flags.clip_norm > 0) muster::ClipGradNorm({}, model.shards(), *comm, flags.clip_norm, 2);
      model.Expire();
      adamw.Step();
      adamw.ZeroGrad();
      if (!meter.Step(loss)) break;
    }
  }
}

void Run(const Flags& flags) {
  muster::AcceleratorOptions options;
  options.mixed_precision = flags.precision;
  if (flags.cpu) options.cpu = true;
  if (!flags.divide) {
    options.sharding = muster::ParseSharding(flags.strategy, 1);
    options.sharding->overlap = flags.overlap;
    options.sharding->optimizer_in_backward = flags.optimizer_in_backward;
    std::tie(options.sharding->offload_optimizer, options.sharding->offload_optimizer_path) =
        muster::ParseOffload(flags.offload_optimizer);
    std::tie(options.sharding->offload_parameters, options.sharding->offload_parameters_path) =
        muster::ParseOffload(flags.offload_parameters);
    if (flags.activation_checkpointing) {
      auto& checkpointing = options.activation_checkpointing.emplace();
      std::tie(checkpointing.offload, checkpointing.offload_path) =
          muster::ParseOffload(flags.offload_activations);
    }
  }
  muster::Accelerator accelerator(options);
  muster::set_seed(1);
  if (c10::DeviceAllocator* const allocator = AllocatorOf(accelerator.device())) {
    allocator->resetPeakStats(accelerator.device().index());
  }
  Meter meter(flags, accelerator.device());
  flags.divide ? TrainDivided(accelerator, flags, meter) : Train(accelerator, flags, meter);
  meter.Print();
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Tokens per second of training a GPT-2 on one GPU.");
  app.add_option("--strategy", flags.strategy)
      ->check(CLI::IsMember({"no_shard", "zero1", "zero2", "zero3"}));
  app.add_option("--precision", flags.precision)->check(CLI::IsMember({"no", "bf16"}));
  app.add_option("--activation", flags.activation,
                 "gelu_new, GPT-2's own, which takes several operations in bf16; or gelu_tanh, the "
                 "same function as one")
      ->check(CLI::IsMember({"gelu_new", "gelu_tanh"}));
  app.add_option("--model", flags.model_dir,
                 "folder with the first weights (bench/peers/gpu_train.py --make), whose config "
                 "counts in place of the flags; default: random ones");
  for (const auto& [name, number] :
       {std::pair("--layers", &flags.layers), std::pair("--width", &flags.width),
        std::pair("--heads", &flags.heads), std::pair("--context", &flags.context),
        std::pair("--vocab", &flags.vocab), std::pair("--batch_size", &flags.batch_size),
        std::pair("--warmup", &flags.warmup), std::pair("--steps", &flags.steps),
        std::pair("--blocks", &flags.blocks)}) {
    app.add_option(name, *number)->check(CLI::PositiveNumber)->capture_default_str();
  }
  app.add_option("--trace", flags.trace,
                 "folder for a trace of three more steps (bench/trace_top sums it up)");
  app.add_option("--clip_norm", flags.clip_norm, "0: any")->check(CLI::NonNegativeNumber);
  CLI::Option* const divide =
      app.add_flag("--divide", flags.divide,
                   "the sharding engine in a group of one rank over NCCL, which the Accelerator "
                   "leaves out");
  app.add_flag("--overlap", flags.overlap, "of gathers and reductions with the computation");
  app.add_flag("--optimizer_in_backward", flags.optimizer_in_backward,
               "with --clip_norm 0 and a strategy")
      ->excludes(divide);
  CLI::Option* const checkpointing =
      app.add_flag("--activation_checkpointing", flags.activation_checkpointing)->excludes(divide);
  app.add_option("--offload_optimizer", flags.offload_optimizer,
                 "none, cpu or disk:FOLDER: where the optimizer's state is between the steps")
      ->excludes(divide);
  app.add_option("--offload_parameters", flags.offload_parameters,
                 "none, cpu or disk:FOLDER, with --strategy zero3: where parameters and gradients "
                 "are while nothing uses them")
      ->excludes(divide);
  app.add_option("--offload_activations", flags.offload_activations,
                 "none, cpu or disk:FOLDER: where the inputs of blocks are between the passes")
      ->needs(checkpointing);
  app.add_flag("--cpu", flags.cpu, "also where a GPU is");
  CLI11_PARSE(app, argc, argv);
  if (flags.divide && flags.strategy == "no_shard") {
    std::fprintf(stderr, "gpu_train: --divide needs --strategy zero1, zero2 or zero3\n");
    return 1;
  }
  try {
    Run(flags);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "gpu_train: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_train: %s\n", error.what());
    return 1;
  }
  return 0;
}
