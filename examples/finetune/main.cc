// Fine-tunes a language model of a Hub folder on a text file, all of its weights or LoRA adapters:
//
//   muster launch --num_processes 2 -- finetune --model gpt2 --data notes.txt --output_dir tuned
//   finetune --model gpt2 --data notes.txt --output_dir adapters --lora 8
//
// --sharding and --mixed_precision are for models that fit no single process: each process reads
// only its part of a sharded model's weights. The folder that the program writes loads in
// transformers (adapters load in PEFT), `muster generate` and here again. Rank 0 prints a JSON line
// every --log_every steps and at the end. With --checkpoint_dir, a run that was stopped continues
// where it was, also on other processes.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "examples/finetune/packed_text.h"
#include "muster/models.h"
#include "muster/muster.h"
#include "muster/tokenizer.h"

namespace {

using muster::models::CausalLm;
using muster::models::LoraOptions;
using muster::models::TextBatch;

// The most steps in a row that may overflow: fp16 needs some twenty to lower its loss scale until
// gradients fit.
constexpr int kMostOverflows = 100;

struct Flags {
  std::string model, data, output, sharding, checkpoints;
  std::vector<std::string> ignore_settings;
  // 0: 512, or the model's own.
  int64_t context = 0;
  int64_t batch_size = 4, steps = 100, accumulate = 1, lora = 0, log_every = 10,
          checkpoint_steps = 0;
  double lr = 2e-5, warmup = 0.05, weight_decay = 0;
  bool activation_checkpointing = false;
  uint64_t seed = 1;
};

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  // A folder opens like a file, and cannot be read.
  if (!file.good() || std::filesystem::is_directory(path)) {
    return absl::NotFoundError(absl::StrCat("--data ", path, ": cannot be read"));
  }
  text << file.rdbuf();
  return text.str();
}

// Returns the text as rows of --context tokens.
absl::StatusOr<at::Tensor> Rows(const Flags& flags, const muster::models::CommonConfig& config) {
  auto tokenizer = muster::Tokenizer::FromFolder(flags.model);
  if (!tokenizer.ok()) return tokenizer.status();
  auto text = ReadText(flags.data);
  if (!text.ok()) return text.status();
  if (flags.context > config.max_positions) {
    return absl::InvalidArgumentError(absl::StrCat("--context ", flags.context,
                                                   " is more than the model's ",
                                                   config.max_positions, " positions"));
  }
  const int64_t context =
      flags.context > 0 ? flags.context : std::min<int64_t>(512, config.max_positions);
  const int64_t end = config.eos_token_ids.empty() ? -1 : config.eos_token_ids.front();
  auto packed = PackText(*text, *tokenizer, context, end);
  if (packed.ok()) return packed;
  return absl::Status(packed.status().code(),
                      absl::StrCat("--data ", flags.data, ": ", packed.status().message()));
}

// Copies what transformers and `muster generate` need besides the weights.
void CopyTokenizer(const std::string& from, const std::string& to) {
  for (const char* const name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja",
        "chat_template.json", "generation_config.json"}) {
    const std::filesystem::path file = std::filesystem::path(from) / name;
    // --output_dir may be the model's own folder.
    const std::filesystem::path copy = std::filesystem::path(to) / name;
    if (!std::filesystem::exists(file) ||
        (std::filesystem::exists(copy) && std::filesystem::equivalent(file, copy))) {
      continue;
    }
    std::filesystem::copy_file(file, copy, std::filesystem::copy_options::overwrite_existing);
  }
}

template <class Model>
absl::Status Save(muster::Accelerator& accelerator, const Flags& flags, CausalLm& net,
                  const Model& model, const LoraOptions& lora) {
  absl::Status saved;
  if (flags.lora > 0) {
    // The base model is not written, so no process needs room for it.
    const auto adapters = accelerator.get_state_dict(model, muster::models::IsLoraParameter);
    if (accelerator.is_main_process()) {
      saved = muster::models::SaveLora(*net, adapters, flags.output, lora, flags.model);
    }
    return saved;
  }
  saved = accelerator.save_model(model, flags.output);
  if (saved.ok() && accelerator.is_main_process()) {
    saved = muster::save_config(net, flags.output);
    CopyTokenizer(flags.model, flags.output);
  }
  return saved;
}

// Called before the training, whose result would be lost otherwise.
absl::Status MakeOutput(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("--output_dir ", folder, " cannot be made: ", error.message()));
  }
  // An existing folder may be read-only, or on a disk that is.
  const std::string probe = absl::StrCat(folder, "/.finetune-", getpid());
  if (!std::ofstream(probe).flush()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--output_dir ", folder, " cannot be written to: ", strerror(errno)));
  }
  std::filesystem::remove(probe, error);
  return absl::OkStatus();
}

