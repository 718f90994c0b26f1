// The program behind `muster generate`: prints what a model of a Hub folder generates after a
// prompt, token by token.
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/malloc_tuning.h"
#include "base/regular_file.h"
#include "base/size_option.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/version.h"
#include "c10/util/Exception.h"
#include "muster/offload.h"
#include "worker/bigmodel/max_memory.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/models/check_options.h"
#include "worker/models/generation_config.h"
#include "worker/models/generation_memory.h"
#include "worker/models/lora.h"
#include "worker/models/text_generator.h"

namespace muster {
namespace {

using Clock = std::chrono::steady_clock;
using models::GeneratedText;
using models::TextGenerator;
using models::TextOptions;

constexpr char kAbout[] =
    "Continues a prompt with a language model and streams the text. The model is a folder in the "
    "format of the\nHugging Face Hub: config.json, weights, tokenizer.json; GPT-2, Llama, Mistral, "
    "Mixtral or Qwen2.";
constexpr char kFooter[] =
    "\nThe prompt is used as it is: the model's chat template is not applied. You may write its "
    "markers\n(\"<|im_start|>user\" and so on) into the prompt; they become their tokens.\n"
    "\nText goes to standard output, figures to standard error. Defaults come from the model's "
    "generation_config.json;\n--max_new_tokens defaults to 256, or to the positions that the model "
    "has left if those are fewer.\n\n"
    "Exit codes: 0 done; 2 wrong options or a file that is not valid; 3 a file is missing; 70 "
    "anything else.\n\n"
    "Examples:\n"
    "  muster generate --model Llama-3.2-1B --prompt \"The capital of France is\"\n"
    "  muster generate --model gpt2 --prompt_file - --sample --temperature 0.8 --seed 7 < text\n"
    "  muster generate --model gpt2 --prompt \"Hello\" --num_beams 4 -o json\n"
    "  muster generate --model gpt2 --lora adapters --prompt \"Hello\"\n"
    "  muster generate --model Mixtral-8x7B --mmap --prompt \"Hello\"\n";

constexpr int64_t kNewTokens = 256;

// More positions than any model has, and more beams than any memory can hold: sums of them do not
// overflow.
constexpr int64_t kMostNewTokens = int64_t{1} << 40, kMostBeams = int64_t{1} << 20;

struct Flags {
  std::string model, lora, prompt_file, dtype = "auto", device = "cpu", output = "text",
                                        weights_memory, max_memory;
  std::vector<std::string> prompts, stop, ignore_settings;
  std::optional<int64_t> max_new_tokens;
  std::optional<int64_t> min_new_tokens, top_k, no_repeat_ngram_size, num_beams,
      num_return_sequences, prefill_chunk_size;
  std::optional<double> temperature, top_h, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff,
      repetition_penalty, length_penalty;
  std::optional<uint64_t> seed;
  bool sample = false, greedy = false, ignore_end = false, no_special_tokens = false, quiet = false,
       version = false, mmap = false;

