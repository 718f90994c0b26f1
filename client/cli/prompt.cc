#include "client/cli/prompt.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/columns.h"
#include "base/text.h"

namespace muster::client {
namespace {

using Kind = Key::Kind;

// Returns the end of the text before the cursor, as much as fits.
absl::string_view BeforeCursor(absl::string_view text, int columns) {
  // Counted once, because a pasted text is long and is drawn again for each of its characters.
  int more = Columns(text) - columns;
  while (more > 0) {
    const size_t bytes = CharacterBytes(text);
    more -= Columns(text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return text;
}

// The key of a sequence "ESC [ parameters final" or "ESC O final".
Kind KindOfSequence(absl::string_view parameters, char final) {
  switch (final) {
    case 'A':
      return Kind::kUp;
    case 'B':
      return Kind::kDown;
    case 'C':
      return Kind::kRight;
    case 'D':
      return Kind::kLeft;
    case 'H':
      return Kind::kHome;
    case 'F':
      return Kind::kEnd;
    case '~':
      if (parameters == "1" || parameters == "7") return Kind::kHome;
      if (parameters == "4" || parameters == "8") return Kind::kEnd;
      if (parameters == "3") return Kind::kDelete;
      return Kind::kOther;
    default:
      return Kind::kOther;
  }
}

Kind KindOfControl(char byte) {
  switch (byte) {
    case '\r':
    case '\n':
      return Kind::kEnter;
    case '\x01':
      return Kind::kHome;
    case '\x03':
      return Kind::kInterrupt;
    case '\x04':
      return Kind::kEndOfInput;
    case '\x05':
      return Kind::kEnd;
    case '\x08':
    case '\x7f':
      return Kind::kBackspace;
    case '\x15':
      return Kind::kEraseLine;
    case '\x1a':
      return Kind::kSuspend;
    default:
      return Kind::kOther;
  }
}

// Returns how many bytes the character that begins with `lead` has.
size_t BytesAfter(unsigned char lead) {
  return lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
}

}  // namespace

std::optional<Key> KeyReader::Next(bool complete) {
  if (bytes_.empty()) return std::nullopt;
  const auto take = [this](Kind kind, size_t bytes) {
    Key key = {kind, kind == Kind::kText ? bytes_.substr(0, bytes) : ""};
    bytes_.erase(0, bytes);
    return key;
  };
  const char first = bytes_[0];
  if (first == '\x1b') {
    if (bytes_.size() == 1) {
      return complete ? std::optional(take(Kind::kEscape, 1)) : std::nullopt;
    }
    if (bytes_[1] != '[' && bytes_[1] != 'O') return take(Kind::kEscape, 1);
    size_t end = 2;
    while (end < bytes_.size() && (bytes_[end] < '@' || bytes_[end] > '~')) ++end;
    if (end < bytes_.size()) {
      const std::string parameters = bytes_.substr(2, end - 2);
      return take(KindOfSequence(parameters, bytes_[end]), end + 1);
    }
    return complete ? std::optional(take(Kind::kOther, bytes_.size())) : std::nullopt;
  }
  if (static_cast<unsigned char>(first) < ' ' || first == '\x7f') {
    return take(KindOfControl(first), 1);
  }
  if (const size_t bytes = Utf8CharacterBytes(bytes_); bytes > 0) return take(Kind::kText, bytes);
  if (!complete && bytes_.size() < BytesAfter(static_cast<unsigned char>(first))) {
    return std::nullopt;
  }
  return take(Kind::kOther, 1);
}

std::string ChoiceText(const DialogQuestion& question, size_t index) {
  const DialogChoice& choice = question.choices[index];
  size_t width = 0;
  bool explained = false;
  for (const DialogChoice& other : question.choices) {
    width = std::max(width, other.value.size());
    explained = explained || other.label != other.value;
  }
  if (!explained) return choice.value;
  return absl::StrFormat("%-*s  %s", static_cast<int>(width), choice.value, choice.label);
}

std::vector<std::string> WrapText(absl::string_view text, size_t width) {
  width = std::max<size_t>(width, 1);
  std::vector<std::string> lines;
  for (const absl::string_view paragraph : absl::StrSplit(text, '\n')) {
    absl::string_view rest = paragraph;
    while (Columns(rest) > static_cast<int>(width)) {
      const absl::string_view fits = FitColumns(rest, static_cast<int>(width));
      size_t cut = fits.empty() ? CharacterBytes(rest) : fits.size();
      if (cut < rest.size() && rest[cut] != ' ') {
        const size_t blank = fits.rfind(' ');
        if (blank != absl::string_view::npos && blank > 0) cut = blank;
      }
      lines.emplace_back(rest.substr(0, cut));
      rest.remove_prefix(cut);
      if (absl::StartsWith(rest, " ")) rest.remove_prefix(1);
    }
    lines.emplace_back(rest);
  }
  return lines;
}

Prompt::Prompt(DialogQuestion question, int number)
    : question_(std::move(question)), number_(number) {
  for (size_t i = 0; i < question_.choices.size(); ++i) {
    if (question_.choices[i].value == question_.suggestion) chosen_ = i;
  }
}

Prompt::Event Prompt::Press(const Key& key) {
  refusal_.clear();
  switch (key.kind) {
    case Kind::kInterrupt:
      return Event::kCancel;
    case Kind::kEndOfInput:
      return text_.empty() ? Event::kCancel : Event::kNone;
    case Kind::kEnter:
      return Event::kAnswer;
    case Kind::kEscape:
      return Event::kBack;
    default:
      return question_.choices.empty() ? PressInText(key) : PressInList(key);
  }
}

Prompt::Event Prompt::PressInList(const Key& key) {
  const size_t count = question_.choices.size();
  switch (key.kind) {
    case Kind::kUp:
      chosen_ = (chosen_ + count - 1) % count;
      return Event::kNone;
    case Kind::kDown:
      chosen_ = (chosen_ + 1) % count;
      return Event::kNone;
    case Kind::kHome:
      chosen_ = 0;
      return Event::kNone;
    case Kind::kEnd:
      chosen_ = count - 1;
      return Event::kNone;
    case Kind::kLeft:
    case Kind::kBackspace:
      return Event::kBack;
    case Kind::kText:
      if (key.text == "<") return Event::kBack;
      if (key.text == "k") return PressInList({Kind::kUp});
      if (key.text == "j") return PressInList({Kind::kDown});
      if (key.text[0] >= '1' && key.text[0] <= '9') {
        const size_t index = key.text[0] - '1';
        if (index < count) {
          chosen_ = index;
        } else {
          Refuse(absl::StrCat(key.text, " is no answer: press a number from 1 to ", count));
        }
      }
      return Event::kNone;
    default:
      return Event::kNone;
  }
}

size_t Prompt::Left(size_t at) const {
  size_t left = 0;
  for (size_t i = 0; i < at; i += CharacterBytes(absl::string_view(text_).substr(i))) left = i;
  return left;
}

size_t Prompt::Right(size_t at) const {
  return at < text_.size() ? at + CharacterBytes(absl::string_view(text_).substr(at)) : at;
}

Prompt::Event Prompt::PressInText(const Key& key) {
  switch (key.kind) {
    case Kind::kText:
      if (key.text == "<" && text_.empty()) return Event::kBack;
      text_.insert(at_, key.text);
      at_ += key.text.size();
      return Event::kNone;
    case Kind::kLeft:
      if (text_.empty()) return Event::kBack;
      at_ = Left(at_);
      return Event::kNone;
    case Kind::kRight:
      at_ = Right(at_);
      return Event::kNone;
    case Kind::kHome:
      at_ = 0;
      return Event::kNone;
    case Kind::kEnd:
      at_ = text_.size();
      return Event::kNone;
    case Kind::kBackspace: {
      const size_t left = Left(at_);
      text_.erase(left, at_ - left);
      at_ = left;
      return Event::kNone;
    }
    case Kind::kDelete:
      text_.erase(at_, Right(at_) - at_);
      return Event::kNone;
    case Kind::kEraseLine:
      text_.clear();
      at_ = 0;
      return Event::kNone;
    default:
      return Event::kNone;
  }
}

std::string Prompt::answer() const {
  return question_.choices.empty() ? text_ : question_.choices[chosen_].value;
}

std::vector<PromptLine> Prompt::Lines(size_t width) const {
  width = std::max<size_t>(width, 8);
  std::vector<PromptLine> lines;
  const auto add = [&](absl::string_view text, bool strong) {
    for (std::string& line : WrapText(text, width)) lines.push_back({std::move(line), strong});
  };
  add(absl::StrCat(number_, ". ", question_.text), true);
  if (!question_.note.empty()) add(question_.note, false);
  for (size_t i = 0; i < question_.choices.size(); ++i) {
    const std::string line =
        absl::StrCat(i == chosen_ ? "> " : "  ", i + 1, ") ", ChoiceText(question_, i));
    lines.push_back({std::string(FitColumns(line, static_cast<int>(width))), i == chosen_});
  }
  add(question_.choices.empty()
          ? absl::StrCat("Enter: ",
                         question_.suggestion.empty()
                             ? (question_.optional ? "nothing" : "what you have written")
                             : absl::StrCat("take ", question_.suggestion),
                         question_.optional && !question_.suggestion.empty() ? "; -: nothing" : "",
                         "; Esc: back; Ctrl-C: end without a file")
          : "arrows or a number, then Enter; Esc: back; Ctrl-C: end without a file",
      false);
  if (!refusal_.empty()) add(refusal_, true);
  if (question_.choices.empty()) {
    const int room = static_cast<int>(width) - 3;
    const size_t hidden = at_ - BeforeCursor(absl::string_view(text_).substr(0, at_), room).size();
    lines.push_back(
        {absl::StrCat("> ", FitColumns(absl::string_view(text_).substr(hidden), room)), false});
  }
  return lines;
}

std::optional<Prompt::Place> Prompt::Cursor(size_t width) const {
  if (!question_.choices.empty()) return std::nullopt;
  width = std::max<size_t>(width, 8);
  const absl::string_view before =
      BeforeCursor(absl::string_view(text_).substr(0, at_), static_cast<int>(width) - 3);
  return Place{Lines(width).size() - 1, 2 + static_cast<size_t>(Columns(before))};
}

std::string Prompt::Settled() const {
  std::string answer = this->answer();
  if (answer.empty()) answer = question_.suggestion;
  if (answer.empty() || (question_.optional && answer == "-")) answer = "(nothing)";
  return absl::StrCat(number_, ". ", question_.text, " ", answer);
}

}  // namespace muster::client
