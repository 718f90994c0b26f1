#ifndef MUSTER_WORKER_PARALLEL_SHARDING_OPTIONS_H_
#define MUSTER_WORKER_PARALLEL_SHARDING_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10/core/Device.h"
#include "c10/core/ScalarType.h"

namespace muster {

// What is divided among the ranks, instead of each keeping a copy.
enum class ShardingStrategy {
  kNone,       // nothing: data parallelism
  kOptimizer,  // the optimizer's state (ZeRO-1)
  kGradients,  // and the gradients (ZeRO-2, FSDP's SHARD_GRAD_OP)
  kFull,       // and the parameters (ZeRO-3, FSDP's FULL_SHARD)
};

// Where state is kept while it is not needed.
enum class Offload {
  kNone,  // on the device that uses it
  kCpu,   // in the memory of the machine
  kDisk,  // in a file that goes with the process
};

// Whether state on `device` moves to another place. kCpu does not move state that is already on the
// CPU.
bool GoesElsewhere(Offload place, const c10::Device& device);

// How a model is sharded. A unit is a group of parameters that are gathered and freed together:
// make the blocks of the model units. A parameter belongs to the innermost unit around it; the
// parameters outside all units form one more unit. Set at most one of unit_types, unit_names and
// min_unit_parameters.
struct ShardingOptions {
  ShardingStrategy strategy = ShardingStrategy::kNone;
  // Ranks that divide one copy of the model (hybrid sharding): each group of this many consecutive
  // ranks has a whole copy, and the groups average their gradients. It must divide the number of
  // ranks. 0: all ranks are one group.
  int64_t group_size = 0;
  // kFull: parameters are freed after the forward pass as well, not only after the backward pass.
  // false: less communication, more memory.
  bool reshard_after_forward = true;
  // With reshard_after_forward: each group of this many consecutive ranks (those of a node) keeps
  // one copy of the parameters, divided among them, from the forward pass to the backward pass,
  // which gathers it within the group. It must divide the number of ranks that divide the model. 0:
  // no such copy.
  int64_t reshard_group_size = 0;
  // The dtype in which fp32 parameters are gathered and used; the optimizer has them in fp32.
  // Halves the communication and memory of gathered parameters, for forward and backward passes in
  // low precision: it must be the type of mixed_precision. Absent: fp32, which autocast converts.
  std::optional<c10::ScalarType> parameter_dtype = std::nullopt;
  // The dtype in which gradients are summed over micro-steps and ranks; their mean, which divides
  // the sum, is in the wider one of this and the parameters' dtype. Absent: that of the parameters,
  // which gradients of fp64 parameters and of ignored ones (`ignored_modules`,
  // `ignored_parameters`) always keep.
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;
  // The dtype of the prepared model's outputs: all their floating-point tensors are converted, and
  // gradients flow through the conversion. With a strategy other than kNone and under
  // mixed_precision, outputs of units that the model calls by muster::call() are converted too.
  // Absent: fp32 for fp16 and bf16 outputs under mixed_precision; otherwise nothing is converted.
  // Applies to any number of processes, but not to models that are prepared for evaluation.
  std::optional<c10::ScalarType> output_dtype = std::nullopt;
  // The dtype of floating-point buffers: prepare() converts them permanently. Checkpoints and saved
  // models hold them in it, and a load converts the buffers that it reads. Not converted: running
  // statistics of normalization (`running_mean`, `running_var`), whose operators need their
  // original dtype, and buffers inside `ignored_modules`. Absent: no buffer is converted. Like
  // output_dtype, applies to any number of processes, but not to models that are prepared for
  // evaluation.
  std::optional<c10::ScalarType> buffer_dtype = std::nullopt;
  // Gathers the next unit and reduces gradients while the previous unit computes: with a separate
  // thread on the CPU, with a separate stream on a GPU. Results are the same to the last bit, and
  // so are the bytes on the wire. For links that are slower than the computation; not measured on
  // GPUs. Must be the same on every rank.
  bool overlap = false;
  // Optimizers update the parameters of a unit inside the backward pass, as soon as all of its
  // gradients are reduced (with a separate thread on the CPU). The gradients are then freed, so
  // only those of a few units exist at a time. optimizer.step() only ends the step. Results are the
  // same to the last bit. Works with Muster's fused optimizers and every strategy but kNone, even
  // with one process. Operations that need all gradients first are refused: clipping, fp16's loss
  // scale, skipping a step after backward(). Takes effect from the second step on. Must be the same
  // on every rank.
  bool optimizer_in_backward = false;
  // Where the states of Muster's fused optimizers are kept between steps, with any strategy, even
  // with one process; other optimizers are refused. A step moves them to the parameters in windows
  // of 64 MiB, or of the largest parameter's state if that is larger, and needs memory for three
  // windows. Results are the same to the last bit. kCpu: in pinned memory; no effect for parameters
  // on the CPU. kDisk: in one file per process in `offload_optimizer_path`, which vanishes with the
  // process; bypasses the page cache, reads the next window and writes the previous one during the
  // update.
  Offload offload_optimizer = Offload::kNone;
  std::string offload_optimizer_path = {};
  // Where this process's parts of the gradients are from the end of their reduction until the step
  // has used them, one unit at a time; with every strategy but kNone, even with one process, and
  // with any optimizer. A use of a gradient reads the gradients of its unit; those of two units
  // stay in memory. Results are the same to the last bit. kOptimizer: gradients are whole until the
  // end of the backward pass, so this does not lower its peak. kCpu: gradients on a GPU, in pinned
  // host memory; no effect for parameters on the CPU. kDisk: in one file per process in
  // `offload_gradients_path`, like that of `offload_optimizer_path`. kNone: where
  // offload_parameters says.
  Offload offload_gradients = Offload::kNone;
  std::string offload_gradients_path = {};
  // kFull: where the parts of the parameters are kept while their unit is not gathered and no
  // optimizer steps. From the backward pass to the step the parts of the gradients are kept there
  // too, unless offload_gradients names another place. kCpu: parameters on a GPU, in pinned host
  // memory; no effect for parameters on the CPU. kDisk: in one file per process in
  // `offload_parameters_path`, like that of `offload_optimizer_path`. Parts are read and written
  // one unit at a time.
  Offload offload_parameters = Offload::kNone;
  std::string offload_parameters_path = {};
  // An ECMAScript regular expression that matches full names of modules: these modules, and
  // everything in them, are not divided. Each rank keeps their whole parameters, gradients and
  // states, and gradients are averaged as in data parallelism. Empty: none.
  std::string ignored_modules = {};
  // The same for full names of parameters: "blocks\\.0\\.norm\\.weight". For tied weights one
  // matching name is enough, in both settings.
  std::string ignored_parameters = {};
  // Modules of these classes are units. "Block" and "BlockImpl" are the same; omit namespaces.
  std::vector<std::string> unit_types = {};
  // Modules of these names are units: "encoder.layers.0".
  std::vector<std::string> unit_names = {};
  // Modules with at least this many parameters, not counting units inside them, are units.
  int64_t min_unit_parameters = 0;
  // With none of the three, the entries of each torch::nn::ModuleList and torch::nn::Sequential are
  // units.

  // Modules of these classes, or with these names, are not divided further: where the rule would
  // make units inside such a module, the module is the unit instead. If such modules are nested,
  // the outermost counts.
  std::vector<std::string> no_split = {};
};

// "no_shard", "zero1", "zero2", "zero3" or "hybrid" (zero3 in groups of `ranks_per_node`).
// Throws c10::Error for another name.
ShardingOptions ParseSharding(const std::string& name, int64_t ranks_per_node);

// "none", "cpu" or "disk:FOLDER": the place, and the folder. Throws c10::Error for another text.
std::pair<Offload, std::string> ParseOffload(const std::string& text);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARDING_OPTIONS_H_