  // Whether the weights stay in their files, or may.
  bool leaves_weights() const { return mmap || !weights_memory.empty() || !max_memory.empty(); }
};

void AddOptions(CLI::App& app, Flags& flags) {
  app.add_option("--model", flags.model, "The model's folder")->type_name("DIR");
  app.add_option("--lora", flags.lora,
                 "A folder of LoRA adapters for the model, as PEFT writes them")
      ->type_name("DIR");
  app.add_option("--prompt", flags.prompts, "What the model continues; may be given several times")
      ->type_name("TEXT");
  app.add_option("--prompt_file", flags.prompt_file, "A file with the prompt; -: standard input")
      ->type_name("FILE");
  app.add_option("--max_new_tokens", flags.max_new_tokens, "The most tokens to generate")
      ->check(CLI::Range(int64_t{1}, kMostNewTokens));
  app.add_option("--min_new_tokens", flags.min_new_tokens,
                 "The least number of tokens before the text may end");
  app.add_flag("--sample", flags.sample, "Sample tokens instead of taking the most likely one");
  app.add_flag("--greedy", flags.greedy,
               "Take the most likely token, whatever the model's files say");
  app.add_option("--seed", flags.seed, "Seed for sampling: the same seed gives the same text");
  app.add_option("--temperature", flags.temperature, "Below 1: likely tokens become more likely");
  app.add_option("--top_h", flags.top_h,
                 "Sample from the most likely tokens whose share of the entropy is at most this");
  app.add_option("--top_k", flags.top_k, "Sample from the k most likely tokens; 0: from all");
  app.add_option("--top_p", flags.top_p,
                 "Sample from the most likely tokens whose probabilities add up to this");
  app.add_option("--min_p", flags.min_p,
                 "Sample from tokens at least this fraction as likely as the most likely one");
  app.add_option("--typical_p", flags.typical_p,
                 "Sample from the most typical tokens whose probabilities add up to this");
  app.add_option("--epsilon_cutoff", flags.epsilon_cutoff,
                 "Sample from tokens with at least this probability");
  app.add_option("--eta_cutoff", flags.eta_cutoff,
                 "The same, with a lower limit where many tokens are about equally likely");
  app.add_option("--repetition_penalty", flags.repetition_penalty,
                 "Above 1: tokens that already occur become less likely");
  app.add_option("--no_repeat_ngram_size", flags.no_repeat_ngram_size,
                 "Never repeat an n-gram of this size");
  app.add_option("--num_beams", flags.num_beams, "Number of beams for beam search")
      ->check(CLI::Range(int64_t{1}, kMostBeams));
  app.add_option("--num_return_sequences", flags.num_return_sequences,
                 "Number of texts per prompt: samples, or the best of the beams");
  app.add_option("--length_penalty", flags.length_penalty,
                 "With beam search: above 0 favours longer texts");
  app.add_option("--prefill_chunk_size", flags.prefill_chunk_size,
                 "The most tokens of a prompt that are read in one pass; 0: all (default 2048)")
      ->check(CLI::Range(int64_t{0}, kMostNewTokens));
  app.add_option("--stop", flags.stop, "Stop before this text; may be given several times")
      ->type_name("TEXT");
  app.add_flag("--ignore_end", flags.ignore_end, "Continue after an end token");
  app.add_flag("--no_special_tokens", flags.no_special_tokens,
               "Omit the special tokens that the tokenizer adds around a text");
  app.add_option(
         "--ignore_settings", flags.ignore_settings,
         "Settings of config.json that Muster does not know, or auto_map, if they change nothing")
      ->delimiter(',')
      ->type_name("NAMES");
  app.add_option(
         "--dtype", flags.dtype,
         "Type of the weights; auto: the type in config.json or, without one, that of the files")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16"}));
  app.add_option("--device", flags.device, "cpu, cuda or cuda:N");
  app.add_option(
         "--weights_memory", flags.weights_memory,
         "Keep the weights in their files and at most this much of them in memory, for example 4GB")
      ->type_name("SIZE");
  app.add_option("--max_memory", flags.max_memory,
                 "How much of the weights each device may hold, for example 0=20GB,cpu=30GB; the "
                 "rest stays in the files. See muster plan")
      ->type_name("LIST");
  app.add_flag("--mmap", flags.mmap,
               "Use weights that stay in their files where these are in the page cache, without a "
               "copy: alone all of them, with --max_memory those that it leaves there. Do not "
               "change the files meanwhile");
  app.add_option("-o,--output", flags.output, "text or json")
      ->check(CLI::IsMember({"text", "json"}));
  app.add_flag("--quiet", flags.quiet, "Print no figures");
  app.add_flag("--version", flags.version, "Print the version");
}

absl::StatusOr<std::vector<std::string>> Prompts(const Flags& flags) {
  std::vector<std::string> prompts = flags.prompts;
  if (flags.prompt_file == "-") {
    prompts.emplace_back(std::istreambuf_iterator<char>(std::cin),
                         std::istreambuf_iterator<char>());
  } else if (!flags.prompt_file.empty()) {
    MUSTER_ASSIGN_OR_RETURN(std::string text, ReadFile(flags.prompt_file));
    prompts.push_back(std::move(text));
  }
  if (prompts.empty()) return absl::InvalidArgumentError("say what to continue: --prompt TEXT");
  return prompts;
}

// Returns the type of a folder whose config.json names none: as in transformers, that of the first
// floating tensor by name in its first file. Empty if the files cannot be read: loading them
// reports the error.
std::string TypeOfWeights(const std::string& folder) {
  const absl::StatusOr<WeightFiles> files = WeightFiles::Open(folder);
  if (!files.ok()) return "";
  static const auto* const names =
      new std::map<SafetensorsType, std::string>{{SafetensorsType::kBF16, "bfloat16"},
                                                 {SafetensorsType::kF16, "float16"},
                                                 {SafetensorsType::kF32, "float32"},
                                                 {SafetensorsType::kF64, "float64"}};
  const StoredTensor* first = nullptr;
  for (const WeightEntry& entry : files->entries()) {
    if (entry.file != 0 || !names->contains(entry.tensor.type)) continue;
    if (first == nullptr || entry.tensor.name < first->name) first = &entry.tensor;
  }
  return first == nullptr ? "" : names->at(first->type);
}

absl::StatusOr<models::LoadPretrainedOptions> LoadOptions(const Flags& flags,
                                                          models::ModelConfig* config) {
  models::LoadPretrainedOptions options;
  options.config.ignore_settings = flags.ignore_settings;
  try {
    options.device = c10::Device(flags.device);
  } catch (const c10::Error&) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device ", Printable(flags.device), " is not cpu, cuda or cuda:N"));
  }
  MUSTER_ASSIGN_OR_RETURN(*config, models::ReadModelConfig(flags.model, options.config));
  std::string type = flags.dtype;
  if (type == "auto") {
    type = models::Common(*config).dtype;
    if (type.empty()) type = TypeOfWeights(flags.model);
    // A CPU has no arithmetic for it.
    if (type == "float16" && options.device.is_cpu()) type = "float32";
  }
  options.dtype = type == "bfloat16"  ? c10::kBFloat16
                  : type == "float16" ? c10::kHalf
                  : type == "float64" ? c10::kDouble
                                      : c10::kFloat;
  return options;
}

// Whether to sample; absent: as the model's files say.
std::optional<bool> DoSample(const Flags& flags) {
  if (flags.sample || flags.greedy) return flags.sample;
  return std::nullopt;
}

TextOptions OptionsOf(const Flags& flags, const models::GenerateOptions& defaults) {
  TextOptions options = {
      .tokens = defaults, .stop = flags.stop, .add_special_tokens = !flags.no_special_tokens};
  models::GenerateOptions& tokens = options.tokens;
  models::ScoreRules& rules = tokens.rules;
  const auto set = [](auto* to, const auto& flag) {
    if (flag.has_value()) *to = *flag;
  };
  set(&tokens.max_new_tokens, flags.max_new_tokens);
  options.shorten_to_context = !flags.max_new_tokens.has_value();
  set(&tokens.seed, flags.seed);
  set(&rules.min_new_tokens, flags.min_new_tokens);
  if (flags.min_new_tokens.has_value()) rules.min_length = 0;
  set(&rules.temperature, flags.temperature);
  set(&rules.top_h, flags.top_h);
  set(&rules.top_k, flags.top_k);
  set(&rules.top_p, flags.top_p);
  set(&rules.min_p, flags.min_p);
  set(&rules.typical_p, flags.typical_p);
  set(&rules.epsilon_cutoff, flags.epsilon_cutoff);
  set(&rules.eta_cutoff, flags.eta_cutoff);
  set(&rules.repetition_penalty, flags.repetition_penalty);
  set(&rules.no_repeat_ngram_size, flags.no_repeat_ngram_size);
  set(&tokens.num_beams, flags.num_beams);
  set(&tokens.num_return_sequences, flags.num_return_sequences);
  set(&tokens.length_penalty, flags.length_penalty);
  set(&tokens.prefill_chunk_size, flags.prefill_chunk_size);
  if (flags.ignore_end) tokens.eos_token_ids.emplace();
  return options;
}

// Refuses, by name, options that would have no effect, considering also the model's files.
absl::Status CheckEffects(const Flags& flags, const models::GenerateOptions& tokens) {
  if (flags.seed.has_value() && !tokens.do_sample) {
    return absl::InvalidArgumentError("--seed is for sampling: add --sample or leave it out");
  }
  if (flags.length_penalty.has_value() && tokens.num_beams == 1) {
    return absl::InvalidArgumentError(
        "--length_penalty is for beam search: add --num_beams N or leave it out");
  }
  if (!flags.min_new_tokens.has_value()) return absl::OkStatus();
  if (flags.ignore_end && *flags.min_new_tokens > 0) {
    return absl::InvalidArgumentError(
        "--ignore_end already continues after end tokens, so --min_new_tokens has no effect: leave "
        "out one of them");
  }
  if (*flags.min_new_tokens > tokens.max_new_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--min_new_tokens ", *flags.min_new_tokens, " is more than the ", tokens.max_new_tokens,
        " new tokens that are allowed: lower it or raise --max_new_tokens"));
  }
  return absl::OkStatus();
}

