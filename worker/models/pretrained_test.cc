#include "worker/models/pretrained.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "ATen/record_function.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/test_huge_file.h"
#include "worker/train/autocast.h"

namespace muster::models {
namespace {

using Json = nlohmann::json;
using testing_support::GoldenPath;

constexpr const char* kFolders[] = {"hf_models/bert_shared",  "hf_models/gpt2_shared",
                                    "hf_models/llama_shared", "hf_models/mixtral_shared",
                                    "hf_models/qwen2_shared", "hf_train/bert_cls_shared"};

at::Tensor Logits(const TextModel& model) {
  const at::NoGradGuard no_grad;
  return model.ptr()
      ->forward({.input_ids = at::tensor({1, 2, 3, 4}, c10::kLong).view({2, 2})})
      .logits;
}

NamedTensors TensorsOf(const TextModel& model) {
  NamedTensors all;
  for (const auto& item : model->named_parameters()) all.emplace_back(item.key(), item.value());
  return all;
}

void WriteFolder(const TestFolder& folder, const NamedTensors& tensors, const ModelConfig& config) {
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), ToJson(config)).ok());
}

TEST(SavePretrained, EveryFamily_LoadsAgainAndSaysTheSame) {
  for (const char* const name : kFolders) {
    SCOPED_TRACE(name);
    const auto model = LoadPretrained(GoldenPath(name));
    ASSERT_TRUE(model.ok()) << model.status();
    const TestFolder folder;
    // In several files.
    ASSERT_TRUE(SavePretrained(**model, folder.path(), 50'000).ok());
    const auto again = LoadPretrained(folder.path());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(at::equal(Logits(*model), Logits(*again)));
  }
}

TEST(LoadPretrained, Dtype_IsThatOfTheWeightsAndOfTheSavedConfig) {
  const auto model =
      LoadPretrained(GoldenPath("hf_models/llama_shared"), {.dtype = c10::kBFloat16});
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(Logits(*model).scalar_type(), c10::kBFloat16);
  const TestFolder folder;
  ASSERT_TRUE(SavePretrained(**model, folder.path()).ok());
  EXPECT_EQ(Json::parse(*ReadFile(folder.Path("config.json")))["torch_dtype"], "bfloat16");
}

TEST(LoadPretrained, OlderNames_AreUnderstood) {
  const auto gpt2 = LoadPretrained(GoldenPath("hf_models/gpt2_shared"));
  NamedTensors old;
  for (const auto& [name, tensor] : TensorsOf(*gpt2)) {
    // OpenAI's files have no prefix, and contain the causal mask of each layer.
    old.emplace_back(name.substr(std::string("transformer.").size()), tensor);
  }
  old.emplace_back("h.0.attn.bias", at::ones({1, 1, 64, 64}, c10::kByte));
  old.emplace_back("lm_head.weight", TensorsOf(*gpt2)[0].second.clone());
  const TestFolder folder;
  WriteFolder(folder, old, (*gpt2)->config());
  const auto again = LoadPretrained(folder.path());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(at::equal(Logits(*gpt2), Logits(*again)));
}

TEST(LoadPretrained, BertForPreTraining_LosesWhatMaskedTokensDoNotNeed) {
  const auto bert = LoadPretrained(GoldenPath("hf_models/bert_shared"));
  NamedTensors old;
  for (auto [name, tensor] : TensorsOf(*bert)) {
    const std::string norm = "LayerNorm.weight";
    if (name.ends_with(norm)) name = name.substr(0, name.size() - 6) + "gamma";
    old.emplace_back(name, tensor);
  }
  old.emplace_back("cls.seq_relationship.weight", at::ones({2, 48}));
  old.emplace_back("bert.pooler.dense.bias", at::ones({48}));
  const TestFolder folder;
  WriteFolder(folder, old, (*bert)->config());
  const auto again = LoadPretrained(folder.path());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(at::equal(Logits(*bert), Logits(*again)));
}

// The names and shapes of a Mixtral in the memory of transformers 5, and in folders that are saved
// from there (save_original_format=False, Accelerate's save_model).
NamedTensors WithFusedExperts(const NamedTensors& tensors) {
  std::map<std::string, std::vector<at::Tensor>> fused;
  NamedTensors all;
  for (auto [name, tensor] : tensors) {
    const size_t block = name.find(".block_sparse_moe.");
    if (block == std::string::npos) {
      all.emplace_back(name, tensor);
      continue;
    }
    const std::string mlp = name.substr(0, block) + ".mlp.";
    if (name.ends_with(".gate.weight")) {
      all.emplace_back(mlp + "gate.weight", tensor);
    } else {
      // In the order of the model: w1, w3 and w2 of one expert after the other.
      fused[mlp + (name.ends_with(".w2.weight") ? "experts.down_proj" : "experts.gate_up_proj")]
          .push_back(tensor.detach());
    }
  }
  for (const auto& [name, parts] : fused) {
    const int64_t each = name.ends_with("down_proj") ? 1 : 2;
    const int64_t experts = static_cast<int64_t>(parts.size()) / each;
    all.emplace_back(name, at::cat(parts).view({experts, each * parts[0].size(0), -1}));
  }
  return all;
}

TEST(LoadPretrained, ExpertsInOneTensor_AreTakenApart) {
  const auto mixtral = LoadPretrained(GoldenPath("hf_models/mixtral_shared"));
  ASSERT_TRUE(mixtral.ok()) << mixtral.status();
  const NamedTensors fused = WithFusedExperts(TensorsOf(*mixtral));
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), fused, 50'000).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), ToJson((*mixtral)->config())).ok());
  LoadedWeights report;
  const auto again = LoadPretrained(folder.path(), {}, &report);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(report.loaded.size(), TensorsOf(*mixtral).size());
  const NamedTensors want = TensorsOf(*mixtral), got = TensorsOf(*again);
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_TRUE(at::equal(got[i].second, want[i].second)) << want[i].first;
  }

  // Fewer experts than the config declares.
  ModelConfig config = (*mixtral)->config();
  std::get<DecoderConfig>(config).num_experts = 5;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), ToJson(config)).ok());
  const std::string error(LoadPretrained(folder.path()).status().message());
  EXPECT_NE(error.find(".mlp.experts."), std::string::npos) << error;
  EXPECT_NE(error.find("matrices of one size"), std::string::npos) << error;
}

