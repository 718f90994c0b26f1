#ifndef MUSTER_OPTIONS_H_
#define MUSTER_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "worker/parallel/data_parallel_options.h"
#include "worker/parallel/sharding_options.h"
#include "worker/train/autocast.h"
#include "worker/train/options.h"

namespace muster {

// How prepared loaders divide the data among processes.
struct DataLoaderOptions {
  // true: processes split each batch; false: every process gets whole batches.
  bool split_batches = false;
  // Every process gets the same number of equally long batches, padded with samples from the
  // epoch's start.
  bool even_batches = true;
  // Process 0 reads and distributes slices. Absent: only for streams.
  std::optional<bool> dispatch_batches;
  // The seed of shuffled orders. Absent: LibTorch's initial seed (what set_seed set) or, without
  // use_seedable_sampler, a number drawn from its generator. Process 0's seed applies to all.
  std::optional<uint64_t> data_seed;
  bool use_seedable_sampler = true;
  // Copies from pinned memory to the device do not block the host.
  bool non_blocking = true;
};

// Where checkpoints and logs go.
struct ProjectOptions {
  std::string directory;          // absent: MUSTER_PROJECT_DIR, else "muster-run"
  std::string logging_directory;  // absent: `directory`
  // The same as checkpoint.keep, under Accelerate's name.
  std::optional<int64_t> total_limit;
  // For nodes without a shared file system: every node keeps its own processes' files under its own
  // `directory`, and load_state() fetches what a node lacks from the others, or names the missing
  // node. save_model() writes the whole model on every node, and save() its file. Nodes that do
  // share the folder are detected and write it once.
  bool save_on_each_node = false;
};

// How save_state() writes.
struct CheckpointOptions {
  // save_state() copies the state into memory (see `lazy`) and returns; a thread writes it during
  // training. Each process keeps memory for two copies of its part (see divide_above); a process
  // that offloads to a disk copies to files there, before save_state() returns. The next
  // save_state(), wait_for_checkpoint() or end_training() reports a failed save. A killed process
  // loses its unwritten saves; earlier ones remain.
  bool asynchronous = false;
  // For asynchronous saves: parameters and state of prepared optimizers are copied during the next
  // forward and backward pass, and the optimizer's step waits for the copy. If the program itself
  // changes them between save_state() and the next step (not through a prepared optimizer,
  // muster::Ema or muster::LocalSGD), the save fails and names the tensor. Writes through
  // Tensor::data() bypass that check: a program that makes them in that interval must set `lazy` to
  // false, which copies everything before save_state() returns. The GPU copies tensors that are on
  // it.
  bool lazy = true;
  // save_state() also keeps the state in memory that the node's agent holds (`muster launch`,
  // `muster-agent`). When the job restarts after a crash, load_state() without a directory loads
  // that state if it is newer than the one on the disk. Takes memory for two copies of each
  // process's part (see divide_above; more with `mirror`), which the agent frees when the job ends.
  // Without an agent or enough memory, a warning says so and only the disk is used. `lazy` applies
  // here too. Cannot be combined with promote = false.
  bool memory = false;
  // With `memory` on several nodes: each save in memory is copied during training to another node,
  // so that a job that loses a node continues from memory. Copies as fast as the network allows,
  // and takes memory on each node for two more copies of each process's part; for one or two more
  // if copying takes longer than the time between two saves. A save that begins while an earlier
  // one is being copied is not copied itself. Without enough memory, a warning says so and saves
  // stay only on their own nodes.
  bool mirror = true;
  // With `memory`: one in this many calls of save_state() without a directory also writes to the
  // disk; the others write only to memory. State that is only in memory is lost when the job or its
  // agent ends: if the last state matters, end the program with save_state(directory). After the
  // trigger "stop" every save goes to the disk.
  int64_t disk_every = 1;
  // All processes write an unsharded model with more bytes of parameters than this: each writes
  // some of its tensors and optimizer states, in files like those of a sharded model
  // (model-00001-of-00004.safetensors; docs/checkpoint_format.md). Process 0 writes the others, and
  // every model if a save hook is registered or if processes may have trained apart
  // (muster::LocalSGD, allow_local_gradients, a gradient_hook). 0: every model is divided.
  int64_t divide_above = int64_t{1} << 30;
  // Write rate of an asynchronous save on each process. 0: as fast as the disk; but if training
  // needs all cores, slowly enough to cost training less than 3 %, as long as that takes no more
  // than a minute. Saves that training waits for are not slowed down.
  int64_t max_bytes_per_second = 0;
  // How many numbered checkpoints to keep, besides the pinned ones. The oldest are deleted once a
  // new one is complete. Absent: project.total_limit; if that is absent too, all are kept.
  std::optional<int64_t> keep;
  // Checkpoints whose global_step() is a multiple of this are kept as well; 0: none are kept for
  // that reason. Step 0, at which a program without a prepared optimizer stays, is not a multiple.
  int64_t keep_every = 0;
  // false: no process resumes from a new checkpoint until `muster checkpoints promote` releases it,
  // unless the program names it. Needs a coordinator and a file system shared by all nodes.
  bool promote = true;
};

// Makes blocks of prepared models keep only their inputs for the backward pass, which runs the
// blocks again (muster::activation_checkpoint). Applies to blocks that the model calls with
// muster::call(block, inputs...), as the models of muster/models.h call their layers. Results are
// the same to the last bit; a step takes about a third longer. Works with any strategy, under data
// parallelism and in one process.
struct ActivationCheckpointingOptions {
  bool enabled = true;
  // The blocks are modules of these classes, named without namespaces; "Block" and "BlockImpl" are
  // the same. Empty: the units of options.sharding (unit_types, unit_names or min_unit_parameters,
  // else the entries of each torch::nn::ModuleList and torch::nn::Sequential), whatever the
  // strategy. A block inside another block is part of it. prepare() throws if the model has no
  // block; backward() throws if a block that was never called with muster::call() gets gradients. A
  // block that was, but not in this pass, is named in one warning.
  std::vector<std::string> block_types = {};
  // Where the inputs of blocks are kept between the two passes. Applies to tensors of at least 4
  // KiB that depend on parameters and have no gaps; tensors inside classes that are not structures
  // of tensors (worker/nested/nested.h) stay where they are. kCpu: tensors of a GPU are kept in
  // pinned memory; no effect on the CPU. kDisk: in one file per process in `offload_path`, which
  // disappears with the process; a thread writes during the forward pass and reads ahead during the
  // backward pass, with at most 64 MiB, or one tensor, waiting to be written. backward() throws if
  // the disk fails.
  Offload offload = Offload::kNone;
  std::string offload_path = {};
};

// Arguments of make_optimizer() for what the configuration leaves "auto", like Accelerate's
// DummyOptim.
struct OptimizerArguments {
  double lr = 1e-3;
  double weight_decay = 0;
};

// A parameter group for make_optimizer(), with the values that differ from the configuration.
struct ConfiguredGroup {
  std::vector<at::Tensor> params;
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
};

// Arguments of make_scheduler() for what the configuration leaves "auto", like Accelerate's
// DummyScheduler.
struct SchedulerArguments {
  // Steps of all processes together, as counted by a program that has not divided its data. With
  // "auto", the schedule's length is this number divided by the number of processes, rounded up;
  // with split_batches, it is this number. The warm-up is not divided.
  std::optional<int64_t> total_num_steps = {};
  int64_t warmup_num_steps = 0;
};

// Options of backward().
struct BackwardOptions {
  // Keeps the graph for another backward pass.
  bool retain_graph = false;
  // The backward pass becomes part of the graph, for higher-order derivatives. Also retains the
  // graph.
  bool create_graph = false;
  // Accumulates gradients into these tensors only, for example the parameters of one of two models;
  // empty: into all. With several processes, give all trained parameters of a model or none.
  std::vector<at::Tensor> inputs = {};
};

// An absent setting comes from the environment, then from the default. An explicit setting always
// wins.
struct AcceleratorOptions {
  std::optional<std::string> mixed_precision;  // "no", "bf16", "fp16". MUSTER_MIXED_PRECISION, "no"
  std::optional<int64_t> gradient_accumulation_steps;  // MUSTER_GRADIENT_ACCUMULATION_STEPS, 1
  // num_steps in here is another name for gradient_accumulation_steps: set one of them, or both to
  // the same value.
  AccumulationOptions accumulation;
  std::optional<bool> cpu;  // MUSTER_CPU; else a GPU is used if there is one
  DataLoaderOptions data_loader;
  DataParallelOptions data_parallel;
  // Divides prepared models, their gradients and the state of their optimizers among the processes.
  // With one process nothing is divided. Absent: MUSTER_SHARDING (a name of ParseSharding) with
  // a variable for each of its settings (docs/sharding.md, "From outside"), else nothing.
  std::optional<ShardingOptions> sharding;
  // Absent: MUSTER_ACTIVATION_CHECKPOINTING (yes or no) with MUSTER_ACTIVATION_BLOCKS (its
  // block_types, separated by commas) and MUSTER_OFFLOAD_ACTIVATIONS (none, cpu or disk:FOLDER),
  // else what an FSDP configuration requests, else nothing.
  std::optional<ActivationCheckpointingOptions> activation_checkpointing;
  // The total 2-norm to which step() of a prepared optimizer clips its parameters' gradients when
  // gradients are synchronized. clip_grad_norm_() then returns the norm and leaves these gradients
  // unchanged, as Accelerate's does under DeepSpeed; it still clips other gradients. backward()
  // throws once an optimizer that is not prepared has changed a parameter of a prepared model that
  // neither step() nor clip_grad_norm_() clips. 0: none. Absent: a DeepSpeed configuration's
  // gradient_clipping, else none.
  std::optional<double> gradient_clipping;
  // If every field has its default value, the fp16 section of a DeepSpeed configuration applies, if
  // there is one.
  GradScalerOptions grad_scaler;
  // For prepared models and autocast().
  AutocastOptions autocast;
  // Models and batches are moved to device(). false: the program moves them.
  bool device_placement = true;
  // Random states that every process copies from process 0 at the start of a pass over a prepared
  // loader: "generator" (the order of the samples, which is always agreed), "torch" (the random
  // numbers of the CPU), "cuda" (those of the GPU).
  std::vector<std::string> rng_types = {"generator"};
  ProjectOptions project;
  CheckpointOptions checkpoint;
  // false: schedules advance at every call of step(), independently of the optimizer.
  bool step_scheduler_with_optimizer = true;
  // kProcesses: num_processes steps of the schedule for each step of the optimizer, as in
  // Accelerate.
  SchedulerUnits scheduler_units = SchedulerUnits::kOptimizerSteps;
  // Timeout of collectives and of joining the job. MUSTER_TIMEOUT, 10 minutes.
  std::optional<absl::Duration> timeout;
  // Checks operation, shape, dtype and order across processes before each collective. MUSTER_DEBUG.
  std::optional<bool> debug;
  // From its first call on, should_stop() treats SIGTERM at any process as the trigger "stop" of
  // the whole job; a second SIGTERM kills. false: SIGTERM kills.
  bool stop_on_sigterm = true;
  // Lets optimizers step on gradients that no prepared model averages over the processes, because
  // the program averages them itself. false: step() throws and names the parameter.
  bool allow_local_gradients = false;
  // backward() throws on a loss that is NaN or infinite, naming the process and the micro-step. A
  // loss of weight 0 may be NaN or infinite.
  bool check_finite_loss = false;
};

}  // namespace muster

#endif  // MUSTER_OPTIONS_H_