// Refuses an option whose value is empty, as from a shell variable that is not set. A prompt may be
// empty.
absl::Status CheckValues(const CLI::App& app) {
  for (const CLI::Option* const option : app.get_options()) {
    if (option->count() == 0 || option->get_name() == "--prompt") continue;
    for (const std::string& value : option->results()) {
      if (value.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat(option->get_name(), " is empty: give it a value or leave it out"));
      }
    }
  }
  return absl::OkStatus();
}

const char* ReasonName(GeneratedText::Reason reason) {
  switch (reason) {
    case GeneratedText::Reason::kEndToken:
      return "end_token";
    case GeneratedText::Reason::kStopString:
      return "stop_string";
    case GeneratedText::Reason::kMaxTokens:
      return "max_new_tokens";
  }
  return "";
}

// Whether the folder has a chat template, in any of the places where transformers looks for one.
bool HasChatTemplate(const std::string& folder) {
  if (PathExists(JoinPath(folder, "chat_template.jinja")) ||
      PathExists(JoinPath(folder, "chat_template.json"))) {
    return true;
  }
  const absl::StatusOr<std::string> text =
      ReadRegularFile(JoinPath(folder, "tokenizer_config.json"), int64_t{16} << 20);
  if (!text.ok()) return false;
  const auto json = ParseJson(*text, "tokenizer_config.json", {.max_bytes = size_t{16} << 20});
  return json.ok() && json->is_object() && json->contains("chat_template") &&
         !(*json)["chat_template"].is_null();
}