TEST(LoadPretrained, AnotherHead_GetsRandomWeightsIfAsked) {
  LoadPretrainedOptions options = {.strict = true,
                                   .config = {.architecture = "BertForSequenceClassification"}};
  const std::string path = GoldenPath("hf_models/bert_shared");
  const auto refused = LoadPretrained(path, options);
  EXPECT_NE(refused.status().message().find("missing: bert.pooler.dense.bias"), std::string::npos)
      << refused.status();
  options.strict = false;
  LoadedWeights report;
  const auto model = LoadPretrained(path, options, &report);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(report.missing.size(), 4);
  EXPECT_EQ(Logits(*model).sizes(), at::IntArrayRef({2, 2}));
  EXPECT_TRUE(Logits(*model).isfinite().all().item<bool>());
}

TEST(LoadPretrained, ShapesUnlikeTheConfig_NameTensorAndBoth) {
  const std::string path = GoldenPath("hf_models/llama_shared");
  ModelConfig config = *ReadModelConfig(path);
  std::get<DecoderConfig>(config).intermediate_size = 113;
  const TestFolder folder;
  WriteFolder(folder, TensorsOf(*LoadPretrained(path)), config);
  const auto model = LoadPretrained(folder.path());
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(model.status().message().find(
                "mlp.gate_proj.weight ([112, 48] in the file, [113, 48] by the config)"),
            std::string::npos)
      << model.status();
}

// transformers 4 computes without such a head, transformers 5 with it.
TEST(LoadPretrained, TiedHeadWithValuesOfItsOwn_IsRefused) {
  for (const auto& [name, embedding, head] :
       {std::tuple("hf_models/qwen2_shared", "model.embed_tokens.weight", "lm_head.weight"),
        std::tuple("hf_models/gpt2_shared", "transformer.wte.weight", "lm_head.weight"),
        std::tuple("hf_models/bert_shared", "bert.embeddings.word_embeddings.weight",
                   "cls.predictions.decoder.weight")}) {
    SCOPED_TRACE(name);
    const auto model = LoadPretrained(GoldenPath(name));
    ASSERT_TRUE(model.ok()) << model.status();
    for (const bool equal : {true, false}) {
      NamedTensors tensors = TensorsOf(*model);
      for (const auto& [each, tensor] : TensorsOf(*model)) {
        if (each == embedding) tensors.emplace_back(head, equal ? tensor.clone() : tensor + 1);
      }
      const TestFolder folder;
      WriteFolder(folder, tensors, (*model)->config());
      const auto again = LoadPretrained(folder.path());
      EXPECT_EQ(again.ok(), equal) << again.status();
      EXPECT_EQ(NamesInFiles(folder.path(), **model).ok(), equal);
      if (equal) continue;
      EXPECT_NE(again.status().message().find(std::string("ties ") + head + " to " + embedding),
                std::string::npos)
          << again.status();
    }
  }
}