// A model without weights yet gets them after prepare(), by LoadParts().
absl::StatusOr<CausalLm> LoadOrMakeEmpty(muster::Accelerator& accelerator, const Flags& flags,
                                         bool* is_empty) {
  const muster::models::ReadConfigOptions reading = {.ignore_settings = flags.ignore_settings};
  auto config = muster::models::ReadModelConfig(flags.model, reading);
  if (!config.ok()) return config.status();
  if (muster::shards_models(accelerator) &&
      !std::holds_alternative<muster::models::BertConfig>(*config)) {
    *is_empty = true;
    const auto model = muster::models::MakeEmptyModel(*config);
    return CausalLm(std::dynamic_pointer_cast<muster::models::CausalLmImpl>(model.ptr()));
  }
  return muster::load_causal_lm(flags.model, {.config = reading});
}

// Each process loads its part of a sharded model.
absl::Status LoadParts(muster::Accelerator& accelerator, const Flags& flags, CausalLm& net) {
  auto names = muster::models::NamesInFiles(flags.model, *net);
  if (!names.ok()) return names.status();
  // Adapters have their first values, and the files have none for them.
  const bool strict = flags.lora == 0;
  // All experts of a layer may be one tensor.
  const auto parts = [&net](const std::string& name) { return net->PartsOf(name); };
  auto loaded =
      accelerator.load_weights(flags.model, {.strict = strict, .rename = *names, .parts = parts});
  if (!loaded.ok() || strict) return loaded.status();
  for (const std::string& name : loaded->models[0].missing) {
    if (name.find(".lora_") != std::string::npos) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--model ", flags.model, ": its files lack ", name));
  }
  const std::vector<std::string>& unexpected = loaded->models[0].unexpected;
  if (!unexpected.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--model ", flags.model, ": its files hold ",
                                                   unexpected[0],
                                                   ", which its config.json has no place for"));
  }
  return absl::OkStatus();
}

