#include "client/cli/config_command.h"

#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "client/config/launch_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class ConfigCommandTest : public ::testing::Test {
 protected:
  // `answers`: one per line.
  int Run(std::vector<std::string> args, const std::string& answers, bool terminal = false) {
    out_.str("");
    err_.str("");
    std::istringstream in(answers);
    return RunConfigCommand(args,
                            {.variables = {{"HOME", folder_.path()}, {"CUDA_VISIBLE_DEVICES", ""}},
                             .out = out_,
                             .err = err_,
                             .in = &in,
                             .in_is_terminal = terminal});
  }
  std::string Path() const { return folder_.Path(".config/muster/config.yaml"); }
  Layer Written(const std::string& path) {
    auto layer = LoadConfig({path, "test", true});
    EXPECT_TRUE(layer.ok()) << layer.status();
    return layer.value_or(Layer());
  }

  TestFolder folder_;
  std::ostringstream out_, err_;
};

TEST_F(ConfigCommandTest, Show_HasTheFormatThatItIsAskedFor) {
  ASSERT_EQ(Run({"show", "--num_processes", "3", "-o", "json"}, ""), kExitOk) << err_.str();
  const auto shown = nlohmann::json::parse(out_.str(), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(shown.is_object()) << out_.str();
  EXPECT_EQ(shown["settings"]["num_processes"]["value"], "3");
  const std::string as_json = out_.str();
  ASSERT_EQ(Run({"show", "--num_processes", "3", "--json"}, ""), kExitOk);
  EXPECT_EQ(out_.str(), as_json);
  ASSERT_EQ(Run({"show", "--num_processes", "3", "-o", "yaml"}, ""), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("\"settings\":\n"));
  // Neither a launch nor a file has these options here.
  EXPECT_EQ(Run({"default", "-o", "json"}, ""), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("leave out --output"));
  EXPECT_EQ(Run({"show", "--dry_run"}, ""), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("unknown option --dry_run"));
}

TEST_F(ConfigCommandTest, AnswersByLine_WriteTheFileAndEndWithItsPath) {
  ASSERT_EQ(Run({}, "one\ncpu\n2\n\nbf16\n1\nprogram\n0\n\nno\nno\nyes\n"), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("1. Where do the processes of a job run?\n   1) one"),
                    HasSubstr("  num_processes: 2\n"), HasSubstr("muster launch -- PROGRAM\n"),
                    EndsWith(absl::StrCat("written: ", Path(), "\n"))));
  EXPECT_EQ(Written(Path()).settings.at("mixed_precision").text, "bf16");
  EXPECT_EQ(Run({"validate"}, ""), kExitOk) << err_.str();
}

