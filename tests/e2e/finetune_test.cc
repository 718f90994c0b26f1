// examples/finetune under the launcher: from a Hub folder and a text to a Hub folder.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "muster/models.h"
#include "muster/tokenizer.h"
#include "tests/e2e/hub_folder.h"
#include "tests/e2e/launch_fixture.h"
#include "tests/support/command.h"
#include "tests/support/python.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class FinetuneTest : public LaunchFixture {
 protected:
  void SetUp() override {
    LaunchFixture::SetUp();
    ASSERT_TRUE(WriteHubFolder(Temp("model")).ok());
    std::string text;
    for (int i = 0; i < 60; ++i) absl::StrAppend(&text, "The quick brown fox jumps.\n\n");
    ASSERT_TRUE(WriteFileAtomically(Temp("text"), text).ok());
  }

  // Returns the losses of the reports, first to last.
  std::vector<double> Finetune(const std::vector<std::string>& args) {
    std::vector<std::string> command = {"launch",
                                        "--cpu",
                                        "--no_prefix",
                                        "--num_processes",
                                        "2",
                                        "--",
                                        Runfile("examples/finetune/finetune"),
                                        "--model",
                                        Temp("model"),
                                        "--data",
                                        Temp("text"),
                                        "--output_dir",
                                        Temp("tuned"),
                                        "--context",
                                        "16",
                                        "--batch_size",
                                        "2",
                                        "--lr",
                                        "0.02",
                                        "--log_every",
                                        "5"};
    command.insert(command.end(), args.begin(), args.end());
    auto run = Muster(std::move(command));
    EXPECT_EQ(run->Wait(), 0) << run->err_text();
    std::vector<double> losses;
    for (const std::string& line : run->out()) {
      losses.push_back(nlohmann::json::parse(line)["loss"].get<double>());
    }
    return losses;
  }
};

at::Tensor Logits(models::CausalLm& model) {
  const at::NoGradGuard no_grad;
  return model->forward({.input_ids = at::arange(8, c10::kLong).unsqueeze(0)}).logits;
}

TEST_F(FinetuneTest, AllWeightsSharded_LearnAndLoadAgain) {
  ASSERT_TRUE(WriteFileAtomically(Temp("model/vocab.txt"), "as in older folders").ok());
  ASSERT_TRUE(WriteFileAtomically(Temp("model/tokenizer.model"), "beside it").ok());
  const std::vector<double> losses = Finetune({"--steps", "20", "--sharding", "zero3"});
  ASSERT_GE(losses.size(), 2);
  EXPECT_LT(losses.back(), losses.front() / 2);
  auto tuned = load_causal_lm(Temp("tuned"));
  ASSERT_TRUE(tuned.ok()) << tuned.status();
  auto base = load_causal_lm(Temp("model"));
  EXPECT_FALSE(at::allclose(Logits(*tuned), Logits(*base)));
  EXPECT_TRUE(PathExists(Temp("tuned/tokenizer.json")));
  EXPECT_TRUE(PathExists(Temp("tuned/vocab.txt")));
  EXPECT_TRUE(PathExists(Temp("tuned/tokenizer.model")));
}

// Each process has read only its parts of the weights.
TEST_F(FinetuneTest, ShardedRun_EndsAtTheWeightsOfAnUndividedOne) {
  Finetune({"--steps", "4"});
  auto whole = load_causal_lm(Temp("tuned"));
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_TRUE(RemoveTree(Temp("tuned")).ok());
  Finetune({"--steps", "4", "--sharding", "zero3"});
  auto sharded = load_causal_lm(Temp("tuned"));
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  EXPECT_TRUE(at::allclose(Logits(*sharded), Logits(*whole), 1e-3, 1e-4));
}

TEST_F(FinetuneTest, ShardedMixtureOfExperts_EndsAtTheWeightsOfAnUndividedOne) {
  ASSERT_TRUE(RemoveTree(Temp("model")).ok());
  ASSERT_TRUE(WriteHubFolder(Temp("model"), 32, 2, 64, /*experts=*/4).ok());
  Finetune({"--steps", "3"});
  auto whole = load_causal_lm(Temp("tuned"));
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_TRUE(RemoveTree(Temp("tuned")).ok());
  Finetune({"--steps", "3", "--sharding", "zero3"});
  auto sharded = load_causal_lm(Temp("tuned"));
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  EXPECT_TRUE(at::allclose(Logits(*sharded), Logits(*whole), 1e-3, 1e-4));
}

TEST_F(FinetuneTest, AdaptersOfAShardedModel_LearnAndLoadIntoTheBaseModel) {
  const std::vector<double> losses =
      Finetune({"--steps", "20", "--lora", "4", "--sharding", "zero3"});
  ASSERT_GE(losses.size(), 2);
  EXPECT_LT(losses.back(), losses.front());
  auto base = load_causal_lm(Temp("model"));
  ASSERT_TRUE(base.ok()) << base.status();
  EXPECT_TRUE(models::LoadLora(**base, Temp("tuned")).ok());
}

