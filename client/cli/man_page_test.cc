#include "client/cli/man_page.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const CommandSpec kSpec = {
    .name = "muster box open",
    .summary = "Opens a box.",
    .usage = "BOX [OPTIONS]",
    .details =
        "Doesn't close it.\n.hidden stays text, and so does \\n.\n\nlid   how it opens\nExit "
        "codes: 0 done.",
    .options = {{.name = "wide", .help = "All the way", .negative = true},
                {.name = "output", .value_name = "FORMAT", .help = "text", .letter = "o"},
                {.name = "key", .value_name = "FILE", .help = "Its key", .group = "Locks"},
                {.name = "refused", .group = ""}}};

TEST(ManPage, Command_HasWhatItsHelpHas) {
  EXPECT_EQ(ManPageName(kSpec), "muster-box-open");
  EXPECT_THAT(ManPage(kSpec),
              AllOf(StartsWith(".TH MUSTER\\-BOX\\-OPEN 1 "),
                    HasSubstr(".SH NAME\nmuster\\-box\\-open \\- Opens a box\n"),
                    HasSubstr(".SH SYNOPSIS\n\\fBmuster box open\\fR BOX [OPTIONS]\n"),
                    HasSubstr(".TP\n\\fB\\-\\-wide\\fR, \\fB\\-\\-no_wide\\fR\nAll the way\n"),
                    HasSubstr(".TP\n\\fB\\-o\\fR, \\fB\\-\\-output\\fR \\fIFORMAT\\fR\ntext\n"),
                    HasSubstr(".SS Locks\n.TP\n\\fB\\-\\-key\\fR \\fIFILE\\fR\nIts key\n"),
                    HasSubstr(".TP\n\\fBlid\\fR\nhow it opens\n"),
                    HasSubstr(".PP\nExit codes: 0 done.\n"), Not(HasSubstr("refused"))));
}

TEST(ManPage, TextThatLooksLikeTroff_StaysText) {
  EXPECT_THAT(ManPage(kSpec),
              HasSubstr("Doesn\\(aqt close it.\n\\&.hidden stays text, and so does \\en.\n"));
}

TEST(MainManPage, EveryCommand_IsListed) {
  EXPECT_THAT(MainManPage({kSpec}),
              AllOf(StartsWith(".TH MUSTER 1 "),
                    HasSubstr(".TP\n\\fBmuster\\-box\\-open\\fR(1)\nOpens a box.\n")));
}

}  // namespace
}  // namespace muster::client
