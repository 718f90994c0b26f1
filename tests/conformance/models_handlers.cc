#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/tensor.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/test_ranks.h"
#include "muster/tokenizer.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"
#include "tests/parity/case_training.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/models/generate.h"
#include "worker/models/model_config.h"
#include "worker/models/pretrained.h"
#include "worker/models/text_generator.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;
using models::CausalLm;
using models::TextBatch;
using models::TextModel;

// The most steps and tokens of a case: enough for any, and few enough not to hold up the runner.
constexpr int64_t kMaxSteps = 1000;

at::Tensor Ids(const Json& rows) {
  const auto values = rows.get<std::vector<std::vector<int64_t>>>();
  TORCH_CHECK(!values.empty(), "no rows");
  std::vector<int64_t> flat;
  for (const auto& row : values) {
    TORCH_CHECK(row.size() == values[0].size(), "rows of different lengths");
    flat.insert(flat.end(), row.begin(), row.end());
  }
  return at::tensor(flat, c10::kLong)
      .view({static_cast<int64_t>(values.size()), static_cast<int64_t>(values[0].size())});
}

bool IsGiven(const Json& in, const char* name) { return in.contains(name) && !in[name].is_null(); }

at::Tensor IdsIf(const Json& in, const char* name) {
  return IsGiven(in, name) ? Ids(in[name]) : at::Tensor();
}

Json RowsOf(const at::Tensor& ids) {
  Json rows = Json::array();
  for (int64_t row = 0; row < ids.size(0); ++row) {
    const at::Tensor values = ids[row].contiguous();
    const int64_t* const data = values.const_data_ptr<int64_t>();
    rows.push_back(std::vector<int64_t>(data, data + values.numel()));
  }
  return rows;
}

// A new file with these tensors; the answer names it.
std::string WriteTensors(const NamedTensors& tensors) {
  static std::atomic<int> count = 0;
  const std::string path = TestPath("answer-" + std::to_string(count++) + ".safetensors");
  if (const auto written = WriteSafetensors(path, tensors); !written.ok()) {
    throw std::runtime_error(written.status().ToString());
  }
  return path;
}

models::LoadPretrainedOptions AsSaid(const Json& in) {
  models::LoadPretrainedOptions options;
  if (IsGiven(in, "architecture")) options.config.architecture = in["architecture"];
  return options;
}

// transformers warns if rotary positions go beyond the config's, and continues
bool IsRotary(const models::TextModelImpl& model) {
  return std::holds_alternative<models::DecoderConfig>(model.config());
}

Json HfModelsCase(const Json& in) {
  const std::string dir = in.at("dir");
  TextModel model = ValueOf(models::LoadPretrained(dir, AsSaid(in)));
  const WeightFiles files = ValueOf(WeightFiles::Open(dir));
  const at::NoGradGuard no_grad;
  const TextBatch batch = {.input_ids = Ids(in.at("input_ids")),
                           .attention_mask = IdsIf(in, "attention_mask"),
                           .token_type_ids = IdsIf(in, "token_type_ids"),
                           .position_ids = IdsIf(in, "position_ids")};
  const at::Tensor logits = model->forward(batch).logits.to(c10::kFloat);
  Json out = {{"golden", WriteTensors({{"logits", logits.contiguous()}})},
              {"logits_key", "logits"},
              {"logits_shape", logits.sizes().vec()},
              {"num_shards", files.Files().size()},
              {"total_size", 0},
              {"tensors", Json::array()}};
  std::vector<std::string> names;
  uint64_t total = 0;
  for (const WeightEntry& entry : files.entries()) {
    names.push_back(entry.tensor.name);
    total += WeightFiles::BytesOf(entry);
  }
  std::sort(names.begin(), names.end());
  out["tensors"] = names;
  out["total_size"] = total;
  // A classifier has no positions.
  const at::Tensor last = logits.dim() == 3 ? logits.select(1, logits.size(1) - 1) : logits;
  out["last_position_argmax"] = RowsOf(last.argmax(-1).unsqueeze(0))[0];
  if (IsGiven(in, "max_new_tokens")) {
    CausalLm lm = ValueOf(models::LoadCausalLm(dir, AsSaid(in)));
    const models::Generated generated =
        models::Generate(*lm, batch.input_ids, {},
                         {.max_new_tokens = IntOf(in, "max_new_tokens", 1, kMaxSteps),
                          .eos_token_ids = {{}},
                          .beyond_context = IsRotary(*lm)});
    out["generated"] = RowsOf(generated.tokens);
  }
  return out;
}

