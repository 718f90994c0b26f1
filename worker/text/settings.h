#ifndef MUSTER_WORKER_TEXT_SETTINGS_H_
#define MUSTER_WORKER_TEXT_SETTINGS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::text {

// Returns the number if it is a whole one from 0 to `most`.
std::optional<int64_t> WholeNumber(const nlohmann::json& json, int64_t most);

// One object of a tokenizer.json, read field by field. The first error is kept and returned by
// status(), with the path of the field ("pre_tokenizer.pretokenizers[1].behavior"); the getters
// then return an empty value. Finish() returns an error if a field was not requested, because an
// unknown setting may change every token. Borrows the JSON. Not thread-safe.
class Settings {
 public:
  // `path` is that of the object. An error is kept if `json` is not an object.
  Settings(const nlohmann::json& json, std::string path);

  // A required field, and an optional one. null counts as absent.
  bool Bool(absl::string_view name);
  bool Bool(absl::string_view name, bool if_absent);
  std::optional<bool> MaybeBool(absl::string_view name);
  std::string String(absl::string_view name);
  std::optional<std::string> MaybeString(absl::string_view name);
  // Returns one character, as UTF-8.
  std::string Character(absl::string_view name);
  uint32_t Id(absl::string_view name);
  // Returns a whole number from 0 to `most`.
  int64_t Count(absl::string_view name, int64_t most);
  int64_t Count(absl::string_view name, int64_t most, int64_t if_absent);
  // Returns the position of the value in `words`, the allowed ones.
  size_t Choice(absl::string_view name, const std::vector<absl::string_view>& words);
  size_t Choice(absl::string_view name, const std::vector<absl::string_view>& words,
                size_t if_absent);
  // Returns the field unchanged; nullptr if it is absent.
  const nlohmann::json* Find(absl::string_view name);
  // The same, for a field that must be a list.
  const std::vector<nlohmann::json>& List(absl::string_view name);

  // Accepts a field that may be present and has no meaning.
  void Ignore(absl::string_view name) { Find(name); }

  // Returns the field `type`; NotSupported refuses a type without a component.
  std::string Type() { return String("type"); }
  absl::Status NotSupported(absl::string_view what) const;
  absl::Status Wrong(absl::string_view name, absl::string_view what) const;

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }
  std::string PathOf(absl::string_view name) const;

  // Returns status(), or UNIMPLEMENTED naming a field that was not requested.
  absl::Status Finish();

 private:
  const nlohmann::json* Needed(absl::string_view name);
  void Fail(absl::string_view name, absl::string_view what);

  const nlohmann::json& json_;
  const std::string path_;
  std::vector<std::string> known_;
  absl::Status status_;
};

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_SETTINGS_H_
