// Models whose config.json was put together at random, and some as on the Hub
// (tests/testdata/models/README.md): their outputs, losses and learned weights are those of
// transformers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/models/pretrained.h"

namespace muster::models {
namespace {

using Json = nlohmann::json;

// Returns numbers from -0.5 to 0.5, as make.py has them.
at::Tensor Numbers(const std::string& name, int64_t count) {
  uint32_t salt = 2166136261;
  for (const char byte : name) salt = (salt ^ static_cast<unsigned char>(byte)) * 16777619;
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1 + salt;
    x ^= x >> 16;
    x *= 0x85EBCA6B;
    x ^= x >> 13;
    x *= 0xC2B2AE35;
    x ^= x >> 16;
    values.push_back(x * 0x1.0p-32 - 0.5);
  }
  return at::tensor(values, c10::kDouble);
}

at::Tensor Weight(const std::string& name, const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  const at::Tensor numbers = Numbers(name, count).view(shape);
  const bool is_weight = name.size() >= 6 && name.compare(name.size() - 6, 6, "weight") == 0;
  const at::Tensor values = shape.size() > 1 ? numbers * 0.8
                            : is_weight      ? 1 + numbers * 0.6
                                             : numbers * 0.4;
  return values.to(c10::kFloat);
}

void Flatten(const Json& value, std::vector<double>* to) {
  if (!value.is_array()) return to->push_back(value.get<double>());
  for (const Json& each : value) Flatten(each, to);
}

bool HasFraction(const Json& value) {
  return value.is_array() ? std::any_of(value.begin(), value.end(), HasFraction)
                          : value.is_number_float();
}

// Reads nested lists; int64 unless the numbers are written with a point. Undefined if there are
// none.
at::Tensor TensorOf(const Json& in, const char* name) {
  if (!in.contains(name)) return {};
  std::vector<int64_t> shape;
  for (const Json* each = &in[name]; each->is_array(); each = &each->at(0)) {
    shape.push_back(static_cast<int64_t>(each->size()));
  }
  std::vector<double> values;
  Flatten(in[name], &values);
  return at::tensor(values, c10::kDouble)
      .view(shape)
      .to(HasFraction(in[name]) ? c10::kFloat : c10::kLong);
}

void ExpectSaid(const at::Tensor& logits, const Json& want) {
  const at::Tensor flat = logits.detach().to(c10::kDouble).flatten(0, -2);
  ASSERT_EQ(flat.size(0), static_cast<int64_t>(want.size()));
  const at::Tensor best = flat.amax(1);
  const at::Tensor sums = flat.matmul(Numbers("logits", flat.size(1)));
  for (int64_t i = 0; i < flat.size(0); ++i) {
    if (want[i].is_null()) continue;
    const double bound = 1e-4 * std::max(1.0, flat[i].abs().max().item<double>() / 10);
    EXPECT_NEAR(best[i].item<double>(), want[i][0].get<double>(), bound) << "position " << i;
    EXPECT_NEAR(sums[i].item<double>(), want[i][1].get<double>(), bound) << "position " << i;
  }
}

void ExpectGradients(const TextModelImpl& model, const Json& want) {
  std::map<std::string, at::Tensor> left;
  for (const auto& item : model.named_parameters()) left.emplace(item.key(), item.value().grad());
  double squares = 0;
  for (const auto& [name, of_tensor] : want.items()) {
    squares += std::pow(of_tensor[0].get<double>(), 2);
  }
  for (const auto& [name, of_tensor] : want.items()) {
    const auto found = left.find(model.ParameterName(name));
    ASSERT_TRUE(found != left.end()) << name;
    ASSERT_TRUE(found->second.defined()) << name;
    const at::Tensor gradient = found->second.to(c10::kDouble);
    const double norm = of_tensor[0], bound = 1e-4 * (norm + 0.001 * std::sqrt(squares));
    EXPECT_NEAR(gradient.norm().item<double>(), norm, bound) << name;
    EXPECT_NEAR(gradient.flatten().dot(Numbers(name, gradient.numel())).item<double>(),
                of_tensor[1].get<double>(), bound)
        << name;
    left.erase(found);
  }
  // Gradients of what transformers does not use.
  for (const auto& [name, gradient] : left) {
    EXPECT_TRUE(!gradient.defined() || !gradient.any().item<bool>()) << name;
  }
}

void ExpectPasses(CausalLmImpl& model, const TextBatch& batch, const Json& passes,
                  const Json& want) {
  const at::NoGradGuard no_grad;
  KvCache cache = model.NewCache(batch.input_ids.size(0), batch.input_ids.size(1));
  std::vector<at::Tensor> logits;
  for (const Json& pass : passes) {
    const int64_t count = pass.get<int64_t>(), past = cache.length();
    TextBatch part = {.input_ids = batch.input_ids.narrow(1, past, count)};
    if (batch.attention_mask.defined()) {
      part.attention_mask = batch.attention_mask.narrow(1, 0, past + count);
    }
    logits.push_back(model.NextLogits(part, &cache, count));
  }
  ExpectSaid(at::cat(logits, 1), want);
}

void Check(const Json& test_case) {
  const TestFolder folder;
  NamedTensors tensors;
  for (const auto& [name, shape] : test_case["tensors"].items()) {
    tensors.emplace_back(name, Weight(name, shape.get<std::vector<int64_t>>()));
  }
  ASSERT_TRUE(WriteSafetensors(folder.Path("model.safetensors"), tensors).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("config.json"), test_case["config"].dump()).ok());
  auto model =
      LoadPretrained(folder.path(), {.config = {.architecture = test_case["architecture"]}});
  ASSERT_TRUE(model.ok()) << model.status();

