// Runs `muster generate` on a folder as on the Hub, as a person and as a script use it.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "tests/e2e/hub_folder.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

class GenerateTest : public LaunchFixture {
 protected:
  void SetUp() override {
    LaunchFixture::SetUp();
    model_ = Temp("model");
    ASSERT_TRUE(WriteHubFolder(model_).ok());
  }

  std::unique_ptr<Command> Generate(std::vector<std::string> args) {
    args.insert(args.begin(), "--model");
    args.insert(args.begin() + 1, model_);
    return Run(std::move(args));
  }
  // Starts `muster generate ARGS...`, which finds its program in PATH.
  std::unique_ptr<Command> Run(std::vector<std::string> args) {
    env_["PATH"] = std::string(ParentPath(Runfile("muster/muster-generate")));
    args.insert(args.begin(), "generate");
    return Muster(std::move(args));
  }

  // Starts it with `limit` KiB of writable memory for the process.
  std::unique_ptr<Command> GenerateWithin(const std::string& limit, const std::string& model,
                                          const std::string& args) {
    env_["PATH"] = "/bin:/usr/bin";
    return std::make_unique<Command>(
        *host_,
        std::vector<std::string>{
            "/bin/bash", "-c",
            absl::StrCat("ulimit -d ", limit, "; exec \"$0\" --model \"$1\" ", args),
            Runfile("muster/muster-generate"), model},
        env_);
  }

  std::string model_;
};

TEST_F(GenerateTest, Prompt_IsContinuedOnStandardOutput) {
  auto run = Generate({"--prompt", "Hello there", "--max_new_tokens", "12"});
  EXPECT_EQ(run->Wait(), 0) << absl::StrJoin(run->err(), "\n");
  EXPECT_FALSE(absl::StrJoin(run->out(), "\n").empty());
  EXPECT_THAT(run->err(), ElementsAre(MatchesRegex(
                              "[0-9]+ prompt tokens, 12 new tokens: .* tokens/s; model "
                              "loaded in .* s, first token after .* s; peak memory [0-9]+ MiB")));
}

TEST_F(GenerateTest, SameSeed_SaysTheSame) {
  const auto text = [&](const char* seed) {
    auto run = Generate(
        {"--prompt", "Hello", "--sample", "--seed", seed, "--quiet", "--max_new_tokens", "20"});
    EXPECT_EQ(run->Wait(), 0);
    EXPECT_THAT(run->err(), IsEmpty());
    return absl::StrJoin(run->out(), "\n");
  };
  EXPECT_EQ(text("1"), text("1"));
  EXPECT_NE(text("1"), text("2"));
}

TEST_F(GenerateTest, Json_HasTextsAndFigures) {
  auto run = Generate({"--prompt", "Hello", "--prompt", "Good morning", "--max_new_tokens", "5",
                       "--num_beams", "2", "-o", "json"});
  ASSERT_EQ(run->Wait(), 0) << absl::StrJoin(run->err(), "\n");
  const auto json = nlohmann::json::parse(absl::StrJoin(run->out(), "\n"));
  ASSERT_EQ(json["texts"].size(), 2);
  EXPECT_EQ(json["texts"][1]["new_tokens"], 5);
  EXPECT_EQ(json["texts"][1]["stopped_by"], "max_new_tokens");
  EXPECT_GT(json["load_seconds"], 0);
  // Tokens of beams can still change, so there is no first one.
  EXPECT_FALSE(json.contains("first_token_seconds"));
  auto text = Generate({"--prompt", "Hello", "--max_new_tokens", "5", "--num_beams", "2"});
  ASSERT_EQ(text->Wait(), 0);
  EXPECT_THAT(text->err_text(), testing::Not(HasSubstr("first token")));
}

TEST_F(GenerateTest, MaxNewTokens_AreThoseOfTheModelsFilesUnlessSet) {
  const auto new_tokens = [&](std::vector<std::string> args) {
    args.insert(args.end(), {"--prompt", "Hello", "--ignore_end", "-o", "json"});
    auto run = Generate(args);
    EXPECT_EQ(run->Wait(), 0) << run->err_text();
    const auto text = nlohmann::json::parse(run->out_text())["texts"][0];
    return std::make_pair(text["prompt_tokens"].get<int64_t>(), text["new_tokens"].get<int64_t>());
  };
  const auto write = [&](const char* config) {
    ASSERT_TRUE(WriteFileAtomically(model_ + "/generation_config.json", config).ok());
  };
  // The model has 64 positions.
  const auto [prompt, rest] = new_tokens({});
  EXPECT_EQ(prompt + rest, 64);
  for (const char* const memory : {"", "1GB"}) {
    std::vector<std::string> args;
    if (*memory != '\0') args = {"--weights_memory", memory};
    write(R"({"max_new_tokens": 3})");
    EXPECT_EQ(new_tokens(args).second, 3);
    write(R"({"max_new_tokens": 2000})");
    EXPECT_EQ(new_tokens(args).second, rest);
    args.insert(args.end(), {"--max_new_tokens", "5"});
    EXPECT_EQ(new_tokens(args).second, 5);
  }
}