// Sets where the weights are to be: by default all in memory.
absl::Status SetPlaces(const Flags& flags, const c10::Device& device, DeviceMapChoice* map,
                       BigModelOptions* options) {
  options->mmap = flags.mmap;
  if (!flags.max_memory.empty()) {
    if (!flags.weights_memory.empty() || flags.device != "cpu") {
      return absl::InvalidArgumentError(
          "--max_memory already says where the weights go: leave out --weights_memory and "
          "--device");
    }
    const absl::StatusOr<DeviceLimits> limits = get_max_memory(flags.max_memory);
    if (!limits.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--max_memory: ", limits.status().message()));
    }
    MUSTER_RETURN_IF_ERROR(CheckDevicesAreThere(*limits));
    options->max_memory = *limits;
    *map = std::string("auto");
    return absl::OkStatus();
  }
  if (!device.is_cpu()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.weights_memory.empty() ? "--mmap" : "--weights_memory",
                     " works only with --device cpu; use --max_memory 0=SIZE to stream weights to "
                     "a GPU"));
  }
  *map = DeviceEntries{{"", "disk"}};
  if (flags.weights_memory.empty()) return absl::OkStatus();
  const absl::StatusOr<int64_t> bytes = ParseSizeOption(flags.weights_memory);
  if (!bytes.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--weights_memory: ", bytes.status().message()));
  }
  options->ring_bytes = static_cast<uint64_t>(*bytes);
  return absl::OkStatus();
}

bool OnlyCpuComputes(const DeviceLimits& limits) {
  return std::all_of(limits.begin(), limits.end(), [](const auto& limit) {
    return limit.first == "cpu" || limit.first == "disk" || limit.second == 0;
  });
}

// Loads the model into memory, or with its weights in their files; without adapters.
absl::StatusOr<TextGenerator> LoadBase(const Flags& flags,
                                       const models::LoadPretrainedOptions& load,
                                       Tokenizer tokenizer, models::GenerateOptions defaults,
                                       OffloadedCausalLm* offloaded) {
  if (!flags.leaves_weights()) {
    MUSTER_ASSIGN_OR_RETURN(models::CausalLm model, models::LoadCausalLm(flags.model, load));
    return TextGenerator(std::move(model), std::move(tokenizer), std::move(defaults));
  }
  DeviceMapChoice map;
  BigModelOptions options = {.dtype = load.dtype};
  MUSTER_RETURN_IF_ERROR(SetPlaces(flags, load.device, &map, &options));
  // Memory that a pass over a prompt has freed would stay with the process, in addition to the
  // plan. Call this before the weights are loaded, which would lie between that memory and the end
  // of the heap.
  if (OnlyCpuComputes(options.max_memory)) GiveBackFreedMemory();
  MUSTER_ASSIGN_OR_RETURN(*offloaded,
                          load_offloaded_causal_lm(flags.model, map, options, load.config));
  return TextGenerator(offloaded->model, std::move(tokenizer), std::move(defaults));
}

