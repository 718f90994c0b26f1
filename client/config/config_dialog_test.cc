#include "client/config/config_dialog.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

using State = ConfigDialog::State;

DialogFacts Machine(int gpus = 0) {
  return {.gpus = gpus,
          .usable_gpus = gpus,
          .cores = 4,
          .memory_bytes = int64_t{8} << 30,
          .path = "/home/u/config.yaml",
          .find_file = [](const std::string& name, const std::string& answer,
                          const auto&) -> absl::StatusOr<std::string> {
            if (answer.find("missing") == std::string::npos) return absl::StrCat("/abs/", answer);
            return absl::NotFoundError(absl::StrCat(name, ": ", answer, " does not exist"));
          }};
}

// Answers questions until one answer is refused; returns the first refusal.
std::string Say(ConfigDialog& dialog, const std::vector<std::string>& answers) {
  for (const std::string& answer : answers) {
    const std::string question = dialog.question().text;
    const absl::Status status = dialog.Answer(answer);
    if (!status.ok()) return std::string(status.message());
  }
  return "";
}

// Takes every suggestion until the end.
void TakeTheRest(ConfigDialog& dialog) {
  for (int i = 0; i < 100 && dialog.state() == State::kAsking; ++i) {
    const absl::Status status = dialog.Answer("");
    ASSERT_TRUE(status.ok()) << dialog.question().text << ": " << status;
  }
}

absl::StatusOr<LaunchConfig> ReadBack(const ConfigDialog& dialog, int gpus) {
  auto layer = ParseConfig(dialog.FileText(), "config.yaml");
  if (!layer.ok()) return layer.status();
  return ResolveLaunch({*layer}, {.gpus = gpus, .cores = 4});
}

std::string Summary(const ConfigDialog& dialog) {
  return absl::StrJoin(dialog.Summary(), " ", absl::PairFormatter("="));
}

TEST(ConfigDialog, OneMachineOnTheCpu_IsReadBack) {
  ConfigDialog dialog(Machine());
  EXPECT_EQ(dialog.number(), 1);
  EXPECT_EQ(Say(dialog, {"one", "cpu", "2", "", "bf16", "4", "zero3", "Block, Head", "3", "logs",
                         "yes", "no", "no", "yes"}),
            "");
  ASSERT_EQ(dialog.state(), State::kWrite);
  EXPECT_EQ(Summary(dialog),
            "cpu=true num_processes=2 mixed_precision=bf16 gradient_accumulation_steps=4 "
            "sharding=zero3 sharding_units=Block,Head max_restarts=3 log_dir=logs "
            "tee=true debug=false");
  const auto config = ReadBack(dialog, 0);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->cpu);
  EXPECT_EQ(config->num_processes, 2);
  EXPECT_EQ(config->mixed_precision, "bf16");
  EXPECT_EQ(config->sharding, "zero3");
  EXPECT_EQ(config->env.at("MUSTER_SHARDING_UNITS"), "Block,Head");
  EXPECT_TRUE(config->tee);
}

TEST(ConfigDialog, NothingButSuggestions_AreThoseOfTheMachine) {
  ConfigDialog without(Machine());
  TakeTheRest(without);
  ASSERT_EQ(without.state(), State::kWrite);
  EXPECT_THAT(Summary(without), HasSubstr("cpu=true num_processes=1 "));
  ConfigDialog with(Machine(8));
  TakeTheRest(with);
  EXPECT_THAT(Summary(with), HasSubstr("cpu=false num_processes=8 "));
  EXPECT_TRUE(ReadBack(with, 8).ok());
}

TEST(ConfigDialog, NumbersAndWords_AreTheSameChoice) {
  ConfigDialog dialog(Machine(2));
  EXPECT_EQ(Say(dialog, {"1", " GPU "}), "");
  EXPECT_THAT(dialog.question().text, HasSubstr("Which GPUs"));
}

