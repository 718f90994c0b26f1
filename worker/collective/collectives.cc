#include "worker/collective/collectives.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>

#include "ATen/ops/cat.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "worker/collective/comm_checks.h"

namespace muster {
namespace {

// Returns dtype, number of dimensions, and dimensions of each tensor, as numbers.
std::vector<int64_t> ShapesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> numbers;
  for (const at::Tensor& tensor : tensors) {
    numbers.push_back(static_cast<int64_t>(tensor.scalar_type()));
    numbers.push_back(tensor.dim());
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return numbers;
}

// Calls `collective` for each tensor. Without any, ranks still meet, to find out whether others
// have some.
template <class Function>
void ForEachTensor(Comm& comm, const std::vector<at::Tensor>& tensors, const Function& collective) {
  if (tensors.empty()) {
    const comm_checks::PlaceScope none(0, 0);
    comm.Barrier();
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const comm_checks::PlaceScope place(i, tensors.size());
    collective(tensors[i]);
  }
}

// Returns `value` as an element of `dtype`, converted as a number: beyond the largest float16 it is
// an infinity, as in PyTorch. Throws c10::Error if an integer dtype has no such number.
at::Scalar PadElement(const at::Scalar& value, at::ScalarType dtype) {
  bool fits = !value.isComplex() || at::isComplexType(dtype);
  at::Scalar element = value;
  if (fits && (at::isFloatingType(dtype) || at::isComplexType(dtype))) {
    const at::ScalarType wide = at::isComplexType(dtype) ? at::kComplexDouble : at::kDouble;
    return at::full({}, value, wide).to(dtype).item();
  }
  if (fits && value.isFloatingPoint()) fits = std::floor(value.toDouble()) == value.toDouble();
  try {
    if (fits) element = at::full({}, value, dtype).item();
  } catch (const std::exception&) {  // c10 throws a standard exception if a number overflows
    fits = false;
  }
  TORCH_CHECK(fits, "pad_across_processes: a pad_index of ", value, " does not fit ",
              comm_checks::DescribeShape(dtype, {}));
  return element;
}

std::vector<int64_t> Numbers(const std::string& bytes) {
  std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(int64_t));
  return numbers;
}

}  // namespace

ReduceOp ParseReduceOp(const std::string& name) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin}) {
    if (name == comm_checks::OpName(op)) return op;
  }
  TORCH_CHECK(false, "unknown reduction '", name, "': use sum, mean, max or min");
}

std::vector<at::Tensor> GatherTensors(Comm& comm, const std::vector<at::Tensor>& tensors) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  ForEachTensor(comm, tensors, [&](const at::Tensor& tensor) {
    comm_checks::CheckTensor(tensor, "gather", comm.rank());
    std::vector<at::Tensor> all;
    try {
      all = comm.AllGather(tensor.dim() == 0 ? tensor.detach().reshape({1}) : tensor.detach());
    } catch (const c10::DistBackendError&) {
      throw;
    } catch (const c10::Error& e) {
      TORCH_CHECK(false, "gather: ", e.what_without_backtrace(),
                  ". If only lengths differ, call pad_across_processes first");
    }
    result.push_back(all.size() == 1 ? all[0] : at::cat(all));
  });
  return result;
}

std::vector<at::Tensor> ReduceTensors(Comm& comm, const std::vector<at::Tensor>& tensors,
                                      ReduceOp op, double scale) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  ForEachTensor(comm, tensors, [&](const at::Tensor& tensor) {
    comm_checks::CheckReduce(tensor, op, comm.rank());
    const bool fractional = tensor.is_floating_point() || tensor.is_complex();
    // A bool has no multiples, and beyond 2^63 there is no such int64_t.
    const bool whole = std::floor(scale) == scale && std::abs(scale) < 0x1p63;
    TORCH_CHECK(fractional || scale == 1 || (whole && tensor.scalar_type() != at::kBool),
                "reduce on rank ", comm.rank(), ": a scale of ", scale, " does not fit ",
                comm_checks::Describe(tensor), "; convert it to a floating dtype first");
    at::Tensor copy = tensor.detach().clone();
    comm.AllReduce(copy, op);
    if (scale != 1) {
      if (fractional) {
        copy.mul_(scale);
      } else {
        copy.mul_(static_cast<int64_t>(scale));
      }
    }
    result.push_back(copy);
  });
  return result;
}

double ReduceNumber(Comm& comm, double number, ReduceOp op, double scale) {
  return ReduceTensors(comm, {at::full({}, number, at::kDouble)}, op, scale)[0].item<double>();
}

int64_t ReduceNumber(Comm& comm, int64_t number, ReduceOp op, double scale) {
  return ReduceTensors(comm, {at::full({}, number, at::kLong)}, op, scale)[0].item<int64_t>();
}

void BroadcastTensors(Comm& comm, const std::vector<at::Tensor>& tensors, int from) {
  ForEachTensor(comm, tensors, [&](at::Tensor tensor) { comm.Broadcast(tensor, from); });
}

