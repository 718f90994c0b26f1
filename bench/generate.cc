// Tokens per second of a Llama on the CPU, and the time from the start of the process to the first
// token. bench/run_generate makes the model (--make) and pairs the runs with transformers'.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "ATen/Functions.h"
#include "muster/models.h"

namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The shape of SmolLM2-135M, with random weights.
int Make(const std::string& dir) {
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
  const auto model = muster::models::MakeModel(config);
  const absl::Status saved = muster::save_pretrained(model, dir);
  if (!saved.ok()) std::fprintf(stderr, "%s\n", saved.ToString().c_str());
  return saved.ok() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const auto start = Clock::now();
  CLI::App app("Tokens per second of a model on the CPU");
  std::string make, model_dir, dtype = "float32";
  int64_t batch = 1, prompt_tokens = 32, new_tokens = 64, rounds = 3;
  app.add_option("--make", make, "write a model of 135 million parameters into this folder");
  app.add_option("--model", model_dir, "its folder");
  app.add_option("--batch", batch, "rows");
  app.add_option("--prompt_tokens", prompt_tokens, "tokens of the prompt");
  app.add_option("--new_tokens", new_tokens, "tokens to generate");
  app.add_option("--rounds", rounds, "generations, of which the fastest counts");
  app.add_option("--dtype", dtype, "float32 or bfloat16");
  CLI11_PARSE(app, argc, argv);
  if (!make.empty()) return Make(make);
  auto model = muster::load_causal_lm(
      model_dir, {.dtype = dtype == "bfloat16" ? c10::kBFloat16 : c10::kFloat});
  if (!model.ok()) {
    std::fprintf(stderr, "%s\n", model.status().ToString().c_str());
    return 1;
  }
  const double load = SecondsSince(start);
  const at::Tensor prompt =
      (at::arange(batch * prompt_tokens, c10::kLong) * 7919).remainder(1000).view({batch, -1});
  const auto generate = [&](int64_t count) {
    return muster::generate(*model, prompt, {}, {.max_new_tokens = count, .eos_token_ids = {{}}});
  };
  generate(1);
  const double first = SecondsSince(start);
  double best = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    const auto begin = Clock::now();
    generate(new_tokens);
    best = std::max(best, static_cast<double>(batch * new_tokens) / SecondsSince(begin));
  }
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  std::printf(
      "{\"bench\":\"generate\",\"batch\":%ld,\"dtype\":\"%s\",\"tokens_per_s\":%.2f,"
      "\"load_s\":%.3f,\"first_token_s\":%.3f,\"peak_mib\":%ld}\n",
      static_cast<long>(batch), dtype.c_str(), best, load, first, usage.ru_maxrss / 1024);
  return 0;
}