// A config.json without a type, as older ones are, gets the type of its files.
TEST_F(GenerateTest, TypeOfTheConfigOrOfTheFiles_Counts) {
  const auto bytes = [&](const char* type) {
    auto run = Generate({"--prompt", "Hello", "--max_new_tokens", "2", "--weights_memory", "1GB",
                         "--dtype", type, "-o", "json"});
    EXPECT_EQ(run->Wait(), 0) << run->err_text();
    return nlohmann::json::parse(run->out_text())["weights"]["offloaded"].get<int64_t>();
  };
  const int64_t float32 = bytes("float32");
  for (const auto& [type, wanted] :
       {std::pair{c10::kBFloat16, bytes("bfloat16")}, {c10::kDouble, 2 * float32}}) {
    const auto model = load_causal_lm(model_, {.dtype = type});
    ASSERT_TRUE(model.ok()) << model.status();
    ASSERT_TRUE(save_pretrained(*model, model_).ok());
    EXPECT_EQ(bytes("auto"), wanted);
    EXPECT_EQ(bytes("float32"), float32);
    const std::string path = model_ + "/config.json";
    auto config = nlohmann::json::parse(ReadFile(path).value_or("{}"));
    ASSERT_EQ(config.erase("torch_dtype"), 1);
    ASSERT_TRUE(WriteFileAtomically(path, config.dump()).ok());
    EXPECT_EQ(bytes("auto"), wanted);
  }
}

TEST_F(GenerateTest, OutputThatCannotBeWritten_IsAnError) {
  for (const char* const args :
       {"--prompt a", "--prompt a --prompt b", "--prompt a -o json", "--version", "--help"}) {
    const auto full = std::make_unique<Command>(
        *host_,
        std::vector<std::string>{
            "/bin/sh", "-c",
            absl::StrCat("exec \"$0\" --model \"$1\" --max_new_tokens 3 --quiet ", args,
                         " > /dev/full"),
            Runfile("muster/muster-generate"), model_},
        env_);
    EXPECT_EQ(full->Wait(), 70) << args;
    EXPECT_THAT(full->err(), ElementsAre(HasSubstr("standard output cannot be written"))) << args;
  }
}

// Byte 0 of a text is one of its characters.
TEST_F(GenerateTest, TextWithAZero_IsPrintedWhole) {
  const auto tokenizer = nlohmann::json::parse(ReadFile(model_ + "/tokenizer.json").value_or(""));
  const auto& vocabulary = tokenizer["model"]["vocab"];
  const int64_t zero = vocabulary["<0x00>"], letter = vocabulary["<0x61>"];
  ASSERT_TRUE(
      WriteFileAtomically(
          model_ + "/generation_config.json",
          nlohmann::json(
              {{"sequence_bias", {{{zero}, 1e4}, {{zero, letter}, 1e5}, {{letter, letter}, 1e5}}}})
              .dump())
          .ok());
  const std::vector<std::string> one = {"--prompt", "a", "--max_new_tokens", "3", "--quiet"};
  std::vector<std::string> two = one;
  two.insert(two.end(), {"--prompt", "a"});
  for (const auto& args : {one, two}) {
    auto run = Generate(args);
    EXPECT_EQ(run->Wait(), 0) << run->err_text();
    EXPECT_THAT(run->out_text(), HasSubstr(std::string("\0aa", 3)));
  }
}

TEST_F(GenerateTest, SettingsOfSamplingThatAreNotValid_CountForWhoSamples) {
  ASSERT_TRUE(WriteFileAtomically(model_ + "/generation_config.json",
                                  R"({"do_sample": true, "top_p": 7, "suppress_tokens": [5]})")
                  .ok());
  auto greedy = Generate({"--prompt", "Hello", "--greedy", "--max_new_tokens", "3", "--quiet"});
  EXPECT_EQ(greedy->Wait(), 0) << greedy->err_text();
  auto sampled = Generate({"--prompt", "Hello", "--max_new_tokens", "3", "--quiet"});
  EXPECT_EQ(sampled->Wait(), 2);
  EXPECT_THAT(sampled->err(), ElementsAre(HasSubstr("generation_config.json: top_p is 7")));
}