TEST(ConfigDialog, WrongAnswers_SayWhatToWriteAndAskAgain) {
  const struct {
    int gpus;
    std::vector<std::string> before;
    std::vector<std::string> wrong;
    std::string text;
  } kCases[] = {
      {0, {}, {"4", "0", "two", "-", "one two"}, "write a number from 1 to 3, or one, several"},
      {0, {"several"}, {"1", "0", "-2", "many", "2.5"}, "a whole number of at least 2"},
      {0, {"several", "4"}, {"4", "-1", "x"}, "a whole number from 0 to 3"},
      {0,
       {"several", "4", "0"},
       {"", "host", "10.0.0.5:0", "10.0.0.5:99999", "unix:/a", "10.0.0"},
       "write the numeric address of machine 0"},
      {0, {"several", "4", "0"}, {"0.0.0.0", "[::]:1"}, "cannot call it"},
      {0, {"several", "4", "0", "10.0.0.5", "token"}, {"missing"}, "does not exist"},
      {0, {"several", "4", "0", "10.0.0.5", "token"}, {""}, "write the path of the file"},
      {2, {"one", "gpu"}, {"2", "0,2", "-1", "0,", ","}, "write all, or numbers from 0 to 1"},
      {2, {"one", "gpu"}, {"0,0", "1,01"}, "is listed twice"},
      {2, {"one", "gpu", "all"}, {"3"}, "write 2 at most"},
      {2, {"one", "gpu", "1"}, {"2"}, "write 1 at most"},
      {0,
       {"several", "2", "0", "::1", "tok", "cpu"},
       {"3", "1"},
       "2 machines must have the same number"},
      {0, {"one", "cpu"}, {"0", "-1", "all"}, "a whole number of at least 1"},
      {0, {"one", "cpu", "2"}, {"0", "x"}, "a whole number of at least 1"},
      {0, {"one", "cpu", "2", ""}, {"fp8", "4"}, "write a number from 1 to 3, or no, bf16, fp16"},
      {0, {"one", "cpu", "2", "", "no", "1"}, {"hybrid"}, "zero3"},
      {0, {"one", "cpu", "2", "", "no", "1", "zero2"}, {"A,,B", "a b", "\"A\""}, "class names"},
      {0, {"one", "cpu", "1", "", "no", "1"}, {"-1", "often"}, "a whole number of at least 0"},
      {0, {"one", "cpu", "1", "", "no", "1", "0", ""}, {"perhaps"}, "or yes, no"},
  };
  for (const auto& c : kCases) {
    for (const std::string& wrong : c.wrong) {
      ConfigDialog dialog(Machine(c.gpus));
      ASSERT_EQ(Say(dialog, c.before), "") << dialog.question().text;
      const std::string question = dialog.question().text;
      EXPECT_THAT(Say(dialog, {wrong}), HasSubstr(c.text)) << question << " " << wrong;
      EXPECT_EQ(dialog.question().text, question);
      EXPECT_EQ(dialog.number(), static_cast<int>(c.before.size()) + 1);
    }
  }
}

TEST(ConfigDialog, RangeOfMachines_HasSettingsOfItsOwn) {
  ConfigDialog dialog(Machine());
  EXPECT_EQ(Say(dialog, {"several", "1:3",  "1",   "10.0.0.5", "certificates",
                         "ca",      "cert", "key", "cpu",      "3",
                         "",        "",     "",    "",         "",
                         "",        "",     "yes", "",         "",
                         "",        ""}),
            "");
  EXPECT_EQ(dialog.question().text, "last_call?");
  EXPECT_EQ(Say(dialog, {"1m"}), "");
  EXPECT_EQ(dialog.question().text, "grow_after?");
  EXPECT_EQ(Say(dialog, {"inf"}), "");
  TakeTheRest(dialog);
  const auto config = ReadBack(dialog, 0);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->min_machines, 1);
  EXPECT_EQ(config->num_machines, 3);
  EXPECT_EQ(config->last_call, absl::Minutes(1));
  EXPECT_EQ(config->grow_after, absl::InfiniteDuration());
}

TEST(ConfigDialog, SeveralMachines_AreAskedWhatTheLaunchNeeds) {
  ConfigDialog certificates(Machine());
  EXPECT_EQ(Say(certificates,
                {"several", "2", "1", "10.0.0.5", "certificates", "ca", "cert", "key", "cpu", "4"}),
            "");
  TakeTheRest(certificates);
  EXPECT_THAT(Summary(certificates),
              HasSubstr("num_machines=2 machine_rank=1 main_process_ip=10.0.0.5 "
                        "main_process_port=29400 tls_ca=/abs/ca tls_cert=/abs/cert "
                        "tls_key=/abs/key cpu=true num_processes=4"));
  EXPECT_TRUE(ReadBack(certificates, 0).ok()) << ReadBack(certificates, 0).status();

  ConfigDialog token(Machine());
  EXPECT_EQ(Say(token, {"several", "2", "0", "[fd00::1]:7", "token", "tok", "ca", "cert", "key"}),
            "");
  TakeTheRest(token);
  EXPECT_TRUE(ReadBack(token, 0).ok()) << ReadBack(token, 0).status();

  ConfigDialog other(Machine());
  EXPECT_EQ(Say(other, {"several", "2", "1", "10.0.0.5", "token", "tok", "ca"}), "");
  EXPECT_THAT(other.question().text, HasSubstr("train on")) << "machine 0 alone has a certificate";
  TakeTheRest(other);
  EXPECT_TRUE(ReadBack(other, 0).ok()) << ReadBack(other, 0).status();

  ConfigDialog loopback(Machine());
  EXPECT_EQ(Say(loopback, {"several", "2", "0", "127.0.0.1", "tok"}), "");
  EXPECT_THAT(loopback.question().text, HasSubstr("train on"));
}

