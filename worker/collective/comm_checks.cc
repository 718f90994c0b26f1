#include "worker/collective/comm_checks.h"

#include <algorithm>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"
#include "worker/collective/shm_reduce.h"

namespace muster::comm_checks {
namespace {
thread_local TensorPlace current_place;
}  // namespace

const char* OpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMean:
      return "mean";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
  }
  return "unknown";
}

std::string DescribeShape(at::ScalarType dtype, at::IntArrayRef shape) {
  std::ostringstream text;
  switch (dtype) {
    case at::kFloat:
      text << "float32";
      break;
    case at::kDouble:
      text << "float64";
      break;
    case at::kHalf:
      text << "float16";
      break;
    case at::kBFloat16:
      text << "bfloat16";
      break;
    case at::kLong:
      text << "int64";
      break;
    case at::kInt:
      text << "int32";
      break;
    case at::kShort:
      text << "int16";
      break;
    case at::kChar:
      text << "int8";
      break;
    case at::kByte:
      text << "uint8";
      break;
    case at::kBool:
      text << "bool";
      break;
    default:
      text << c10::toString(dtype);
  }
  text << shape;
  return text.str();
}

std::string Describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::string text = DescribeShape(tensor.scalar_type(), tensor.sizes());
  if (!tensor.device().is_cpu()) text += c10::str("@", tensor.device());
  return text;
}

void CheckTensor(const at::Tensor& tensor, const char* operation, int rank) {
  TORCH_CHECK(tensor.defined(), operation, " on rank ", rank, ": the tensor is undefined");
  TORCH_CHECK(tensor.layout() == at::kStrided, operation, " on rank ", rank, ": ", tensor.layout(),
              " tensors are not supported; call to_dense() first");
}

void CheckReduce(const at::Tensor& tensor, ReduceOp op, int rank) {
  CheckTensor(tensor, "AllReduce", rank);
  // Check before anything is sent, because an error of the backend makes the group unusable.
  TORCH_CHECK(CanReduce(c10::toRealValueType(tensor.scalar_type()), ShmReduceOp::kSum),
              "AllReduce on rank ", rank, ": ", Describe(tensor),
              " cannot be reduced; convert it to another dtype first");
  if (op == ReduceOp::kMean) {
    TORCH_CHECK(tensor.is_floating_point() || tensor.is_complex(), "AllReduce on rank ", rank,
                ": the mean of ", Describe(tensor),
                " is not an integer; convert it to a floating dtype or use sum");
  }
  if (op == ReduceOp::kMax || op == ReduceOp::kMin) {
    TORCH_CHECK(!tensor.is_complex(), "AllReduce on rank ", rank, ": complex numbers have no ",
                OpName(op));
  }
}

void CheckFlat(const at::Tensor& flat, int size, const char* operation, int rank) {
  CheckTensor(flat, operation, rank);
  TORCH_CHECK(flat.dim() == 1 && flat.is_contiguous() && flat.numel() % size == 0, operation,
              " on rank ", rank, ": ", Describe(flat), " is not a contiguous row of ", size,
              " equal parts");
}

void CheckReduceScatter(const at::Tensor& flat, ReduceOp op, int size, int rank) {
  CheckFlat(flat, size, "ReduceScatter", rank);
  TORCH_CHECK(flat.is_floating_point(), "ReduceScatter on rank ", rank, ": ", Describe(flat),
              " is not of a floating dtype");
  TORCH_CHECK(op == ReduceOp::kSum || op == ReduceOp::kMean, "ReduceScatter on rank ", rank,
              " takes a sum or mean, not ", OpName(op));
}

void CheckRoot(int root, int size, const char* operation, int rank) {
  TORCH_CHECK(root >= 0 && root < size, operation, " on rank ", rank, ": there is no rank ", root,
              " among ", size, " ranks");
}

void CheckParts(const std::vector<at::Tensor>& parts, int size, int rank) {
  TORCH_CHECK(parts.size() == static_cast<size_t>(size), "Scatter on rank ", rank, ": ",
              parts.size(), " parts for ", size, " ranks");
  for (const at::Tensor& part : parts) CheckTensor(part, "Scatter", rank);
}

void CheckPart(const at::Tensor& part, const at::Tensor& out, int rank) {
  TORCH_CHECK(part.sizes() == out.sizes() && part.scalar_type() == out.scalar_type(),
              "Scatter on rank ", rank, ": the part for this rank is ", Describe(part),
              " but its output is ", Describe(out));
}

PlaceScope::PlaceScope(size_t index, size_t count) : before_(current_place) {
  current_place = {static_cast<int32_t>(index), static_cast<int32_t>(count)};
}
PlaceScope::~PlaceScope() { current_place = before_; }

TensorPlace CurrentPlace() { return current_place; }

std::string Describe(const TensorPlace& place) {
  if (place.count == 0) return " for a structure without tensors";
  if (place.count == 1) return "";
  return c10::str(", tensor ", place.index + 1, " of ", place.count);
}

std::string ByRanks(const std::vector<std::string>& texts, const char* one, const char* many,
                    const std::vector<int>& ranks) {
  constexpr size_t kShown = 8;
  std::vector<std::pair<const std::string*, std::vector<int>>> groups;
  std::unordered_map<std::string_view, size_t> group_of;
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto [it, is_new] = group_of.try_emplace(texts[i], groups.size());
    if (is_new) groups.emplace_back(&texts[i], std::vector<int>());
    groups[it->second].second.push_back(ranks.empty() ? static_cast<int>(i) : ranks[i]);
  }
  std::string result;
  for (size_t g = 0; g < std::min(groups.size(), kShown); ++g) {
    const auto& [text, members] = groups[g];
    result += c10::str(g == 0 ? "" : "; ", members.size() == 1 ? "rank " : "ranks ");
    for (size_t i = 0; i < std::min(members.size(), kShown); ++i) {
      result += c10::str(i == 0 ? "" : ", ", members[i]);
    }
    if (members.size() > kShown) result += c10::str(" and ", members.size() - kShown, " more");
    result += c10::str(" ", members.size() == 1 ? one : many, " ", *text);
  }
  if (groups.size() > kShown) result += c10::str("; and ", groups.size() - kShown, " others");
  return result;
}

}  // namespace muster::comm_checks
