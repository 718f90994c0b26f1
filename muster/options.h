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
  // Process 0 reads and distributes slices. Absent: for streams only.
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
  // As checkpoint.keep, under Accelerate's name.
  std::optional<int64_t> total_limit;
  // Without a file system that all nodes share: every node keeps the files of its own processes
  // under its own `directory`, and load_state() fetches what a node lacks from the others, or names
  // the node that is missing. save_model() writes the whole model on every node. Nodes that do
  // share the folder are detected and write it once.
  bool save_on_each_node = false;
};

// How save_state() writes.
struct CheckpointOptions {
  // save_state() copies the state into memory (see `lazy`) and returns; a thread writes it during
  // training. Each process keeps memory for two copies of its part (see divide_above). The next
  // save_state(), wait_for_checkpoint() or end_training() reports a failed save. A process that is
  // killed loses its unwritten saves; earlier ones remain.
  bool asynchronous = false;
  // Of an asynchronous save: parameters and state of prepared optimizers are copied while the next
  // forward and backward pass run, and the optimizer's step waits for the copy. If the program
  // itself changes them between save_state() and the next step (not through a prepared optimizer,
  // muster::Ema or muster::LocalSGD), that save fails and names the tensor. Writes through
  // Tensor::data() bypass that check: a program that makes them there must set false, which copies
  // everything before save_state() returns. What is on a GPU is copied by the GPU.
  bool lazy = true;
  // save_state() also keeps the state in memory that the node's agent holds (`muster launch`,
  // `muster-agent`): when the job is restarted after a crash, load_state() without a directory
  // takes it from there if it is newer than what is on the disk. It takes memory for two copies of
  // each process's part (see divide_above; more with `mirror`), which the agent frees at the job's
  // end.
  // Without an agent or without memory a warning says so, and the disk alone counts. `lazy` counts
  // here too. Not with promote = false.
  bool memory = false;
  // With `memory` on several nodes: each save in memory is copied during training to another node,
  // so that a job that loses a node continues from memory. Takes the network as fast as it is, and
  // on each node memory for two more copies of each process's part; one or two more if copying
  // takes longer than the time between two saves. A save that begins while an earlier one is being
  // copied is not copied itself. Where there is no memory for it a warning says so, and saves stay
  // on their own nodes alone.
  bool mirror = true;
  // With `memory`: every so many calls of save_state() without a directory write to the disk, the
  // others to memory alone. What is in memory alone is lost when the job ends or its agent does:
  // end the program with a save_state(directory), if its last state matters. After the trigger
  // "stop" every save goes to the disk.
  int64_t disk_every = 1;
  // An unsharded model with more bytes of parameters than this is written by all processes: each
  // has some of the tensors and of the optimizers' states, in files as those of a sharded model
  // (model-00001-of-00004.safetensors; docs/checkpoint_format.md). Others are written by process 0,
  // as are all where a save hook is registered, and where processes have trained apart
  // (muster::LocalSGD, allow_local_gradients). 0: every model is divided.
  int64_t divide_above = int64_t{1} << 30;
  // Write rate of an asynchronous save on each process; 0: as fast as the disk, but where training
  // wants all cores, slowly enough for it to lose less than 3 % if a minute is enough for that.
  // What training waits for is not held back.
  int64_t max_bytes_per_second = 0;
  // How many numbered checkpoints to keep, besides the pinned ones. The oldest are deleted once a
  // new one is complete. Absent: project.total_limit; if that is absent too, all stay.
  std::optional<int64_t> keep;
  // Checkpoints whose global_step() is a multiple of it stay as well; 0: none for that reason.
  int64_t keep_every = 0;
  // false: no process resumes from a new checkpoint until `muster checkpoints promote` releases it,
  // unless the program names it. Needs a coordinator and a file system that all nodes share.
  bool promote = true;
};

