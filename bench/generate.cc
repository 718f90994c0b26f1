// Tokens per second of a model with random weights. bench/run_generate makes the model (--make),
// pairs the runs with transformers', and times the command by the lines of it that come first: one
// when the model is loaded, one at the first token.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/str_join.h"
#include "bench/load_average.h"
#include "muster/models.h"

namespace {

using Clock = std::chrono::steady_clock;

// How many tokens of the first row are shown, to compare with another program's.
constexpr int64_t kShownTokens = 16;

// Prints a line that bench/run_generate waits for.
void Say(const char* what) {
  std::printf("%s\n", what);
  std::fflush(stdout);
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// The shape of SmolLM2-135M.
muster::models::DecoderConfig SmallLlama() {
  muster::models::DecoderConfig config;
  config.architecture = muster::models::Architecture::kLlamaForCausalLM;
  config.vocab_size = 49152;
  config.max_positions = 8192;
  config.tie_word_embeddings = true;
  config.hidden_size = 576;
  config.intermediate_size = 1536;
  config.num_layers = 30;
  config.num_heads = 9;
  config.num_key_value_heads = 3;
  config.head_dim = 64;
  config.rms_norm_eps = 1e-5;
  config.rope.theta = 100000;
  config.sliding_windows.assign(30, 0);
  return config;
}

// The shape of Llama-3.2-1B.
muster::models::DecoderConfig LargeLlama() {
  muster::models::DecoderConfig config = SmallLlama();
  config.vocab_size = 128256;
  config.max_positions = 131072;
  config.hidden_size = 2048;
  config.intermediate_size = 8192;
  config.num_layers = 16;
  config.num_heads = 32;
  config.num_key_value_heads = 8;
  config.rope.kind = muster::models::RopeConfig::Kind::kLlama3;
  config.rope.theta = 500000;
  config.rope.factor = 32;
  config.sliding_windows.assign(16, 0);
  return config;
}

// The shape of GPT-2 with 124 million parameters.
muster::models::Gpt2Config Gpt2() {
  muster::models::Gpt2Config config;
  config.architecture = muster::models::Architecture::kGpt2LMHeadModel;
  config.vocab_size = 50257;
  config.max_positions = 1024;
  config.tie_word_embeddings = true;
  config.hidden_size = 768;
  config.inner_size = 3072;
  config.num_layers = 12;
  config.num_heads = 12;
  return config;
}

int Make(const std::string& dir, const std::string& shape, c10::ScalarType type) {
  const muster::models::ModelConfig config = shape == "gpt2" ? muster::models::ModelConfig(Gpt2())
                                             : shape == "llama-1b"
                                                 ? muster::models::ModelConfig(LargeLlama())
                                                 : muster::models::ModelConfig(SmallLlama());
  muster::models::TextModel model = muster::models::MakeModel(config);
  model->to(type);
  const absl::Status saved = muster::save_pretrained(model, dir);
  if (!saved.ok()) std::fprintf(stderr, "%s\n", saved.ToString().c_str());
  return saved.ok() ? 0 : 1;
}

std::string FirstTokens(const at::Tensor& tokens) {
  const at::Tensor row = tokens[0].contiguous();
  const int64_t* const data = row.const_data_ptr<int64_t>();
  return absl::StrJoin(data, data + std::min(row.numel(), kShownTokens), ", ");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Tokens per second of a model");
  std::string make, model_dir, dtype = "float32", device = "cpu", shape = "llama-135m";
  std::vector<int64_t> batches = {1};
  int64_t prompt_tokens = 32, new_tokens = 64, rounds = 3;
  app.add_option("--make", make, "write a model of --shape and --dtype into this folder");
  app.add_option("--shape", shape, "llama-135m, llama-1b or gpt2")
      ->check(CLI::IsMember({"llama-135m", "llama-1b", "gpt2"}));
  app.add_option("--model", model_dir, "its folder");
  app.add_option("--device", device, "cpu or cuda:N");
  app.add_option("--batch", batches, "rows; several numbers, one line each: 1,8,32")
      ->delimiter(',');
  app.add_option("--prompt_tokens", prompt_tokens, "tokens of the prompt");
  app.add_option("--new_tokens", new_tokens, "tokens to generate");
  app.add_option("--rounds", rounds, "generations, of which the median counts")
      ->check(CLI::PositiveNumber);
  app.add_option("--dtype", dtype, "float32 or bfloat16")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  CLI11_PARSE(app, argc, argv);
  const c10::ScalarType type = dtype == "bfloat16" ? c10::kBFloat16 : c10::kFloat;
  if (!make.empty()) return Make(make, shape, type);
  auto model = muster::load_causal_lm(model_dir, {.dtype = type, .device = c10::Device(device)});
  if (!model.ok()) {
    std::fprintf(stderr, "%s\n", model.status().ToString().c_str());
    return 1;
  }
  Say("loaded");
  bool first = true;
  for (const int64_t batch : batches) {
    const at::Tensor prompt =
        (at::arange(batch * prompt_tokens, c10::kLong) * 7919).remainder(1000).view({batch, -1});
    // Tokens come to the host, so that a GPU is done when it returns.
    const auto generate = [&](int64_t count) {
      return muster::generate(*model, prompt, {}, {.max_new_tokens = count, .eos_token_ids = {{}}});
    };
    generate(1);
    if (std::exchange(first, false)) Say("first token");
    std::vector<double> rates;
    std::string tokens;
    for (int64_t round = 0; round < rounds; ++round) {
      const auto begin = Clock::now();
      const muster::models::Generated generated = generate(new_tokens);
      rates.push_back(static_cast<double>(batch * new_tokens) / SecondsSince(begin));
      tokens = FirstTokens(generated.tokens);
    }
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    std::printf(
        "{\"bench\":\"generate\",\"device\":\"%s\",\"batch\":%ld,\"dtype\":\"%s\","
        "\"tokens_per_s\":%.2f,\"fastest_tokens_per_s\":%.2f,\"peak_mib\":%ld,"
        "\"tokens\":[%s],\"load\":%.2f}\n",
        device.c_str(), static_cast<long>(batch), dtype.c_str(), Median(rates),
        *std::max_element(rates.begin(), rates.end()), usage.ru_maxrss / 1024, tokens.c_str(),
        muster::bench::LoadAverage());
    std::fflush(stdout);
  }
  return 0;
}
