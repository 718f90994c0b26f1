#include "worker/checkpoint/divided_files.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/text.h"

namespace muster {
namespace {

// Splits a name into "model" and ".safetensors".
std::pair<absl::string_view, absl::string_view> Cut(absl::string_view name) {
  const size_t dot = std::min(name.rfind('.'), name.size());
  return {name.substr(0, dot), name.substr(dot)};
}

// Returns the number of parts of `name` according to the file name `candidate`; 0 if it is not a
// part.
size_t CountIn(absl::string_view candidate, absl::string_view name) {
  const auto [stem, extension] = Cut(name);
  if (!absl::ConsumePrefix(&candidate, absl::StrCat(stem, "-")) ||
      !absl::ConsumeSuffix(&candidate, extension)) {
    return 0;
  }
  const size_t of = candidate.find("-of-");
  if (of == absl::string_view::npos) return 0;
  const absl::string_view index = candidate.substr(0, of), count = candidate.substr(of + 4);
  size_t number = 0;
  const auto digits = [](absl::string_view text) { return text.size() >= 5 && IsDigits(text); };
  return digits(index) && digits(count) && absl::SimpleAtoi(count, &number) ? number : 0;
}

}  // namespace

std::vector<DividedFile> DivideTensors(const std::vector<SizedTensor>& tensors, int ranks,
                                       int64_t max_bytes) {
  std::vector<size_t> by_size(tensors.size());
  std::iota(by_size.begin(), by_size.end(), size_t{0});
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](size_t a, size_t b) { return tensors[a].bytes > tensors[b].bytes; });
  using Load = std::pair<int64_t, int>;  // bytes, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int rank = 0; rank < ranks; ++rank) least.emplace(0, rank);
  std::vector<std::vector<size_t>> of_rank(static_cast<size_t>(ranks));
  for (const size_t i : by_size) {
    const auto [bytes, rank] = least.top();
    least.pop();
    of_rank[static_cast<size_t>(rank)].push_back(i);
    // A tensor without elements counts as one byte, because it has an entry.
    least.emplace(bytes + std::max<int64_t>(tensors[i].bytes, 1), rank);
  }
  std::vector<DividedFile> files;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<size_t>& mine = of_rank[static_cast<size_t>(rank)];
    std::sort(mine.begin(), mine.end());
    int64_t bytes = 0;
    for (size_t k = 0; k < mine.size(); ++k) {
      const SizedTensor& tensor = tensors[mine[k]];
      if (k == 0 || bytes + tensor.bytes > max_bytes) {
        files.push_back({.rank = rank, .tensors = {}});
        bytes = 0;
      }
      files.back().tensors.push_back(tensor.name);
      bytes += tensor.bytes;
    }
  }
  return files;
}

std::string PartFileName(absl::string_view name, size_t index, size_t count) {
  const auto [stem, extension] = Cut(name);
  return absl::StrFormat("%s-%05d-of-%05d%s", stem, index + 1, count, extension);
}

std::string IndexFileName(absl::string_view name) { return absl::StrCat(name, ".index.json"); }

absl::StatusOr<std::vector<std::string>> PartsOf(const Manifest& manifest, absl::string_view name) {
  size_t count = 0;
  for (const ManifestFile& file : manifest.files) count = std::max(count, CountIn(file.name, name));
  // There cannot be more parts than files: do not build names for a number from a damaged name.
  if (count > manifest.files.size()) {
    return absl::DataLossError(absl::StrCat("the checkpoint holds a part of ", name, " of ", count,
                                            ", but only ", manifest.files.size(), " files"));
  }
  std::vector<std::string> parts;
  for (size_t i = 0; i < count; ++i) {
    parts.push_back(PartFileName(name, i, count));
    if (manifest.Find(parts.back()) == nullptr) {
      return absl::DataLossError(absl::StrCat("the checkpoint has parts of ", name, " but not ",
                                              parts.back(), ": it was put together by hand"));
    }
  }
  return parts;
}

absl::StatusOr<std::vector<std::string>> FilesOfModel(const Manifest& manifest,
                                                      absl::string_view name) {
  if (manifest.Find(name) != nullptr) return std::vector<std::string>{std::string(name)};
  return PartsOf(manifest, name);
}

}  // namespace muster
