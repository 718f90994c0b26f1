#ifndef MUSTER_WORKER_TEXT_VOCABULARY_H_
#define MUSTER_WORKER_TEXT_VOCABULARY_H_

#include <cstdint>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::text {

// The tokens of a model and their ids, which need not be dense. Immutable once built; thread-safe.
class Vocabulary {
 public:
  // Reads {"token": id}. `path` names it in messages. Errors: INVALID_ARGUMENT if an id is not a
  // whole number below 2^31.
  static absl::StatusOr<Vocabulary> FromJson(const nlohmann::json& json, const std::string& path);

  // If two tokens have the same text, the later one counts; if two have the same id, the earlier
  // one.
  void Add(std::string text, uint32_t id);

  std::optional<uint32_t> Id(absl::string_view text) const {
    const auto found = ids_.find(text);
    return found == ids_.end() ? std::nullopt : std::optional<uint32_t>(found->second);
  }
  // Returns nullptr if there is no such id.
  const std::string* Text(uint32_t id) const;

  // The number of texts.
  size_t size() const { return ids_.size(); }
  // Calls `visit` (text, id) for every text, in no order.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const auto& [text, id] : ids_) visit(text, id);
  }

 private:
  // Ids from this number on are rare and stored separately.
  static constexpr uint32_t kMaxDense = 4 << 20;

  std::deque<std::string> texts_;  // their addresses never change
  absl::flat_hash_map<absl::string_view, uint32_t> ids_;
  std::vector<const std::string*> dense_;
  absl::flat_hash_map<uint32_t, const std::string*> sparse_;
};

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_VOCABULARY_H_
