#include "worker/collective/all_to_all.h"

#include <exception>
#include <numeric>
#include <optional>
#include <string>

#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/progress_board.h"

namespace muster {
namespace {

void CheckBytes(const at::Tensor& tensor, int64_t bytes, const char* what) {
  TORCH_CHECK(tensor.defined() && tensor.is_cpu() && tensor.scalar_type() == at::kByte &&
                  tensor.dim() == 1 && tensor.is_contiguous() && tensor.numel() >= bytes,
              "AllToAll: what is ", what, " must be ", bytes,
              " bytes on the CPU, in a contiguous tensor of one dimension");
}

// Uses one backend call for everything.
void ThroughGroup(Comm& comm, c10d::ProcessGroup& group, at::Tensor sent, std::vector<int64_t> to,
                  at::Tensor received, std::vector<int64_t> from) {
  std::string why = "the operation was aborted";
  try {
    // The call below bypasses the Comm: it comes after all that was submitted to the Comm, and once
    // all ranks are known to have called this function.
    comm.Barrier();
    std::optional<CollectiveOnBoard> on_board;
    if (comm.board() != nullptr) on_board.emplace(*comm.board(), "AllToAll", sent.numel(), "Byte");
    c10d::AllToAllOptions options;
    options.asyncOp = false;
    if (group.getBackend(c10::DeviceType::CPU)
            ->alltoall_base(received, sent, from, to, options)
            ->wait()) {
      return;
    }
  } catch (const c10::Error& e) {
    why = e.what_without_backtrace();
  } catch (const std::exception& e) {
    why = e.what();
  }
  C10_THROW_ERROR(DistBackendError,
                  c10::str("AllToAll on rank ", comm.rank(), " of ", comm.size(), ": ", why));
}

void InTurns(Comm& comm, const at::Tensor& sent, const std::vector<int64_t>& to,
             at::Tensor& received, const std::vector<int64_t>& from) {
  int64_t at = 0;
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<at::Tensor> parts;
    if (root == comm.rank()) parts = sent.split_with_sizes(to);
    at::Tensor out = received.narrow(0, at, from[root]);
    comm.Scatter(parts, out, root);
    at += from[root];
  }
}

}  // namespace

void AllToAllBytes(Comm& comm, const at::Tensor& sent, const std::vector<int64_t>& to,
                   at::Tensor& received, const std::vector<int64_t>& from) {
  const auto size = static_cast<size_t>(comm.size());
  TORCH_CHECK(to.size() == size && from.size() == size, "AllToAll: ", to.size(), " and ",
              from.size(), " numbers of bytes for ", size, " ranks");
  const int64_t sent_bytes = std::accumulate(to.begin(), to.end(), int64_t{0});
  const int64_t received_bytes = std::accumulate(from.begin(), from.end(), int64_t{0});
  CheckBytes(sent, sent_bytes, "sent");
  CheckBytes(received, received_bytes, "received");
  const at::NoGradGuard no_grad;
  const at::Tensor out = sent.narrow(0, 0, sent_bytes);
  at::Tensor in = received.narrow(0, 0, received_bytes);
  if (c10d::ProcessGroup* const group = comm.process_group(); group != nullptr) {
    ThroughGroup(comm, *group, out, to, in, from);
  } else {
    InTurns(comm, out, to, in, from);
  }
}

}  // namespace muster