TEST(ConfigDialog, Cluster_LeavesTheMachinesToIt) {
  ConfigDialog dialog(Machine(2));
  EXPECT_EQ(Say(dialog, {"cluster", "flags", "gpu", "no"}), "");
  TakeTheRest(dialog);
  EXPECT_EQ(Summary(dialog), "cpu=false mixed_precision=no max_restarts=0 debug=false");
}

TEST(ConfigDialog, Back_AsksAgainAndSuggestsWhatWasAnswered) {
  ConfigDialog dialog(Machine());
  EXPECT_FALSE(dialog.Back());
  EXPECT_EQ(Say(dialog, {"several", "4", "3"}), "");
  EXPECT_TRUE(dialog.Back());
  EXPECT_EQ(dialog.question().suggestion, "3");
  EXPECT_TRUE(dialog.Back());
  EXPECT_EQ(dialog.question().suggestion, "4");
  EXPECT_EQ(Say(dialog, {"2"}), "");
  EXPECT_EQ(dialog.question().suggestion, "0") << "there is no machine 3 of 2";
  EXPECT_TRUE(dialog.Back());
  EXPECT_TRUE(dialog.Back());
  EXPECT_EQ(dialog.number(), 1);
  // Settings for several machines are not written for one.
  EXPECT_EQ(Say(dialog, {"one"}), "");
  TakeTheRest(dialog);
  EXPECT_THAT(Summary(dialog), Not(HasSubstr("machine")));
  EXPECT_EQ(ReadBack(dialog, 0)->num_machines, 1);
}

TEST(ConfigDialog, Back_OverAnOptionalAnswerOfNothing_KeepsIt) {
  DialogFacts facts = Machine();
  facts.given["log_dir"] = "logs";
  ConfigDialog dialog(facts);
  EXPECT_EQ(Say(dialog, {"one", "cpu", "1", "", "", "", ""}), "");
  EXPECT_EQ(dialog.question().suggestion, "logs");
  EXPECT_EQ(Say(dialog, {"-"}), "");
  EXPECT_TRUE(dialog.Back());
  EXPECT_EQ(dialog.question().suggestion, "");
  EXPECT_EQ(Say(dialog, {"", "no"}), "");
  TakeTheRest(dialog);
  EXPECT_EQ(ReadBack(dialog, 0)->log_dir, "");
}

TEST(ConfigDialog, FileThatExists_IsLeftUnlessSaidOtherwise) {
  DialogFacts facts = Machine();
  facts.exists = true;
  ConfigDialog leave(facts);
  EXPECT_EQ(Say(leave, {""}), "");
  EXPECT_EQ(leave.state(), State::kLeave);
  ConfigDialog broken(facts);
  EXPECT_THAT(Say(broken, {"change"}), HasSubstr("replace, leave"));
  facts.former = ParseConfig(
                     "num_processes: 3\nmixed_precision: \"no\"\nlease: 30s\nenv: {A: b, "
                     "MUSTER_SHARDING_UNITS: C}\n"
                     "cpu: true\nstop_grace: 1m\n",
                     "config.yaml")
                     .value();
  ConfigDialog change(facts);
  EXPECT_EQ(Say(change, {"change", "one", "cpu"}), "");
  EXPECT_EQ(change.question().suggestion, "3");
  TakeTheRest(change);
  const auto config = ReadBack(change, 0);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_processes, 3);
  EXPECT_EQ(config->lease, absl::Seconds(30)) << "not asked about, so as it was";
  EXPECT_EQ(config->stop_grace, absl::Minutes(1));
  EXPECT_EQ(config->env.at("A"), "b");
  EXPECT_FALSE(config->env.contains("MUSTER_SHARDING_UNITS")) << "nothing is sharded";
  ConfigDialog replace(facts);
  EXPECT_EQ(Say(replace, {"replace"}), "");
  TakeTheRest(replace);
  EXPECT_EQ(ReadBack(replace, 0)->num_processes, 1);
  EXPECT_TRUE(ReadBack(replace, 0)->env.empty());
}