TEST_F(FinetuneTest, AdaptersOfAShardedModel_RefuseFilesOfAnotherModel) {
  auto text = ReadFile(Temp("model/config.json"));
  ASSERT_TRUE(text.ok()) << text.status();
  auto config = nlohmann::json::parse(*text);
  // The files have one block more than the config.
  config["num_hidden_layers"] = config["num_hidden_layers"].get<int>() - 1;
  ASSERT_TRUE(WriteFileAtomically(Temp("model/config.json"), config.dump()).ok());
  auto run = Muster({"launch",     "--cpu",        "--num_processes",
                     "2",          "--",           Runfile("examples/finetune/finetune"),
                     "--model",    Temp("model"),  "--data",
                     Temp("text"), "--output_dir", Temp("tuned"),
                     "--context",  "16",           "--steps",
                     "2",          "--lora",       "4",
                     "--sharding", "zero3"});
  EXPECT_NE(run->Wait(), 0);
  EXPECT_THAT(run->err_text(), HasSubstr("/model: its files hold model.layers."));
}

TEST_F(FinetuneTest, Adapters_LearnAndLoadIntoTheBaseModel) {
  const std::vector<double> losses = Finetune({"--steps", "20", "--lora", "4"});
  ASSERT_GE(losses.size(), 2);
  EXPECT_LT(losses.back(), losses.front());
  auto base = load_causal_lm(Temp("model"));
  ASSERT_TRUE(base.ok()) << base.status();
  const at::Tensor before = Logits(*base);
  const auto adapters = models::LoadLora(**base, Temp("tuned"));
  ASSERT_TRUE(adapters.ok()) << adapters.status();
  EXPECT_EQ(adapters->rank, 4);
  EXPECT_FALSE(at::allclose(Logits(*base), before));
}

// Computes with a folder that Muster wrote, in transformers or in PEFT on top of it, if is_there():
// no Python may have them.
class PythonReader {
 public:
  explicit PythonReader(const std::string& modules)
      : python_(testing_support::PythonWith(modules)) {}
  bool is_there() const { return !python_.empty(); }

  // Returns the logits of `ids` by the model that `load` makes as `model`, after `import torch`.
  at::Tensor Logits(const std::string& load, const std::string& work) const {
    const std::string script =
        absl::StrCat("import json, torch\n", load,
                     "\nmodel.eval()\nwith torch.no_grad():\n"
                     "    logits = model(input_ids=torch.arange(8)[None]).logits\n",
                     "with open('", work,
                     "/logits.json', 'w') as file:\n"
                     "    json.dump(logits.flatten().tolist(), file)\n");
    EXPECT_TRUE(WriteFileAtomically(work + "/read.py", script).ok());
    const testing_support::CommandResult run = testing_support::RunCommand(absl::StrCat(
        "HF_HUB_OFFLINE=1 HF_HOME=", work, " ", python_, " -B ", work, "/read.py 2>&1"));
    EXPECT_EQ(run.exit_code, 0) << run.output;
    const auto read = nlohmann::json::parse(ReadFile(work + "/logits.json").value_or("[]"));
    return at::tensor(read.get<std::vector<float>>()).view({1, 8, -1});
  }

 private:
  const std::string python_;
};

TEST_F(FinetuneTest, FolderThatWasWritten_IsTheSameModelInTransformers) {
  const PythonReader python("torch, transformers");
  if (!python.is_there()) return;
  Finetune({"--steps", "5", "--sharding", "zero3"});
  auto tuned = load_causal_lm(Temp("tuned"));
  ASSERT_TRUE(tuned.ok()) << tuned.status();
  const at::Tensor theirs = python.Logits(
      absl::StrCat("from transformers import AutoModelForCausalLM\n"
                   "model, info = AutoModelForCausalLM.from_pretrained('",
                   Temp("tuned"),
                   "', output_loading_info=True)\n"
                   "for name in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):\n"
                   "    assert not info[name], (name, info[name])"),
      Temp(""));
  ASSERT_EQ(theirs.size(2), 1203);
  EXPECT_TRUE(at::allclose(Logits(*tuned), theirs, 1e-4, 1e-4));
}

TEST_F(FinetuneTest, AdaptersThatWereWritten_AreTheSameInPeft) {
  const PythonReader python("torch, transformers, peft");
  if (!python.is_there()) return;
  Finetune({"--steps", "20", "--lora", "4"});
  auto tuned = load_causal_lm(Temp("model"));
  ASSERT_TRUE(tuned.ok()) << tuned.status();
  const at::Tensor base = Logits(*tuned);
  ASSERT_TRUE(models::LoadLora(**tuned, Temp("tuned")).ok());
  const at::Tensor ours = Logits(*tuned);
  // A name that PEFT does not find is only a warning there, and the adapter stays as it was made.
  const at::Tensor theirs = python.Logits(
      absl::StrCat("import warnings\nwarnings.filterwarnings('error', message='Found missing')\n"
                   "from transformers import AutoModelForCausalLM\nfrom peft import PeftModel\n"
                   "model = PeftModel.from_pretrained(\n    "
                   "AutoModelForCausalLM.from_pretrained('",
                   Temp("model"), "'), '", Temp("tuned"), "')"),
      Temp(""));
  ASSERT_EQ(theirs.size(2), 1203);
  EXPECT_FALSE(at::allclose(ours, base, 1e-3, 1e-3));
  EXPECT_TRUE(at::allclose(ours, theirs, 1e-4, 1e-4));
}

