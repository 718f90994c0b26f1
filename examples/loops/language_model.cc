// A token language model: weight decay for matrices only (two parameter groups), a schedule with
// warm-up, gradient accumulation, clipping, and a loss that is a mean over tokens although batches
// hold different numbers of them.
#include <memory>
#include <vector>

#include "examples/loops/result.h"
#include "muster/muster.h"

namespace {

constexpr int64_t kWords = 32, kLength = 20, kNoTarget = -100;

struct LanguageModelImpl : torch::nn::Module {
  // Returns logits [N, kWords, length] of the words that follow `words` [N, length].
  torch::Tensor forward(const torch::Tensor& words) {
    return out(std::get<0>(gru(embedding(words)))).transpose(1, 2);
  }
  torch::nn::Embedding embedding{register_module("embedding", torch::nn::Embedding(kWords, 32))};
  torch::nn::GRU gru{
      register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(32, 64).batch_first(true)))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(64, kWords))};
};
TORCH_MODULE(LanguageModel);

// Returns sentences [count, kLength] of a language in which nine words of ten follow from the one
// before, and what comes after each word; kNoTarget beyond a sentence's end.
std::pair<torch::Tensor, torch::Tensor> Sentences(int64_t count) {
  torch::Tensor words = torch::randint(kWords, {count, kLength + 1});
  const torch::Tensor follows = torch::rand({count, kLength + 1}) < 0.9;
  for (int64_t t = 1; t <= kLength; ++t) {
    const torch::Tensor next = (words.select(1, t - 1) * 5 + 3) % kWords;
    words.select(1, t).copy_(torch::where(follows.select(1, t), next, words.select(1, t)));
  }
  const torch::Tensor lengths = torch::randint(4, kLength + 1, {count, 1});
  const torch::Tensor targets =
      words.slice(1, 1).masked_fill(torch::arange(kLength) >= lengths, kNoTarget);
  return {words.slice(1, 0, kLength).contiguous(), targets};
}

std::vector<torch::optim::OptimizerParamGroup> Groups(const LanguageModel& net, double lr) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const torch::Tensor& parameter : net->parameters()) {
    (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
  }
  using Options = torch::optim::AdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<Options>(Options(lr).weight_decay(0.1)));
  groups.emplace_back(vectors, std::make_unique<Options>(Options(lr).weight_decay(0)));
  return groups;
}

torch::Tensor Loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(
      logits, targets, torch::nn::functional::CrossEntropyFuncOptions().ignore_index(kNoTarget));
}

absl::Status Train(muster::Accelerator& accelerator) {
  constexpr int64_t kSentences = 512, kBatch = 32, kEpochs = 10;
  muster::set_seed(1);
  LanguageModel net;
  torch::optim::AdamW adamw(Groups(net, 1e-2), torch::optim::AdamWOptions(1e-2));
  const auto [words, targets] = Sentences(kSentences);
  const int64_t steps = kEpochs * kSentences / kBatch / accelerator.gradient_accumulation_steps();

  auto [model, optimizer, sentences, schedule] = accelerator.prepare(
      net, adamw,
      muster::batches(muster::TensorDataset<torch::Tensor, torch::Tensor>(words, targets),
                      kBatch / accelerator.num_processes())
          .shuffle(true),
      muster::CosineWithWarmup(/*warmup=*/steps / 10, steps));

  for ([[maybe_unused]] int64_t epoch : accelerator.epochs(kEpochs)) {
    for (auto& [input, target] : sentences) {
      auto scope = accelerator.accumulate();
      // The weight makes every token count the same, in any batch and on any process.
      const double tokens = target.ne(kNoTarget).sum().item<double>();
      accelerator.backward(Loss(model(input), target), tokens);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();
    }
  }

  torch::NoGradGuard no_grad;
  const torch::Tensor loss =
      Loss(model(words.to(accelerator.device())), targets.to(accelerator.device()));
  return Report(accelerator, "language model: loss per token", loss.item<double>(), 1.2,
                model->parameters());
}

}  // namespace

int main(int argc, char** argv) {
  muster::AcceleratorOptions options;
  options.gradient_accumulation_steps = 2;
  return muster::run(argc, argv, options, Train);
}
