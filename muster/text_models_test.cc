// Hub models trained on several processes: the same as on one, under every strategy.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/bigmodel.h"
#include "muster/models.h"
#include "muster/optim.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "muster/weights.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/models/model_config.h"
#include "worker/models/pretrained.h"

namespace muster {
namespace {

using Weights = std::map<std::string, at::Tensor>;
using testing_support::GoldenPath;

// With the router's loss.
constexpr char kMixtral[] = "hf_train/mixtral_shared";
constexpr const char* kFolders[] = {"hf_train/bert_cls_shared",
                                    "hf_train/bert_mlm_shared",
                                    "hf_train/gpt2_shared",
                                    "hf_train/llama_tied_shared",
                                    kMixtral,
                                    "hf_train/qwen2_shared"};

models::TextModel Load(const std::string& folder) {
  auto model = load_text_model(GoldenPath(folder));
  EXPECT_TRUE(model.ok()) << model.status();
  if (folder != kMixtral) return *model;
  models::ModelConfig config = (*model)->config();
  std::get<models::DecoderConfig>(config).output_router_logits = true;
  models::TextModel routed = models::MakeModel(config);
  const at::NoGradGuard no_grad;
  for (auto& item : routed->named_parameters()) {
    item.value().copy_((*model)->named_parameters()[item.key()]);
  }
  return routed;
}

// Returns [B, T] ids: the rows' own, or a class for each row.
at::Tensor LabelsOf(const models::TextModelImpl& net, const at::Tensor& ids) {
  return models::Common(net.config()).architecture ==
                 models::Architecture::kBertForSequenceClassification
             ? ids.select(1, 0).remainder(3)
             : ids;
}

// Returns four rows of one length: the mean of the processes' losses is that of all rows. The
// router's loss is not a mean over rows, so with it each process has the same rows.
models::TextBatch RowsOf(const Accelerator& accelerator, const models::TextModelImpl& net,
                         int step) {
  const at::Tensor all =
      (at::arange(4 * 8, c10::kLong) * 37 + step * 11).remainder(100).view({4, 8});
  const auto* const decoder = std::get_if<models::DecoderConfig>(&net.config());
  if (decoder != nullptr && decoder->output_router_logits) return {.input_ids = all, .labels = all};
  const at::Tensor mine = all.chunk(accelerator.num_processes())[accelerator.process_index()];
  return {.input_ids = mine, .labels = LabelsOf(net, mine)};
}

Weights Train(Accelerator& accelerator, const std::string& folder) {
  models::TextModel net = Load(folder);
  // Not smaller: gradients of key biases are only rounding errors, which Adam would scale up to
  // full steps.
  FusedAdamW adamw(net->parameters(), {.lr = 1e-2, .eps = 1e-4});
  auto [model, optimizer] = accelerator.prepare(net, adamw);
  model->eval();  // without dropout
  for (int step = 0; step < 4; ++step) {
    const models::ModelOutput output = model(RowsOf(accelerator, *net, step));
    accelerator.backward(output.loss);
    accelerator.clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  Weights weights;
  for (const auto& [name, tensor] : accelerator.get_state_dict(model)) {
    weights[name] = tensor.clone();
  }
  return weights;
}

double Distance(const Weights& got, const Weights& want, const std::string& folder) {
  double off = 0, moved = 0;
  const models::TextModel start = Load(folder);
  for (const auto& item : start->named_parameters()) {
    const at::Tensor& target = want.at(item.key());
    off += (got.at(item.key()) - target).to(at::kDouble).square().sum().item<double>();
    moved += (target - item.value()).to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(off / moved);
}

TEST(TextModels, EveryFamilyUnderEveryStrategy_TrainsAsOnOneProcess) {
  for (const char* const folder : kFolders) {
    Weights want;
    RunAccelerators(1, {}, [&](Accelerator& accelerator) { want = Train(accelerator, folder); });
    for (const char* const strategy : {"no_shard", "zero1", "zero2", "zero3", "hybrid"}) {
      SCOPED_TRACE(std::string(folder) + " " + strategy);
      AcceleratorOptions options;
      options.sharding = ParseSharding(strategy, 2);
      RunAccelerators(2, options, [&](Accelerator& accelerator) {
        const Weights got = Train(accelerator, folder);
        if (accelerator.is_main_process()) {
          EXPECT_LE(Distance(got, want, folder), 1e-4);
        }
      });
    }
  }
}

// One of its parameters is never used: no rank waits for its gradient, and it is saved.
TEST(TextModels, MaskedBertWithAHeadOfItsOwn_TrainsUnderEveryStrategy) {
  for (const char* const strategy : {"no_shard", "zero1", "zero2", "zero3", "hybrid"}) {
    SCOPED_TRACE(strategy);
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, 2);
    const TestFolder folder;
    RunAccelerators(2, options, [&](Accelerator& accelerator) {
      models::ModelConfig config = Load("hf_train/bert_mlm_shared")->config();
      models::Common(config).tie_word_embeddings = false;
      models::TextModel net = models::MakeModel(config);
      net->named_buffers()["cls.predictions.bias"].fill_(1);  // decay would change it
      FusedAdamW adamw(net->parameters(), {.lr = 1e-2, .weight_decay = 0.5});
      auto [model, optimizer] = accelerator.prepare(net, adamw);
      for (int step = 0; step < 3; ++step) {
        accelerator.backward(model(RowsOf(accelerator, *net, step)).loss);
        accelerator.clip_grad_norm_(model.parameters(), 1.0);
        optimizer.step();
        optimizer.zero_grad();
      }
      const absl::Status written = accelerator.save_model(model, folder.path());
      EXPECT_TRUE(written.ok()) << written;
      if (accelerator.is_main_process()) {
        EXPECT_TRUE(save_config(net, folder.path()).ok());
      }
    });
    const auto saved = WeightFiles::Open(folder.path());
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_NE(saved->Find("cls.predictions.bias"), nullptr);
    const auto again = load_text_model(folder.path());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE((*again)->named_buffers()["cls.predictions.bias"].eq(1).all().item<bool>());
    EXPECT_TRUE((*again)->named_parameters()["cls.predictions.decoder.bias"].any().item<bool>());
  }
}

models::ModelConfig ConfigWithAHeadOfItsOwn() {
  models::ModelConfig config = Load("hf_train/bert_mlm_shared")->config();
  models::Common(config).tie_word_embeddings = false;
  return config;
}

NamedTensors TensorsOf(const models::TextModelImpl& net) {
  NamedTensors tensors;
  for (const auto& some : {net.named_parameters(), net.named_buffers()}) {
    for (const auto& item : some) tensors.emplace_back(item.key(), item.value());
  }
  return tensors;
}

void RemoveUnused(NamedTensors& tensors) {
  const auto removed = std::erase_if(
      tensors, [](const auto& tensor) { return tensor.first == "cls.predictions.bias"; });
  EXPECT_EQ(removed, 1u);
}

// Versions of Muster that did not keep the bias wrote such checkpoints.
TEST(TextModels, CheckpointWithoutWhatNothingComputesWith_Loads) {
  for (const char* const strategy : {"no_shard", "zero3"}) {
    SCOPED_TRACE(strategy);
    AcceleratorOptions options;
    options.sharding = ParseSharding(strategy, 2);
    const TestFolder folder;
    RunAccelerators(2, options, [&](Accelerator& accelerator) {
      models::TextModel net = models::MakeModel(ConfigWithAHeadOfItsOwn());
      net->named_buffers()["cls.predictions.bias"].fill_(1);
      FusedAdamW adamw(net->parameters(), {.lr = 1e-2});
      auto [model, optimizer] = accelerator.prepare(net, adamw);
      const auto step = [&, &model = model, &optimizer = optimizer] {
        accelerator.backward(model(RowsOf(accelerator, *net, 0)).loss);
        optimizer.step();
        optimizer.zero_grad();
      };
      const auto weights = [&, &model = model] {
        Weights copies;
        for (const auto& [name, tensor] : accelerator.get_state_dict(model)) {
          copies.emplace(name, tensor.clone());
        }
        return copies;
      };
      const auto expect_equal = [](const Weights& got, const Weights& want) {
        for (const auto& [name, tensor] : want) {
          ASSERT_EQ(got.count(name), 1u) << name;
          EXPECT_TRUE(at::equal(got.at(name), tensor)) << name;
        }
      };
      step();
      HookHandle hook = accelerator.register_save_state_pre_hook(
          [](std::vector<NamedTensors>& all, StateWriter&) {
            for (NamedTensors& tensors : all) {
              if (!tensors.empty()) RemoveUnused(tensors);
            }
          });
      const absl::Status saved = accelerator.save_state(folder.path());
      ASSERT_TRUE(saved.ok()) << saved;
      const Weights at_save = weights();
      step();
      const Weights later = weights();
      const absl::Status loaded = accelerator.load_state(folder.path());
      ASSERT_TRUE(loaded.ok()) << loaded;
      expect_equal(weights(), at_save);
      step();
      expect_equal(weights(), later);
      const auto taken = accelerator.load_weights(folder.path());
      ASSERT_TRUE(taken.ok()) << taken.status();
      EXPECT_TRUE(taken->models[0].missing.empty());
      expect_equal(weights(), at_save);
    });
  }
}

TEST(TextModels, WeightsWithoutWhatNothingComputesWith_Load) {
  const models::ModelConfig config = ConfigWithAHeadOfItsOwn();
  const models::TextModel net = models::MakeModel(config);
  NamedTensors tensors = TensorsOf(*net);
  RemoveUnused(tensors);
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors, 1 << 30).ok());
  models::TextModel other = models::MakeModel(config);
  other->named_buffers()["cls.predictions.bias"].fill_(1);
  const auto loaded = load_model(other, folder.path(), {.dtype = c10::kDouble});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->missing.empty());
  const at::Tensor bias = other->named_buffers()["cls.predictions.bias"];
  EXPECT_TRUE(bias.eq(1).all().item<bool>());
  EXPECT_EQ(bias.scalar_type(), c10::kDouble);
  // Any other tensor must be there.
  tensors.pop_back();
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors, 1 << 30).ok());
  EXPECT_FALSE(load_model(other, folder.path()).ok());
}

