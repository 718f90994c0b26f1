// Mistakes that programs make, one by name: bad_input CASE. Each has to end every process with a
// line that says what is wrong.
//
// bad_input killed_in_forward|killed_in_backward|killed_in_no_memory FOLDER: rank 1 of a sharded
// model is killed in the middle of a pass, or has no memory for a gather; each rank that throws
// writes its error to FOLDER/rank_N.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "ATen/Functions.h"
#include "c10/core/CPUAllocator.h"
#include "c10/util/Exception.h"
#include "muster/accelerator.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/digest.h"

namespace {

using muster::Accelerator;

// A data set whose sample 13 cannot be read; on rank `only`, or on all for -1.
struct Broken {
  int rank;
  int only;
  size_t size() const { return 64; }
  at::Tensor get(size_t index) const {
    if (index % 32 == 13 && (only < 0 || only == rank)) {
      throw std::runtime_error("cannot decode image " + std::to_string(index));
    }
    return at::ones({1});
  }
};

// Tries what cannot be saved to or loaded, each an error of the call; `step` trains between them.
// Rank R prints "rank R CASE: ERROR".
absl::Status TryCheckpoints(Accelerator& a, const std::function<void()>& step) {
  namespace fs = std::filesystem;
  const fs::path folder = std::getenv("BAD_INPUT_DIR");
  const std::string whole = folder / "whole", newer = folder / "newer",
                    lacking = folder / "lacking";
  const std::string file = folder / "file";
  const auto tell = [&](const char* what, const absl::Status& status) {
    std::printf("rank %d %s: %s\n", a.process_index(), what, status.ToString().c_str());
    std::fflush(stdout);
    step();
  };
  step();
  if (absl::Status s = a.save_state(whole); !s.ok()) return s;
  if (a.is_main_process()) {
    std::ofstream(file) << "not a folder";
    fs::copy(whole, newer, fs::copy_options::recursive);
    fs::copy(whole, lacking, fs::copy_options::recursive);
    fs::remove(lacking + "/model.safetensors");
    std::ifstream manifest(newer + "/manifest.json");
    nlohmann::json json = nlohmann::json::parse(manifest);
    json["version"] = 7;
    json.erase("digest");
    json["digest"] = muster::DigestBytes(json.dump()).xxh3;
    std::ofstream(newer + "/manifest.json") << json.dump();
  }
  a.wait_for_everyone();
  tell("saves to a file", a.save_state(file));
  tell("saves below a file", a.save_state(file + "/below"));
  tell("loads a file", a.load_state(file));
  tell("loads a newer one", a.load_state(newer));
  tell("loads a part", a.load_state(lacking));
  // Saves as if nothing had happened.
  if (absl::Status s = a.save_state(whole); !s.ok()) return s;
  tell("loads what is whole", a.load_state(whole));
  return absl::OkStatus();
}

absl::Status Train(Accelerator& a, const std::string& name) {
  torch::nn::Linear net(1, name == "models" ? a.process_index() + 1 : 1);
  muster::FusedSGD sgd(net->parameters(), {.lr = 0.1});
  if (name == "unprepared") {
    auto model = a.prepare(net);
    auto scope = a.accumulate();
    a.backward(model(at::ones({1, 1})).mean());
    return absl::OkStatus();
  }
  auto [model, optimizer] = a.prepare(net, sgd);
  const auto micro_step = [&, &model = model, &optimizer = optimizer](const at::Tensor& x) {
    auto scope = a.accumulate();
    a.backward(model(x).mean());
    optimizer.step();
    optimizer.zero_grad();
  };
  if (name == "thread" || name == "dispatch") {
    auto loader = a.prepare(
        muster::batches(Broken{a.process_index(), name == "thread" ? 1 : -1}, 4).workers(2));
    for (auto& batch : loader) micro_step(batch.value());
    return absl::OkStatus();
  }
  if (name == "divide") {
    (void)a.prepare(muster::batches(muster::TensorDataset(at::ones({9, 1})), 3));
    return absl::OkStatus();
  }
  if (name == "saves_beside_barrier" && a.is_main_process()) return a.save_state("never written");
  if (name == "checkpoints") return TryCheckpoints(a, [&] { micro_step(at::ones({1, 1})); });
  const int steps = name == "saves_beside_barrier" ? 0 : 8;
  for (int i = 0; i < steps; ++i) {
    const bool here = a.process_index() == 1 && i == 3;
    if (name == "exception" && here) throw std::runtime_error("the user's own trouble");
    if (name == "exit" && here) std::_Exit(3);
    if (name == "leaves" && here) return absl::OkStatus();
    if (name == "skips" && here) continue;  // the others have one exchange of gradients more
    if (name == "shapes" && i == 3) (void)a.gather(at::ones({2 + a.process_index()}));
    if (name == "objects" && i == 3) {
      // Some ranks call one collective, others another.
      if (a.is_main_process()) {
        (void)a.gather_object(std::string("x"));
      } else {
        (void)a.gather(at::ones({2}));
      }
    }
    if (name == "saves_beside_training" && i == 3 && a.is_main_process()) {
      return a.save_state("never written");
    }
    if (name == "order" && i == 3) return a.save_state("never written");
    micro_step(
        at::full({1, 1}, name == "nan" && here ? std::numeric_limits<float>::quiet_NaN() : 1.0f));
  }
  // Rank 1 of "skips" comes here early: the exchange that it skipped must time out first.
  a.wait_for_everyone(name == "skips" ? absl::Minutes(5) : absl::ZeroDuration());
  return absl::OkStatus();
}

// Allocates no piece of a gathered unit's size once it is full.
class FullMemory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!full || bytes < 520 * 520 * 4, "DefaultCPUAllocator: can't allocate memory");
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }
  bool full = false;

 private:
  c10::Allocator* const inner_ = c10::GetDefaultCPUAllocator();
};

