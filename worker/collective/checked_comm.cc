#include "worker/collective/checked_comm.h"

#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "c10/util/Exception.h"
#include "worker/collective/call_site.h"
#include "worker/collective/comm_checks.h"

namespace muster {
namespace {

class CheckedComm : public Comm {
 public:
  explicit CheckedComm(std::unique_ptr<Comm> inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  c10d::ProcessGroup* process_group() override { return inner_->process_group(); }
  ProgressBoard* board() override { return inner_->board(); }

  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    Check(c10::str("AllReduce(", comm_checks::OpName(op), ") ", comm_checks::Describe(tensor)));
    inner_->AllReduce(tensor, op);
  }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    Check("AllGather " + comm_checks::Describe(tensor));
    return inner_->AllGather(tensor);
  }
  void AllGatherParts(at::Tensor& flat) override {
    Check("AllGatherParts " + comm_checks::Describe(flat));
    inner_->AllGatherParts(flat);
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    Check(c10::str("ReduceScatter(", comm_checks::OpName(op), ") ", comm_checks::Describe(flat)));
    return inner_->ReduceScatter(flat, op);
  }
  void Broadcast(at::Tensor& tensor, int root) override {
    Check(c10::str("Broadcast(root ", root, ") ", comm_checks::Describe(tensor)));
    inner_->Broadcast(tensor, root);
  }
  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override {
    Check(c10::str("Scatter(root ", root, ")"));
    inner_->Scatter(parts, out, root);
  }
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    Check("AllGatherBytes");
    return inner_->AllGatherBytes(bytes);
  }
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    Check(c10::str("BroadcastBytes(root ", root, ")"));
    return inner_->BroadcastBytes(bytes, root);
  }
  void Barrier() override {
    Check("Barrier");
    inner_->Barrier();
  }

 private:
  void Check(const std::string& call) {
    ++sequence_;
    const std::string called =
        c10::str(call, " #", sequence_, comm_checks::Describe(comm_checks::CurrentPlace()));
    const std::string mine = called + '\n' + CurrentCallSite();
    // The text contains the place: if places were compared first, they would hide calls and lines.
    const comm_checks::PlaceScope alone(0, 1);
    const std::vector<std::string> all = inner_->AllGatherBytes(mine);
    bool same_calls = true;
    bool same_sites = true;
    std::vector<std::string> texts;
    for (const std::string& other : all) {
      const size_t newline = other.find('\n');
      const std::string site = other.substr(newline + 1);
      same_calls = same_calls && other.substr(0, newline) == called;
      same_sites = same_sites && other == mine;
      texts.push_back(other.substr(0, newline) + (site.empty() ? "" : " at " + site));
    }
    if (same_calls && (same_sites || warned_)) return;
    const std::string groups = comm_checks::ByRanks(texts, "called", "called");
    TORCH_CHECK(same_calls, "debug mode: ranks disagree about a collective: ", groups);
    warned_ = true;
    if (rank() == 0) {
      MUSTER_LOG(Warning) << "debug mode: ranks meet in one collective from different lines: "
                          << groups;
    }
  }

  const std::unique_ptr<Comm> inner_;
  uint64_t sequence_ = 0;
  bool warned_ = false;
};

}  // namespace

std::unique_ptr<Comm> MakeCheckedComm(std::unique_ptr<Comm> inner) {
  TORCH_CHECK(inner, "MakeCheckedComm: no Comm to check");
  return std::make_unique<CheckedComm>(std::move(inner));
}

}  // namespace muster
