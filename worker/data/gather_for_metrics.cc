#include "worker/data/gather_for_metrics.h"

#include <algorithm>
#include <functional>
#include <string>
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

void AgreeOnRows(Comm& comm, const std::string& per_sample, const BatchInfo& info,
                 const char* what) {
  const std::vector<int64_t>& sizes = info.rank_sizes;
  if (std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) == sizes.end()) return;
  const std::vector<std::string> all = comm.AllGatherBytes(per_sample);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    // The numbers of tensors are compared when they are gathered.
    for (size_t i = 0; i < std::min(all[0].size(), all[rank].size()); ++i) {
      const bool first = all[0][i] == '1';
      TORCH_CHECK(first == (all[rank][i] == '1'), "gather_for_metrics: ", what, " ", i + 1, " of ",
                  all[0].size(), " has as many rows as its batch has samples on rank ",
                  first ? 0 : rank, ", but not on rank ", first ? rank : 0,
                  ", and these batches differ in length: say whether its rows are samples, by "
                  "MetricRows::kPerSample or MetricRows::kPerProcess");
    }
  }
}

std::vector<at::Tensor> GatherForMetrics(Comm& comm, const std::vector<at::Tensor>& tensors,
                                         const BatchInfo& info, MetricRows rows) {
  // Every rank knows the number of real samples of each rank, so all send equally long pieces and
  // cut them in the same way.
  const std::vector<int64_t>& real = info.rank_real_samples;
  const int64_t longest = real.empty() ? 0 : *std::max_element(real.begin(), real.end());
  std::string is_per_sample;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.defined(), "gather_for_metrics got an undefined tensor");
    TORCH_CHECK(rows != MetricRows::kPerSample || tensor.dim() > 0,
                "gather_for_metrics: a tensor without dimensions has no row per sample: say "
                "MetricRows::kPerProcess, or give one row for each of the batch's ",
                info.size, " samples");
    const bool per_sample = tensor.dim() > 0 && HasRowPerSample(tensor.size(0), info, rows);
    is_per_sample += per_sample ? '1' : '0';
  }
  if (rows == MetricRows::kAuto) AgreeOnRows(comm, is_per_sample, info, "tensor");
  std::vector<at::Tensor> sent;
  std::vector<bool> is_cut;
  for (const at::Tensor& tensor : tensors) {
    is_cut.push_back(is_per_sample[is_cut.size()] == '1' && !real.empty());
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
