#include "client/cli/man_page.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/version.h"

namespace muster::client {
namespace {

// Escapes text so that troff finds no request in it.
std::string Escaped(absl::string_view text) {
  std::string line =
      absl::StrReplaceAll(text, {{"\\", "\\e"}, {"-", "\\-"}, {"'", "\\(aq"}, {"`", "\\(ga"}});
  if (absl::StartsWith(line, ".")) line.insert(0, "\\&");
  return line;
}

std::string Bold(absl::string_view text) { return absl::StrCat("\\fB", Escaped(text), "\\fR"); }
std::string Italic(absl::string_view text) { return absl::StrCat("\\fI", Escaped(text), "\\fR"); }

std::string Header(absl::string_view name, absl::string_view summary) {
  const std::string upper = absl::AsciiStrToUpper(name);
  return absl::StrCat(".TH ", Escaped(upper), " 1 \"\" \"muster ", kVersion,
                      "\" \"Muster\"\n.SH NAME\n", Escaped(name), " \\- ",
                      Escaped(absl::StripSuffix(summary, ".")), "\n");
}

// Lines of a help text are broken by hand, but a page fills them again. "WORD   meaning" is an
// entry of a list.
std::string Paragraphs(absl::string_view text) {
  std::string page;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (line.empty()) {
      absl::StrAppend(&page, ".PP\n");
      continue;
    }
    const std::pair<absl::string_view, absl::string_view> entry =
        absl::StrSplit(line, absl::MaxSplits("  ", 1));
    const absl::string_view meaning = absl::StripLeadingAsciiWhitespace(entry.second);
    if (!meaning.empty() && !absl::StrContains(entry.first, ' ')) {
      absl::StrAppend(&page, ".TP\n", Bold(entry.first), "\n", Escaped(meaning), "\n");
      continue;
    }
    if (absl::StartsWith(line, "Exit codes")) absl::StrAppend(&page, ".PP\n");
    absl::StrAppend(&page, Escaped(line), "\n");
  }
  return page;
}

std::string OptionEntry(const OptionSpec& option) {
  std::string tag = Bold(absl::StrCat("--", option.name));
  if (!option.letter.empty()) tag = absl::StrCat(Bold("-" + option.letter), ", ", tag);
  if (!option.value_name.empty()) absl::StrAppend(&tag, " ", Italic(option.value_name));
  if (option.negative) absl::StrAppend(&tag, ", ", Bold(absl::StrCat("--no_", option.name)));
  return absl::StrCat(".TP\n", tag, "\n", Escaped(absl::StrReplaceAll(option.help, {{"\n", " "}})),
                      option.help.empty() ? "\\&\n" : "\n");
}

std::string Options(const CommandSpec& spec) {
  std::string page =
      ".SH OPTIONS\n.TP\n\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nPrint this help and exit\n";
  std::string group = "Options";
  for (const OptionSpec& option : spec.options) {
    if (option.group.empty()) continue;
    if (option.group != group) absl::StrAppend(&page, ".SS ", Escaped(option.group), "\n");
    group = option.group;
    absl::StrAppend(&page, OptionEntry(option));
  }
  return page;
}

}  // namespace

std::string ManPageName(const CommandSpec& spec) {
  return absl::StrReplaceAll(spec.name, {{" ", "-"}});
}

std::string ManPage(const CommandSpec& spec) {
  std::string page = Header(ManPageName(spec), spec.summary);
  absl::StrAppend(&page, ".SH SYNOPSIS\n", Bold(spec.name), spec.usage.empty() ? "" : " ",
                  Escaped(spec.usage), "\n");
  if (!spec.details.empty()) {
    absl::StrAppend(&page, ".SH DESCRIPTION\n", Paragraphs(spec.details));
  }
  return absl::StrCat(page, Options(spec), ".SH SEE ALSO\n", Bold("muster"), "(1)\n");
}

std::string MainManPage(const std::vector<CommandSpec>& commands) {
  std::string page = Header("muster", "trains and runs LibTorch models on one machine or many");
  absl::StrAppend(&page, ".SH SYNOPSIS\n", Bold("muster"), " ", Italic("COMMAND"),
                  " [OPTIONS]\n.SH COMMANDS\n");
  for (const CommandSpec& spec : commands) {
    absl::StrAppend(&page, ".TP\n", Bold(ManPageName(spec)), "(1)\n", Escaped(spec.summary), "\n");
  }
  return page;
}

}  // namespace muster::client
