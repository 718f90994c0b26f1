#include "worker/checkpoint/planned_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/checkpoint/digest.h"

namespace muster {

using Json = nlohmann::json;

void TensorList::Add(absl::string_view name, absl::string_view type,
                     absl::Span<const int64_t> shape) {
  // Names may contain any bytes.
  lines_.push_back(
      absl::StrCat(absl::CHexEscape(name), "\t", type, "\t", absl::StrJoin(shape, ","), "\n"));
}

std::string TensorList::Summary() const {
  std::vector<std::string> sorted = lines_;
  std::sort(sorted.begin(), sorted.end());
  Digester digester;
  for (const std::string& line : sorted) digester.Update(line);
  return absl::StrCat(size(), size() == 1 ? " tensor, " : " tensors, ", digester.Finish().xxh3);
}

std::string FileReport::Encode() const { return Json({planned, held}).dump(); }

absl::StatusOr<FileReport> FileReport::Parse(const std::string& text) {
  try {
    const Json json = Json::parse(text);
    FileReport report;
    json.at(0).get_to(report.planned);
    json.at(1).get_to(report.held);
    return report;
  } catch (const Json::exception& error) {
    return absl::InternalError(absl::StrCat("a rank reports its files as ", error.what()));
  }
}

absl::Status CheckPlannedFiles(const std::vector<FileReport>& ranks) {
  std::map<std::string, std::pair<size_t, std::string>> planned, held;  // with the rank
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [file, summary] : ranks[rank].planned) {
      const auto [at, added] = planned.try_emplace(file, rank, summary);
      if (added || at->second.second == summary) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the ranks plan ", file, " differently: rank ", at->second.first, " with ",
                       at->second.second, ", rank ", rank, " with ", summary,
                       ": prepare the same models and optimizers in the same order on every rank"));
    }
    for (const auto& [file, summary] : ranks[rank].held) {
      const auto [at, added] = held.try_emplace(file, rank, summary);
      if (added) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("ranks ", at->second.first, " and ", rank, " have both written ", file));
    }
  }
  for (const auto& [file, plan] : planned) {
    const auto found = held.find(file);
    if (found == held.end()) {
      return absl::InvalidArgumentError(absl::StrCat("no rank has written ", file, ", which rank ",
                                                     plan.first, " plans with ", plan.second));
    }
    if (found->second.second != plan.second) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, " of rank ", found->second.first, " has ", found->second.second,
                       ", but rank ", plan.first, " plans ", plan.second,
                       ": a tensor is missing, occurs twice, or has a different shape"));
    }
  }
  return absl::OkStatus();
}

}  // namespace muster
