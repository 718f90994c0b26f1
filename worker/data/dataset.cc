#include "worker/data/dataset.h"

#include <cstring>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/index_select.h"

namespace muster {

at::Tensor SelectRows(const at::Tensor& tensor, const std::vector<int64_t>& indices) {
  const int64_t count = static_cast<int64_t>(indices.size());
  // The memory of a conjugated or negated view does not hold its values.
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.requires_grad() || tensor.is_conj() ||
      tensor.is_neg()) {
    const at::Tensor rows = at::from_blob(const_cast<int64_t*>(indices.data()), {count}, at::kLong);
    return at::index_select(tensor, 0, rows.to(tensor.device()));
  }
  std::vector<int64_t> sizes = tensor.sizes().vec();
  const int64_t rows = sizes[0];
  sizes[0] = count;
  at::Tensor selected = at::empty(sizes, tensor.options());
  if (selected.numel() == 0) return selected;
  const size_t row_bytes = static_cast<size_t>(selected.numel() / count) * tensor.itemsize();
  const char* from = static_cast<const char*>(tensor.const_data_ptr());
  char* to = static_cast<char*>(selected.mutable_data_ptr());
  for (const int64_t index : indices) {
    TORCH_CHECK_INDEX(index >= 0 && index < rows, "row ", index, " of a tensor with ", rows,
                      " rows");
    std::memcpy(to, from + static_cast<size_t>(index) * row_bytes, row_bytes);
    to += row_bytes;
  }
  return selected;
}

}  // namespace muster
