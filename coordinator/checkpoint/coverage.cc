#include "coordinator/checkpoint/coverage.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

// The most comparisons of all slices: a tenth of a second, in which no other caller is served.
constexpr size_t kMaxComparisons = 20'000'000;
constexpr size_t kMaxDtype = 16;

template <typename Numbers>
std::string Text(const Numbers& numbers) {
  return absl::StrCat("[", absl::StrJoin(numbers, ", "), "]");
}

// Returns the elements of a box or a shape; nullopt if the number does not fit 63 bits.
template <typename Numbers>
std::optional<int64_t> Elements(const Numbers& extent) {
  int64_t elements = 1;
  bool too_large = false;
  for (const int64_t n : extent) {
    // An empty tensor may have huge other dimensions.
    if (n == 0) return 0;
    too_large = too_large || __builtin_mul_overflow(elements, n, &elements);
  }
  if (too_large) return std::nullopt;
  return elements;
}

}  // namespace

std::optional<v1::OpError> Coverage::Check(const v1::TensorSlice& slice,
                                           const std::string& file) const {
  const std::string& name = slice.tensor();
  if (name.empty() || name.size() > kMaxName) {
    return BadField("files.slices.tensor",
                    absl::StrCat("file ", Quoted(file), ": a tensor's name has 1 to ", kMaxName,
                                 " bytes, not ", name.size()));
  }
  const auto bad = [&](const std::string& what) {
    return BadField("files.slices",
                    absl::StrCat("file ", Quoted(file), ", tensor ", Quoted(name), ": ", what));
  };
  const int rank = slice.global_shape_size();
  if (rank > kMaxRank) return bad(absl::StrCat(rank, " dimensions; at most ", kMaxRank));
  if (slice.offset_size() != rank || slice.extent_size() != rank) {
    return bad(absl::StrCat("offset and extent have ", slice.offset_size(), " and ",
                            slice.extent_size(), " entries: the shape ", Text(slice.global_shape()),
                            " needs ", rank, " of each"));
  }
  for (int i = 0; i < rank; ++i) {
    const int64_t size = slice.global_shape(i), from = slice.offset(i), count = slice.extent(i);
    if (size < 0 || from < 0 || count < 0 || from > size || count > size - from) {
      return bad(absl::StrCat("offset ", Text(slice.offset()), " and extent ", Text(slice.extent()),
                              " leave the shape ", Text(slice.global_shape())));
    }
  }
  if (!Elements(slice.global_shape()).has_value()) {
    return bad(absl::StrCat("shape ", Text(slice.global_shape()), " has more than 2^63 elements"));
  }
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) return std::nullopt;
  const Tensor& tensor = it->second;
  if (tensor.dtype != slice.dtype().substr(0, kMaxDtype) ||
      !std::equal(tensor.shape.begin(), tensor.shape.end(), slice.global_shape().begin(),
                  slice.global_shape().end())) {
    const std::string& before = tensor.boxes.empty() ? file : *tensor.boxes.front().file;
    return bad(absl::StrCat("it is ", Quoted(slice.dtype()), " of ", Text(slice.global_shape()),
                            " here and ", Quoted(tensor.dtype), " of ", Text(tensor.shape),
                            " in file ", Quoted(before)));
  }
  return std::nullopt;
}

std::optional<v1::OpError> Coverage::Add(const v1::TensorSlice& slice, const std::string& file) {
  if (auto error = Check(slice, file)) return error;
  const auto [it, is_new] = tensors_.try_emplace(slice.tensor());
  Tensor& tensor = it->second;
  if (is_new) {
    tensor.dtype = slice.dtype().substr(0, kMaxDtype);
    tensor.shape.assign(slice.global_shape().begin(), slice.global_shape().end());
    bytes_ += sizeof(Tensor) + slice.tensor().size() + 64;
  }
  const size_t rank = tensor.shape.size();
  // A slice without elements covers nothing and overlaps nothing.
  if (*Elements(slice.extent()) == 0) return std::nullopt;
  std::unique_ptr<const std::string>& kept = files_[file];
  if (kept == nullptr) {
    kept = std::make_unique<const std::string>(file);
    bytes_ += 2 * file.size() + 96;
  }
  Box box;
  box.offset.assign(slice.offset().begin(), slice.offset().end());
  box.extent.assign(slice.extent().begin(), slice.extent().end());
  box.file = kept.get();
  bytes_ += sizeof(Box) + (rank > 2 ? 2 * rank * sizeof(int64_t) : 0);
  tensor.boxes.push_back(std::move(box));
  return std::nullopt;
}

