#ifndef MUSTER_CLIENT_CONFIG_CONFIG_DIALOG_H_
#define MUSTER_CLIENT_CONFIG_CONFIG_DIALOG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/config/launch_config.h"

namespace muster::client {

struct DialogChoice {
  std::string value;
  std::string label;
};

// One question of `muster config`.
struct DialogQuestion {
  std::string text;
  std::string note = {};                   // lines that explain the question
  std::vector<DialogChoice> choices = {};  // empty: the answer is a text
  std::string suggestion = {};             // the meaning of an empty answer; empty: it has none
  bool optional = false;                   // "-", or nothing, means: not set
};

// The facts that the dialog has when it begins.
struct DialogFacts {
  int gpus = 0;         // of this machine
  int usable_gpus = 0;  // visible to programs without gpu_ids
  int cores = 1;
  int64_t memory_bytes = 0;
  std::string path = {};                          // of the file to write
  bool exists = false;                            // the file exists, and must not be lost silently
  std::optional<Layer> former = std::nullopt;     // its settings, if they can be taken over
  std::string why_no_former = {};                 // if they cannot
  std::map<std::string, std::string> given = {};  // settings to suggest, before all others
  // Returns the absolute path of the file that `answer` names, if the setting `name` can use it.
  // `answers`: to earlier questions. Errors: one line that says what is wrong with it.
  std::function<absl::StatusOr<std::string>(const std::string& name, const std::string& answer,
                                            const std::map<std::string, std::string>& answers)>
      find_file = nullptr;
};

// The questions of `muster config`, in an order that depends on the answers. A state machine: its
// only input and output is `find_file`. Not thread-safe.
class ConfigDialog {
 public:
  explicit ConfigDialog(DialogFacts facts);
  ~ConfigDialog();

  enum class State {
    kAsking,
    kWrite,  // all questions are answered, and the user wants the file
    kLeave,  // the user wants no file
  };
  State state() const;

  // While asking: the question and its number, from 1.
  const DialogQuestion& question() const;
  int number() const;

  // Takes an answer: the value or the number of a choice, a text, or nothing for the suggestion.
  // Blanks around it are ignored. Errors: INVALID_ARGUMENT, one line that says what to write; the
  // question remains.
  absl::Status Answer(absl::string_view answer);

  // Asks the previous question again, and suggests its answer. Returns false if there is none.
  bool Back();

  // Returns the answers as keys and values of the file, in the order of the questions, "env.NAME"
  // for variables.
  std::vector<std::pair<std::string, std::string>> Summary() const;

  // Returns the file's text: the answers, and what `former` and `given` say about settings that
  // were not asked. ParseConfig reads it, and ResolveLaunch accepts it on this machine.
  std::string FileText() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_CONFIG_DIALOG_H_