TEST_F(GenerateTest, SettingThatMusterDoesNotKnow_CanBeIgnored) {
  const std::string path = model_ + "/config.json";
  auto config = nlohmann::json::parse(ReadFile(path).value_or("{}"));
  config["auto_map"] = {{"AutoModelForCausalLM", "modeling_own.OwnForCausalLM"}};
  config["own_setting"] = 7;
  ASSERT_TRUE(WriteFileAtomically(path, config.dump()).ok());
  std::vector<std::string> args = {"--prompt", "Hello", "--max_new_tokens", "3", "--quiet"};
  auto refused = Generate(args);
  EXPECT_EQ(refused->Wait(), 2);
  EXPECT_THAT(refused->err(), ElementsAre(HasSubstr("with --ignore_settings")));
  args.insert(args.end(), {"--ignore_settings", "auto_map,own_setting"});
  for (const char* const memory : {"", "1GB"}) {
    if (*memory != '\0') args.insert(args.end(), {"--weights_memory", memory});
    auto run = Generate(args);
    EXPECT_EQ(run->Wait(), 0) << run->err_text();
  }
}

TEST_F(GenerateTest, ChatTemplate_IsSaidNotToBeApplied) {
  ASSERT_TRUE(WriteFileAtomically(model_ + "/tokenizer_config.json",
                                  R"({"chat_template": "{{ messages }}"})")
                  .ok());
  const std::vector<std::string> args = {"--prompt", "Hello", "--max_new_tokens", "3"};
  auto run = Generate(args);
  EXPECT_EQ(run->Wait(), 0);
  EXPECT_THAT(run->err(), ElementsAre(HasSubstr("3 new tokens"),
                                      HasSubstr("a chat template, which is not applied")));
  std::vector<std::string> quiet = args;
  quiet.emplace_back("--quiet");
  auto silent = Generate(quiet);
  EXPECT_EQ(silent->Wait(), 0);
  EXPECT_THAT(silent->err(), IsEmpty());
}

TEST_F(GenerateTest, SeveralDraws_AreShownOneAfterTheOther) {
  auto run = Generate({"--prompt", "Hello", "--sample", "--num_return_sequences", "3",
                       "--max_new_tokens", "4", "-o", "json"});
  ASSERT_EQ(run->Wait(), 0) << run->err_text();
  EXPECT_EQ(nlohmann::json::parse(run->out_text())["texts"].size(), 3);
}

