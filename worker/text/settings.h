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

// The number, if it is a whole one from 0 to `most`.
std::optional<int64_t> WholeNumber(const nlohmann::json& json, int64_t most);

// One object of a tokenizer.json, read field by field. The first thing that is wrong is kept and
// given by status(), with the path of the field ("pre_tokenizer.pretokenizers[1].behavior"); the
// getters then return an empty value. A field that was not requested is an error of Finish(): a
// setting that we do not know may change every token. Borrows the JSON. Not thread-safe.
class Settings {
 public:
  // `path` is that of the object. An error is kept if `json` is no object.
  Settings(const nlohmann::json& json, std::string path);

  // A field that must be there, and one that need not. null is the same as not there.
  bool Bool(absl::string_view name);
  bool Bool(absl::string_view name, bool if_absent);
  std::optional<bool> MaybeBool(absl::string_view name);
  std::string String(absl::string_view name);
  std::optional<std::string> MaybeString(absl::string_view name);
  // One character, as UTF-8.
  std::string Character(absl::string_view name);
  uint32_t Id(absl::string_view name);
  // A whole number from 0 to `most`.
  int64_t Count(absl::string_view name, int64_t most);
  int64_t Count(absl::string_view name, int64_t most, int64_t if_absent);
  // One of `words`; its place in the list.
  size_t Choice(absl::string_view name, const std::vector<absl::string_view>& words);
  size_t Choice(absl::string_view name, const std::vector<absl::string_view>& words,
                size_t if_absent);
  // The field as it is; nullptr if it is not there.
  const nlohmann::json* Find(absl::string_view name);
  // The same, of a field that must be a list.
  const std::vector<nlohmann::json>& List(absl::string_view name);

  // Fields that may be there and mean nothing.
  void Ignore(absl::string_view name) { Find(name); }

  // What `type` says; what there is no component for is refused by NotSupported.
  std::string Type() { return String("type"); }
  absl::Status NotSupported(absl::string_view what) const;
  absl::Status Wrong(absl::string_view name, absl::string_view what) const;

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }
  std::string PathOf(absl::string_view name) const;

  // status(), or UNIMPLEMENTED that names a field that was not asked for.
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