// Rank 1 is killed in the third step, when it has used half of the units; the others come to the
// gathers, or the reductions, of the rest without it.
absl::Status TrainUntilKilled(Accelerator& a, const std::string& name) {
  FullMemory& memory = *new FullMemory;
  c10::SetCPUAllocator(&memory, /*priority=*/255);
  constexpr int kLayers = 4;
  constexpr int64_t kWidth = 520;  // its parts are large enough to be shared in memory
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  muster::FusedSGD sgd(net->parameters(), {.lr = 0.1});
  auto [model, optimizer] = a.prepare(net, sgd);
  for (int step = 0; step < 10; ++step) {
    const bool here = a.process_index() == 1 && step == 2;
    auto scope = a.accumulate();
    const at::Tensor loss = model.call([&](torch::nn::SequentialImpl& layers) {
      at::Tensor x = at::full({1, kWidth}, 0.01).requires_grad_();
      for (int i = 0; i < kLayers; ++i) {
        if (here && i == kLayers / 2) {
          memory.full = name == "killed_in_no_memory";
          if (name == "killed_in_forward") std::raise(SIGKILL);
          if (name == "killed_in_backward") {
            x.register_hook([](const at::Tensor&) { std::raise(SIGKILL); });
          }
        }
        x = layers[i]->as<torch::nn::Linear>()->forward(x);
      }
      return x.mean();
    });
    a.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
  }
  return absl::OkStatus();
}

int MainUntilKilled(int argc, char** argv, const std::string& name, const std::string& folder) {
  // A rank prints its error before its agent ends it.
  std::signal(SIGTERM, SIG_IGN);
  return muster::run(argc, argv, {}, [&](Accelerator& a, const muster::Arguments&) {
    const auto tell = [&](const std::string& error) {
      std::ofstream(folder + "/rank_" + std::to_string(a.process_index())) << error;
    };
    try {
      absl::Status end = TrainUntilKilled(a, name);
      tell(end.ok() ? "no error" : std::string(end.message()));
      return end;
    } catch (const c10::Error& error) {
      tell(error.what_without_backtrace());
      throw;
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name.starts_with("killed_in_") && argc > 2) {
    return MainUntilKilled(argc, argv, name, argv[2]);
  }
  muster::AcceleratorOptions options;
  options.check_finite_loss = name == "nan";
  if (name == "skips") options.timeout = absl::Seconds(20);
  if (name == "saves_beside_barrier") options.timeout = absl::Seconds(10);
  options.data_loader.split_batches = name == "divide";
  if (name == "dispatch") options.data_loader.dispatch_batches = true;
  if (name == "order") options.gradient_accumulation_steps = 5;
  if (name == "unprepared") options.gradient_accumulation_steps = 2;
  return muster::run(argc, argv, options,
                     [&](Accelerator& a, const muster::Arguments&) { return Train(a, name); });
}
