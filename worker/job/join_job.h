#ifndef MUSTER_WORKER_JOB_JOIN_JOB_H_
#define MUSTER_WORKER_JOB_JOIN_JOB_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "worker/checkpoint/save_progress.h"
#include "worker/collective/collective_error.h"
#include "worker/collective/comm.h"
#include "worker/collective/progress_board.h"
#include "worker/job/coordinator_client.h"
#include "worker/job/environment.h"

namespace muster {

struct JoinedProcess;

struct JoinJobOptions {
  // For a process whose variables give it no rank (Environment::seated is false): how many workers
  // the job needs; 0: such a process is refused.
  int min_workers = 0;
  int max_workers = 0;
  // Whether to build a process group even for a job of one process, for code that needs a
  // c10d::ProcessGroup.
  bool always_group = false;
  // See CoordinatorClient::Options; called only for the generation that it has joined.
  std::function<void(const absl::Status&)> on_generation_ended = nullptr;
  // Called when the coordinator has given a seat, before the process group is built.
  std::function<void(const JoinedProcess&)> on_seated = nullptr;
  // Whether, if the process group cannot be built, to wait until the coordinator knows whether a
  // peer is lost (PatienceForEnd). Then JoinJob returns ABORTED, and the process may join the next
  // generation.
  bool reenters = false;
};

// Returns how long a process that has lost a connection waits for the coordinator to report that
// its generation has ended: its agent may be lost with the peer.
absl::Duration PatienceForEnd(const Environment& environment);

// A process that has met its peers.
struct JoinedProcess {
  // As given, with the place and generation that the rendezvous assigned.
  Environment environment;
  c10::Device device = c10::Device(c10::kCPU);
  std::shared_ptr<CoordinatorClient> coordinator;  // null without one
  c10::intrusive_ptr<c10d::Store> store;           // null for a process alone without a coordinator
  // The progress of this process; its heartbeats carry it.
  std::shared_ptr<ProgressBoard> progress = std::make_shared<ProgressBoard>();
  // The checkpoints that it writes; its heartbeats report them, too.
  std::shared_ptr<SaveProgress> saves = std::make_shared<SaveProgress>();
  // LocalComm for a single process, otherwise Gloo, plus NCCL if `device` is a GPU. Checked in
  // debug mode.
  std::unique_ptr<Comm> comm;
  // Tells which ranks did not take part in a collective over all ranks that was lost outside of
  // `comm` (gradients in a backward pass): see RethrowExplained. Null for a single process.
  CollectiveExplainer explain;
  int subgroups = 0;  // number of subgroups made so far
};

// Takes this process's place in its job: chooses the device; joins the rendezvous if there is a
// coordinator (even for a single process), or meets the others through a TCPStore at
// MASTER_ADDR:MASTER_PORT; builds the process group. Blocks until all ranks have joined, at most
// environment.timeout. Makes `device` the current one of this thread; on the CPU, without
// OMP_NUM_THREADS, divides LibTorch's threads among the processes of this node (thread_share.h).
//
// A process may join again, during or after its first membership, if all ranks do so in the same
// order: each time has keys of its own. Under a coordinator the first membership must have ended,
// because a process has one place there: otherwise FAILED_PRECONDITION. Errors, each one line with
// what was tried: those of ChooseDevice, CoordinatorClient and MakeGlooGroup; UNAVAILABLE for a
// TCPStore that cannot be reached or whose port is taken.
absl::StatusOr<JoinedProcess> JoinJob(const Environment& environment,
                                      const JoinJobOptions& options = {});

// Makes a Comm over some ranks of the job, over the same transports. A collective over all ranks,
// which pass the same `ranks` (of the job, distinct, in any order: ranks of the group follow the
// order of the job's). Null on ranks that are not listed. Its collectives involve only the listed
// ranks; they may alternate with the job's if every rank calls them in the same order. Blocks until
// the listed ranks have connected. Errors: INVALID_ARGUMENT, on every rank, naming the rank or the
// difference; those of JoinJob.
absl::StatusOr<std::unique_ptr<Comm>> MakeSubgroup(JoinedProcess& process, std::vector<int> ranks);

// Makes a Comm over all ranks of the job for a thread that runs during training: Gloo only, without
// a progress board, and for collectives that may wait for the slowest disk (a week, or the job's
// timeout if that is longer). A collective over all ranks. Blocks until they have connected.
// Errors: those of JoinJob.
absl::StatusOr<std::unique_ptr<Comm>> MakeBackgroundComm(JoinedProcess& process);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_JOIN_JOB_H_
