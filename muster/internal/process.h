#ifndef MUSTER_INTERNAL_PROCESS_H_
#define MUSTER_INTERNAL_PROCESS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "ATen/core/Tensor.h"
#include "muster/internal/engine_settings.h"
#include "muster/options.h"
#include "worker/collective/comm.h"
#include "worker/collective/comm_queue.h"
#include "worker/collective/progress_board.h"
#include "worker/job/coordinator_client.h"
#include "worker/job/environment.h"
#include "worker/job/join_job.h"
#include "worker/train/autocast.h"

namespace muster::internal {

// Returns the micro-steps per optimizer step, if the program sets them. Throws c10::ValueError if
// it sets two numbers.
std::optional<int64_t> AccumulationStepsOfProgram(const AcceleratorOptions& options);

// Returns the program's number, else that of the environment.
int64_t AccumulationSteps(const AcceleratorOptions& options, const Environment& environment);

// The process of an Accelerator: its place in the job and its settings. Does not change between
// construction and LoseComm(). Methods marked (collective) are collectives of the whole job.
class Process {
 public:
  Process(const AcceleratorOptions& options, JoinedProcess joined);
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  const AcceleratorOptions& options() const { return options_; }
  const Environment& environment() const { return joined_.environment; }
  at::Device device() const { return device_; }
  int rank() const { return joined_.comm->rank(); }
  int size() const { return joined_.comm->size(); }
  int local_rank() const { return joined_.environment.local_rank.value; }
  const std::string& mixed_precision() const { return joined_.environment.mixed_precision.value; }
  Comm& comm() const { return *joined_.comm; }
  // The queue that runs collectives beside the computation, in one order with those of comm() and
  // of the result of InOrder(). Null if there is none.
  const std::shared_ptr<CommQueue>& comm_queue() const { return comm_queue_; }
  std::unique_ptr<Comm> InOrder(std::unique_ptr<Comm> comm) const;
  ProgressBoard& progress() const { return *joined_.progress; }
  // Null in a job without a coordinator.
  const std::shared_ptr<CoordinatorClient>& coordinator() const { return joined_.coordinator; }
  const JoinedProcess& joined() const { return joined_; }
  JoinedProcess& joined() { return joined_; }
  // Call it when the generation has ended: closes the connections of comm(), so that no other
  // process waits for this one. Collectives throw from now on.
  void LoseComm();

  MixedPrecision precision() const { return precision_; }
  // The program's options or, where it sets none, those of the environment.
  const ShardingOptions& sharding() const { return settings_.sharding; }
  const ActivationCheckpointingOptions& activation_checkpointing() const {
    return settings_.activation_checkpointing;
  }
  // 0: none.
  double gradient_clipping() const { return settings_.gradient_clipping; }
  const GradScalerOptions& grad_scaler() const { return settings_.grad_scaler; }
  const ConfiguredTraining& configured() const { return settings_.configured; }
  AutocastGuard Autocast(const AutocastOptions& options) const {
    return AutocastGuard(precision_, device_.type(), options);
  }
  bool autocast_on() const {
    return precision_ != MixedPrecision::kNo && options_.autocast.enabled;
  }

  // The number of this node, the same on all of its processes, if each node keeps its own files.
  std::optional<int> own_node() const;

  std::string ProjectDirectory() const;
  std::string LoggingDirectory() const;

  // (collective) Returns the mean over all processes of a tensor of one number; as double if there
  // are several processes.
  at::Tensor MeanOfAll(const at::Tensor& number) const;

  // The settings that result from options and environment.
  struct Settings {
    ShardingOptions sharding;
    ActivationCheckpointingOptions activation_checkpointing = {.enabled = false};
    double gradient_clipping = 0;
    GradScalerOptions grad_scaler;
    ConfiguredTraining configured = {};
  };

 private:
  const AcceleratorOptions options_;
  JoinedProcess joined_;
  const at::Device device_;
  const MixedPrecision precision_;
  const Settings settings_;
  std::shared_ptr<CommQueue> comm_queue_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_PROCESS_H_
