// Trains a decoder on the bytes of a file, or on a file of tokens, with any sharding strategy:
//
//   muster launch --num_processes 2 -- lm --data book.txt --sharding zero3
//   muster launch --num_processes 2 -- lm --tokens train.bin --vocabulary 50257 --sharding zero3
//
// A file of tokens holds their ids one after the other, little-endian, in two or four bytes each,
// as nanoGPT's prepare.py writes them.
//
// Rank 0 prints one JSON line at the end: loss, milliseconds for a step, peak memory of the
// process.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>

#include "examples/lm/decoder.h"
#include "muster/muster.h"

namespace {

// The most steps in a row that may overflow: fp16 needs some twenty to lower its loss scale until
// gradients fit.
constexpr int kMostOverflows = 100;

struct Flags {
  std::string data, tokens, sharding, checkpoint;
  DecoderOptions model;
  int64_t batch_size = 8, steps = 100, group_size = 0, token_bytes = 2;
  double lr = 3e-4, weight_decay = 0.1, clip_norm = 1;
  bool asynchronous = false;
  bool activation_checkpointing = false;
  std::string activation_offload;
};

// Returns unsigned numbers, which LibTorch has as signed ones.
at::Tensor IdsOf(const at::Tensor& tokens) {
  const int64_t bits = 8 * static_cast<int64_t>(tokens.element_size());
  return tokens.to(torch::kLong).bitwise_and_((int64_t{1} << bits) - 1);
}

// Returns rows of context + 1 tokens [rows, context + 1], mapped from the file: processes of a
// machine share what they have read of it. The rest at the end of the file is not used.
at::Tensor Rows(const Flags& flags) {
  const bool text = flags.tokens.empty();
  const std::string flag = text ? "--data" : "--tokens";
  const std::string& path = text ? flags.data : flags.tokens;
  const int64_t size = text ? 1 : flags.token_bytes;
  std::error_code error;
  TORCH_CHECK(std::filesystem::is_regular_file(path, error) && std::ifstream(path).good(), flag,
              " ", path, ": cannot be read");
  const auto length = static_cast<int64_t>(std::filesystem::file_size(path));
  TORCH_CHECK(length % size == 0, flag, " ", path, ": ", length,
              " bytes are not a whole number of tokens of ", size, " bytes (--token_bytes)");
  const int64_t row = flags.model.context + 1;
  const int64_t rows = length / size / row;
  TORCH_CHECK(rows > 0, flag, " ", path, ": ", length / size, text ? " bytes" : " tokens",
              " are less than one row of ", row);
  const at::Tensor tokens = at::from_file(path, /*shared=*/false, length / size,
                                          size == 1   ? torch::kByte
                                          : size == 2 ? torch::kShort
                                                      : torch::kInt);
  constexpr int64_t kAtOnce = 1 << 20;
  for (int64_t i = 0; i < tokens.numel(); i += kAtOnce) {
    const at::Tensor ids = IdsOf(tokens.slice(0, i, i + kAtOnce));
    const at::Tensor wrong = ids.ge(flags.model.vocabulary);
    if (!wrong.any().item<bool>()) continue;
    const int64_t at = i + wrong.to(torch::kByte).argmax().item<int64_t>();
    TORCH_CHECK(false, flag, " ", path, ": token ", at, " (at byte ", at * size, ") is ",
                ids[at - i].item<int64_t>(), ", but --vocabulary is ", flags.model.vocabulary,
                text ? "" : "; ids are little-endian, of --token_bytes each");
  }
  return tokens.narrow(0, 0, rows * row).view({rows, row});
}

absl::Status Train(muster::Accelerator& accelerator, const Flags& flags) {
  muster::set_seed(1);
  // With --sharding zero3 no process ever has memory for the whole model.
  Decoder net = muster::deferred_init([&] { return Decoder(flags.model); });
  // No decay for biases, norms and embeddings of positions.
  muster::FusedAdamW adamw(muster::DecayGroups(
      *net, muster::AdamWOptions{.lr = flags.lr, .weight_decay = flags.weight_decay},
      "positions\\.weight"));
  const at::Tensor rows = Rows(flags);
  auto [model, optimizer, loader] =
      accelerator.prepare(net, adamw,
                          muster::batches(muster::TensorDataset<at::Tensor>(rows), flags.batch_size)
                              .shuffle(true)
                              .drop_last(true));
  TORCH_CHECK(loader.size() > 0,
              flags.tokens.empty() ? "--data " + flags.data : "--tokens " + flags.tokens, ": ",
              rows.size(0), " rows are less than a batch of --batch_size for each process");
  if (!flags.checkpoint.empty() && std::ifstream(flags.checkpoint + "/manifest.json").good()) {
    if (absl::Status loaded = accelerator.load_state(flags.checkpoint); !loaded.ok()) return loaded;
  }
  double loss_sum = 0;
  int64_t steps = 0;
  int overflows = 0;
  std::chrono::steady_clock::time_point start;
  while (optimizer.steps() < flags.steps) {
    for (auto& batch : loader) {
      // The first steps allocate, and agree on orders.
      if (steps++ == 2) start = std::chrono::steady_clock::now();
      auto scope = accelerator.accumulate();
      const at::Tensor ids = IdsOf(batch.value());
      const at::Tensor logits = model(ids.slice(1, 0, -1));
      const at::Tensor loss =
          at::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), ids.slice(1, 1).flatten());
      accelerator.backward(loss);
      if (accelerator.sync_gradients() && flags.clip_norm > 0) {
        accelerator.clip_grad_norm_(model.parameters(), flags.clip_norm);
      }
      optimizer.step();
      optimizer.zero_grad();
      loss_sum = loss.item<double>();
      if (!accelerator.sync_gradients()) continue;
      // Under fp16 a step that overflows is skipped and not counted: without this limit the loop
      // might never end.
      overflows = optimizer.step_was_skipped() ? overflows + 1 : 0;
      TORCH_CHECK(overflows < kMostOverflows, "after ", optimizer.steps(), " steps ", overflows,
                  " in a row overflow fp16: take a smaller --lr, or --mixed_precision bf16");
      // Checked here and not at the start of the body: a batch that the loop has taken counts as
      // used, and a run that resumes would continue behind it.
      if (optimizer.steps() >= flags.steps) break;
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double loss = accelerator.reduce(loss_sum, "mean");
  if (!flags.checkpoint.empty()) {
    if (absl::Status saved = accelerator.save_state(flags.checkpoint); !saved.ok()) return saved;
  }
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  if (accelerator.is_main_process()) {
    std::printf(
        "{\"processes\":%d,\"steps\":%lld,\"loss\":%.6f,"
        "\"ms_per_step\":%.2f,\"peak_rss_mib\":%ld}\n",
        accelerator.num_processes(), static_cast<long long>(steps), loss,
        steps > 2 ? 1e3 * seconds / static_cast<double>(steps - 2) : 0.0, usage.ru_maxrss / 1024);
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Trains a decoder on the bytes of a file, or on a file of tokens.");
  auto* const what = app.add_option_group("what to train on")->require_option(1);
  what->add_option("--data", flags.data, "a file of which each byte is a token");
  CLI::Option* const tokens = what->add_option(
      "--tokens", flags.tokens,
      "a file of token ids, little-endian, one after the other, as nanoGPT's train.bin");
  app.add_option("--token_bytes", flags.token_bytes, "of each id in --tokens: 2 or 4; default 2")
      ->needs(tokens)
      ->check(CLI::IsMember({2, 4}));
  app.add_option("--vocabulary", flags.model.vocabulary,
                 "ids are below it; default 256, and 50304 with --tokens")
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--sharding", flags.sharding,
                 "no_shard, zero1, zero2, zero3 or hybrid. Default: MUSTER_SHARDING, which muster "
                 "launch --sharding sets")
      ->check(CLI::IsMember({"no_shard", "zero1", "zero2", "zero3", "hybrid"}));
  app.add_option("--group_size", flags.group_size, "hybrid: processes that share one copy");
  app.add_option("--checkpoint", flags.checkpoint,
                 "folder to resume from, if it is there, and to save to at the end");
  app.add_flag("--asynchronous", flags.asynchronous, "save while training goes on");
  app.add_flag("--activation_checkpointing", flags.activation_checkpointing,
               "run each block again in the backward pass rather than keep what it needs");
  app.add_option("--activation_offload", flags.activation_offload,
                 "with it: a folder for the inputs of blocks between the passes")
      ->needs("--activation_checkpointing");
  app.add_option("--context", flags.model.context)->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--width", flags.model.width)->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--heads", flags.model.heads)->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--layers", flags.model.layers)->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--batch_size", flags.batch_size, "of each process")
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--steps", flags.steps)->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--lr", flags.lr);
  app.add_option("--weight_decay", flags.weight_decay,
                 "not of biases, norms and embeddings of positions")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--clip_norm", flags.clip_norm,
                 "the most that the norm of all gradients may be; 0: any, as muster launch "
                 "--optimizer_in_backward needs it")
      ->check(CLI::NonNegativeNumber);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    // Exit code 2 is a usage error, after which no launcher starts the program again.
    std::fprintf(stderr, "lm: %s (see --help)\n", error.what());
    return 2;
  }
  if (!flags.tokens.empty() && app.count("--vocabulary") == 0) flags.model.vocabulary = 50304;
  muster::AcceleratorOptions options;
  if (!flags.sharding.empty()) {
    options.sharding = muster::ParseSharding(flags.sharding, flags.group_size);
    options.sharding->unit_types = {"Block"};
  }
  options.checkpoint.asynchronous = flags.asynchronous;
  if (flags.activation_checkpointing) {
    options.activation_checkpointing = {.block_types = {"Block"}};
    if (!flags.activation_offload.empty()) {
      options.activation_checkpointing->offload = muster::Offload::kDisk;
      options.activation_checkpointing->offload_path = flags.activation_offload;
    }
  }
  return muster::run(argc, argv, options,
                     [&](muster::Accelerator& accelerator, const muster::Arguments&) {
                       return Train(accelerator, flags);
                     });
}