std::string Coverage::Problem(const Tensor& tensor, size_t* comparisons) {
  const size_t rank = tensor.shape.size();
  std::vector<const Box*> boxes;
  boxes.reserve(tensor.boxes.size());
  for (const Box& box : tensor.boxes) boxes.push_back(&box);
  // A sweep along one dimension: only boxes that it cuts at the same place can overlap. The
  // dimension in which most of them begin at places of their own leaves the fewest of those.
  size_t along = 0, most = 0;
  for (size_t i = 0; i < rank; ++i) {
    std::vector<int64_t> places;
    places.reserve(boxes.size());
    for (const Box* const box : boxes) places.push_back(box->offset[i]);
    std::sort(places.begin(), places.end());
    const size_t distinct = std::unique(places.begin(), places.end()) - places.begin();
    if (distinct > most) along = i, most = distinct;
  }
  std::sort(boxes.begin(), boxes.end(), [&](const Box* a, const Box* b) {
    if (rank > 0 && a->offset[along] != b->offset[along]) {
      return a->offset[along] < b->offset[along];
    }
    return std::tie(a->offset, *a->file) < std::tie(b->offset, *b->file);
  });
  std::vector<const Box*> open;
  int64_t covered = 0;
  for (const Box* const box : boxes) {
    if (rank > 0) {
      open.erase(std::remove_if(open.begin(), open.end(),
                                [&](const Box* other) {
                                  return other->offset[along] + other->extent[along] <=
                                         box->offset[along];
                                }),
                 open.end());
    }
    *comparisons += open.size();
    if (*comparisons > kMaxComparisons) {
      return absl::StrCat("its ", boxes.size(),
                          " slices, and those of the tensors before it, take ",
                          "too many comparisons: cut tensors along one dimension");
    }
    for (const Box* const other : open) {
      bool overlap = true;
      for (size_t i = 0; i < rank && overlap; ++i) {
        overlap = other->offset[i] < box->offset[i] + box->extent[i] &&
                  box->offset[i] < other->offset[i] + other->extent[i];
      }
      if (overlap) {
        return absl::StrCat("files ", Quoted(*other->file), " (offset ", Text(other->offset),
                            ", extent ", Text(other->extent), ") and ", Quoted(*box->file),
                            " (offset ", Text(box->offset), ", extent ", Text(box->extent),
                            ") both have some of it");
      }
    }
    open.push_back(box);
    // Boxes that do not overlap are together no larger than the tensor: no overflow.
    covered += *Elements(box->extent);
  }
  const int64_t all = *Elements(tensor.shape);
  if (covered == all) return "";
  return absl::StrCat("the files have ", covered, " of its ", all, " elements");
}

std::string Coverage::FirstProblem() const {
  std::vector<const std::pair<const std::string, Tensor>*> by_name;
  by_name.reserve(tensors_.size());
  for (const auto& entry : tensors_) by_name.push_back(&entry);
  std::sort(by_name.begin(), by_name.end(),
            [](const auto* a, const auto* b) { return a->first < b->first; });
  size_t comparisons = 0;
  for (const auto* const entry : by_name) {
    const std::string problem = Problem(entry->second, &comparisons);
    if (problem.empty()) continue;
    return absl::StrCat("tensor ", Quoted(entry->first), " of ", Text(entry->second.shape), ": ",
                        problem);
  }
  return "";
}

}  // namespace muster::coordinator