TEST_F(ConfigCommandTest, WrongAnswerOfAScript_EndsItWithoutAFile) {
  EXPECT_EQ(Run({}, "one\ncpu\nmany\n2\n"), kExitUsage);
  EXPECT_EQ(err_.str(),
            "muster config: question 3 (How many processes?): many is no answer: write a whole "
            "number of at least 1; nothing is written\n");
  EXPECT_EQ(Run({}, "one\ncpu\n"), kExitUsage);
  EXPECT_THAT(err_.str(),
              HasSubstr("question 3 (How many processes?): the input ended before this answer"));
  EXPECT_EQ(Run({}, "<\n"), kExitUsage);
  EXPECT_EQ(Run({}, std::string(70'000, 'x')), kExitUsage);
  EXPECT_EQ(Run({}, ""), kExitUsage);
  EXPECT_FALSE(PathExists(folder_.Path(".config"))) << "not even a folder is left";
}

TEST_F(ConfigCommandTest, WrongAnswerOnADumbTerminal_IsAskedAgain) {
  EXPECT_EQ(Run({}, "<\none\ncpu\nmany\n2\n<\n4\n\n\n\n\n\n\n\n\n\n\n", /*terminal=*/true), kExitOk)
      << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("many is no answer: write a whole number of at least 1\n"));
  EXPECT_EQ(Written(Path()).settings.at("num_processes").text, "4");
}

TEST_F(ConfigCommandTest, FileThatExists_IsOnlyReplacedIfSaid) {
  const std::string path = folder_.Path("c.yaml");
  ASSERT_TRUE(WriteFileAtomically(path, "num_processes: 3\nlease: 30s\n").ok());
  EXPECT_EQ(Run({"--config_file", path}, "\n"), kExitOk);
  EXPECT_THAT(out_.str(), EndsWith("nothing is written\n"));
  EXPECT_EQ(ReadFile(path).value(), "num_processes: 3\nlease: 30s\n");
  EXPECT_EQ(Run({"--config_file", path}, "change\n\n\n\n\n\n\n\n\n\n\n\n\n\n"), kExitOk)
      << err_.str();
  EXPECT_EQ(Written(path).settings.at("num_processes").text, "3");
  EXPECT_EQ(Written(path).settings.at("lease").text, "30s");
  EXPECT_THAT(out_.str(), HasSubstr(absl::StrCat("--config_file ", path, " -- PROGRAM")));
  ASSERT_TRUE(WriteFileAtomically(path, "distributed_type: MULTI_CPU\nnum_processes: 2\n").ok());
  EXPECT_EQ(Run({"--config_file", path}, "leave\n"), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("an Accelerate config file"));
  EXPECT_EQ(Run({"--config_file", path, "--force"}, "\n\n\n\n\n\n\n\n\n\n\n\n"), kExitOk)
      << err_.str();
  EXPECT_EQ(Written(path).settings.at("num_processes").text, "1");
}

TEST_F(ConfigCommandTest, Validate_SaysWhatProgramsWrittenWithMusterDoNotTake) {
  const std::string path = folder_.Path("c.yaml");
  const auto validate = [&](const std::string& text) {
    EXPECT_TRUE(WriteFileAtomically(path, text).ok());
    EXPECT_EQ(Run({"validate", path}, ""), kExitOk) << err_.str();
    return out_.str();
  };
  EXPECT_EQ(validate("num_processes: 1\ncpu: true\n"), path + ": ok\n");
  EXPECT_THAT(
      validate("distributed_type: MEGATRON_LM\nnum_processes: 1\n"
               "megatron_lm_config: {megatron_lm_tp_degree: 2}\n"
               "dynamo_config: {dynamo_backend: INDUCTOR}\n"),
      AllOf(HasSubstr(path + ": ok\nfor Python programs; those written with Muster refuse it: "),
            HasSubstr("\nwithout effect on programs written with Muster: dynamo_config: ")));
  EXPECT_EQ(validate("distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n"
                     "fsdp_config: {fsdp_version: 2}\n"),
            path + ": ok\n" + path +
                ":4: fsdp_config has no effect with distributed_type: NO: to use it, write "
                "distributed_type: FSDP\n");
}

TEST_F(ConfigCommandTest, Options_AreSuggested) {
  ASSERT_EQ(Run({"--num_processes", "3", "--lease", "20s"}, "\n\n\n\n\n\n\n\n\n\n\n\n\n"), kExitOk)
      << err_.str();
  EXPECT_EQ(Written(Path()).settings.at("num_processes").text, "3");
  EXPECT_EQ(Written(Path()).settings.at("lease").text, "20s");
}

// A launch with the file would lack them.
TEST_F(ConfigCommandTest, OptionsThatTheFileCannotHave_AreRefused) {
  for (const std::vector<std::string>& verb : {std::vector<std::string>(), {"default"}}) {
    for (const auto& [options, text] :
         {std::pair<std::vector<std::string>, const char*>{{"--use_fsdp", "--fsdp_version", "2"},
                                                           "is a flag of muster launch"},
          {{"--env", "A=b"}, "--env A=b is not copied into the file"},
          {{"--env_file", "x"}, "--env_file is a flag of muster launch"}}) {
      std::vector<std::string> args = verb;
      args.insert(args.end(), options.begin(), options.end());
      EXPECT_EQ(Run(args, "one\n"), kExitUsage);
      EXPECT_THAT(err_.str(), HasSubstr(text));
      EXPECT_FALSE(PathExists(Path()));
    }
  }
  // A launch with these flags.
  EXPECT_EQ(Run({"show", "--use_fsdp", "--env", "A=b"}, ""), kExitOk) << err_.str();
}

TEST_F(ConfigCommandTest, PlacesThatCannotBeWritten_AreRefusedBeforeTheFirstQuestion) {
  const auto refused = [&](const std::vector<std::string>& args, int code, const char* text) {
    EXPECT_EQ(Run(args, "one\n"), code);
    EXPECT_THAT(err_.str(), AllOf(StartsWith("muster config: "), HasSubstr(text)));
    EXPECT_THAT(out_.str(), IsEmpty());
  };
  refused({"--config_file", folder_.path()}, kExitUsage, "is a folder");
  refused({"--config_file", folder_.Path("c.json")}, kExitUsage, "does not end in .json");
  refused({"default", "--config_file", folder_.Path("c.json")}, kExitUsage, "is YAML");
  refused({"--num_processes", "many"}, kExitUsage, "num_processes: many");
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("plain"), "").ok());
  refused({"--config_file", folder_.Path("plain/c.yaml")}, kExitUsage, "is not a folder");
}

TEST_F(ConfigCommandTest, FilesThatAnswersName_AreLookedAt) {
  const std::string token = folder_.Path("token");
  ASSERT_TRUE(WriteFileAtomically(token, "secret").ok());
  ASSERT_EQ(chmod(token.c_str(), 0644), 0);
  const std::string before = "several\n2\n0\n127.0.0.1\n";
  EXPECT_EQ(Run({}, before + "~/token\n"), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("other users can access the token"));
  EXPECT_EQ(Run({}, before + "/nowhere/token\n"), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("/nowhere/token"));
  ASSERT_EQ(chmod(token.c_str(), 0600), 0);
  EXPECT_EQ(Run({}, before + "~/token\ncpu\n2\n\n\n\n\n\n\n\n\nyes\n"), kExitOk) << err_.str();
  EXPECT_EQ(Written(Path()).settings.at("token_file").text, token);
  EXPECT_THAT(out_.str(), HasSubstr("The other machines need files of their own"));
  EXPECT_EQ(Run({"--force"}, "several\n2\n0\n10.0.0.5\ncertificates\n~/token\n"), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("is not a PEM file"));
}

TEST_F(ConfigCommandTest, NobodyAnswers_SaysWhatAsksNothing) {
  EXPECT_EQ(
      RunConfigCommand({}, {.variables = {{"HOME", folder_.path()}}, .out = out_, .err = err_}),
      kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("muster config default"));
}

}  // namespace
}  // namespace muster::client
