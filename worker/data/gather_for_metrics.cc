#include "worker/data/gather_for_metrics.h"

#include <algorithm>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/zeros.h"
#include "worker/collective/collectives.h"

namespace muster {

bool HasRowPerSample(int64_t size, const BatchInfo& info, MetricRows rows) {
  TORCH_CHECK(rows != MetricRows::kPerSample || size == info.size, "gather_for_metrics: ", size,
              " rows, but the batch has ", info.size,
              " samples on this rank: give one row per sample, or say MetricRows::kPerProcess");
  return rows != MetricRows::kPerProcess && size == info.size;
}

std::vector<at::Tensor> GatherForMetrics(Comm& comm, const std::vector<at::Tensor>& tensors,
                                         const BatchInfo& info, MetricRows rows) {
  // Every rank knows how many real samples each of them has, so all send equally long pieces and
  // cut them alike.
  const std::vector<int64_t>& real = info.rank_real_samples;
  const int64_t longest = real.empty() ? 0 : *std::max_element(real.begin(), real.end());
  std::vector<at::Tensor> sent;
  std::vector<bool> is_cut;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.defined(), "gather_for_metrics got an undefined tensor");
    TORCH_CHECK(rows != MetricRows::kPerSample || tensor.dim() > 0,
                "gather_for_metrics: a tensor without dimensions has no row per sample: say "
                "MetricRows::kPerProcess, or give one row for each of the batch's ",
                info.size, " samples");
    const bool per_sample = tensor.dim() > 0 && HasRowPerSample(tensor.size(0), info, rows);
    is_cut.push_back(per_sample && !real.empty());
    if (!is_cut.back()) {
      sent.push_back(tensor);
      continue;
    }
    TORCH_CHECK(static_cast<int>(real.size()) == comm.size(),
                "gather_for_metrics: the batch was made for ", real.size(), " ranks, not ",
                comm.size());
    at::Tensor mine = tensor.detach().narrow(0, 0, info.real_samples);
    if (info.real_samples < longest) {
      std::vector<int64_t> shape = tensor.sizes().vec();
      shape[0] = longest - info.real_samples;
      mine = at::cat({mine, at::zeros(shape, tensor.options())});
    }
    sent.push_back(mine);
  }
  std::vector<at::Tensor> result = GatherTensors(comm, sent);
  for (size_t i = 0; i < result.size(); ++i) {
    if (!is_cut[i]) continue;
    std::vector<at::Tensor> pieces;
    for (int rank = 0; rank < comm.size(); ++rank) {
      pieces.push_back(result[i].narrow(0, rank * longest, real[rank]));
    }
    result[i] = at::cat(pieces);
  }
  return result;
}

at::Tensor GatherForMetrics(Comm& comm, const at::Tensor& tensor, const BatchInfo& info,
                            MetricRows rows) {
  return GatherForMetrics(comm, std::vector<at::Tensor>{tensor}, info, rows).front();
}

}  // namespace muster