TEST(TextModels, EmptyModelAndWeightsWithoutWhatNothingComputesWith_HasZerosThere) {
  const models::ModelConfig config = ConfigWithAHeadOfItsOwn();
  NamedTensors tensors = TensorsOf(*models::MakeModel(config));
  RemoveUnused(tensors);
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors, 1 << 30).ok());
  models::TextModel empty = models::MakeEmptyModel(config);
  const auto dispatched = load_checkpoint_and_dispatch(empty, folder.path(), "auto");
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_TRUE(dispatched->loaded().missing.empty());
  const at::Tensor bias = empty->named_buffers()["cls.predictions.bias"];
  ASSERT_TRUE(bias.is_cpu());
  EXPECT_FALSE(bias.any().item<bool>());
}

// The configs of all families have a dropout of 0 here, so that two runs can be compared.
TEST(TextModels, ActivationCheckpointing_ChangesNoGradient) {
  for (const char* const folder : kFolders) {
    SCOPED_TRACE(folder);
    std::map<std::string, at::Tensor> gradients[2];
    for (const bool on : {false, true}) {
      models::TextModel net = Load(folder);
      net->train();
      net->set_activation_checkpointing(on);
      const at::Tensor ids = at::arange(12, c10::kLong).view({2, 6});
      net->forward({.input_ids = ids, .labels = LabelsOf(*net, ids)}).loss.backward();
      for (const auto& item : net->named_parameters()) {
        gradients[on][item.key()] = item.value().grad();
      }
    }
    for (const auto& [name, gradient] : gradients[0]) {
      EXPECT_TRUE(at::equal(gradient, gradients[1].at(name))) << name;
    }
  }
}