struct Loaded {
  TextGenerator generator;
  // The ranks of adapters that are not merged.
  models::AdapterRanks adapters = {};
};

absl::StatusOr<Loaded> LoadGenerator(const Flags& flags, const models::LoadPretrainedOptions& load,
                                     Tokenizer tokenizer, models::GenerateOptions defaults,
                                     OffloadedCausalLm* offloaded) {
  MUSTER_ASSIGN_OR_RETURN(TextGenerator generator, LoadBase(flags, load, std::move(tokenizer),
                                                            std::move(defaults), offloaded));
  Loaded loaded = {.generator = std::move(generator)};
  if (flags.lora.empty()) return loaded;
  MUSTER_RETURN_IF_ERROR(models::LoadLora(*loaded.generator.model(), flags.lora).status());
  // Merged adapters cost nothing; weights in files stay as they are.
  if (offloaded->weights == nullptr) {
    models::MergeLora(*loaded.generator.model());
  } else {
    loaded.adapters = models::AdapterRanksOf(*loaded.generator.model());
  }
  return loaded;
}

int64_t PeakMemory() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

struct Times {
  double load = 0, generate = 0;
  // Absent with beams, whose tokens can still change.
  std::optional<double> first_token = std::nullopt;
};

// The memory plan, in bytes, of a model whose weights are not all in memory.
struct MemoryPlan {
  // Bytes of weights that stay in memory; that are loaded when used; and the most that are in
  // memory at a time.
  uint64_t resident = 0, offloaded = 0, most = 0;
  // Bytes of `offloaded` that are used in the page cache: part of the process's memory while they
  // are there, but of no plan, since the kernel takes them back when other processes need memory.
  uint64_t mapped = 0;
  // Bytes that the prompts and new tokens need: keys and values, and the rest.
  uint64_t cache = 0, activations = 0;
  // The total, including the program. Absent if a GPU computes: its memory is not the process's.
  std::optional<uint64_t> process = std::nullopt;
};

// Memory that LibTorch's libraries use once they compute, in addition to tensors: for threads, and
// for blocks of the matrices that they multiply.
constexpr uint64_t kLibraries = uint64_t{32} << 20;

models::GenerationShape ShapeOf(TextGenerator& generator, const models::EncodedPrompts& prompts,
                                const TextOptions& options, const models::AdapterRanks& adapters) {
  const models::GenerateOptions& tokens = options.tokens;
  models::GenerationShape shape = {
      .rows = prompts.ids.size(0),
      .prompt_tokens = prompts.ids.size(1),
      .times = std::max<int64_t>(1, std::max(tokens.num_beams, tokens.num_return_sequences)),
      .do_sample = tokens.do_sample,
      .element_bytes = generator.model()->parameters().at(0).element_size(),
      .prefill_chunk_size = tokens.prefill_chunk_size,
      .adapters = adapters};
  for (const int64_t length : prompts.lengths) {
    shape.is_padded = shape.is_padded || length != shape.prompt_tokens;
  }
  shape.new_tokens = models::NewTokens(generator.model()->config(), prompts, options);
  return shape;
}

// Returns the sum, or the largest uint64 if it overflows.
template <typename... Numbers>
uint64_t SumOf(Numbers... numbers) {
  uint64_t sum = 0;
  const auto add = [&sum](uint64_t number) {
    if (__builtin_add_overflow(sum, number, &sum)) sum = std::numeric_limits<uint64_t>::max();
  };
  (add(static_cast<uint64_t>(numbers)), ...);
  return sum;
}

// Returns the bytes of adapters, which are in addition to the weights: they were added after the
// weights had been placed.
uint64_t AdapterBytes(const models::TextModelImpl& model) {
  uint64_t bytes = 0;
  for (const auto& item : model.named_parameters()) {
    if (absl::StrContains(item.key(), ".lora_")) bytes += item.value().nbytes();
  }
  return bytes;
}