models::GenerateOptions OptionsOf(const Json& in) {
  models::GenerateOptions options;
  const auto number = [&in](const char* name, double* to) {
    if (IsGiven(in, name)) *to = in[name].get<double>();
  };
  const auto count = [&in](const char* name, int64_t* to) {
    if (IsGiven(in, name)) *to = IntOf(in, name, 0, kMaxSteps);
  };
  number("repetition_penalty", &options.rules.repetition_penalty);
  number("encoder_repetition_penalty", &options.rules.encoder_repetition_penalty);
  number("temperature", &options.rules.temperature);
  number("top_h", &options.rules.top_h);
  number("top_p", &options.rules.top_p);
  number("min_p", &options.rules.min_p);
  number("typical_p", &options.rules.typical_p);
  number("epsilon_cutoff", &options.rules.epsilon_cutoff);
  number("eta_cutoff", &options.rules.eta_cutoff);
  number("length_penalty", &options.length_penalty);
  count("no_repeat_ngram_size", &options.rules.no_repeat_ngram_size);
  count("encoder_no_repeat_ngram_size", &options.rules.encoder_no_repeat_ngram_size);
  if (!IsGiven(in, "min_new_tokens")) count("min_length", &options.rules.min_length);
  count("min_new_tokens", &options.rules.min_new_tokens);
  count("top_k", &options.rules.top_k);
  count("max_new_tokens", &options.max_new_tokens);
  count("num_beams", &options.num_beams);
  count("num_return_sequences", &options.num_return_sequences);
  if (IsGiven(in, "do_sample")) options.do_sample = in["do_sample"].get<bool>();
  if (IsGiven(in, "renormalize_logits")) {
    options.rules.renormalize_logits = in["renormalize_logits"].get<bool>();
  }
  if (IsGiven(in, "seed")) options.seed = in["seed"].get<uint64_t>();
  const auto tokens = [&in](const char* name, std::vector<int64_t>* to) {
    if (!IsGiven(in, name)) return;
    *to = in[name].is_array() ? in[name].get<std::vector<int64_t>>()
                              : std::vector<int64_t>{in[name].get<int64_t>()};
  };
  tokens("eos_token_id", &options.eos_token_ids.emplace());
  tokens("forced_eos_token_id", &options.rules.forced_eos_token_id);
  tokens("suppress_tokens", &options.rules.suppress_tokens);
  tokens("begin_suppress_tokens", &options.rules.begin_suppress_tokens);
  if (IsGiven(in, "forced_bos_token_id")) {
    options.rules.forced_bos_token_id = in["forced_bos_token_id"].get<int64_t>();
  }
  if (IsGiven(in, "bad_words_ids")) {
    options.rules.bad_words_ids = in["bad_words_ids"].get<std::vector<std::vector<int64_t>>>();
  }
  if (IsGiven(in, "sequence_bias")) {
    for (const Json& pair : in["sequence_bias"]) {
      options.rules.sequence_bias[pair.at(0).get<std::vector<int64_t>>()] =
          pair.at(1).get<double>();
    }
  }
  if (IsGiven(in, "stop_strings")) {
    options.ends_row = models::EndsAtStopString(ValueOf(Tokenizer::FromFile(in.at("tokenizer"))),
                                                in["stop_strings"].get<std::vector<std::string>>());
  }
  if (IsGiven(in, "exponential_decay_length_penalty")) {
    const Json& decay = in["exponential_decay_length_penalty"];
    options.rules.exponential_decay_length_penalty = models::ScoreRules::LengthDecay{
        .start = decay.at(0).get<int64_t>(), .factor = decay.at(1).get<double>()};
  }
  if (IsGiven(in, "pad_token_id")) options.pad_token_id = in["pad_token_id"].get<int64_t>();
  if (IsGiven(in, "early_stopping")) {
    const Json& early = in["early_stopping"];
    options.early_stopping = early == "never"    ? models::EarlyStopping::kNever
                             : early.get<bool>() ? models::EarlyStopping::kWhenFull
                                                 : models::EarlyStopping::kWhenUnlikely;
  }
  return options;
}

Json NumbersOf(const at::Tensor& values) {
  Json out = Json::array();
  const at::Tensor wide = values.to(c10::kDouble).contiguous();
  for (int64_t i = 0; i < wide.numel(); ++i) {
    const double value = wide.const_data_ptr<double>()[i];
    if (std::isfinite(value)) {
      out.push_back(value);
    } else {
      out.push_back(std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
    }
  }
  return out;
}

Json HfGenerateCase(const Json& in) {
  CausalLm model = ValueOf(models::LoadCausalLm(in.at("dir"), AsSaid(in)));
  const std::string mode = in.at("mode");
  models::GenerateOptions options = OptionsOf(in);
  options.beyond_context = IsRotary(*model);
  const at::Tensor ids = Ids(in.at("input_ids"));
  const at::Tensor mask = IdsIf(in, "attention_mask");
  if (mode == "next_token") {
    options.rules.end_tokens = *options.eos_token_ids;
    Json rows = Json::array();
    const at::Tensor logprobs = models::NextTokenLogprobs(*model, ids, mask, options.rules);
    for (int64_t row = 0; row < logprobs.size(0); ++row) rows.push_back(NumbersOf(logprobs[row]));
    return {{"logprobs", rows}};
  }
  TORCH_CHECK(mode == "greedy" || mode == "beam", "unknown mode '", mode, "'");
  options.output_logits = mode == "greedy";
  const models::Generated generated = models::Generate(*model, ids, mask, options);
  Json out = {{"generated", RowsOf(generated.tokens)}};
  if (mode == "beam") {
    out["scores"] = NumbersOf(generated.scores);
  } else {
    out["golden"] = WriteTensors({{"logits", generated.logits.contiguous()}});
    out["logits_key"] = "logits";
    out["logits_shape"] = generated.logits.sizes().vec();
  }
  return out;
}

// Returns the batches of a case, by name [steps, ...].
std::map<std::string, at::Tensor> BatchesOf(const std::string& path) {
  std::map<std::string, at::Tensor> batches;
  const auto reader = ValueOf(SafetensorsReader::Open(path));
  for (auto& [name, tensor] : ValueOf(reader.ReadAll())) batches.emplace(name, tensor);
  return batches;
}

NamedTensors Floats(const models::TextModelImpl& model, bool gradients) {
  NamedTensors all;
  const auto add = [&all](const std::string& name, const at::Tensor& tensor) {
    all.emplace_back(name, tensor.detach().to(c10::kFloat).contiguous().clone());
  };
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& tensor = gradients ? item.value().grad() : item.value();
    TORCH_CHECK(tensor.defined(), item.key(), " has no gradient");
    add(item.key(), tensor);
  }
  if (gradients) return all;
  // A buffer that the model does not use is a parameter in transformers, without a gradient.
  for (const auto& item : model.named_buffers()) add(item.key(), item.value());
  return all;
}

