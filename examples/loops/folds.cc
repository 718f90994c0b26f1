// Cross-validation: in each fold a model, an optimizer and loaders of their own, all with one
// Accelerator. What a fold has prepared is forgotten when its variables have left their scope.
#include <vector>

#include "examples/loops/result.h"
#include "muster/muster.h"

namespace {

constexpr int64_t kFolds = 4, kSamples = 1024, kEpochs = 3;
using Samples = muster::TensorDataset<torch::Tensor, torch::Tensor>;

absl::Status Train(muster::Accelerator& accelerator) {
  muster::set_seed(1);
  const torch::Tensor inputs = torch::randn({kSamples, 8});
  const torch::Tensor wanted =
      inputs.matmul(torch::randn({8, 1})) + 0.1 * torch::randn({kSamples, 1});
  const torch::Tensor fold_of = torch::arange(kSamples) % kFolds;
  const int64_t batch_size = 32 / accelerator.num_processes();

  double total = 0;
  std::vector<torch::Tensor> weights;
  for (int64_t fold = 0; fold < kFolds; ++fold) {
    const torch::Tensor held_out = fold_of.eq(fold), kept = fold_of.ne(fold);
    torch::nn::Linear net(8, 1);
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(5e-2));
    auto [model, optimizer, training, validation] = accelerator.prepare(
        net, adam,
        muster::batches(Samples(inputs.index({kept}), wanted.index({kept})), batch_size)
            .shuffle(true),
        muster::batches(Samples(inputs.index({held_out}), wanted.index({held_out})), batch_size));

    // Not epochs(): a checkpoint knows one count of epochs, not one for each fold.
    for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      for (auto& [x, y] : training) {
        auto scope = accelerator.accumulate();
        optimizer.zero_grad();
        accelerator.backward(torch::mse_loss(model(x), y));
        optimizer.step();
      }
    }
    const int64_t steps = kEpochs * training.size();
    if (optimizer.steps() != steps) {
      return absl::InternalError(
          absl::StrCat("fold ", fold, ": ", optimizer.steps(), " steps instead of ", steps));
    }

    torch::NoGradGuard no_grad;
    double sum = 0;
    int64_t seen = 0;
    for (auto& [x, y] : validation) {
      const torch::Tensor errors =
          accelerator.gather_for_metrics((model(x) - y).square(), muster::MetricRows::kPerSample);
      sum += errors.sum().item<double>();
      seen += errors.size(0);
    }
    if (seen != kSamples / kFolds) {
      return absl::InternalError(absl::StrCat("fold ", fold, ": ", seen, " samples held out"));
    }
    accelerator.print("fold %ld: squared error %.5f\n", fold, sum / static_cast<double>(seen));
    total += sum / static_cast<double>(seen);
    for (const torch::Tensor& weight : model->parameters()) weights.push_back(weight);
  }
  return Report(accelerator, "folds: mean squared error", total / kFolds, 0.1, weights);
}

}  // namespace

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
