#include "worker/parallel/coalesce.h"

#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/variable.h"

namespace muster {
namespace {

// Beyond this, a flat copy costs more memory than a collective per part costs time.
constexpr int64_t kMaxFlatBytes = int64_t{250} << 20;

template <typename Fn>
void ForEachFlat(const std::vector<at::Tensor>& tensors, Fn collective) {
  at::NoGradGuard no_grad;
  std::vector<std::pair<int64_t, std::vector<at::Tensor>>> lists;  // bytes, tensors
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const int64_t bytes = static_cast<int64_t>(tensor.nbytes());
    size_t i = 0;
    while (i < lists.size() && (lists[i].second[0].scalar_type() != tensor.scalar_type() ||
                                lists[i].second[0].device() != tensor.device() ||
                                lists[i].first + bytes > kMaxFlatBytes)) {
      ++i;
    }
    if (i == lists.size()) lists.emplace_back();
    lists[i].first += bytes;
    lists[i].second.push_back(tensor.detach());
  }
  for (auto& [bytes, list] : lists) {
    if (list.size() == 1 && list[0].is_contiguous()) {
      // Flattened here too: on another rank the same tensor may not be contiguous, and shapes must
      // agree.
      at::Tensor flat = list[0].view({-1});
      collective(flat);
      // The copies below increase the version as well.
      if (!list[0].is_inference()) torch::autograd::impl::bump_version(list[0]);
      continue;
    }
    std::vector<at::Tensor> rows;
    rows.reserve(list.size());
    for (const at::Tensor& tensor : list) rows.push_back(tensor.reshape({-1}));
    at::Tensor flat = at::cat(rows);
    collective(flat);
    int64_t offset = 0;
    for (at::Tensor& tensor : list) {
      tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  }
}

}  // namespace

void AllReduceCoalesced(Comm& comm, const std::vector<at::Tensor>& tensors, ReduceOp op) {
  if (comm.size() == 1) return;
  ForEachFlat(tensors, [&](at::Tensor& flat) {
    if (op == ReduceOp::kMean && !flat.is_floating_point() && !flat.is_complex()) {
      comm.AllReduce(flat, ReduceOp::kSum);
      flat.div_(comm.size(), "trunc");
    } else {
      comm.AllReduce(flat, op);
    }
  });
}

void BroadcastCoalesced(Comm& comm, const std::vector<at::Tensor>& tensors, int root) {
  if (comm.size() == 1) return;
  ForEachFlat(tensors, [&](at::Tensor& flat) { comm.Broadcast(flat, root); });
}

}  // namespace muster
