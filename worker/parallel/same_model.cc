#include "worker/parallel/same_model.h"

#include <algorithm>
#include <functional>
#include <sstream>

#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

// Describes name, kind and strides, in lines.
std::string Describe(const at::Tensor& tensor, const std::string& name, bool sparse,
                     bool frozen_too) {
  std::ostringstream out;
  out << name << '\n' << tensor.sizes() << ' ' << tensor.scalar_type();
  if (!tensor.requires_grad()) out << " without gradient";
  if (sparse) out << " with sparse gradient";
  out << '\n';
  // It has no gradient.
  if (!tensor.requires_grad() && !frozen_too) return out.str();
  // Sparse gradients are exchanged by index.
  if (sparse || tensor.layout() != at::kStrided) return out.str();
  std::vector<int64_t> strides = GradientStrides(tensor);
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    // The stride of such a dimension has no influence on the place of elements.
    if (tensor.size(d) <= 1) strides[static_cast<size_t>(d)] = 1;
  }
  out << at::IntArrayRef(strides);
  return out.str();
}

std::vector<std::string> SplitRecords(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find('\0', begin)) != std::string::npos; begin = end + 1) {
    parts.push_back(text.substr(begin, end - begin));
  }
  return parts;
}

std::vector<std::string> Lines(const std::string& record) {
  std::istringstream in(record);
  std::vector<std::string> lines(3);
  for (std::string& line : lines) std::getline(in, line);
  return lines;
}

}  // namespace

std::vector<int64_t> GradientStrides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  std::vector<int64_t> strides(static_cast<size_t>(parameter.dim()));
  int64_t stride = 1;
  for (int64_t d = parameter.dim() - 1; d >= 0; --d) {
    strides[static_cast<size_t>(d)] = stride;
    stride *= std::max<int64_t>(parameter.size(d), 1);
  }
  return strides;
}

void VerifySameModel(Comm& comm, const std::vector<at::Tensor>& parameters,
                     const std::vector<std::string>& names, const std::vector<bool>& sparse,
                     bool frozen_too) {
  std::string mine;
  for (size_t i = 0; i < parameters.size(); ++i) {
    mine += Describe(parameters[i], names[i], sparse[i], frozen_too) + '\0';
  }
  const std::string digest =
      std::to_string(parameters.size()) + " " + std::to_string(std::hash<std::string>()(mine));
  const std::vector<std::string> digests = comm.AllGatherBytes(digest);
  if (std::all_of(digests.begin(), digests.end(), [&](const auto& d) { return d == digests[0]; })) {
    return;
  }
  const std::vector<std::string> all = comm.AllGatherBytes(mine);
  const std::vector<std::string> first = SplitRecords(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const std::vector<std::string> other = SplitRecords(all[rank]);
    for (size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
      if (first[i] == other[i]) continue;
      const std::vector<std::string> a = Lines(first[i]), b = Lines(other[i]);
      TORCH_CHECK(a[0] == b[0] && a[1] == b[1], "the models of the ranks differ: parameter ", i,
                  " is '", a[0], "' ", a[1], " on rank 0 but '", b[0], "' ", b[1], " on rank ",
                  rank, "; build the same model on every rank");
      TORCH_CHECK(false, "the models of the ranks differ: parameter ", i, ", '", a[0], "' ", a[1],
                  ", lies in memory with strides ", a[2], " on rank 0 but ", b[2], " on rank ",
                  rank,
                  "; a parameter has the strides of what it was loaded from or set_data() was "
                  "given: do that on every rank, or "
                  "parameter.set_data(parameter.contiguous()) before prepare()");
    }
    TORCH_CHECK(first.size() == other.size(), "the models of the ranks differ: rank 0 has ",
                first.size(), " parameters and rank ", rank, " has ", other.size(),
                "; build the same model on every rank");
  }
}

}  // namespace muster
