// A training run that keeps a checkpoint after each round (an epoch), continues from the newest
// one, and prints its weights at the end, bit for bit, on every rank.
//   training [ROUNDS]
// $MUSTER_CHAOS_ONE_FOLDER: each checkpoint takes the place of the one before.
// $MUSTER_CHAOS_ASYNCHRONOUS: checkpoints are written in the background.
// $MUSTER_CHAOS_KEEP: how many are kept; the run fails if one that was saved is lost.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/strings/numbers.h"
#include "muster/muster.h"

namespace {

// Its first weight is large enough for a lazy copy.
struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return out(torch::relu(in(x))); }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(8, 256))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(256, 1))};
};
TORCH_MODULE(Net);

muster::TensorDataset<torch::Tensor, torch::Tensor> Data() {
  torch::Generator random = at::detail::createCPUGenerator(1);
  const torch::Tensor x = torch::randn({96, 8}, random);
  return muster::TensorDataset<torch::Tensor, torch::Tensor>(x, x.sum(1, /*keepdim=*/true).sin());
}

double SumOfSquares(torch::nn::Module& module) {
  double sum = 0;
  for (const torch::Tensor& parameter : module.parameters()) {
    sum += parameter.detach().to(torch::kDouble).square().sum().item<double>();
  }
  return sum;
}

// FNV-1a over the bytes of all parameters.
uint64_t Digest(torch::nn::Module& module) {
  uint64_t hash = 14695981039346656037u;
  for (const torch::Tensor& parameter : module.parameters()) {
    const torch::Tensor bytes = parameter.detach().contiguous();
    const auto* p = static_cast<const unsigned char*>(bytes.data_ptr());
    for (size_t i = 0; i < bytes.nbytes(); ++i) hash = (hash ^ p[i]) * 1099511628211u;
  }
  return hash;
}

// Returns the number of the newest checkpoint that save_state() has reported; -1: none.
std::string AckedPath(const muster::Accelerator& accelerator) {
  return accelerator.project_dir() + "/acked";
}
int64_t Acked(const muster::Accelerator& accelerator) {
  int64_t acked = -1;
  std::ifstream(AckedPath(accelerator)) >> acked;
  return acked;
}
void NoteAcked(const muster::Accelerator& accelerator) {
  const std::string path = AckedPath(accelerator);
  std::ofstream(path + ".new") << accelerator.save_iteration() - 1 << std::endl;
  std::rename((path + ".new").c_str(), path.c_str());
}

absl::Status Train(muster::Accelerator& accelerator, const muster::Arguments& arguments) {
  int64_t rounds = 3;
  if (!arguments.empty() && !absl::SimpleAtoi(arguments[0], &rounds)) {
    return absl::InvalidArgumentError(arguments[0]);
  }
  const char* const project = std::getenv("MUSTER_PROJECT_DIR");
  const std::string folder = std::getenv("MUSTER_CHAOS_ONE_FOLDER") == nullptr || project == nullptr
                                 ? ""
                                 : std::string(project) + "/one";

  muster::set_seed(42);
  Net net;
  torch::optim::AdamW adamw(net->parameters(), /*lr=*/1e-2);
  auto [model, optimizer, data] =
      accelerator.prepare(net, adamw, muster::batches(Data(), 8).shuffle(true));
  if (absl::Status s = accelerator.load_state_if_present(folder); !s.ok()) return s;
  const bool keeps = accelerator.options().checkpoint.keep.has_value();
  if (keeps && accelerator.save_iteration() - 1 < Acked(accelerator)) {
    return absl::DataLossError("LOST: checkpoint " + std::to_string(Acked(accelerator)) +
                               " was saved, and the newest is " +
                               std::to_string(accelerator.save_iteration() - 1));
  }
  for (int64_t epoch : accelerator.epochs(rounds)) {
    for (auto& [x, y] : data) {
      torch::Tensor loss = torch::mse_loss(model(x), y);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
    if (absl::Status s = accelerator.save_state(folder); !s.ok()) return s;
    if (keeps && accelerator.is_main_process() && !accelerator.options().checkpoint.asynchronous) {
      NoteAcked(accelerator);
    }
    accelerator.print("round %" PRId64 " is saved\n", epoch);
  }
  // What a killed save has left is removed by the next one, also if it was the last.
  if (keeps) {
    if (absl::Status s = accelerator.save_state(folder); !s.ok()) return s;
  }
  std::printf("squares %.9f\nweights %016" PRIx64 "\n", SumOfSquares(*net), Digest(*net));
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  muster::AcceleratorOptions options;
  options.checkpoint.asynchronous = std::getenv("MUSTER_CHAOS_ASYNCHRONOUS") != nullptr;
  if (std::getenv("MUSTER_CHAOS_DIVIDED") != nullptr) options.checkpoint.divide_above = 0;
  int64_t keep = 0;
  if (const char* const text = std::getenv("MUSTER_CHAOS_KEEP");
      absl::SimpleAtoi(text == nullptr ? "" : text, &keep)) {
    options.checkpoint.keep = keep;
  }
  return muster::run(argc, argv, options, Train);
}
