#include "worker/collective/local_comm.h"

#include "c10/core/GradMode.h"
#include "worker/collective/comm_checks.h"

namespace muster {

void LocalComm::AllReduce(at::Tensor& tensor, ReduceOp op) {
  comm_checks::CheckReduce(tensor, op, rank());
}

std::vector<at::Tensor> LocalComm::AllGather(const at::Tensor& tensor) {
  comm_checks::CheckTensor(tensor, "AllGather", rank());
  at::NoGradGuard no_grad;
  return {tensor.detach().clone(at::MemoryFormat::Contiguous)};
}

void LocalComm::AllGatherParts(at::Tensor& flat) {
  comm_checks::CheckFlat(flat, size(), "AllGatherParts", rank());
}

at::Tensor LocalComm::ReduceScatter(const at::Tensor& flat, ReduceOp op) {
  comm_checks::CheckReduceScatter(flat, op, size(), rank());
  at::NoGradGuard no_grad;
  return flat.detach().clone();
}

void LocalComm::Broadcast(at::Tensor& tensor, int root) {
  comm_checks::CheckTensor(tensor, "Broadcast", rank());
  comm_checks::CheckRoot(root, size(), "Broadcast", rank());
}

void LocalComm::Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) {
  comm_checks::CheckRoot(root, size(), "Scatter", rank());
  comm_checks::CheckTensor(out, "Scatter", rank());
  comm_checks::CheckParts(parts, size(), rank());
  comm_checks::CheckPart(parts[0], out, rank());
  at::NoGradGuard no_grad;
  out.copy_(parts[0]);
}

std::vector<std::string> LocalComm::AllGatherBytes(const std::string& bytes) { return {bytes}; }

std::string LocalComm::BroadcastBytes(const std::string& bytes, int root) {
  comm_checks::CheckRoot(root, size(), "BroadcastBytes", rank());
  return bytes;
}

}  // namespace muster