// 170 MB of weights, with room for 40 MB of them: they are read again and again, and the text is
// the same.
TEST_F(GenerateTest, ModelLargerThanMemory_RunsFromItsFiles) {
  const std::string large = Temp("large");
  ASSERT_TRUE(WriteHubFolder(large, /*width=*/512, /*layers=*/16).ok());
  const std::string hello = "--prompt Hello --max_new_tokens 5 ";
  auto whole = GenerateWithin("unlimited", large, hello + "--quiet");
  ASSERT_EQ(whole->Wait(), 0) << whole->err_text();
  auto offloaded = GenerateWithin("170000", large, hello + "--weights_memory 40MB");
  ASSERT_EQ(offloaded->Wait(), 0) << offloaded->err_text();
  EXPECT_EQ(offloaded->out_text(), whole->out_text());
  EXPECT_THAT(offloaded->err_text(),
              testing::ContainsRegex(
                  "weights: 0 MiB stay in memory, 16[0-9] MiB come when they are used; at most "
                  "3[0-9] MiB in memory\nplan: keys and values of [0-9]+ tokens 0 MiB, .*\n.*peak "
                  "memory [1-9][0-9]+ MiB\nweights: [1-9][0-9]+ MiB read"));
  // The file is mapped here, which no limit of the process's own memory counts.
  auto mapped = GenerateWithin("170000", large, hello + "--mmap");
  ASSERT_EQ(mapped->Wait(), 0) << mapped->err_text();
  EXPECT_EQ(mapped->out_text(), whole->out_text());
  EXPECT_THAT(mapped->err_text(),
              testing::ContainsRegex("weights: 0 MiB stay in memory, 0 MiB come when they are "
                                     "used; at most 0 MiB in memory\nweights: 16[0-9] MiB are used "
                                     "in the page cache, .*\nplan: .*\n.*\nweights: 0 MiB read"));
  auto part = GenerateWithin("260000", large, hello + "--mmap --max_memory cpu=100MB -o json");
  ASSERT_EQ(part->Wait(), 0) << part->err_text();
  const auto of_part = nlohmann::json::parse(part->out_text())["weights"];
  EXPECT_GT(of_part["resident"].get<int64_t>(), 50'000'000) << of_part;
  EXPECT_GT(of_part["mapped"].get<int64_t>(), 50'000'000) << of_part;
  EXPECT_EQ(of_part["mapped"], of_part["offloaded"]);
  // A part of the weights stays in memory.
  auto divided = GenerateWithin("260000", large, hello + "--max_memory cpu=100MB");
  ASSERT_EQ(divided->Wait(), 0) << divided->err_text();
  EXPECT_EQ(divided->out_text(), whole->out_text());
  EXPECT_THAT(
      divided->err_text(),
      testing::ContainsRegex("weights: [1-9][0-9]* MiB stay in memory, [1-9][0-9]* MiB come "
                             "when they are used; at most [1-9][0-9] MiB in memory"));
  auto json = GenerateWithin("260000", large, hello + "--max_memory cpu=100MB -o json");
  ASSERT_EQ(json->Wait(), 0) << json->err_text();
  const auto figures = nlohmann::json::parse(json->out_text());
  EXPECT_GT(figures["weights"]["offloaded"], 60'000'000);
  EXPECT_LE(figures["weights"]["most_in_memory"], 100'000'000);
  EXPECT_GT(figures["peak_memory"], figures["weights"]["most_in_memory"]);
  auto too_large = GenerateWithin("170000", large, hello + "--quiet");
  EXPECT_NE(too_large->Wait(), 0);
  EXPECT_THAT(too_large->err(),
              ElementsAre(AllOf(HasSubstr(" needs "), HasSubstr(" bytes of memory"),
                                HasSubstr("--max_memory cpu=SIZE leaves the rest"))));
  // If --max_memory is given, the message differs.
  auto too_much = GenerateWithin("170000", large, hello + "--quiet --max_memory cpu=160MB");
  EXPECT_NE(too_much->Wait(), 0);
  EXPECT_THAT(too_much->err(), ElementsAre(HasSubstr("a smaller --max_memory cpu=SIZE")));
}

// The plan includes the keys and values and the activations of a prompt, and the process takes as
// much.
TEST_F(GenerateTest, PromptOfAModelLargerThanMemory_TakesWhatWasPlanned) {
  const std::string large = Temp("large");
  ASSERT_TRUE(WriteHubFolder(large, /*width=*/1024, /*layers=*/12, /*max_positions=*/600).ok());
  const auto expect_planned = [&](int tokens, const std::string& args) {
    SCOPED_TRACE(absl::StrCat(tokens, args));
    std::string prompt;
    for (int i = 0; i < tokens; ++i) absl::StrAppend(&prompt, "7 ");
    // 500 MB of weights, of which 250 MB are in memory; 100 KB for a token of the prompt. The limit
    // counts the whole stacks of threads, 8 MB each.
    const auto run =
        GenerateWithin("560000", large,
                       absl::StrCat("--prompt '", prompt,
                                    "' --max_new_tokens 1 --max_memory cpu=250MB -o json", args));
    ASSERT_EQ(run->Wait(), 0) << run->err_text();
    const auto figures = nlohmann::json::parse(run->out_text());
    EXPECT_GT(figures["texts"][0]["prompt_tokens"], tokens * 9 / 10);
    const auto planned = figures["planned_memory"].get<double>();
    const auto peak = figures["peak_memory"].get<double>();
    const std::string name = absl::StrCat(tokens, args.empty() ? "" : "_lora");
    RecordProperty("planned_" + name, static_cast<int>(planned / 1e6));
    RecordProperty("peak_" + name, static_cast<int>(peak / 1e6));
    EXPECT_LT(peak, 1.15 * planned);
    EXPECT_GT(peak, 0.9 * planned);
  };
  expect_planned(128, "");
  expect_planned(500, "");
  expect_planned(500, " --prefill_chunk_size 64");
  // Adapters stay in memory beside weights in files: 53 MB of them, in all layers.
  {
    auto model = load_causal_lm(large);
    ASSERT_TRUE(model.ok()) << model.status();
    const models::LoraOptions options = {.rank = 64,
                                         .target_modules = {"q_proj", "k_proj", "v_proj", "o_proj",
                                                            "gate_proj", "up_proj", "down_proj"}};
    models::AddLora(**model, options);
    ASSERT_TRUE(models::SaveLora(**model, Temp("adapters"), options).ok());
  }
  expect_planned(128, absl::StrCat(" --lora ", Temp("adapters")));
}