std::vector<at::Tensor> PadTensorsAcrossProcesses(Comm& comm,
                                                  const std::vector<at::Tensor>& tensors,
                                                  int64_t dim, const at::Scalar& pad_value,
                                                  bool pad_first) {
  at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    comm_checks::CheckTensor(tensor, "pad_across_processes", comm.rank());
  }
  const std::vector<int64_t> mine = ShapesOf(tensors);
  const std::vector<std::string> gathered = comm.AllGatherBytes(
      std::string(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(int64_t)));
  std::vector<std::vector<int64_t>> all;
  for (const std::string& bytes : gathered) all.push_back(Numbers(bytes));

  // Every rank checks all ranks' shapes in the same order, so that all find the same error or none.
  // `at[r]` is where rank r's current tensor begins. Other dimensions need not agree: a program
  // that pads one dimension after the other has shapes that differ in both at first.
  std::vector<size_t> at(all.size(), 0);
  std::vector<int64_t> longest;
  for (size_t i = 0; i < tensors.size() || at[0] < all[0].size(); ++i) {
    const size_t first = at[0];
    int64_t length = -1;
    std::vector<std::string> shapes;
    bool same = true, same_length = true;
    for (size_t r = 0; r < all.size(); ++r) {
      const std::vector<int64_t>& numbers = all[r];
      TORCH_CHECK(at[r] < numbers.size(), "pad_across_processes: rank ", r,
                  " has fewer tensors than others; the structures must be the same on all ranks");
      const int64_t ndim = numbers[at[r] + 1];
      std::vector<int64_t> shape(numbers.begin() + at[r] + 2, numbers.begin() + at[r] + 2 + ndim);
      const auto dtype = static_cast<at::ScalarType>(numbers[at[r]]);
      shapes.push_back(comm_checks::DescribeShape(dtype, shape));
      const int64_t axis = dim < 0 ? dim + ndim : dim;
      if (axis >= 0 && axis < ndim) {
        same_length = same_length && (length == -1 || shape[axis] == length);
        length = std::max(length, shape[axis]);
      }
      same = same && numbers[at[r]] == all[0][first] && ndim == all[0][first + 1];
      at[r] += 2 + ndim;
    }
    // A tensor without the dimension is not padded, so nothing needs to fit.
    if (!same && length >= 0) {
      TORCH_CHECK(false,
                  "pad_across_processes: dtype and number of dimensions must be the same on all "
                  "ranks: ",
                  comm_checks::ByRanks(shapes, "has", "have"));
    }
    longest.push_back(length);
    // Checked on every rank, though only ranks with shorter tensors need it.
    if (!same_length) PadElement(pad_value, static_cast<at::ScalarType>(all[0][first]));
  }
  for (size_t r = 0; r < all.size(); ++r) {
    TORCH_CHECK(at[r] == all[r].size(), "pad_across_processes: rank ", r,
                " has more tensors than others; the structures must be the same on all ranks");
  }

  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const int64_t axis = dim < 0 ? dim + tensor.dim() : dim;
    if (axis < 0 || axis >= tensor.dim() || tensor.size(axis) == longest[i]) {
      result.push_back(tensor);
      continue;
    }
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes[axis] = longest[i];
    at::Tensor padded = at::full(sizes, PadElement(pad_value, tensor.scalar_type()),
                                 tensor.options().requires_grad(false));
    padded.narrow(axis, pad_first ? longest[i] - tensor.size(axis) : 0, tensor.size(axis))
        .copy_(tensor.detach());
    result.push_back(padded);
  }
  return result;
}

at::Tensor PadInputTensor(const at::Tensor& tensor, int64_t batch_size, int num_processes) {
  TORCH_CHECK(num_processes > 0, "pad_input_tensors: num_processes must be positive, not ",
              num_processes);
  TORCH_CHECK(tensor.defined() && tensor.dim() > 0 && tensor.size(0) == batch_size,
              "pad_input_tensors: ", comm_checks::Describe(tensor), " is not a batch of ",
              batch_size);
  const int64_t missing = (num_processes - batch_size % num_processes) % num_processes;
  if (missing == 0) return tensor;
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[0] = missing;
  return at::cat({tensor, at::zeros(sizes, tensor.options().requires_grad(false))});
}

SplitRange SplitRangeOf(int64_t length, int num_processes, int rank, bool apply_padding) {
  TORCH_CHECK(length >= 0 && num_processes > 0 && rank >= 0 && rank < num_processes,
              "split_between_processes: no part ", rank, " of ", num_processes, " of ", length,
              " items");
  const int64_t each = length / num_processes;
  const int64_t extra = length % num_processes;
  SplitRange range;
  range.begin = rank * each + std::min<int64_t>(rank, extra);
  range.end = range.begin + each + (rank < extra ? 1 : 0);
  if (apply_padding && extra > 0 && rank >= extra) range.padding = 1;
  return range;
}

at::Tensor SplitTensor(const at::Tensor& tensor, const SplitRange& range) {
  const at::Tensor rows = tensor.narrow(0, range.begin, range.end - range.begin);
  if (range.padding == 0) return rows;
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[0] = range.padding;
  return at::cat({rows, tensor.narrow(0, tensor.size(0) - 1, 1).expand(sizes)});
}

}  // namespace muster
