#include "worker/text/settings.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/text.h"
#include "worker/text/unicode.h"

namespace muster::text {

using Json = nlohmann::json;

Settings::Settings(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
  if (!json_.is_object()) {
    status_ = absl::InvalidArgumentError(
        absl::StrCat(path_, ": must be an object, is ", json_.type_name()));
  }
}

std::optional<int64_t> WholeNumber(const Json& json, int64_t most) {
  if (!json.is_number_integer()) return std::nullopt;
  if (json.is_number_unsigned() && json.get<uint64_t>() > static_cast<uint64_t>(most)) {
    return std::nullopt;
  }
  const auto value = json.get<int64_t>();
  return value < 0 || value > most ? std::nullopt : std::optional<int64_t>(value);
}

std::string Settings::PathOf(absl::string_view name) const {
  return absl::StrCat(path_, ".", name);
}

absl::Status Settings::Wrong(absl::string_view name, absl::string_view what) const {
  return absl::InvalidArgumentError(absl::StrCat(PathOf(name), ": ", what));
}

absl::Status Settings::NotSupported(absl::string_view what) const {
  return absl::UnimplementedError(
      absl::StrCat(path_, ": ", what, " is not supported; docs/tokenizers.md lists what is"));
}

void Settings::Fail(absl::string_view name, absl::string_view what) {
  if (status_.ok()) status_ = Wrong(name, what);
}

const Json* Settings::Find(absl::string_view name) {
  known_.emplace_back(name);
  if (!json_.is_object()) return nullptr;
  const auto field = json_.find(known_.back());
  return field == json_.end() || field->is_null() ? nullptr : &*field;
}

const Json* Settings::Needed(absl::string_view name) {
  const Json* const field = Find(name);
  if (field == nullptr) Fail(name, "is missing");
  return field;
}

std::optional<bool> Settings::MaybeBool(absl::string_view name) {
  const Json* const field = Find(name);
  if (field == nullptr) return std::nullopt;
  if (!field->is_boolean()) {
    Fail(name, absl::StrCat("must be true or false, is ", field->type_name()));
    return std::nullopt;
  }
  return field->get<bool>();
}

bool Settings::Bool(absl::string_view name, bool if_absent) {
  return MaybeBool(name).value_or(if_absent);
}

bool Settings::Bool(absl::string_view name) {
  const std::optional<bool> value = MaybeBool(name);
  if (!value.has_value()) Fail(name, "is missing");
  return value.value_or(false);
}

std::optional<std::string> Settings::MaybeString(absl::string_view name) {
  const Json* const field = Find(name);
  if (field == nullptr) return std::nullopt;
  if (!field->is_string()) {
    Fail(name, absl::StrCat("must be a text, is ", field->type_name()));
    return std::nullopt;
  }
  return field->get<std::string>();
}

std::string Settings::String(absl::string_view name) {
  std::optional<std::string> value = MaybeString(name);
  if (!value.has_value()) Fail(name, "is missing");
  return std::move(value).value_or("");
}

std::string Settings::Character(absl::string_view name) {
  std::string value = String(name);
  if (ok() && CountCharacters(value) != 1) {
    Fail(name, absl::StrCat("must be one character, is \"", Printable(value), "\""));
  }
  return ok() ? value : " ";
}

int64_t Settings::Count(absl::string_view name, int64_t most, int64_t if_absent) {
  const Json* const field = Find(name);
  if (field == nullptr) return if_absent;
  const std::optional<int64_t> value = WholeNumber(*field, most);
  if (!value.has_value()) {
    Fail(name, absl::StrCat("must be a whole number from 0 to ", most, ", is ",
                            Printable(field->dump(-1, ' ', true), 40)));
  }
  return value.value_or(if_absent);
}

int64_t Settings::Count(absl::string_view name, int64_t most) {
  const int64_t value = Count(name, most, -1);
  if (value < 0) Fail(name, "is missing");
  return std::max<int64_t>(value, 0);
}

uint32_t Settings::Id(absl::string_view name) {
  return static_cast<uint32_t>(Count(name, std::numeric_limits<int32_t>::max()));
}

size_t Settings::Choice(absl::string_view name, const std::vector<absl::string_view>& words,
                        size_t if_absent) {
  const std::optional<std::string> value = MaybeString(name);
  if (!value.has_value()) return if_absent;
  const auto found = std::find(words.begin(), words.end(), *value);
  if (found != words.end()) return static_cast<size_t>(found - words.begin());
  if (ok()) {
    status_ = absl::UnimplementedError(absl::StrCat(PathOf(name), ": '", Printable(*value),
                                                    "' is not supported; it may be ",
                                                    absl::StrJoin(words, ", ")));
  }
  return if_absent;
}

size_t Settings::Choice(absl::string_view name, const std::vector<absl::string_view>& words) {
  const size_t value = Choice(name, words, words.size());
  if (value < words.size()) return value;
  Fail(name, "is missing");
  return 0;
}

const std::vector<Json>& Settings::List(absl::string_view name) {
  static const auto* const none = new std::vector<Json>;
  const Json* const field = Needed(name);
  if (field == nullptr) return *none;
  if (!field->is_array()) {
    Fail(name, absl::StrCat("must be a list, is ", field->type_name()));
    return *none;
  }
  return field->get_ref<const Json::array_t&>();
}

absl::Status Settings::Finish() {
  if (!ok()) return status_;
  for (const auto& [name, value] : json_.items()) {
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    return absl::UnimplementedError(
        absl::StrCat(path_, ": the setting '", Printable(name),
                     "' is not known; without knowing what it means, the tokens may be wrong"));
  }
  return absl::OkStatus();
}

}  // namespace muster::text