// An error that only depends on options is reported before the weights are read, which takes
// minutes.
TEST_F(GenerateTest, OptionsThatDoNotGoTogether_AreRefusedBeforeTheWeightsAreRead) {
  ASSERT_EQ(std::remove((model_ + "/model.safetensors").c_str()), 0);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--dtype", "float32", "--seed", "7"}, "--seed is for sampling"},
      {{"--length_penalty", "2"}, "--length_penalty is for beam search"},
      {{"--min_new_tokens", "9", "--max_new_tokens", "4"}, "--min_new_tokens 9 is more"},
      {{"--temperature", "0.5"}, "add --sample"},
      {{"--sample", "--top_p", "7"}, "top_p is 7"},
      {{"--num_return_sequences", "2"}, "num_return_sequences is 2"},
      {{"--max_new_tokens", "200"}, "are more than the 64 positions of the model: shorten"},
      {{"--prompt", std::string(400, 'a')}, "prompt 1, of 40"},
      {{"--sample", "--num_return_sequences", "2000000"}, "1 prompts have room for 1048576 each"},
      {{}, "safetensors"}};
  for (const auto& [options, message] : cases) {
    for (const char* const memory : {"", "1GB"}) {
      std::vector<std::string> args = {"--prompt", "a"};
      args.insert(args.end(), options.begin(), options.end());
      if (*memory != '\0') args.insert(args.end(), {"--weights_memory", memory});
      auto run = Generate(args);
      EXPECT_NE(run->Wait(), 0);
      EXPECT_THAT(run->err(), ElementsAre(HasSubstr(message)));
    }
  }
}

TEST_F(GenerateTest, NumbersThatNoModelHas_AreRefused) {
  for (const char* const option : {"--max_new_tokens", "--num_beams"}) {
    for (const char* const number : {"9223372036854775807", "0", "-1"}) {
      SCOPED_TRACE(absl::StrCat(option, " ", number));
      auto run = Generate({"--prompt", "a", option, number});
      EXPECT_EQ(run->Wait(), 2);
      EXPECT_THAT(run->out(), IsEmpty());
      EXPECT_THAT(run->err_text(), testing::AllOf(StartsWith(absl::StrCat(option, ": Value ")),
                                                  HasSubstr("not in range 1 to 1")));
    }
  }
}

TEST_F(GenerateTest, WhatIsWrong_IsOneLineThatNamesIt) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{}, "say what to continue: --prompt TEXT"},
      {{"--prompt", "", "--no_special_tokens"}, "prompt 0 has no token"},
      {{"--prompt", "a", "--max_new_tokens", "200"}, "are more than the 64 positions of the model"},
      {{"--prompt", std::string(400, 'a')}, "are more than the 64 positions of the model: shorten"},
      {{"--prompt", "a", "--prompt", std::string(400, 'a'), "--max_new_tokens", "2"},
       "prompt 1, of 40"},
      {{"--prompt", "a", "--seed", "5"}, "--seed is for sampling: add --sample"},
      {{"--prompt", "a", "--num_beams", "2", "--seed", "0"}, "--seed is for sampling"},
      {{"--prompt", "a", "--length_penalty", "2"}, "--length_penalty is for beam search"},
      {{"--prompt", "a", "--min_new_tokens", "9", "--max_new_tokens", "4"},
       "--min_new_tokens 9 is more than the 4 new tokens"},
      {{"--prompt", "a", "--min_new_tokens", "9", "--ignore_end"}, "leave out one of them"},
      {{"--prompt", "a", "--stop", ""}, "--stop is empty: give it a value or leave it out"},
      {{"--prompt", "a", "--max_memory", ""}, "--max_memory is empty"},
      {{"--prompt", "a", "--lora", ""}, "--lora is empty"},
      {{"--prompt", "a", "--weights_memory", "1KB"}, "raise --weights_memory"},
      {{"--prompt", "a", "--mmap", "--device", "cuda"}, "--mmap works only with --device cpu"},
      {{"--prompt", "a", "--temperature", "0.5"}, "add --sample"},
      {{"--prompt", "a", "--sample", "--greedy"}, "--sample and --greedy exclude each other"},
      {{"--prompt", "a", "--sample", "--top_p", "7"}, "top_p is 7"},
      {{"--prompt", "a", "--max_memory", "plenty"}, "--max_memory: "},
      {{"--prompt", "a", "--max_memory", "7=1GB,cpu=1GB"}, "7"},
      {{"--prompt", "a", "--max_memory", "cpu=1KB"}, "more than any device has"},
      {{"--prompt", "a", "--max_memory", "cpu=1GB", "--weights_memory", "1GB"},
       "leave out --weights_memory"},
      {{"--prompt", "a", "--device", "moon"}, "--device moon is not cpu, cuda or cuda:N"},
      {{"--prompt_file", "/no/such/file"}, "/no/such/file"}};
  for (const auto& [args, message] : cases) {
    auto run = Generate(args);
    EXPECT_NE(run->Wait(), 0);
    EXPECT_THAT(run->out(), IsEmpty());
    ASSERT_EQ(run->err().size(), 1) << absl::StrJoin(run->err(), "\n");
    EXPECT_THAT(run->err()[0], testing::AllOf(StartsWith("muster generate: "), HasSubstr(message)));
  }
  auto run = Run({"--model", Temp("nowhere"), "--prompt", "a"});
  EXPECT_EQ(run->Wait(), 3);
  EXPECT_THAT(run->err(), ElementsAre(HasSubstr("nowhere")));
}

