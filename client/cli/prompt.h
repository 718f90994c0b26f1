#ifndef MUSTER_CLIENT_CLI_PROMPT_H_
#define MUSTER_CLIENT_CLI_PROMPT_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/config/config_dialog.h"

namespace muster::client {

// What a user presses.
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
    kOther,       // one that means nothing here
  };
  Kind kind = Kind::kOther;
  std::string text = {};  // kText: one character of UTF-8
};

// The bytes that a terminal sends, as keys. Pure.
class KeyReader {
 public:
  void Add(absl::string_view bytes) { bytes_.append(bytes.data(), bytes.size()); }
  // The next whole key; nullopt: it needs more bytes. `complete`: none follow soon, so that an ESC
  // is the key of that name and not the beginning of another.
  std::optional<Key> Next(bool complete);
  // Whether a key has begun.
  bool pending() const { return !bytes_.empty(); }

 private:
  std::string bytes_;
};

// A line of a picture.
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
    kBack,    // to the question before
    kCancel,  // the user ends the dialog
  };
  Event Press(const Key& key);

  // After kAnswer: as ConfigDialog::Answer takes it.
  std::string answer() const;
  // The answer was refused: shows why until the next key.
  void Refuse(absl::string_view why) { refusal_ = std::string(why); }

  // The picture, each line at most `width` columns.
  std::vector<PromptLine> Lines(size_t width) const;
  // Where the cursor is in Lines: for a line to write; nullopt: nowhere.
  struct Place {
    size_t row = 0, column = 0;
  };
  std::optional<Place> Cursor(size_t width) const;

  // The line that remains of it: question and answer.
  std::string Settled() const;

 private:
  Event PressInList(const Key& key);
  Event PressInText(const Key& key);
  size_t Left(size_t at) const;
  size_t Right(size_t at) const;

  const DialogQuestion question_;
  const int number_;
  size_t chosen_ = 0;  // a list's
  std::string text_;   // a line's, and the byte before which the cursor is
  size_t at_ = 0;
  std::string refusal_;
};

// A choice as text: its value and what it means.
std::string ChoiceText(const DialogQuestion& question, size_t index);

// Text in lines of at most `width` columns, broken at blanks where there are any; one column for
// each character.
std::vector<std::string> WrapText(absl::string_view text, size_t width);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_PROMPT_H_