// Makes the plan, before anything is computed. `program`: the memory that the process had before
// the model was loaded.
MemoryPlan PlanOf(const OffloadedCausalLm& offloaded, const models::GenerationShape& shape,
                  int64_t program) {
  const DispatchedModel& weights = *offloaded.weights;
  const OffloadStats stats = weights.stats();
  auto resident = static_cast<double>(AdapterBytes(*offloaded.model));
  for (const auto& [device, bytes] : weights.resident()) resident += bytes;
  const models::GenerationMemory memory =
      models::PlanGenerationMemory(offloaded.model->config(), shape);
  MemoryPlan plan = {.resident = static_cast<uint64_t>(resident),
                     .offloaded = stats.offloaded_bytes,
                     .mapped = stats.mapped_bytes,
                     .cache = static_cast<uint64_t>(memory.cache),
                     .activations = static_cast<uint64_t>(memory.activations)};
  plan.most = plan.resident + stats.ring_bytes;
  if (weights.main_device().is_cpu()) {
    plan.process = SumOf(plan.most, plan.cache, plan.activations, kLibraries, program);
  }
  return plan;
}

// Writes to standard output, including zero bytes; Main() checks whether all was written.
void Print(absl::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

void PrintJson(const std::vector<GeneratedText>& texts, const Times& times,
               const std::optional<MemoryPlan>& plan, const OffloadStats& stats) {
  nlohmann::json out = {{"texts", nlohmann::json::array()},
                        {"load_seconds", times.load},
                        {"generate_seconds", times.generate},
                        {"peak_memory", PeakMemory()}};
  if (times.first_token.has_value()) out["first_token_seconds"] = *times.first_token;
  if (plan.has_value()) {
    out["weights"] = {{"resident", plan->resident},
                      {"offloaded", plan->offloaded},
                      {"most_in_memory", plan->most + stats.overflow_bytes},
                      {"mapped", plan->mapped},
                      {"read", stats.read_bytes}};
    out["cache"] = plan->cache;
    out["activations"] = plan->activations;
    if (plan->process.has_value()) out["planned_memory"] = *plan->process;
  }
  for (const GeneratedText& text : texts) {
    out["texts"].push_back({{"text", text.text},
                            {"stopped_by", ReasonName(text.reason)},
                            {"prompt_tokens", text.num_prompt_tokens},
                            {"new_tokens", text.num_new_tokens}});
  }
  Print(absl::StrCat(out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace), "\n"));
}

void PrintFigures(const std::vector<GeneratedText>& texts, const Times& times) {
  int64_t prompt = 0, fresh = 0;
  for (const GeneratedText& text : texts) {
    prompt += text.num_prompt_tokens;
    fresh += text.num_new_tokens;
  }
  std::fprintf(stderr, "%ld prompt tokens, %ld new tokens: %.1f tokens/s; model loaded in %.2f s",
               static_cast<long>(prompt), static_cast<long>(fresh),
               static_cast<double>(fresh) / std::max(times.generate, 1e-9), times.load);
  if (times.first_token.has_value()) {
    std::fprintf(stderr, ", first token after %.2f s", *times.first_token);
  }
  std::fprintf(stderr, "; peak memory %ld MiB\n", static_cast<long>(PeakMemory() >> 20));
}

long Mib(uint64_t bytes) { return static_cast<long>(bytes >> 20); }

void PrintPlan(const MemoryPlan& plan, const models::GenerationShape& shape) {
  std::fprintf(stderr,
               "weights: %ld MiB stay in memory, %ld MiB come when they are used; at most %ld MiB "
               "in memory\n",
               Mib(plan.resident), Mib(plan.offloaded - plan.mapped), Mib(plan.most));
  if (plan.mapped > 0) {
    std::fprintf(stderr,
                 "weights: %ld MiB are used in the page cache, as far as other programs leave it "
                 "room\n",
                 Mib(plan.mapped));
  }
  std::fprintf(stderr, "plan: keys and values of %lu tokens %ld MiB, activations at most %ld MiB",
               static_cast<unsigned long>(SumOf(shape.prompt_tokens, shape.new_tokens)),
               Mib(plan.cache), Mib(plan.activations));
  if (plan.process.has_value()) {
    std::fprintf(stderr, "; with weights and the program %ld MiB", Mib(*plan.process));
  }
  std::fprintf(stderr, "\n");
}

