#include "worker/data/gather_for_metrics.h"

#include <algorithm>

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

at::Tensor GatherForMetrics(Comm& comm, const at::Tensor& tensor, const BatchInfo& info,
                            MetricRows rows) {
  TORCH_CHECK(tensor.defined(), "gather_for_metrics got an undefined tensor");
  TORCH_CHECK(rows != MetricRows::kPerSample || tensor.dim() > 0,
              "gather_for_metrics: a tensor without dimensions has no row per sample: say "
              "MetricRows::kPerProcess, or give one row for each of the batch's ",
              info.size, " samples");
  const bool per_sample = tensor.dim() > 0 && HasRowPerSample(tensor.size(0), info, rows);
  if (!per_sample || info.rank_real_samples.empty()) return GatherTensors(comm, {tensor}).front();
  TORCH_CHECK(static_cast<int>(info.rank_real_samples.size()) == comm.size(),
              "gather_for_metrics: the batch was made for ", info.rank_real_samples.size(),
              " ranks, not ", comm.size());

  // Every rank knows how many real samples each of them has, so all send equally long pieces and
  // cut them alike.
  const int64_t longest =
      *std::max_element(info.rank_real_samples.begin(), info.rank_real_samples.end());
  at::Tensor mine = tensor.detach().narrow(0, 0, info.real_samples);
  if (info.real_samples < longest) {
    std::vector<int64_t> shape = tensor.sizes().vec();
    shape[0] = longest - info.real_samples;
    mine = at::cat({mine, at::zeros(shape, tensor.options())});
  }
  const at::Tensor all = GatherTensors(comm, {mine}).front();
  std::vector<at::Tensor> pieces;
  for (int rank = 0; rank < comm.size(); ++rank) {
    pieces.push_back(all.narrow(0, rank * longest, info.rank_real_samples[rank]));
  }
  return at::cat(pieces);
}

}  // namespace muster