// transformers saves only one of the two names; which one depends on the framework.
TEST(LoadPretrained, TiedWeightUnderTheHeadsNameAlone_IsTheEmbeddingsToo) {
  for (const auto& [name, renamed] :
       {std::pair(
            "hf_models/qwen2_shared",
            std::map<std::string, std::string>{{"model.embed_tokens.weight", "lm_head.weight"}}),
        std::pair("hf_models/gpt2_shared",
                  std::map<std::string, std::string>{{"transformer.wte.weight", "lm_head.weight"}}),
        std::pair("hf_models/bert_shared",
                  std::map<std::string, std::string>{
                      {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"},
                      {"cls.predictions.bias", "cls.predictions.decoder.bias"}})}) {
    SCOPED_TRACE(name);
    const auto model = LoadPretrained(GoldenPath(name));
    ASSERT_TRUE(model.ok()) << model.status();
    NamedTensors tensors;
    for (const auto& [each, tensor] : TensorsOf(*model)) {
      const auto other = renamed.find(each);
      tensors.emplace_back(other == renamed.end() ? each : other->second, tensor);
    }
    const TestFolder folder;
    WriteFolder(folder, tensors, (*model)->config());
    // Also if missing tensors would get random weights.
    for (const bool strict : {true, false}) {
      LoadedWeights report;
      const auto again = LoadPretrained(folder.path(), {.strict = strict}, &report);
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_TRUE(report.missing.empty());
      EXPECT_TRUE(at::equal(Logits(*model), Logits(*again)));
    }
  }
}

// Returns a masked BERT whose head is not tied, with the tensor that transformers keeps beside it.
NamedTensors WithItsOwnHead(const TextModel& tied, at::Tensor unused) {
  NamedTensors tensors;
  for (const auto& [name, tensor] : TensorsOf(tied)) {
    if (name == "bert.embeddings.word_embeddings.weight") {
      tensors.emplace_back("cls.predictions.decoder.weight", tensor + 0.5);
    }
    if (name == "cls.predictions.bias") {
      tensors.emplace_back("cls.predictions.decoder.bias", tensor - 0.5);
      if (unused.defined()) tensors.emplace_back(name, unused);
    } else {
      tensors.emplace_back(name, tensor);
    }
  }
  return tensors;
}

TEST(LoadPretrained, BiasThatAHeadOfItsOwnDoesNotUse_IsKeptAndSaved) {
  const auto tied = LoadPretrained(GoldenPath("hf_models/bert_shared"));
  ASSERT_TRUE(tied.ok()) << tied.status();
  ModelConfig config = (*tied)->config();
  Common(config).tie_word_embeddings = false;
  const at::Tensor unused = at::arange(Common(config).vocab_size, at::kFloat);
  const TestFolder folder, saved, lacking;
  WriteFolder(folder, WithItsOwnHead(*tied, unused), config);
  const auto model = LoadPretrained(folder.path());
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_TRUE(SavePretrained(**model, saved.path()).ok());
  const auto again = LoadPretrained(saved.path());
  ASSERT_TRUE(again.ok()) << again.status();
  for (const auto& loaded : {*model, *again}) {
    EXPECT_TRUE(at::equal(loaded->named_buffers()["cls.predictions.bias"], unused));
    EXPECT_TRUE(loaded->named_parameters()["cls.predictions.decoder.bias"].requires_grad());
  }
  // Files may lack it, and then nothing counts as missing.
  WriteFolder(lacking, WithItsOwnHead(*tied, {}), config);
  for (const bool strict : {true, false}) {
    LoadedWeights report;
    const auto without = LoadPretrained(lacking.path(), {.strict = strict}, &report);
    ASSERT_TRUE(without.ok()) << without.status();
    EXPECT_TRUE(report.missing.empty());
    EXPECT_FALSE((*without)->named_buffers()["cls.predictions.bias"].any().item<bool>());
    EXPECT_TRUE(at::equal(Logits(*model), Logits(*without)));
  }
}

// Before memory is allocated: the config alone would need more than there is.
TEST(LoadPretrained, HugeConfig_IsRefusedByItsFiles) {
  const std::string path = GoldenPath("hf_models/llama_shared");
  ModelConfig config = *ReadModelConfig(path);
  std::get<DecoderConfig>(config).intermediate_size = int64_t{1} << 24;
  std::get<DecoderConfig>(config).vocab_size = int64_t{1} << 24;
  const TestFolder folder;
  WriteFolder(folder, TensorsOf(*LoadPretrained(path)), config);
  EXPECT_EQ(LoadPretrained(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LoadPretrained, MemoryThatIsRefused_NamesTheLargestTensorAndTheWayOut) {
  const auto model = LoadPretrained(GoldenPath("hf_models/llama_shared"));
  ASSERT_TRUE(model.ok()) << model.status();
  ModelConfig config = (*model)->config();
  // Two TiB.
  constexpr int64_t kWidth = 1 << 15;
  std::get<DecoderConfig>(config).vocab_size = 1 << 24;
  std::get<DecoderConfig>(config).hidden_size = kWidth;
  const TestFolder folder;
  WriteFolder(folder, {{"model.norm.weight", at::ones({kWidth})}}, config);
  const AtMostOneMoreTebibyte scarce;
  const absl::Status status = LoadPretrained(folder.path(), {.strict = false}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find(
                "the largest tensor is model.embed_tokens.weight of 2199023255552 bytes"),
            std::string::npos)
      << status;
  EXPECT_NE(status.message().find("load_offloaded_causal_lm"), std::string::npos) << status;
}

TEST(LoadPretrained, MissingShard_IsNamed) {
  const TestFolder folder;
  const auto model = LoadPretrained(GoldenPath("hf_models/llama_shared"));
  ASSERT_TRUE(SavePretrained(**model, folder.path(), 50'000).ok());
  std::string shard;
  const std::vector<std::string> files =
      ListDirectory(folder.path()).value_or(std::vector<std::string>());
  for (const std::string& name : files) {
    if (name.find("-00002-of") != std::string::npos) shard = name;
  }
  ASSERT_TRUE(RemoveTree(folder.Path(shard)).ok());
  const auto again = LoadPretrained(folder.path());
  EXPECT_TRUE(absl::IsNotFound(again.status()));
  EXPECT_NE(again.status().message().find(shard + ", which does not exist"), std::string::npos)
      << again.status();
}

TEST(LoadPretrained, MetaDevice_HasNoMemoryForWeights) {
  const auto loaded = LoadPretrained(GoldenPath("hf_models/llama_shared"), {.device = c10::kMeta});
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument) << loaded.status();
  EXPECT_NE(loaded.status().message().find("meta device"), std::string::npos) << loaded.status();
}

TEST(LoadPretrained, DeviceThatIsNotThere_IsNamed) {
  const auto model =
      LoadPretrained(GoldenPath("hf_models/llama_shared"), {.device = c10::Device("cuda:99")});
  EXPECT_EQ(model.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(model.status().message().find("device cuda:99 does not exist"), std::string::npos)
      << model.status();
}

TEST(LoadCausalLm, Bert_DoesNotPredictTheNextToken) {
  const auto model = LoadCausalLm(GoldenPath("hf_models/bert_shared"));
  EXPECT_NE(model.status().message().find("a BertForMaskedLM does not predict"), std::string::npos);
}

// Quirks hf_train/s001 to s003: a label that only a padded position could predict does not count.
TEST(CausalLm, LabelAfterPadding_DoesNotCount) {
  for (const char* const name : {"hf_train/gpt2_shared", "hf_train/llama_tied_shared"}) {
    const auto model = LoadPretrained(GoldenPath(name));
    TextBatch batch = {.input_ids = at::tensor({9, 9, 5, 6, 7}, c10::kLong).unsqueeze(0),
                       .attention_mask = at::tensor({0, 0, 1, 1, 1}, c10::kLong).unsqueeze(0),
                       .labels = at::tensor({-100, -100, 5, 6, 7}, c10::kLong).unsqueeze(0)};
    const double loss = (*model).ptr()->forward(batch).loss.item<double>();
    batch.labels = at::tensor({-100, -100, -100, 6, 7}, c10::kLong).unsqueeze(0);
    EXPECT_EQ((*model).ptr()->forward(batch).loss.item<double>(), loss);
  }
}

// Counts this thread's copies of the size of logits, or of one row less.
class LogitsWatch {
 public:
  explicit LogitsWatch(int64_t logits, int64_t without_last) {
    sizes = {logits, without_last};
    copies = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) {
          const std::string name = function.name();
          if (name == "aten::copy_" && sizes.count(function.inputs()[0].toTensor().numel()) > 0) {
            ++copies;
          }
          return std::unique_ptr<at::ObserverContext>();
        })
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~LogitsWatch() { at::removeCallback(handle_); }
  static std::set<int64_t> sizes;
  static int copies;

 private:
  at::CallbackHandle handle_;
};
std::set<int64_t> LogitsWatch::sizes;
int LogitsWatch::copies = 0;

TEST(CausalLm, LossInLowPrecision_CopiesLogitsOnceAndReturnsThatCopy) {
  for (const char* const name : {"hf_train/gpt2_shared", "hf_train/llama_tied_shared"}) {
    const auto loaded = LoadPretrained(GoldenPath(name));
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    TextModelImpl& model = *(*loaded).ptr();
    const int64_t vocabulary = Common(model.config()).vocab_size;
    const at::Tensor ids = at::arange(21, c10::kLong).view({3, 7});
    const at::Tensor apart = [&] {
      const AutocastGuard autocast(MixedPrecision::kBf16, c10::kCPU);
      const at::Tensor logits = model.forward({.input_ids = ids}).logits;
      EXPECT_EQ(logits.scalar_type(), c10::kBFloat16);
      return logits;
    }();
    const AutocastGuard autocast(MixedPrecision::kBf16, c10::kCPU);
    const LogitsWatch watch(21 * vocabulary, 18 * vocabulary);
    const ModelOutput output = model.forward({.input_ids = ids, .labels = ids});
    EXPECT_EQ(LogitsWatch::copies, 1);
    EXPECT_TRUE(at::equal(output.logits, apart.to(c10::kFloat)));
    const at::Tensor rows = output.logits.narrow(1, 0, 6).flatten(0, 1);
    const at::Tensor want = at::cross_entropy_loss(rows, ids.narrow(1, 1, 6).flatten());
    EXPECT_NEAR(output.loss.item<double>(), want.item<double>(), 1e-6);
  }
}

TEST(CausalLm, TokenTypeIds_AreRefusedWhereNothingReadsThem) {
  for (const auto& [name, has_types] : {std::pair("hf_models/llama_shared", false),
                                        {"hf_models/mixtral_shared", false},
                                        {"hf_models/qwen2_shared", false},
                                        {"hf_models/gpt2_shared", true},
                                        {"hf_models/bert_shared", true}}) {
    SCOPED_TRACE(name);
    const auto model = LoadPretrained(GoldenPath(name));
    ASSERT_TRUE(model.ok()) << model.status();
    const at::Tensor ids = at::tensor({1, 2}, c10::kLong).unsqueeze(0);
    const TextBatch batch = {.input_ids = ids, .token_type_ids = at::zeros_like(ids)};
    std::string error;
    try {
      (*model).ptr()->forward(batch);
    } catch (const c10::Error& e) {
      error = e.what_without_backtrace();
    }
    EXPECT_EQ(error.empty(), has_types) << error;
    EXPECT_EQ(error.find("leave token_type_ids out") == std::string::npos, has_types) << error;
  }
}

// Quirk hf_train/s006: the meaning of labels is decided for each batch.
TEST(BertForSequenceClassification, KindOfLabels_IsNotRemembered) {
  const auto model = LoadPretrained(GoldenPath("hf_train/bert_cls_shared"));
  ASSERT_TRUE(model.ok()) << model.status();
  const auto loss = [&](const at::Tensor& labels) {
    const at::Tensor ids = at::tensor({1, 2, 3, 4}, c10::kLong).view({2, 2});
    return (*model).ptr()->forward({.input_ids = ids, .labels = labels}).loss.item<double>();
  };
  const at::Tensor several = at::tensor({1., 0., 1., 0., 0., 1.}, c10::kFloat).view({2, 3});
  const double before = loss(several);
  loss(at::tensor({0, 2}, c10::kLong));
  EXPECT_EQ(loss(several), before);
}

}  // namespace
}  // namespace muster::models
