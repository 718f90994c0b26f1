// Compiles the C++ of docs/*.md as it is printed: extract.py makes PAGE_N.inc of the N-th block of
// a page. What a page leaves to its reader (a net, a data set) is declared here.
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"
#include "muster/muster.h"
#include "tests/docs/includes.inc"

// Pages name variables that they do not use; but results that must be used count.
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"

namespace {

struct Config {};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Config& = {}) {}
  torch::Tensor forward(torch::Tensor x) { return torch::log_softmax(out(x), 1); }
  torch::nn::Linear out{register_module("out", torch::nn::Linear(16, 4))};
};
TORCH_MODULE(Net);

muster::TensorDataset<torch::Tensor, torch::Tensor> TrainData() {
  return muster::TensorDataset<torch::Tensor, torch::Tensor>(torch::randn({64, 16}),
                                                             torch::arange(64) % 4);
}
muster::TensorDataset<torch::Tensor, torch::Tensor> TestData() { return TrainData(); }

torch::Tensor loss(const torch::Tensor& guess, const torch::Tensor& truth) {
  return torch::nll_loss(guess, truth);
}

namespace bigmodel {
absl::Status Load(const torch::Tensor& ids) {
  const Config config;
#include "tests/docs/bigmodel_1.inc"
  return absl::OkStatus();
}
absl::Status LoadMapped(Net net) {
#include "tests/docs/bigmodel_2.inc"
  return absl::OkStatus();
}
absl::Status LoadOnTwoGpus(Net net, const torch::Tensor& ids) {
#include "tests/docs/bigmodel_3.inc"
  return absl::OkStatus();
}
}  // namespace bigmodel

namespace cli {
absl::Status Train(muster::Accelerator&) { return absl::OkStatus(); }
#include "tests/docs/cli_1.inc"
}  // namespace cli

namespace from_accelerate {
#include "tests/docs/from_accelerate_1.inc"
}  // namespace from_accelerate

namespace from_libtorch {
struct Net : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return torch::log_softmax(out(x), 1); }
  torch::nn::Linear out{register_module("out", torch::nn::Linear(16, 4))};
};
struct Points : torch::data::datasets::Dataset<Points> {
  torch::data::Example<> get(size_t index) override {
    return {torch::randn({16}), torch::tensor(static_cast<int64_t>(index) % 4)};
  }
  std::optional<size_t> size() const override { return 1024; }
};

namespace main_calls_run {
#include "tests/docs/from_libtorch_1.inc"
}  // namespace main_calls_run

absl::Status Train(muster::Accelerator& accelerator) {
  auto net = std::make_shared<Net>();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::StepLR step_lr(sgd, /*step_size=*/32, /*gamma=*/0.5);
#include "tests/docs/from_libtorch_2.inc"
#include "tests/docs/from_libtorch_3.inc"
#include "tests/docs/from_libtorch_4.inc"
#include "tests/docs/from_libtorch_5.inc"
  return absl::OkStatus();
}
}  // namespace from_libtorch

namespace models {
struct Row {
  torch::Tensor ids;
};

absl::Status Tune(muster::Accelerator& accelerator, const std::vector<Row>& loader){
#include "tests/docs/models_1.inc"
}

absl::Status Load(const std::string& dir) {
#include "tests/docs/models_2.inc"
#include "tests/docs/models_3.inc"
  return model.ok() ? classifier.status() : model.status();
}

void Generate(absl::StatusOr<muster::models::CausalLm>& model, const torch::Tensor& ids,
              const torch::Tensor& attention_mask){
#include "tests/docs/models_4.inc"
}

absl::Status Adapt(absl::StatusOr<muster::models::CausalLm>& model) {
#include "tests/docs/models_5.inc"
}
}  // namespace models

namespace programs {
void LossOverAll(muster::Accelerator& accelerator, muster::AcceleratedModel<Net>& model,
                 const torch::Tensor& x) {
  auto contrastive = [](const torch::Tensor& rows) { return rows.mean(); };
#include "tests/docs/programs_1.inc"
}

void Register(muster::Accelerator& accelerator, Net net) {
#include "tests/docs/programs_2.inc"
}
}  // namespace programs

namespace sharding {
using muster::batches;

void Train(Net net, torch::optim::AdamW& adamw) {
  auto data = TrainData();
#include "tests/docs/sharding_1.inc"
}

void Groups(muster::Accelerator& accelerator, Net net){
#include "tests/docs/sharding_2.inc"
}

muster::AcceleratorOptions Options() {
  muster::AcceleratorOptions options;
#include "tests/docs/sharding_3.inc"
#include "tests/docs/sharding_8.inc"
#include "tests/docs/sharding_9.inc"
  return options;
}

void Deferred(muster::Accelerator& accelerator) {
  const Config config;
#include "tests/docs/sharding_4.inc"
}

absl::Status Empty(muster::Accelerator& accelerator) {
  const Config config;
#include "tests/docs/sharding_5.inc"
  return loaded.status();
}

absl::Status Average(muster::Accelerator& accelerator, Net net, torch::optim::AdamW& adamw) {
  auto evaluate = [](auto&) {};
  auto [model, optimizer, loader] =
      accelerator.prepare(net, adamw, muster::batches(TrainData(), 8));
#include "tests/docs/sharding_6.inc"
  return absl::OkStatus();
}

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x, torch::Tensor mask) { return x * mask; }
};
TORCH_MODULE(Block);

torch::Tensor Call(std::vector<Block>& blocks_, torch::Tensor x, torch::Tensor mask) {
#include "tests/docs/sharding_7.inc"
  return x;
}
}  // namespace sharding

namespace sharding_config {
void Make(muster::Accelerator& accelerator, Net net) {
#include "tests/docs/sharding_config_1.inc"
}
}  // namespace sharding_config

namespace tokenizers {
absl::Status Encode() {
#include "tests/docs/tokenizers_1.inc"
  return absl::OkStatus();
}
}  // namespace tokenizers

namespace triggers {
absl::Status Step(muster::Accelerator& accelerator, muster::AcceleratedOptimizer& optimizer) {
#include "tests/docs/triggers_1.inc"
  return absl::OkStatus();
}
}  // namespace triggers

namespace weights {
absl::Status Load(muster::Accelerator& accelerator, torch::optim::AdamW& adamw) {
#include "tests/docs/weights_1.inc"
  return absl::OkStatus();
}

absl::Status LoadCheckpoint(muster::Accelerator& accelerator, Net net, torch::optim::AdamW& adamw) {
#include "tests/docs/weights_2.inc"
  return absl::OkStatus();
}
}  // namespace weights

// Returns the exit code of a program of one process that works in a folder of its own.
template <class F>
int RunInFolder(F main) {
  const muster::TestFolder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  std::string name = "train";
  char* arguments[] = {name.data(), nullptr};
  const int code = main(1, arguments);
  std::filesystem::current_path(before);
  return code;
}

TEST(Snippets, ProgramOfFromAccelerate_TrainsAndSaves) {
  EXPECT_EQ(RunInFolder(from_accelerate::main), 0);
}

TEST(Snippets, EditsOfFromLibtorch_MakeAProgramThatTrainsAndSaves) {
  EXPECT_EQ(RunInFolder([](int argc, char** argv) {
              return muster::run(argc, argv, from_libtorch::Train);
            }),
            0);
}

}  // namespace
