#ifndef MUSTER_WORKER_BIGMODEL_STANDARD_MODULES_H_
#define MUSTER_WORKER_BIGMODEL_STANDARD_MODULES_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "torch/nn/modules.h"

namespace muster {

// A module of LibTorch, and a function that runs it: with inputs on the device of its first
// parameter, or buffer if it has no parameters.
struct StandardModule {
  std::string name;
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  std::function<at::Tensor(torch::nn::Module&)> run;
};

inline std::vector<StandardModule> StandardModuleCases() {
  namespace nn = torch::nn;
  const auto input = [](const nn::Module& module, at::IntArrayRef sizes) {
    return at::arange(c10::multiply_integers(sizes))
        .to(at::kFloat)
        .div(50)
        .sin()
        .view(sizes)
        .to((module.parameters().empty() ? module.buffers() : module.parameters())[0].device());
  };
  return {
      {"lstm",
       [] { return nn::LSTM(nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true)).ptr(); },
       [=](nn::Module& m) {
         return std::get<0>(m.as<nn::LSTM>()->forward(input(m, {4, 3, 6})));
       }},
      {"gru", [] { return nn::GRU(nn::GRUOptions(6, 5)).ptr(); },
       [=](nn::Module& m) {
         return std::get<0>(m.as<nn::GRU>()->forward(input(m, {4, 3, 6})));
       }},
      {"lstm_cell", [] { return nn::LSTMCell(nn::LSTMCellOptions(6, 5)).ptr(); },
       [=](nn::Module& m) {
         return std::get<0>(m.as<nn::LSTMCell>()->forward(input(m, {3, 6})));
       }},
      {"conv2d", [] { return nn::Conv2d(nn::Conv2dOptions(3, 4, 3)).ptr(); },
       [=](nn::Module& m) {
         return m.as<nn::Conv2d>()->forward(input(m, {2, 3, 8, 8}));
       }},
      {"conv_transpose",
       [] { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(3, 4, 3)).ptr(); },
       [=](nn::Module& m) {
         return m.as<nn::ConvTranspose2d>()->forward(input(m, {2, 3, 8, 8}));
       }},
      {"attention",
       [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2)).ptr(); },
       [=](nn::Module& m) {
         const at::Tensor x = input(m, {4, 2, 8});
         return std::get<0>(m.as<nn::MultiheadAttention>()->forward(x, x, x));
       }},
      {"encoder_layer",
       [] {
         return nn::TransformerEncoderLayer(
                    nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0))
             .ptr();
       },
       [=](nn::Module& m) {
         return m.as<nn::TransformerEncoderLayer>()->forward(input(m, {4, 2, 8}));
       }},
      {"transformer",
       [] {
         return nn::Transformer(nn::TransformerOptions(8, 2, 1, 1).dim_feedforward(16).dropout(0))
             .ptr();
       },
       [=](nn::Module& m) {
         return m.as<nn::Transformer>()->forward(input(m, {4, 2, 8}), input(m, {3, 2, 8}));
       }},
      {"batch_norm", [] { return nn::BatchNorm2d(nn::BatchNorm2dOptions(3)).ptr(); },
       [=](nn::Module& m) {
         return m.as<nn::BatchNorm2d>()->forward(input(m, {2, 3, 4, 4}));
       }},
      {"batch_norm_of_statistics",
       [] { return nn::BatchNorm2d(nn::BatchNorm2dOptions(3).affine(false)).ptr(); },
       [=](nn::Module& m) {
         return m.as<nn::BatchNorm2d>()->forward(input(m, {2, 3, 4, 4}));
       }},
      {"instance_norm",
       [] {
         return nn::InstanceNorm1d(
                    nn::InstanceNorm1dOptions(3).affine(true).track_running_stats(true))
             .ptr();
       },
       [=](nn::Module& m) {
         return m.as<nn::InstanceNorm1d>()->forward(input(m, {2, 3, 4}));
       }},
      {"embedding_bag", [] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(10, 4)).ptr(); },
       [=](nn::Module& m) {
         return m.as<nn::EmbeddingBag>()->forward(
             at::arange(8).remainder(10).view({2, 4}).to(m.parameters()[0].device()));
       }},
      {"bilinear", [] { return nn::Bilinear(nn::BilinearOptions(3, 4, 5)).ptr(); },
       [=](nn::Module& m) {
         return m.as<nn::Bilinear>()->forward(input(m, {2, 3}), input(m, {2, 4}));
       }},
      {"prelu", [] { return nn::PReLU().ptr(); },
       [=](nn::Module& m) {
         return m.as<nn::PReLU>()->forward(input(m, {2, 3}));
       }},
      {"group_norm", [] { return nn::GroupNorm(nn::GroupNormOptions(2, 4)).ptr(); },
       [=](nn::Module& m) {
         return m.as<nn::GroupNorm>()->forward(input(m, {2, 4, 3}));
       }},
  };
}

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_STANDARD_MODULES_H_