absl::Status Train(muster::Accelerator& accelerator, const Flags& flags) {
  muster::set_seed(flags.seed);
  if (absl::Status made = MakeOutput(flags.output); !made.ok()) return made;
  bool is_empty = false;
  auto base = LoadOrMakeEmpty(accelerator, flags, &is_empty);
  if (!base.ok()) return base.status();
  CausalLm net = *base;
  net->train();
  net->set_activation_checkpointing(flags.activation_checkpointing);
  const LoraOptions lora = {.rank = flags.lora, .alpha = 2.0 * static_cast<double>(flags.lora)};
  if (flags.lora > 0) muster::models::AddLora(*net, lora);
  auto rows = Rows(flags, muster::models::Common(net->config()));
  if (!rows.ok()) return rows.status();
  muster::DecayLists lists = muster::SplitForDecay(*net);
  if (flags.lora > 0) {
    for (std::vector<at::Tensor>* const list : {&lists.decayed, &lists.others}) {
      std::erase_if(*list, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
    }
  }
  muster::FusedAdamW adamw(muster::DecayGroups(
      std::move(lists), muster::AdamWOptions{.lr = flags.lr, .weight_decay = flags.weight_decay}));
  const auto warmup = static_cast<int64_t>(flags.warmup * static_cast<double>(flags.steps));
  auto [model, optimizer, schedule, loader] = accelerator.prepare(
      net, adamw, muster::CosineWithWarmup(warmup, flags.steps),
      muster::batches(muster::TensorDataset<at::Tensor>(*rows), flags.batch_size).shuffle(true));
  if (!flags.checkpoints.empty()) {
    if (absl::Status loaded = accelerator.load_state_if_present(); !loaded.ok()) return loaded;
  }
  if (is_empty && accelerator.last_checkpoint().empty()) {
    if (absl::Status loaded = LoadParts(accelerator, flags, net); !loaded.ok()) return loaded;
  }
  const auto start = std::chrono::steady_clock::now();
  int overflows = 0;
  double loss_sum = 0;
  int64_t micro_steps = 0, tokens = 0, logged = optimizer.steps();
  // Reports the steps since its last call.
  const auto report = [&]() -> absl::Status {
    if (logged == optimizer.steps()) return absl::OkStatus();
    const double loss = accelerator.reduce(
        loss_sum / static_cast<double>(std::max<int64_t>(1, micro_steps)), "mean");
    if (!std::isfinite(loss)) {
      return absl::InternalError(absl::StrCat("after ", optimizer.steps(),
                                              " steps the loss is no number: take a smaller --lr"));
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    accelerator.print("{\"step\":%lld,\"loss\":%.4f,\"tokens_per_s\":%.0f}\n",
                      static_cast<long long>(optimizer.steps()), loss,
                      static_cast<double>(tokens) * accelerator.num_processes() / seconds);
    loss_sum = 0;
    micro_steps = 0;
    logged = optimizer.steps();
    return absl::OkStatus();
  };
  while (optimizer.steps() < flags.steps) {
    for (auto& batch : loader) {
      if (optimizer.steps() >= flags.steps) break;
      auto scope = accelerator.accumulate();
      const at::Tensor& ids = batch.value();
      const auto output = model(TextBatch{.input_ids = ids, .labels = ids});
      accelerator.backward(output.loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();
      loss_sum += output.loss.item<double>();
      ++micro_steps;
      tokens += ids.numel();
      if (!accelerator.sync_gradients()) continue;
      // Under fp16 a step that overflows is skipped and not counted: without this limit the loop
      // might never end.
      overflows = optimizer.step_was_skipped() ? overflows + 1 : 0;
      if (overflows == kMostOverflows) {
        return absl::InternalError(absl::StrCat("after ", optimizer.steps(), " steps ", overflows,
                                                " in a row overflow fp16: take a smaller --lr, or "
                                                "--mixed_precision bf16"));
      }
      if (optimizer.steps() % flags.log_every == 0) {
        if (absl::Status reported = report(); !reported.ok()) return reported;
      }
      // True on all processes after SIGTERM at any of them.
      const bool stops = accelerator.should_stop();
      if (stops && flags.checkpoints.empty()) {
        return absl::CancelledError(absl::StrCat("stopped after ", optimizer.steps(),
                                                 " steps; --checkpoint_dir would have kept them"));
      }
      // Does not save again after each step that is skipped.
      const bool is_due = flags.checkpoint_steps > 0 && overflows == 0 &&
                          optimizer.steps() % flags.checkpoint_steps == 0;
      if (stops || is_due) {
        // Save no state whose loss is not finite.
        if (absl::Status reported = report(); !reported.ok()) return reported;
        if (absl::Status saved = accelerator.save_state(); !saved.ok()) return saved;
      }
      if (stops) return absl::OkStatus();
    }
  }
  if (absl::Status reported = report(); !reported.ok()) return reported;
  return Save(accelerator, flags, net, model, lora);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Fine-tunes a language model on a text file.");
  app.add_option("--model", flags.model, "folder with config.json, weights and tokenizer.json")
      ->required();
  app.add_option("--data", flags.data, "text; blank lines divide documents")->required();
  app.add_option("--output_dir", flags.output, "where the tuned model or its adapters go")
      ->required();
  app.add_option(
         "--ignore_settings", flags.ignore_settings,
         "settings of config.json that Muster does not know, or auto_map, if they change nothing")
      ->delimiter(',');
  app.add_option("--lora", flags.lora, "train adapters of this rank instead of all weights")
      ->check(CLI::Range(0, 1'000'000'000));
  app.add_option("--sharding", flags.sharding, "no_shard, zero1, zero2, zero3 or hybrid")
      ->check(CLI::IsMember({"no_shard", "zero1", "zero2", "zero3", "hybrid"}));
  app.add_flag("--activation_checkpointing", flags.activation_checkpointing,
               "run each layer again in the backward pass rather than keep what it needs");
  app.add_option("--context", flags.context,
                 "tokens of a row; by default 512, or the model's positions if they are fewer")
      ->check(CLI::Range(2, 1 << 20));
  app.add_option("--batch_size", flags.batch_size, "rows, of each process")
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--accumulate", flags.accumulate, "batches for one step")
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--steps", flags.steps)->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--lr", flags.lr)->check(CLI::NonNegativeNumber);
  app.add_option("--weight_decay", flags.weight_decay, "not of biases and norms")
      ->check(CLI::NonNegativeNumber);
  auto* const checkpoints =
      app.add_option("--checkpoint_dir", flags.checkpoints,
                     "where the state of the training goes; goes on from the newest there");
  app.add_option("--checkpoint_steps", flags.checkpoint_steps,
                 "save it every so many steps, besides when the job is stopped")
      ->check(CLI::Range(1, 1'000'000'000))
      ->needs(checkpoints);
  app.add_option("--warmup", flags.warmup, "share of the steps")->check(CLI::Range(0.0, 1.0));
  app.add_option("--seed", flags.seed);
  app.add_option("--log_every", flags.log_every)->check(CLI::Range(1, 1'000'000'000));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    // Exit code 2 is a usage error, after which no launcher starts the program again.
    std::fprintf(stderr, "finetune: %s (see --help)\n", error.what());
    return 2;
  }
  muster::AcceleratorOptions options;
  options.project.directory = flags.checkpoints;
  options.gradient_accumulation_steps = static_cast<int>(flags.accumulate);
  if (!flags.sharding.empty()) options.sharding = muster::ParseSharding(flags.sharding, 0);
  return muster::run(argc, argv, options,
                     [&](muster::Accelerator& accelerator, const muster::Arguments&) {
                       return Train(accelerator, flags);
                     });
}
