#include "worker/models/weight_shapes.h"

#include <gtest/gtest.h>

#include "ATen/core/Tensor.h"
#include "tests/testdata/golden.h"
#include "worker/models/pretrained.h"

namespace muster::models {
namespace {

// Compares with what MakeModel constructs.
void ExpectShapesOfTheModel(const ModelConfig& config) {
  const TextModel model = MakeEmptyModel(config);
  auto shapes = WeightShapes(config);
  ASSERT_TRUE(shapes.ok()) << shapes.status();
  const auto parameters = model->named_parameters();
  // A file lists these buffers among the parameters.
  const auto buffers = model->named_buffers();
  ASSERT_EQ(shapes->size(), parameters.size() + buffers.size());
  std::erase_if(*shapes, [&buffers](const WeightShape& shape) {
    const at::Tensor* const buffer = buffers.find(shape.name);
    return buffer != nullptr && buffer->sizes() == at::IntArrayRef(shape.shape);
  });
  ASSERT_EQ(shapes->size(), parameters.size());
  for (size_t i = 0; i < shapes->size(); ++i) {
    EXPECT_EQ((*shapes)[i].name, parameters[i].key());
    EXPECT_EQ(at::IntArrayRef((*shapes)[i].shape), parameters[i].value().sizes())
        << (*shapes)[i].name;
  }
}

TEST(WeightShapes, EveryFamily_AreThoseOfTheModel) {
  for (const char* const name :
       {"hf_models/bert_shared", "hf_models/gpt2_shared", "hf_models/llama_shared",
        "hf_models/mixtral_shared", "hf_models/qwen2_shared", "hf_train/bert_cls_shared",
        "hf_generate/llama_tied_head_dim_shared"}) {
    SCOPED_TRACE(name);
    auto config = ReadModelConfig(testing_support::GoldenPath(name));
    ASSERT_TRUE(config.ok()) << config.status();
    for (const bool tied : {false, true}) {
      Common(*config).tie_word_embeddings = tied;
      ExpectShapesOfTheModel(*config);
    }
    auto* const decoder = std::get_if<DecoderConfig>(&*config);
    if (decoder == nullptr) continue;
    decoder->qkv_bias = !decoder->qkv_bias;
    decoder->attention_output_bias = decoder->mlp_bias = true;
    ExpectShapesOfTheModel(*config);
  }
}

}  // namespace
}  // namespace muster::models