void PrintRead(const OffloadStats& stats) {
  std::fprintf(stderr, "weights: %ld MiB read", Mib(stats.read_bytes));
  if (stats.overflow_bytes > 0) {
    std::fprintf(stderr, "; an operator took %ld MiB beside the plan", Mib(stats.overflow_bytes));
  }
  std::fprintf(stderr, "\n");
}

// The beginning of the error about the memory through which weights are loaded.
constexpr absl::string_view kNoRing = "no memory for the weights that are in use";

// Whether LibTorch, which has no separate error for lack of CPU memory, or the rest of the program
// has run out of memory.
bool IsOutOfMemory(const absl::Status& status) {
  // A GPU's memory is the ring of --max_memory 0=SIZE; its own error says enough.
  if (absl::StrContains(status.message(), "CUDA out of memory")) return false;
  return absl::StrContains(status.message(), "can't allocate memory") ||
         absl::StrContains(status.message(), "of memory, which this process does not get") ||
         absl::StartsWith(status.message(), kNoRing) ||
         absl::StrContains(status.message(), "bad_alloc");
}

// The part of the model that did not get its memory, with a separator; empty if the error does not
// name it.
std::string Refused(const absl::Status& status) {
  constexpr absl::string_view kEnd = ", which this process does not get";
  const absl::string_view text = status.message();
  if (absl::StartsWith(text, kNoRing)) return absl::StrCat(text, ": ");
  const size_t end = text.find(kEnd);
  if (end == absl::string_view::npos) return "";
  return absl::StrCat(text.substr(0, end + kEnd.size()), ": ");
}

// `cause`: the error of which IsOutOfMemory() is true.
absl::Status NoMemory(const Flags& flags, const std::optional<MemoryPlan>& plan,
                      const absl::Status& cause) {
  const std::string refused = Refused(cause);
  if (!flags.leaves_weights()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        refused,
        "the model does not fit into memory: --max_memory cpu=SIZE leaves the rest of its weights "
        "in their files, --dtype bfloat16 halves them"));
  }
  const char* const flag =
      flags.max_memory.empty() ? "a smaller --weights_memory" : "a smaller --max_memory cpu=SIZE";
  if (!plan.has_value() || !plan->process.has_value()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(refused, "the weights do not fit into memory as they are divided: ", flag,
                     " leaves more of them in their files, --dtype bfloat16 halves them"));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(refused, "memory ended: the plan is ", Mib(*plan->process),
                   " MiB, of which weights ", Mib(plan->most), " MiB, keys and values ",
                   Mib(plan->cache), " MiB, activations ", Mib(plan->activations), " MiB: ", flag,
                   " leaves more room, and so do a shorter prompt, a smaller --max_new_tokens ",
                   "and --dtype bfloat16"));
}