// The steps after the tenth of 20 are repeated.
TEST_F(FinetuneTest, RunThatStopped_GoesOnToTheSameModel) {
  const std::vector<std::string> args = {
      "--steps",          "20",           "--sharding",         "zero3",
      "--checkpoint_dir", Temp("states"), "--checkpoint_steps", "10"};
  Finetune(args);
  auto whole = load_causal_lm(Temp("tuned"));
  ASSERT_TRUE(whole.ok()) << whole.status();
  const auto states = ListDirectory(Temp("states/checkpoints"));
  ASSERT_TRUE(states.ok()) << states.status();
  ASSERT_THAT(*states, ::testing::UnorderedElementsAre("checkpoint_0", "checkpoint_1"));
  ASSERT_TRUE(RemoveTree(Temp("states/checkpoints/checkpoint_1")).ok());
  ASSERT_TRUE(RemoveTree(Temp("tuned")).ok());
  EXPECT_EQ(Finetune(args).size(), 2);
  auto again = load_causal_lm(Temp("tuned"));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(at::equal(Logits(*again), Logits(*whole)));
}

TEST_F(FinetuneTest, LossThatIsNoNumber_IsAnErrorNotAModel) {
  auto run = Muster({"launch", "--cpu", "--num_processes", "1", "--",
                     Runfile("examples/finetune/finetune"), "--model", Temp("model"), "--data",
                     Temp("text"), "--output_dir", Temp("tuned"), "--steps", "9", "--lr", "1e30",
                     "--warmup", "0"});
  EXPECT_NE(run->Wait(), 0);
  EXPECT_THAT(run->err_text(), HasSubstr("the loss is no number: take a smaller --lr"));
  EXPECT_FALSE(PathExists(Temp("tuned/model.safetensors")));
}

TEST_F(FinetuneTest, StepsThatAllOverflowFp16_AreAnErrorNotALoop) {
  auto run = Muster({"launch",
                     "--cpu",
                     "--num_processes",
                     "1",
                     "--mixed_precision",
                     "fp16",
                     "--",
                     Runfile("examples/finetune/finetune"),
                     "--model",
                     Temp("model"),
                     "--data",
                     Temp("text"),
                     "--output_dir",
                     Temp("tuned"),
                     "--steps",
                     "9",
                     "--lr",
                     "1e30",
                     "--warmup",
                     "0",
                     "--checkpoint_dir",
                     Temp("states"),
                     "--checkpoint_steps",
                     "1"});
  EXPECT_NE(run->Wait(), 0);
  EXPECT_THAT(run->err_text(), HasSubstr("100 in a row overflow fp16: take a smaller --lr"));
  EXPECT_FALSE(PathExists(Temp("tuned/model.safetensors")));
  const auto states = ListDirectory(Temp("states/checkpoints"));
  ASSERT_TRUE(states.ok()) << states.status();
  EXPECT_THAT(*states, ::testing::ElementsAre("checkpoint_0")) << "of the step that was made";
}

TEST_F(FinetuneTest, OutputInTheFolderOfTheModel_ReplacesIt) {
  auto before = load_causal_lm(Temp("model"));
  ASSERT_TRUE(before.ok()) << before.status();
  auto run = Muster({"launch", "--cpu", "--num_processes", "2", "--",
                     Runfile("examples/finetune/finetune"), "--model", Temp("model"), "--data",
                     Temp("text"), "--output_dir", Temp("model/../model"), "--steps", "2", "--lr",
                     "1e-2"});
  EXPECT_EQ(run->Wait(), 0) << run->err_text();
  auto after = load_causal_lm(Temp("model"));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_FALSE(at::equal(Logits(*after), Logits(*before)));
  EXPECT_TRUE(Tokenizer::FromFolder(Temp("model")).ok());
}

TEST_F(FinetuneTest, WrongNumber_NamesTheRange) {
  auto run = Muster({"launch", "--cpu", "--num_processes", "1", "--",
                     Runfile("examples/finetune/finetune"), "--model", Temp("model"), "--data",
                     Temp("text"), "--output_dir", Temp("tuned"), "--steps", "-1"});
  EXPECT_NE(run->Wait(), 0);
  EXPECT_THAT(run->err_text(), HasSubstr("--steps: Value -1 not in range 1 to 1000000000"));
  EXPECT_THAT(run->err_text(), HasSubstr("exited with code 2"));
}

TEST_F(FinetuneTest, ContextBeyondTheModel_IsOneLine) {
  auto run = Muster({"launch", "--cpu", "--num_processes", "1", "--",
                     Runfile("examples/finetune/finetune"), "--model", Temp("model"), "--data",
                     Temp("text"), "--output_dir", Temp("tuned"), "--context", "65"});
  EXPECT_NE(run->Wait(), 0);
  EXPECT_THAT(run->err_text(), HasSubstr("--context 65 is more than the model's 64 positions"));
}

}  // namespace
}  // namespace muster