TEST(ConfigDialog, MoreSettings_AreThoseThatAreLeft) {
  ConfigDialog dialog(Machine());
  EXPECT_EQ(Say(dialog, {"one", "cpu", "1", "", "", "", "", "logs", "no", "no", "yes"}), "");
  const std::vector<std::pair<std::string, std::string>> kAnswers = {
      {"offload_optimizer?", "disk:/scratch"},
      {"activation_checkpointing?", "yes"},
      {"activation_blocks?", "Block"},
      {"offload_activations?", "cpu"},
      {"failure_policy?", ""},
      {"user_error_codes?", "3"},
      {"log_max_mib?", "5"},
      {"log_files?", "2"},
      {"prefix?", "no"},
      {"job_name?", "night"},
      {"stop_grace?", "20s"},
      {"join_timeout?", "1m"},
      {"outage_tolerance?", "2m"},
      {"hang_timeout?", "20m"},
      {"hub_listen?", ""},
      {"lease?", "8s"},
      {"checkpoint_key?", "k"}};
  for (const auto& [question, answer] : kAnswers) {
    EXPECT_EQ(dialog.question().text, question);
    if (question == "lease?") {
      EXPECT_THAT(Say(dialog, {"1s"}), HasSubstr("write at least 4s"));
      EXPECT_THAT(Say(dialog, {"soon"}), HasSubstr("a duration with a unit"));
    }
    if (question == "hang_timeout?") {
      EXPECT_THAT(Say(dialog, {"5s"}), HasSubstr("write at least 10s, or 0 for none"));
    }
    if (question == "hub_listen?") {
      EXPECT_THAT(Say(dialog, {"here"}), HasSubstr("10.0.0.5:0"));
    }
    EXPECT_EQ(Say(dialog, {answer}), "") << question;
  }
  TakeTheRest(dialog);
  const auto config = ReadBack(dialog, 0);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->activation_checkpointing, true);
  EXPECT_EQ(config->activation_blocks, "Block");
  EXPECT_EQ(config->offload_activations, "cpu");
  EXPECT_EQ(config->env.at("MUSTER_OFFLOAD_OPTIMIZER"), "disk:/scratch");
  EXPECT_EQ(config->job_name, "night");
  EXPECT_EQ(config->prefix, false);
  EXPECT_EQ(config->checkpoint_key, "/abs/k");
  EXPECT_EQ(config->log_files, 2);
}

