// A model of 1.1 GiB: `make FOLDER` writes it, `whole FOLDER` and `offloaded FOLDER MIB` continue a
// prompt with it, and print the tokens and the most memory that this process has had.
#include <sys/resource.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "ATen/Functions.h"
#include "ATen/ops/tensor.h"
#include "c10/util/Exception.h"
#include "muster/models.h"
#include "muster/offload.h"

namespace muster {
namespace {

models::DecoderConfig Config() {
  models::DecoderConfig config;
  config.vocab_size = 8192;
  config.max_positions = 64;
  config.initializer_range = 0.05;
  config.hidden_size = 1024;
  config.intermediate_size = 3072;
  config.num_layers = 20;
  config.num_heads = config.num_key_value_heads = 16;
  config.head_dim = 64;
  config.sliding_windows.assign(20, 0);
  return config;
}

void Continue(models::CausalLm model) {
  const at::Tensor prompt = at::tensor({1, 77, 2900, 8000}, at::kLong).unsqueeze(0);
  const at::Tensor tokens =
      generate(model, prompt, {}, {.max_new_tokens = 3, .eos_token_ids = {{}}}).tokens;
  std::printf("{\"tokens\":[");
  for (int64_t i = 0; i < tokens.size(1); ++i) {
    std::printf("%s%ld", i == 0 ? "" : ",", static_cast<long>(tokens[0][i].item<int64_t>()));
  }
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  std::printf("],\"peak_rss_mib\":%ld", usage.ru_maxrss / 1024);
}

absl::Status Run(const std::string& mode, const std::string& folder, uint64_t mib) {
  if (mode == "make") {
    at::manual_seed(1);
    const models::TextModel model = models::MakeModel(Config());
    return save_pretrained(model, folder);
  }
  if (mode == "whole") {
    const auto model = load_causal_lm(folder);
    if (!model.ok()) return model.status();
    Continue(*model);
    std::printf("}\n");
    return absl::OkStatus();
  }
  const auto loaded =
      load_offloaded_causal_lm(folder, DeviceEntries{{"", "disk"}}, {.ring_bytes = mib << 20});
  if (!loaded.ok()) return loaded.status();
  Continue(loaded->model);
  const OffloadStats stats = loaded->weights->stats();
  std::printf(",\"offloaded_bytes\":%lu,\"ring_bytes\":%lu,\"overflow_bytes\":%lu}\n",
              static_cast<unsigned long>(stats.offloaded_bytes),
              static_cast<unsigned long>(stats.ring_bytes),
              static_cast<unsigned long>(stats.overflow_bytes));
  return absl::OkStatus();
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  try {
    const absl::Status status =
        muster::Run(argv[1], argv[2], argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0);
    if (status.ok()) return 0;
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  }
  return 1;
}