TEST(TextModels, ActivationCheckpointingByOption_TrainsTheSameWeights) {
  for (const char* const folder : kFolders) {
    SCOPED_TRACE(folder);
    Weights got[2];
    for (const bool on : {false, true}) {
      AcceleratorOptions options;
      if (on) options.activation_checkpointing.emplace();
      RunAccelerators(1, options,
                      [&](Accelerator& accelerator) { got[on] = Train(accelerator, folder); });
    }
    for (const auto& [name, tensor] : got[0]) {
      EXPECT_TRUE(at::equal(tensor, got[1].at(name))) << name;
    }
  }
}

TEST(TextModels, PreparedModel_GeneratesAndSaves) {
  RunAccelerators(1, {}, [&](Accelerator& accelerator) {
    auto loaded = load_causal_lm(GoldenPath("hf_train/gpt2_shared"));
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    auto model = accelerator.prepare_model(*loaded);
    const at::Tensor prompt = at::arange(4, c10::kLong).unsqueeze(0);
    const at::Tensor tokens = generate(model, prompt, {}, {.max_new_tokens = 5}).tokens;
    EXPECT_TRUE(at::equal(tokens, generate(*loaded, prompt, {}, {.max_new_tokens = 5}).tokens));
    const TestFolder folder;
    ASSERT_TRUE(save_pretrained(model, folder.path()).ok());
    auto again = load_causal_lm(folder.path());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(at::equal(tokens, generate(*again, prompt, {}, {.max_new_tokens = 5}).tokens));
  });
}

// Also in passes that use no head.
TEST(TextModels, ShardedModel_GeneratesAsTheWholeOne) {
  for (const char* const folder : {"hf_train/mixtral_shared", "hf_train/gpt2_shared"}) {
    const at::Tensor prompt = at::arange(4, c10::kLong).unsqueeze(0);
    auto whole = load_causal_lm(GoldenPath(folder));
    ASSERT_TRUE(whole.ok()) << whole.status();
    const std::vector<models::GenerateOptions> all = {
        {.max_new_tokens = 5, .eos_token_ids = {{}}},
        {.max_new_tokens = 5, .eos_token_ids = {{}}, .prefill_chunk_size = 2}};
    std::vector<at::Tensor> want;
    for (const auto& options : all) want.push_back(generate(*whole, prompt, {}, options).tokens);
    AcceleratorOptions sharded;
    sharded.sharding = ParseSharding("zero3", 2);
    RunAccelerators(2, sharded, [&](Accelerator& accelerator) {
      auto model = accelerator.prepare_model(*load_causal_lm(GoldenPath(folder)));
      for (size_t i = 0; i < all.size(); ++i) {
        EXPECT_TRUE(at::equal(generate(model, prompt, {}, all[i]).tokens, want[i])) << i;
      }
    });
  }
}

}  // namespace
}  // namespace muster
