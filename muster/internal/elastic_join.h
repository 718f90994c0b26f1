#ifndef MUSTER_INTERNAL_ELASTIC_JOIN_H_
#define MUSTER_INTERNAL_ELASTIC_JOIN_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>

#include "ATen/ThreadLocalState.h"
#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "muster/internal/core.h"
#include "muster/options.h"

namespace muster::internal {

// The generations of its job that one process takes part in: one or, with `elastic` and an agent
// that supports it, a further one each time the job has lost another process. Not thread-safe.
class ElasticJoin {
 public:
  ElasticJoin(const AcceleratorOptions& options, bool elastic);
  ElasticJoin(const ElasticJoin&) = delete;
  ElasticJoin& operator=(const ElasticJoin&) = delete;

  // (collective) Joins the job's next generation, and the one after it if a process is lost
  // meanwhile. The random state is that of the first call. Throws c10::Error: as Accelerator's
  // constructor; if the program still holds objects of the previous Core.
  std::shared_ptr<Core> Join();

  // Whether `error`, with which the program's function has ended, means only that another process
  // is lost, so that this one may call Join() once `core` is destroyed. In that case everything of
  // `core` has ended. May wait for as long as PatienceForEnd.
  bool Leaves(Core& core, const absl::Status& error);

  // The function has ended successfully: this process does not join again.
  void Finished();

 private:
  // Tells the agent what this process can do, now that it has a seat.
  void Offer(const JoinedProcess& process);
  // Whether `error`, with which a process failed to build its group, is due to the loss of a peer.
  bool Lost(const absl::Status& error, const std::shared_ptr<CoordinatorClient>& coordinator,
            const Environment& environment);
  // Throws if the program still holds objects of the previous Core.
  void CheckHeld() const;

  const AcceleratorOptions options_;
  const bool elastic_;
  int reentries_left_;
  // The random state at the first call of Join(), with which every later generation begins, too.
  const std::map<std::string, at::Tensor> random_;
  const at::ThreadLocalState thread_;
  std::string agent_;  // its socket
  // Whether the agent knows that this process re-enters. Read by the heartbeat thread, which may
  // outlive this object.
  const std::shared_ptr<std::atomic<bool>> able_ = std::make_shared<std::atomic<bool>>(false);
  bool logged_unable_ = false;  // the log has the reason
  bool returns_ = false;        // a generation was left
  std::weak_ptr<Core> former_;
  Handed handed_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_ELASTIC_JOIN_H_