Json HfTrainCase(const Json& in) {
  const std::string dir = in.at("dir");
  models::LoadPretrainedOptions options = AsSaid(in);
  TextModel loaded = ValueOf(models::LoadPretrained(dir, options));
  const auto* const decoder = std::get_if<models::DecoderConfig>(&loaded->config());
  const bool of_config = decoder != nullptr && decoder->output_router_logits;
  const bool has_aux =
      IsGiven(in, "output_router_logits") ? in["output_router_logits"].get<bool>() : of_config;
  if (has_aux != of_config) {
    models::DecoderConfig config = std::get<models::DecoderConfig>(loaded->config());
    config.output_router_logits = has_aux;
    loaded = models::MakeModel(config);
    NamedTensors targets;
    for (const auto& item : loaded->named_parameters()) {
      targets.emplace_back(item.key(), item.value());
    }
    ValueOf(LoadWeights(dir, targets));
  }
  const auto batches = BatchesOf(in.at("batch"));
  const int64_t steps = IntOf(in, "steps", 1, kMaxSteps);
  const Json& adamw = in.at("optimizer");
  TORCH_CHECK(adamw.at("type") == "adamw", "unknown optimizer");
  Json out = {{"loss", Json::array()}, {"grad_norm", Json::array()}};
  AcceleratorOptions engine;
  engine.mixed_precision = in.at("mixed_precision").get<std::string>();
  RunAccelerators(1, engine, [&](Accelerator& accelerator) {
    FusedAdamW fused(loaded->parameters(),
                     {.lr = adamw.at("lr"),
                      .betas = {adamw.at("betas").at(0), adamw.at("betas").at(1)},
                      .eps = adamw.at("eps"),
                      .weight_decay = adamw.at("weight_decay")});
    auto [model, optimizer] = accelerator.prepare(loaded, fused);
    // The cases were made in this mode; dropout, if any, is off.
    model->eval();
    for (int64_t step = 0; step < steps; ++step) {
      const auto at_step = [&](const char* name) {
        const auto found = batches.find(name);
        return found == batches.end() ? at::Tensor() : found->second[step];
      };
      const models::ModelOutput output =
          model(TextBatch{.input_ids = at_step("input_ids"),
                          .attention_mask = at_step("attention_mask"),
                          .labels = at_step("labels"),
                          .token_type_ids = at_step("token_type_ids"),
                          .position_ids = at_step("position_ids")});
      accelerator.backward(output.loss);
      if (step == 0) out["grads"] = WriteTensors(Floats(*loaded, /*gradients=*/true));
      const at::Tensor norm =
          accelerator.clip_grad_norm_(loaded->parameters(), in.at("clip_norm").get<double>());
      optimizer.step();
      optimizer.zero_grad();
      out["loss"].push_back(output.loss.item<double>());
      out["grad_norm"].push_back(norm.item<double>());
      if (has_aux) out["aux_loss"].push_back(output.aux_loss.item<double>());
    }
  });
  out["final_weights"] = WriteTensors(Floats(*loaded, /*gradients=*/false));
  return out;
}

Json TrainingCase(const Json& in) {
  parity::Trained trained;
  RunAccelerators(RanksOf(in), parity::TrainingOptions(in, "no_shard"),
                  [&](Accelerator& accelerator) {
                    parity::Trained mine = parity::TrainCase(accelerator, in, "");
                    if (accelerator.is_main_process()) trained = std::move(mine);
                  });
  NamedTensors weights(trained.weights.begin(), trained.weights.end());
  trained.out["final_weights"] = WriteTensors(weights);
  return trained.out;
}

}  // namespace

std::map<std::string, Handler> ModelsHandlers() {
  return {{"hf_models", HfModelsCase},
          {"hf_generate", HfGenerateCase},
          {"hf_train", HfTrainCase},
          {"training", TrainingCase}};
}

}  // namespace muster::conformance
