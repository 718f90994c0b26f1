#ifndef MUSTER_OPTIONS_H_
#define MUSTER_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "worker/parallel/data_parallel_options.h"
#include "worker/train/autocast.h"
#include "worker/train/options.h"

namespace muster {

// How prepared loaders share out the data.
struct DataLoaderOptions {
  // true: processes split each batch; false: every process gets whole batches.
  bool split_batches = false;
  // Every process gets the same number of equally long batches, filled up with samples from the
  // epoch's start.
  bool even_batches = true;
  // Process 0 reads and hands out slices. Absent: for streams only.
  std::optional<bool> dispatch_batches;
  // The seed of shuffled orders. Absent: LibTorch's initial seed (what set_seed set) or, without
  // use_seedable_sampler, a number drawn from its generator. Process 0's counts for all.
  std::optional<uint64_t> data_seed;
  bool use_seedable_sampler = true;
  // Copies to the device do not wait for the host where memory is pinned.
  bool non_blocking = true;
};

// Where checkpoints and logs go.
struct ProjectOptions {
  std::string directory;          // absent: MUSTER_PROJECT_DIR, else "muster-run"
  std::string logging_directory;  // absent: `directory`
  // As checkpoint.keep, under Accelerate's name.
  std::optional<int64_t> total_limit;
};

// How save_state() writes.
struct CheckpointOptions {
  // save_state() copies the state into memory and returns; a thread writes it beside training. The
  // memory for two copies is kept on each process, of what that process writes (process 0 writes
  // nearly all). A save that fails is reported by the next save_state(), by wait_for_checkpoint()
  // or by end_training(). A process that is killed loses the saves that are not written yet; the
  // ones before stay.
  bool asynchronous = false;
  // Of an asynchronous save, on each process; 0: as fast as the disk takes them.
  int64_t max_bytes_per_second = 0;
  // Of numbered checkpoints: how many stay, besides those that are pinned. The oldest go once a new
  // one is complete. Absent: project.total_limit; absent too: all stay.
  std::optional<int64_t> keep;
  // Those whose global_step() is a multiple of it stay as well; 0: none for that reason.
  int64_t keep_every = 0;
  // false: no process resumes from a new checkpoint until `muster checkpoints promote` says so, or
  // names it. Needs a coordinator.
  bool promote = true;
};

// What backward() does beside the plain backward pass.
struct BackwardOptions {
  // Keeps the graph for another backward pass.
  bool retain_graph = false;
  // The backward pass becomes part of the graph, for derivatives of higher order. Retains it too.
  bool create_graph = false;
  // Gradients are added up in these tensors only, such as the parameters of one of two models;
  // empty: in all. On several processes: all trained parameters of a model or none of them.
  std::vector<at::Tensor> inputs = {};
};

// An absent setting comes from the environment, then from the default. An explicit one always wins.
struct AcceleratorOptions {
  std::optional<std::string> mixed_precision;  // "no", "bf16", "fp16". MUSTER_MIXED_PRECISION, "no"
  std::optional<int64_t> gradient_accumulation_steps;  // MUSTER_GRADIENT_ACCUMULATION_STEPS, 1
  // num_steps in here is overruled by gradient_accumulation_steps.
  AccumulationOptions accumulation;
  std::optional<bool> cpu;  // MUSTER_CPU; else a GPU is used if there is one
  DataLoaderOptions data_loader;
  DataParallelOptions data_parallel;
  GradScalerOptions grad_scaler;
  // Of prepared models and of autocast().
  AutocastOptions autocast;
  // Models and batches are moved to device(). false: the program moves them.
  bool device_placement = true;
  // What every process copies from process 0 when a pass over a prepared loader begins:
  // "generator" (the order of the samples, which is always agreed), "torch" (the random numbers of
  // the CPU), "cuda" (those of the GPU).
  std::vector<std::string> rng_types = {"generator"};
  ProjectOptions project;
  CheckpointOptions checkpoint;
  // false: schedules step at every call of step(), whatever the optimizer does.
  bool step_scheduler_with_optimizer = true;
  // kProcesses: Accelerate's num_processes steps of the schedule for each step of the optimizer.
  SchedulerUnits scheduler_units = SchedulerUnits::kOptimizerSteps;
  // Of collectives, and of the meeting at start. MUSTER_TIMEOUT, 10 minutes.
  std::optional<absl::Duration> timeout;
  // Check operation, shape, dtype and order across processes before each collective. MUSTER_DEBUG.
  std::optional<bool> debug;
  // should_stop() takes SIGTERM, at any process, as the trigger "stop" of the whole job, from its
  // first call on; a second SIGTERM kills. false: SIGTERM kills.
  bool stop_on_sigterm = true;
  // Optimizers may step on gradients that no prepared model averages over the processes, since the
  // program does so itself. false: step() throws and names the parameter.
  bool allow_local_gradients = false;
  // backward() throws on a loss that is NaN or infinite, naming the process and the micro-step.
  bool check_finite_loss = false;
};

}  // namespace muster

#endif  // MUSTER_OPTIONS_H_