// Blocks of prepared models that keep their inputs alone for the backward pass, and run again there
// (muster::activation_checkpoint): those that the model calls by muster::call(block, inputs...).
// Results are the same to the last bit; a step takes about a third longer. With any strategy, under
// data parallelism and in one process. The models of muster/models.h call their layers so.
struct ActivationCheckpointingOptions {
  bool enabled = true;
  // Modules of these classes: "Block" and "BlockImpl" are the same, namespaces are left out. Empty:
  // the units of options.sharding (unit_types, unit_names or min_unit_parameters, else the entries
  // of each torch::nn::ModuleList and torch::nn::Sequential), whatever the strategy. A block inside
  // of another one is part of that. prepare() throws if the model has none, and backward() if a
  // block that was never called by muster::call() gets gradients; one that was, but not for this
  // pass, is named in a warning, once.
  std::vector<std::string> block_types = {};
  // Where the inputs of blocks are between the two passes: tensors that depend on parameters,
  // without gaps, of at least 4 KiB; what is in classes that are no structures of tensors
  // (worker/nested/nested.h) stays. kCpu: of a GPU's, in pinned memory; no effect where they are on
  // the CPU. kDisk: in a file of each process in `offload_path`, which goes with the process; a
  // thread writes behind the forward pass and reads ahead of the backward pass, with 64 MiB, or one
  // tensor, to write at most. An error of the disk is thrown by backward().
  Offload offload = Offload::kNone;
  std::string offload_path = {};
};

// Of make_optimizer(): for what the configuration leaves "auto", as Accelerate's DummyOptim.
struct OptimizerArguments {
  double lr = 1e-3;
  double weight_decay = 0;
};

// A parameter group of make_optimizer(), with what differs from the configuration.
struct ConfiguredGroup {
  std::vector<at::Tensor> params;
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
};

// Of make_scheduler(): for what the configuration leaves "auto", as Accelerate's DummyScheduler.
struct SchedulerArguments {
  // Steps of all processes together, as a program counts them that has not divided its data: with
  // "auto" the schedule's length is this divided by the number of processes, rounded up, or, with
  // split_batches, this. The warm-up is not divided.
  std::optional<int64_t> total_num_steps = {};
  int64_t warmup_num_steps = 0;
};

// Options of backward().
struct BackwardOptions {
  // Keeps the graph for another backward pass.
  bool retain_graph = false;
  // The backward pass becomes part of the graph, for derivatives of higher order. Retains it too.
  bool create_graph = false;
  // Accumulates gradients into these tensors only, for example the parameters of one of two models;
  // empty: into all. With several processes, give all trained parameters of a model or none.
  std::vector<at::Tensor> inputs = {};
};

// An absent setting comes from the environment, then from the default. An explicit one always wins.
struct AcceleratorOptions {
  std::optional<std::string> mixed_precision;  // "no", "bf16", "fp16". MUSTER_MIXED_PRECISION, "no"
  std::optional<int64_t> gradient_accumulation_steps;  // MUSTER_GRADIENT_ACCUMULATION_STEPS, 1
  // gradient_accumulation_steps overrides num_steps in here.
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
  // else what a configuration of FSDP asks for, else nothing.
  std::optional<ActivationCheckpointingOptions> activation_checkpointing;
  // The norm (2) to which step() of a prepared optimizer clips the gradients of its parameters, all
  // together, where gradients are synchronized. clip_grad_norm_() then returns the norm and leaves
  // these as they are, as Accelerate's does under DeepSpeed; it clips others. backward() throws
  // once a parameter of a prepared model has been changed that neither clips, by an optimizer that
  // is not prepared. 0: none. Absent: a DeepSpeed configuration's gradient_clipping, else none.
  std::optional<double> gradient_clipping;
  // With every field at its default: the section fp16 of a DeepSpeed configuration, if there is
  // one.
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
  // kProcesses: Accelerate's num_processes steps of the schedule for each step of the optimizer.
  SchedulerUnits scheduler_units = SchedulerUnits::kOptimizerSteps;
  // Timeout of collectives and of joining the job. MUSTER_TIMEOUT, 10 minutes.
  std::optional<absl::Duration> timeout;
  // Check operation, shape, dtype and order across processes before each collective. MUSTER_DEBUG.
  std::optional<bool> debug;
  // should_stop() takes SIGTERM, at any process, as the trigger "stop" of the whole job, from its
  // first call on; a second SIGTERM kills. false: SIGTERM kills.
  bool stop_on_sigterm = true;
  // Optimizers may step on gradients that no prepared model averages over the processes, because
  // the program averages them itself. false: step() throws and names the parameter.
  bool allow_local_gradients = false;
  // backward() throws on a loss that is NaN or infinite, naming the process and the micro-step.
  bool check_finite_loss = false;
};

}  // namespace muster

#endif  // MUSTER_OPTIONS_H_