TEST(ConfigDialog, MoreSettingsOfSharding_AreAskedWhereSomethingIsDivided) {
  const std::vector<std::string> start = {"one", "cpu", "2", "", "", ""};
  ConfigDialog dialog(Machine());
  EXPECT_EQ(Say(dialog, start), "");
  EXPECT_EQ(Say(dialog, {"zero3", "Block", "", "", "no", "yes"}), "");
  const std::vector<std::pair<std::string, std::string>> kAnswers = {
      {"sharding_unit_names?", ""},
      {"sharding_min_unit_parameters?", ""},
      {"sharding_group_size?", "2"},
      {"sharding_reshard_after_forward?", ""},
      {"sharding_reshard_group_size?", ""},
      {"sharding_parameter_dtype?", ""},
      {"sharding_reduce_dtype?", "bf16"},
      {"sharding_output_dtype?", ""},
      {"sharding_buffer_dtype?", "fp16"},
      {"sharding_no_split?", "Experts,blocks.0"},
      {"sharding_ignored_modules?", "head"},
      {"sharding_ignored_parameters?", ".*\\.bias"},
      {"sharding_overlap?", "yes"},
      {"optimizer_in_backward?", "yes"},
      {"offload_optimizer?", "disk:/scratch"},
      {"offload_gradients?", "disk:/more"},
      {"offload_parameters?", "disk:/scratch"}};
  for (const auto& [question, answer] : kAnswers) {
    EXPECT_EQ(dialog.question().text, question);
    if (question == "sharding_ignored_modules?") {
      EXPECT_THAT(Say(dialog, {"head("}), HasSubstr("a regular expression"));
    }
    if (question == "offload_parameters?") {
      EXPECT_THAT(Say(dialog, {"nvme"}), HasSubstr("disk:FOLDER"));
    }
    EXPECT_EQ(Say(dialog, {answer}), "") << question;
  }
  TakeTheRest(dialog);
  const auto config = ReadBack(dialog, 0);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->env,
            (std::map<std::string, std::string>{{"MUSTER_SHARDING_UNITS", "Block"},
                                                {"MUSTER_SHARDING_GROUP_SIZE", "2"},
                                                {"MUSTER_SHARDING_REDUCE_DTYPE", "bf16"},
                                                {"MUSTER_SHARDING_BUFFER_DTYPE", "fp16"},
                                                {"MUSTER_SHARDING_NO_SPLIT", "Experts,blocks.0"},
                                                {"MUSTER_SHARDING_IGNORED_MODULES", "head"},
                                                {"MUSTER_SHARDING_IGNORED_PARAMETERS", ".*\\.bias"},
                                                {"MUSTER_SHARDING_OVERLAP", "true"},
                                                {"MUSTER_OPTIMIZER_IN_BACKWARD", "true"},
                                                {"MUSTER_OFFLOAD_OPTIMIZER", "disk:/scratch"},
                                                {"MUSTER_OFFLOAD_GRADIENTS", "disk:/more"},
                                                {"MUSTER_OFFLOAD_PARAMETERS", "disk:/scratch"}}));
  // A file that shards is changed to one that divides nothing: leftover settings would be refused.
  DialogFacts facts = Machine();
  facts.exists = true;
  facts.former = ParseConfig(dialog.FileText(), "config.yaml").value();
  ConfigDialog change(facts);
  EXPECT_EQ(Say(change, {"change", "one", "cpu", "2", "", "", "", "program"}), "");
  TakeTheRest(change);
  ASSERT_EQ(change.state(), State::kWrite);
  const auto changed = ReadBack(change, 0);
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(changed->env,
            (std::map<std::string, std::string>{{"MUSTER_OFFLOAD_OPTIMIZER", "disk:/scratch"}}));
}

// Files of `muster config` used to have the units as a variable.
TEST(ConfigDialog, UnitsThatAreAVariable_BecomeTheSetting) {
  DialogFacts facts = Machine();
  facts.exists = true;
  facts.former = ParseConfig(
                     "num_processes: 2\ncpu: true\nsharding: zero3\nenv: {MUSTER_SHARDING_UNITS: "
                     "C}\n",
                     "config.yaml")
                     .value();
  ConfigDialog dialog(facts);
  EXPECT_EQ(Say(dialog, {"change"}), "");
  TakeTheRest(dialog);
  EXPECT_THAT(Summary(dialog), HasSubstr("sharding=zero3 sharding_units=C "));
  EXPECT_EQ(ReadBack(dialog, 0)->env.at("MUSTER_SHARDING_UNITS"), "C");
}

TEST(ConfigDialog, LastQuestion_ShowsWhatIsWrittenAndTakesNo) {
  ConfigDialog dialog(Machine());
  EXPECT_EQ(Say(dialog, {"one", "cpu", "1", "", "", "", "", "", "", ""}), "");
  EXPECT_EQ(dialog.question().text, "Write the file?");
  EXPECT_THAT(dialog.question().note,
              HasSubstr("/home/u/config.yaml:\n  cpu: true\n  num_processes: 1\n"));
  EXPECT_EQ(Say(dialog, {"no"}), "");
  EXPECT_EQ(dialog.state(), State::kLeave);
}

// Whatever the answers are, a launch accepts the file.
TEST(ConfigDialog, EveryPath_EndsWithAFileThatIsReadBack) {
  const std::vector<std::string> kWords = {"1",          "2",         "3", "4", "yes", "no", "0",
                                           "10.0.0.5:1", "127.0.0.1", "a", "",  "-",   "8s", "<"};
  uint64_t seed = 1;
  int written = 0;
  for (int run = 0; run < 400; ++run) {
    DialogFacts facts = Machine(run % 3);
    facts.exists = run % 5 == 0;
    ConfigDialog dialog(facts);
    for (int i = 0; i < 2000 && dialog.state() == State::kAsking; ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      const std::string& word = kWords[(seed >> 33) % kWords.size()];
      if (word == "<") {
        dialog.Back();
      } else {
        (void)dialog.Answer(word);
      }
    }
    if (dialog.state() != State::kWrite) continue;
    ++written;
    const auto config = ReadBack(dialog, run % 3);
    EXPECT_TRUE(config.ok()) << config.status() << "\n" << dialog.FileText();
  }
  EXPECT_GT(written, 100);
}

}  // namespace
}  // namespace muster::client
