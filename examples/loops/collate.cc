// Samples of different lengths: a plain struct as sample, a function that pads a list of them into
// a batch, which is a plain struct, too.
#include <algorithm>
#include <string>
#include <vector>

#include "examples/loops/result.h"
#include "muster/muster.h"

namespace {

constexpr int64_t kWords = 20, kPositive = 10;  // words below kPositive speak for a text

struct Text {
  std::string name;
  std::vector<int64_t> words;
  int64_t label;
};
struct TextBatch {
  std::vector<std::string> names;
  torch::Tensor words;   // [N, longest], 0 beyond a text's end
  torch::Tensor mask;    // [N, longest], 1 for words, 0 beyond
  torch::Tensor labels;  // [N]
};

TextBatch Pad(const std::vector<Text>& texts) {
  size_t longest = 0;
  for (const Text& text : texts) longest = std::max(longest, text.words.size());
  const std::vector<int64_t> sizes = {static_cast<int64_t>(texts.size()),
                                      static_cast<int64_t>(longest)};
  TextBatch batch{{}, torch::zeros(sizes, torch::kInt64), torch::zeros(sizes), {}};
  std::vector<int64_t> labels;
  for (size_t i = 0; i < texts.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i),
                  length = static_cast<int64_t>(texts[i].words.size());
    batch.names.push_back(texts[i].name);
    batch.words[row].slice(0, 0, length).copy_(torch::tensor(texts[i].words));
    batch.mask[row].slice(0, 0, length).fill_(1);
    labels.push_back(texts[i].label);
  }
  batch.labels = torch::tensor(labels);
  return batch;
}

std::vector<Text> Texts(int64_t count) {
  std::vector<Text> texts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = torch::randint(1, 12, {1}).item<int64_t>();
    const torch::Tensor words = torch::randint(kWords, {length});
    const int64_t positive = words.lt(kPositive).sum().item<int64_t>();
    const int64_t* first = words.const_data_ptr<int64_t>();
    texts.push_back({absl::StrCat("text ", i), std::vector<int64_t>(first, first + length),
                     2 * positive > length ? 1 : 0});
  }
  return texts;
}

struct ClassifierImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& words, const torch::Tensor& mask) {
    const torch::Tensor sum = (embedding(words) * mask.unsqueeze(2)).sum(1);
    return torch::log_softmax(out(sum / mask.sum(1, /*keepdim=*/true)), 1);
  }
  torch::nn::Embedding embedding{register_module("embedding", torch::nn::Embedding(kWords, 8))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(8, 2))};
};
TORCH_MODULE(Classifier);

absl::Status Train(muster::Accelerator& accelerator) {
  muster::set_seed(1);
  Classifier net;
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(2e-2));
  auto [model, optimizer, training, evaluation] = accelerator.prepare(
      net, adam,
      muster::batches(Texts(512), 32 / accelerator.num_processes()).shuffle(true).collate(Pad),
      muster::batches(Texts(101), 32 / accelerator.num_processes()).collate(Pad));

  for ([[maybe_unused]] int64_t epoch : accelerator.epochs(8)) {
    for (auto& batch : training) {
      auto scope = accelerator.accumulate();
      accelerator.backward(torch::nll_loss(model(batch->words, batch->mask), batch->labels));
      optimizer.step();
      optimizer.zero_grad();
    }
  }

  model->eval();
  torch::NoGradGuard no_grad;
  double loss = 0;
  std::vector<std::string> seen;
  for (auto& batch : evaluation) {
    const torch::Tensor losses = torch::nll_loss(model(batch->words, batch->mask), batch->labels,
                                                 {}, torch::Reduction::None);
    // The tensors and the texts of all processes, without samples that only fill up a batch.
    auto [all_losses, names] = accelerator.gather_for_metrics(losses, batch->names);
    loss += all_losses.sum().item<double>();
    seen.insert(seen.end(), names.begin(), names.end());
  }
  if (seen.size() != 101) {
    return absl::InternalError(absl::StrCat(seen.size(), " texts evaluated instead of 101"));
  }
  return Report(accelerator, "collate: loss", loss / 101, 0.45, model->parameters());
}

}  // namespace

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
