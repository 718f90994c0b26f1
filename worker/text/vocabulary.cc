#include "worker/text/vocabulary.h"

#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/text.h"
#include "worker/text/settings.h"

namespace muster::text {

absl::StatusOr<Vocabulary> Vocabulary::FromJson(const nlohmann::json& json,
                                                const std::string& path) {
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": must be an object of tokens and ids, is ", json.type_name()));
  }
  Vocabulary vocabulary;
  vocabulary.ids_.reserve(json.size());
  for (auto entry = json.begin(); entry != json.end(); ++entry) {
    const std::optional<int64_t> id =
        WholeNumber(entry.value(), std::numeric_limits<int32_t>::max());
    if (!id.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": the id of \"", Printable(entry.key()),
                       "\" must be a whole number below 2^31, is ",
                       Printable(entry.value().dump(-1, ' ', true), 40)));
    }
    vocabulary.Add(entry.key(), static_cast<uint32_t>(*id));
  }
  return vocabulary;
}

void Vocabulary::Add(std::string text, uint32_t id) {
  const std::string& kept = texts_.emplace_back(std::move(text));
  ids_[kept] = id;
  if (id >= kMaxDense) {
    sparse_.emplace(id, &kept);
    return;
  }
  if (id >= dense_.size()) dense_.resize(id + 1);
  if (dense_[id] == nullptr) dense_[id] = &kept;
}

const std::string* Vocabulary::Text(uint32_t id) const {
  if (id < dense_.size()) return dense_[id];
  const auto found = sparse_.find(id);
  return found == sparse_.end() ? nullptr : found->second;
}

}  // namespace muster::text
