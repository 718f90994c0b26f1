#ifndef MUSTER_CLIENT_CLI_PROMPT_H_
#define MUSTER_CLIENT_CLI_PROMPT_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/config/config_dialog.h"

namespace muster::client {

// A key that a user presses.
struct Key {
  enum class Kind {
    kText,  // a character
    kEnter,
    kUp,
    kDown,
    kLeft,
    kRight,
    kHome,
    kEnd,
    kBackspace,
    kDelete,
    kEraseLine,  // Ctrl-U
    kEscape,
    kInterrupt,   // Ctrl-C
    kEndOfInput,  // Ctrl-D
    kSuspend,     // Ctrl-Z
    kOther,       // a key without a meaning here
  };
  Kind kind = Kind::kOther;
  std::string text = {};  // kText: one character of UTF-8
};

// Converts the bytes that a terminal sends to keys. Pure.
class KeyReader {
 public:
  void Add(absl::string_view bytes) { bytes_.append(bytes.data(), bytes.size()); }
  // Returns the next whole key; nullopt: it needs more bytes. `complete`: no more bytes follow
  // soon, so an ESC is the Escape key and not the beginning of another one.
  std::optional<Key> Next(bool complete);
  // Whether a key has begun.
  bool pending() const { return !bytes_.empty(); }

 private:
  std::string bytes_;
};

// A line of the picture.
struct PromptLine {
  std::string text;
  bool strong = false;
};

// One question on a screen: a list to choose from, or a line to write. Pure.
class Prompt {
 public:
  Prompt(DialogQuestion question, int number);

  enum class Event {
    kNone,
    kAnswer,
    kBack,    // to the previous question
    kCancel,  // the user ends the dialog
  };
  Event Press(const Key& key);

  // After kAnswer: the text for ConfigDialog::Answer.
  std::string answer() const;
  // Shows why the answer was refused, until the next key.
  void Refuse(absl::string_view why) { refusal_ = std::string(why); }

  // Returns the picture, with lines of at most `width` columns.
  std::vector<PromptLine> Lines(size_t width) const;
  // The place of the cursor in Lines, for a line to write; nullopt: no cursor.
  struct Place {
    size_t row = 0, column = 0;
  };
  std::optional<Place> Cursor(size_t width) const;

  // Returns the line that stays on the screen afterwards: question and answer.
  std::string Settled() const;

 private:
  Event PressInList(const Key& key);
  Event PressInText(const Key& key);
  size_t Left(size_t at) const;
  size_t Right(size_t at) const;

  const DialogQuestion question_;
  const int number_;
  size_t chosen_ = 0;  // for a list
  std::string text_;   // for a line; then the byte before which the cursor is
  size_t at_ = 0;
  std::string refusal_;
};

// Formats a choice: its value and what it means.
std::string ChoiceText(const DialogQuestion& question, size_t index);

// Breaks text into lines of at most `width` columns, at blanks if there are any; each character
// counts as one column.
std::vector<std::string> WrapText(absl::string_view text, size_t width);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_PROMPT_H_
