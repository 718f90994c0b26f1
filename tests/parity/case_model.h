#ifndef MUSTER_TESTS_PARITY_CASE_MODEL_H_
#define MUSTER_TESTS_PARITY_CASE_MODEL_H_

#include <nlohmann/json.hpp>
#include <string>

#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace muster::parity {

// The models that recorded `training` cases describe (tests/testdata/README.md): a
// `sequential` of named layers or a small causal `decoder`. Parameter names are those of the cases'
// weight files.
class CaseModelImpl : public torch::nn::Module {
 public:
  // Throws c10::Error for a description it does not understand, naming the part.
  explicit CaseModelImpl(const nlohmann::json& description);
  ~CaseModelImpl() override;

  // For sequential, `x` is any float tensor that the first layer takes; for decoder, ids [B, T]
  // (I64), which give logits [B, T, vocab].
  torch::Tensor forward(torch::Tensor x);

 private:
  class Body;
  class Sequential;
  class Decoder;
  std::shared_ptr<Body> body_;
};
TORCH_MODULE(CaseModel);

}  // namespace muster::parity

#endif  // MUSTER_TESTS_PARITY_CASE_MODEL_H_