  const Json& in = test_case["in"];
  const Json& want = test_case["out"];
  TextBatch batch = {.input_ids = TensorOf(in, "input_ids"),
                     .attention_mask = TensorOf(in, "attention_mask"),
                     .token_type_ids = TensorOf(in, "token_type_ids"),
                     .position_ids = TensorOf(in, "position_ids")};
  const at::Tensor said = (*model).ptr()->forward(batch).logits;
  ExpectSaid(said, want["said"]);
  if (want.contains("said_in_passes")) {
    ExpectPasses(*(*model)->as<CausalLmImpl>(), batch, in["passes"], want["said_in_passes"]);
  }

  const TestFolder again;
  ASSERT_TRUE(SavePretrained(**model, again.path()).ok());
  const auto saved = LoadPretrained(again.path());
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_TRUE(at::equal((*saved).ptr()->forward(batch).logits, said));

  if (!want.contains("loss")) return;
  batch.labels = TensorOf(in, "labels");
  const ModelOutput output = (*model).ptr()->forward(batch);
  EXPECT_NEAR(output.loss.item<double>(), want["loss"].get<double>(),
              5e-5 * std::max(1.0, std::abs(want["loss"].get<double>())));
  ASSERT_EQ(output.aux_loss.defined(), want.contains("aux_loss"));
  if (output.aux_loss.defined()) {
    EXPECT_NEAR(output.aux_loss.item<double>(), want["aux_loss"].get<double>(), 5e-5);
  }
  output.loss.backward();
  ExpectGradients(**model, want["gradients"]);
}

TEST(RecordedModels, EveryConfig_SaysAndLearnsWhatTransformersDoes) {
  const char* const others = std::getenv("MUSTER_MODEL_CASES");
  const std::string path =
      others != nullptr ? others : testing_support::TestdataPath("models/cases.jsonl");
  std::ifstream file(path);
  int count = 0;
  for (std::string line; std::getline(file, line); ++count) {
    const Json test_case = Json::parse(line);
    SCOPED_TRACE(test_case["id"].get<std::string>() + ": " + test_case["config"].dump());
    Check(test_case);
  }
  EXPECT_GT(count, 0) << path << " has no cases";
}

}  // namespace
}  // namespace muster::models