absl::Status Run(const Flags& flags) {
  const auto start = Clock::now();
  const auto elapsed = [start] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  if (flags.model.empty()) return absl::InvalidArgumentError("say which model: --model DIR");
  if (!PathExists(JoinPath(flags.model, "config.json")) &&
      PathExists(JoinPath(flags.model, "adapter_config.json"))) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.model, " holds adapters and no model: write --model DIR --lora ",
                     flags.model, ", DIR being the model that they are for"));
  }
  if (flags.sample && flags.greedy) {
    return absl::InvalidArgumentError("--sample and --greedy exclude each other");
  }
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> prompts, Prompts(flags));
  // Small files are read first: a large model takes minutes to load.
  models::ModelConfig config;
  MUSTER_ASSIGN_OR_RETURN(const models::LoadPretrainedOptions load, LoadOptions(flags, &config));
  MUSTER_ASSIGN_OR_RETURN(const models::GenerateOptions defaults,
                          models::ReadGenerationConfig(flags.model, DoSample(flags), kNewTokens));
  TextOptions options = OptionsOf(flags, defaults);
  MUSTER_RETURN_IF_ERROR(CheckEffects(flags, options.tokens));
  MUSTER_RETURN_IF_ERROR(models::CheckOptions(options.tokens));
  MUSTER_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::FromFolder(flags.model));
  MUSTER_ASSIGN_OR_RETURN(const models::EncodedPrompts encoded,
                          models::EncodePrompts(tokenizer, prompts, options.add_special_tokens));
  MUSTER_RETURN_IF_ERROR(models::CheckPrompts(config, encoded, options));
  const int64_t program = PeakMemory();
  OffloadedCausalLm offloaded;
  absl::StatusOr<Loaded> loaded =
      LoadGenerator(flags, load, std::move(tokenizer), defaults, &offloaded);
  if (IsOutOfMemory(loaded.status())) return NoMemory(flags, std::nullopt, loaded.status());
  MUSTER_RETURN_IF_ERROR(loaded.status());
  TextGenerator& generator = loaded->generator;
  Times times = {.load = elapsed()};
  const bool streams = flags.output == "text" && prompts.size() == 1 &&
                       options.tokens.num_beams == 1 && options.tokens.num_return_sequences == 1;
  if (options.tokens.num_beams == 1) {
    options.tokens.on_tokens = [&](const auto&, auto&) {
      if (!times.first_token.has_value()) times.first_token = elapsed();
    };
  }
  if (streams) {
    options.on_text = [](size_t, absl::string_view text) {
      Print(text);
      std::fflush(stdout);
    };
  }
  std::optional<MemoryPlan> plan;
  if (offloaded.weights != nullptr) {
    const models::GenerationShape shape = ShapeOf(generator, encoded, options, loaded->adapters);
    plan = PlanOf(offloaded, shape, program);
    if (!flags.quiet && flags.output == "text") PrintPlan(*plan, shape);
  }
  const absl::StatusOr<std::vector<GeneratedText>> generated =
      generator.GenerateEncoded(encoded, options);
  if (IsOutOfMemory(generated.status())) return NoMemory(flags, plan, generated.status());
  MUSTER_RETURN_IF_ERROR(generated.status());
  const std::vector<GeneratedText>& texts = *generated;
  times.generate = elapsed() - times.load;
  const OffloadStats stats =
      offloaded.weights == nullptr ? OffloadStats() : offloaded.weights->stats();
  if (flags.output == "json") {
    PrintJson(texts, times, plan, stats);
    return absl::OkStatus();
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    const size_t per_prompt = texts.size() / prompts.size();
    if (prompts.size() > 1) std::printf("--- prompt %zu\n", i / per_prompt);
    if (per_prompt > 1) std::printf("--- text %zu\n", i % per_prompt);
    if (!streams) Print(texts[i].text);
    Print("\n");
  }
  std::fflush(stdout);
  if (!flags.quiet) PrintFigures(texts, times);
  if (!flags.quiet && HasChatTemplate(flags.model)) {
    std::fprintf(stderr,
                 "the model has a chat template, which is not applied: its markers can stand in "
                 "the prompt\n");
  }
  if (!flags.quiet && plan.has_value()) PrintRead(stats);
  return absl::OkStatus();
}

int RunMain(int argc, char** argv) {
  CLI::App app(kAbout, "muster generate");
  app.footer(kFooter);
  Flags flags;
  AddOptions(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  if (flags.version) {
    std::printf("muster-generate %s\n", kVersion);
    return kExitOk;
  }
  absl::Status status = CheckValues(app);
  if (status.ok()) status = Run(flags);
  if (status.ok()) return kExitOk;
  std::fprintf(stderr, "muster generate: %s\n",
               absl::StrReplaceAll(OneLine(status.message()),
                                   {{"raise ring_bytes", "raise --weights_memory"},
                                    {"mmap is for", "--mmap is for"},
                                    {"leave mmap out", "leave out --mmap"},
                                    {" in ignore_settings", " with --ignore_settings"},
                                    {"set do_sample too", "add --sample"}})
                   .c_str());
  return absl::IsUnimplemented(status) ? kExitUsage : ExitCodeOf(status);
}

int Main(int argc, char** argv) {
  const int code = RunMain(argc, argv);
  // Text that was lost because a disk is full must not pass for complete.
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  const int error = errno;
  std::fprintf(stderr, "muster generate: standard output cannot be written%s%s\n",
               error == 0 ? "" : ": ", error == 0 ? "" : std::strerror(error));
  return code == kExitOk ? kExitInternal : code;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) { return muster::Main(argc, argv); }
