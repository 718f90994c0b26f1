#include "client/cli/command_line.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

CommandSpec Launch() {
  return {.name = "muster launch",
          .summary = "Runs a program.",
          .usage = "[OPTIONS] -- PROGRAM",
          .options =
              {{.name = "num_processes", .value_name = "N", .help = "How many"},
               {.name = "cpu", .help = "On the CPU", .alias = "use_cpu"},
               {.name = "prefix", .help = "Prefix", .negative = true},
               {.name = "env", .value_name = "NAME=VALUE", .help = "Variable", .repeated = true}},
          .takes_program = true};
}

CommandLine Parse(const std::vector<std::string>& args) {
  CommandLine line;
  const absl::Status status = ParseCommandLine(Launch(), args, &line);
  EXPECT_TRUE(status.ok()) << status;
  return line;
}

std::string ErrorOf(const std::vector<std::string>& args, const CommandSpec& spec = Launch()) {
  CommandLine line;
  return std::string(ParseCommandLine(spec, args, &line).message());
}

TEST(ParseCommandLine, HyphensAndUnderscores_AreTheSame) {
  EXPECT_EQ(Parse({"--num-processes", "2"}).Get("num_processes"), "2");
  EXPECT_EQ(Parse({"--num_processes=3"}).Get("num_processes"), "3");
  EXPECT_EQ(Parse({"--use-cpu"}).Get("cpu"), "true");
}

TEST(ParseCommandLine, OptionsAfterTheProgram_BelongToIt) {
  const CommandLine without = Parse({"--cpu", "./train", "--num_processes", "9", "-x", "--", "y"});
  EXPECT_FALSE(without.Has("num_processes"));
  EXPECT_THAT(without.words, ElementsAre("./train", "--num_processes", "9", "-x", "--", "y"));
  const CommandLine with = Parse({"--cpu", "--", "--odd-program", "--help"});
  EXPECT_THAT(with.words, ElementsAre("--odd-program", "--help"));
  EXPECT_FALSE(with.help);
  EXPECT_THAT(Parse({"--cpu"}).words, IsEmpty());
}

TEST(ParseCommandLine, Flags_TakeValuesOnlyAfterEquals) {
  const CommandLine line = Parse({"--cpu", "False"});
  EXPECT_EQ(line.Get("cpu"), "true");
  EXPECT_THAT(line.words, ElementsAre("False"));
  EXPECT_EQ(Parse({"--cpu=False"}).Get("cpu"), "False");
  EXPECT_EQ(Parse({"--no-prefix"}).Get("prefix"), "false");
}

TEST(ParseCommandLine, Letters_AreTheirOptions) {
  const CommandSpec spec = {
      .name = "muster x",
      .options = {{.name = "output", .value_name = "FORMAT", .help = "Form", .letter = "o"}}};
  CommandLine line;
  ASSERT_TRUE(ParseCommandLine(spec, {"-o", "json"}, &line).ok());
  EXPECT_EQ(line.Get("output"), "json");
  EXPECT_THAT(HelpText(spec), HasSubstr("-o,--output FORMAT"));
  EXPECT_THAT(ErrorOf({"-o"}, spec), HasSubstr("--output needs a value"));
  EXPECT_THAT(ErrorOf({"-ojson"}, spec), HasSubstr("unknown option -ojson"));
  EXPECT_THAT(ErrorOf({"-p", "json"}, spec), HasSubstr("unknown option -p"));
}

TEST(ParseCommandLine, Repeats_LastCountsUnlessCollected) {
  const CommandLine line =
      Parse({"--num_processes", "1", "--num_processes", "2", "--env", "A=1", "--env=B=2"});
  EXPECT_EQ(line.Get("num_processes"), "2");
  EXPECT_THAT(line.options.at("env"), ElementsAre("A=1", "B=2"));
}

TEST(ParseCommandLine, Mistakes_AreOneLineWithTheWayOut) {
  EXPECT_EQ(ErrorOf({"--num_proceses", "2"}),
            "unknown option --num_proceses; did you mean --num_processes?");
  EXPECT_EQ(ErrorOf({"--num_proceses=2"}),
            "unknown option --num_proceses; did you mean --num_processes?");
  EXPECT_EQ(ErrorOf({"--zebra"}), "unknown option --zebra; see muster launch --help");
  EXPECT_EQ(ErrorOf({"-z"}), "unknown option -z; see muster launch --help");
  EXPECT_EQ(ErrorOf({"--num"}), "unknown option --num; did you mean --num_processes?");
  EXPECT_EQ(ErrorOf({"--num_processes"}), "--num_processes needs a value: --num_processes N");
  EXPECT_EQ(ErrorOf({"--num_processes", "--", "x"}),
            "--num_processes needs a value: --num_processes N");
  EXPECT_EQ(ErrorOf({"--no_prefix=1"}), "--no_prefix takes no value");
  const CommandSpec list = {
      .name = "muster list",
      .options = {{.name = "watch"}, OutputOption({"table", "json", "yaml"})}};
  EXPECT_EQ(ErrorOf({"--watch=maybe"}, list),
            "--watch=maybe: write --watch, or yes or no after the =");
  EXPECT_EQ(ErrorOf({"-o", "xml"}, list), "--output xml: write table, json or yaml");
  EXPECT_EQ(ErrorOf({"a"}, {.name = "muster env"}), "unexpected word a; see muster env --help");
}

TEST(HelpText, HasUsageOptionsAndDetails) {
  CommandSpec spec = Launch();
  spec.details = "Exit codes: 0";
  const std::string help = HelpText(spec);
  EXPECT_THAT(help, HasSubstr("Usage: muster launch [OPTIONS] -- PROGRAM"));
  EXPECT_THAT(help, HasSubstr("--num_processes N"));
  EXPECT_THAT(help, HasSubstr("On the CPU"));
  EXPECT_THAT(help, HasSubstr("Exit codes: 0"));
  EXPECT_THAT(help, HasSubstr("-h,--help"));
  EXPECT_THAT(help, HasSubstr("Prefix; --no_prefix turns it off"));
}

}  // namespace
}  // namespace muster::client