// This holds for whatever runs or plans it.
TEST_F(GenerateTest, DamagedFolder_IsOneLineThatNamesWhatIsWrong) {
  const std::vector<std::vector<std::string>> generating = {
      {"generate", "--model", model_, "--prompt", "a"},
      {"generate", "--model", model_, "--prompt", "a", "--weights_memory", "1GB"},
      {"generate", "--model", model_, "--prompt", "a", "--max_memory", "cpu=1GB"}};
  const auto expect = [&](const std::vector<std::string>& args, const std::string& message) {
    SCOPED_TRACE(absl::StrJoin(args, " "));
    env_["PATH"] = std::string(ParentPath(Runfile("muster/muster-generate")));
    auto run = Muster(args);
    EXPECT_NE(run->Wait(), 0);
    EXPECT_THAT(run->out(), IsEmpty());
    EXPECT_THAT(run->err(), ElementsAre(HasSubstr(message)));
  };
  const std::string path = model_ + "/config.json";
  const auto config = nlohmann::json::parse(ReadFile(path).value_or("{}"));
  const auto write = [&](const std::string& name, const nlohmann::json& value) {
    nlohmann::json other = config;
    other[name] = value;
    ASSERT_TRUE(WriteFileAtomically(path, other.dump()).ok());
  };
  write("intermediate_size", 65);
  for (const auto& args : generating) {
    expect(args, "mlp.down_proj.weight ([32, 64] in the file, [32, 65] by the config)");
  }
  for (const char* const command : {"plan", "estimate-memory"}) {
    expect({command, model_}, "mlp.down_proj.weight is [32, 64] in the file, [32, 65] by config");
  }
  write("rms_norm_eps", nullptr);
  for (const auto& args : generating) expect(args, "config.json: \"rms_norm_eps\" is null");
  write("vocab_size", config["vocab_size"]);
  expect({"plan", model_, "--max_memory", "cpu=10KB"}, "raise a limit");
  expect({"plan", model_, "--max_memory", "cpu=1GB", "--no_split", "Nothing"}, "class Nothing");

  ASSERT_TRUE(WriteFileAtomically(model_ + "/model.safetensors.index.json",
                                  R"({"weight_map": {"model.norm.weight": "model-1.safetensors",
                                                     "lm_head.weight": "model-2.safetensors"}})")
                  .ok());
  ASSERT_EQ(
      rename((model_ + "/model.safetensors").c_str(), (model_ + "/model-1.safetensors").c_str()),
      0);
  const std::string lost = "/model-2.safetensors, which does not exist: copy or download it, too";
  for (const auto& args : generating) expect(args, lost);
  // Sizes are known without the missing file.
  for (const char* const command : {"plan", "estimate-memory"}) {
    env_["PATH"] = std::string(ParentPath(Runfile("muster/muster-generate")));
    auto run = Muster({command, model_});
    EXPECT_EQ(run->Wait(), 0) << run->err_text();
    EXPECT_THAT(run->out_text(), HasSubstr(lost));
  }
}

}  // namespace
}  // namespace muster
