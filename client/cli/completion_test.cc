#include "client/cli/completion.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<CommandSpec> Commands() {
  return {{.name = "muster run",
           .summary = "Runs what you're given.",
           .options = {{.name = "mode",
                        .value_name = "fast|safe",
                        .help = "How [not]: how",
                        .letter = "m",
                        .values = {"fast", "safe"}},
                       {.name = "log_file", .value_name = "FILE"},
                       {.name = "tee", .negative = true},
                       {.name = "refused", .group = ""}},
           .takes_program = true},
          {.name = "muster set", .summary = "Sets.", .verbs = {"on", "off"}},
          {.name = "muster box", .summary = "Boxes."},
          {.name = "muster box open", .summary = "Opens one.", .options = {{.name = "wide"}}},
          {.name = "muster serve", .summary = "Serves.", .external = true}};
}

TEST(CompletionScript, Bash_HasCommandsFlagsAndValues) {
  const std::string script = CompletionScript("bash", Commands());
  EXPECT_THAT(
      script,
      AllOf(HasSubstr("compgen -W 'run set box serve --help --version'"),
            HasSubstr("flags='--help -h --mode -m --log_file --tee --no_tee'"),
            HasSubstr("valued=' --mode -m --log_file '"),
            HasSubstr("'run --mode' | 'run -m') values='fast safe' ;;"), HasSubstr("program=yes"),
            HasSubstr("verbs='on off'"), HasSubstr("compgen -W 'open --help'"),
            HasSubstr("'box open')\n      flags='--help -h --wide'"),
            HasSubstr("flags=$(muster serve --help 2>/dev/null"), Not(HasSubstr("refused"))));
}

TEST(CompletionScript, Zsh_HasCommandsFlagsAndValues) {
  EXPECT_THAT(CompletionScript("zsh", Commands()),
              AllOf(HasSubstr("#compdef muster\n"), HasSubstr("'run:Runs what you'\\''re given.'"),
                    HasSubstr("'--mode=[How \\[not\\]\\: how]:fast|safe:(fast safe)'"),
                    HasSubstr("'-m[How"), HasSubstr("'--log_file=[]:FILE:_files'"),
                    HasSubstr("'--no_tee[Not: ]'"), HasSubstr("'1: :(on off)'"),
                    HasSubstr("'open:Opens one.'"), HasSubstr("'--wide[]'"),
                    HasSubstr("$(muster serve --help"), Not(HasSubstr("refused"))));
}

TEST(CompletionScript, Fish_HasCommandsFlagsAndValues) {
  EXPECT_THAT(
      CompletionScript("fish", Commands()),
      AllOf(HasSubstr("'__muster_is --next' -f -a run -d 'Runs what you\\'re given.'"),
            HasSubstr("'__muster_is run' -s m -l mode -x -a 'fast safe' -d 'How [not]: how'"),
            HasSubstr("-l log_file -r -F"), HasSubstr("-l no_tee"),
            HasSubstr("'__muster_is --next set' -f -a 'on off'"),
            HasSubstr("'__muster_is --next box' -f -a open"),
            HasSubstr("'__muster_is box open' -l wide"), HasSubstr("(muster serve --help"),
            Not(HasSubstr("refused"))));
}

}  // namespace
}  // namespace muster::client
