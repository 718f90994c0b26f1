#include "muster/internal/plain_rows.h"

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "worker/train/guard.h"

namespace muster::internal {

void PutRows(const PlainState& rows, StateDict* state) {
  for (const auto& [name, row] : rows) {
    if (row.empty()) state->SetDouble(absl::StrCat(name, ".empty"), 0);
    for (size_t i = 0; i < row.size(); ++i) state->SetDouble(absl::StrCat(name, ".", i), row[i]);
  }
}

PlainState Rows(const StateDict& file) {
  PlainState rows;
  for (const auto& [key, unused] : file.scalars()) {
    const size_t dot = key.rfind('.');
    if (dot == std::string::npos) continue;
    std::vector<double>& row = rows[key.substr(0, dot)];
    // Scalars are sorted as texts, so "10" comes before "2": the row is filled by asking for its
    // places in turn.
    if (!row.empty()) continue;
    for (size_t i = 0; file.scalars().count(absl::StrCat(key.substr(0, dot), ".", i)) > 0; ++i) {
      const absl::StatusOr<double> value = file.GetDouble(absl::StrCat(key.substr(0, dot), ".", i));
      ThrowIfError(value.status());
      row.push_back(*value);
    }
  }
  return rows;
}

}  // namespace muster::internal
