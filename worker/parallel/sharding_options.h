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

// What the ranks divide among them instead of keeping a copy each.
enum class ShardingStrategy {
  kNone,       // nothing: data parallelism
  kOptimizer,  // the optimizer's state (ZeRO-1)
  kGradients,  // and the gradients (ZeRO-2, FSDP's SHARD_GRAD_OP)
  kFull,       // and the parameters (ZeRO-3, FSDP's FULL_SHARD)
};

// Where something is that is not needed at the moment.
enum class Offload {
  kNone,  // on the device that uses it
  kCpu,   // in the memory of the machine
  kDisk,  // in a file that goes with the process
};

// Whether what is on `device` goes elsewhere: what is on the CPU is in the memory of the machine.
bool GoesElsewhere(Offload place, const c10::Device& device);

// How a model is sharded. The unit is what is gathered and freed together: give the blocks of the
// model as units. A parameter belongs to the innermost unit around it; what no unit has is a unit
// of its own. At most one of unit_types, unit_names and min_unit_parameters.
struct ShardingOptions {
  ShardingStrategy strategy = ShardingStrategy::kNone;
  // Ranks that divide one copy of the model (hybrid sharding): each group of so many consecutive
  // ranks has a whole copy, and the groups average their gradients. It must divide the number of
  // ranks. 0: all ranks are one group.
  int64_t group_size = 0;
  // kFull: parameters are freed after the forward pass as well, not only after the backward pass.
  // false: less communication, more memory.
  bool reshard_after_forward = true;
  // With reshard_after_forward: groups of so many consecutive ranks (those of a node) have a copy
  // of the parameters divided among them from the forward pass to the backward pass, which is
  // gathered inside of the group. It must divide the ranks that divide the model. 0: no such copy.
  int64_t reshard_group_size = 0;
  // The dtype in which fp32 parameters are gathered and used; the optimizer has them in fp32. Half
  // the communication and memory of what is gathered, for a forward and backward pass in low
  // precision: it must be the type of mixed_precision. Absent: fp32, which autocast converts.
  std::optional<c10::ScalarType> parameter_dtype = std::nullopt;
  // The dtype in which gradients are summed over micro-steps and ranks. Absent: that of the
  // parameters.
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;
  // The dtype of what the prepared model returns: all floating-point tensors of it are converted,
  // in a way that gradients pass. With a strategy other than kNone and under mixed_precision so is
  // what each unit returns that the model calls by muster::call(). Absent: fp32 for the fp16 and
  // bf16 tensors that a model returns under mixed_precision, and nothing is converted otherwise.
  // Whatever the number of processes; not of models that are prepared for evaluation.
  std::optional<c10::ScalarType> output_dtype = std::nullopt;
  // The dtype of floating-point buffers: prepare() converts them, and they stay so; checkpoints and
  // saved models hold them in it, and a load converts what it finds. Running statistics of
  // normalization (`running_mean`, `running_var`), which its operators need in their own, and
  // buffers inside of `ignored_modules` stay as they are. Absent: all do. As output_dtype, whatever
  // the number of processes, and not of models that are prepared for evaluation.
  std::optional<c10::ScalarType> buffer_dtype = std::nullopt;
  // The next unit is gathered, and gradients are reduced, while the one before computes: on the CPU
  // on a thread of its own, on a GPU on a stream of its own. Results are the same to the last bit,
  // and so are the bytes on the wire. For links that are slower than the computation; not measured
  // on GPUs. The same on every rank.
  bool overlap = false;
  // Optimizers update the parameters of a unit inside of the backward pass, as soon as all of its
  // gradients are reduced, on the CPU on a thread of its own; the gradients are gone then, so no
  // more than those of a few units exist. optimizer.step() only ends the step. Results are the same
  // to the last bit. Of Muster's fused optimizers, with a strategy other than kNone, and with one
  // process as well. What needs all gradients first is refused: clipping, fp16's loss scale, steps
  // that are left out after backward(). From the second step on. The same on every rank.
  bool optimizer_in_backward = false;
  // Where the states of optimizers are between their steps, whatever the strategy, and with one
  // process as well: of Muster's fused optimizers; others are refused. A step takes them to the
  // parameters in windows of 64 MiB, or of the largest parameter's state if that is more, and needs
  // memory for three of these. Results are the same to the last bit. kCpu: pinned; no effect where
  // parameters are on the CPU. kDisk: in a file of each process in `offload_optimizer_path`, which
  // goes with the process; past the page cache, windows ahead and behind of the one that is
  // updated.
  Offload offload_optimizer = Offload::kNone;
  std::string offload_optimizer_path = {};
  // Where this process's parts of the gradients are from the end of their reduction until the step
  // has used them, one unit at a time; with a strategy other than kNone, with one process as well,
  // and with any optimizer. What uses one reads those of its unit; two units' stay in memory.
  // Results are the same to the last bit. kOptimizer: gradients are whole until the end of the
  // backward pass, so this takes nothing from its peak. kCpu: those of a GPU, in pinned memory of
  // the host; no effect where parameters are on the CPU. kDisk: in a file of each process in
  // `offload_gradients_path`, like that of `offload_optimizer_path`. kNone: where
  // offload_parameters says.
  Offload offload_gradients = Offload::kNone;
  std::string offload_gradients_path = {};
  // kFull: where the parts of the parameters are while their unit is not gathered and no optimizer
  // steps. From the backward pass to the step the parts of the gradients are there too, unless
  // offload_gradients names another place. kCpu: those of a GPU, in pinned memory of the host; no
  // effect where parameters are on the CPU. kDisk: in a file of each process in
  // `offload_parameters_path`, like that of `offload_optimizer_path`. Parts are read and written
  // one unit at a time.
  Offload offload_parameters = Offload::kNone;
  std::string offload_parameters_path = {};
  // A regular expression (ECMAScript's) for the whole name of a module: modules that match, and all
  // in them, are not divided. Each rank keeps their parameters, gradients and states whole, and
  // gradients are averaged as in data parallelism. Empty: none.
  std::string ignored_modules = {};
  // The same for whole names of parameters: "blocks\\.0\\.norm\\.weight". Of tied weights one name
  // that matches is enough, here and there.
  std::string ignored_parameters = {};
  // Modules of these classes are units: "Block" and "BlockImpl" are the same, namespaces are left
  // out.
  std::vector<std::string> unit_types = {};
  // Modules of these names are units: "encoder.layers.0".
  std::vector<std::string> unit_names = {};
  // Modules of at least so many parameters are units, without the units in them.
  int64_t min_unit_parameters = 0;
  // With none of the three: the entries of each torch::nn::ModuleList and torch::nn::Sequential.

  // Modules of these classes, or of these names, are not divided further: where the rule would make
  // units inside of one, it is the unit in their place. Of such modules inside of each other the
  // outermost counts.
  std::vector<std::string> no_split = {};
};

// "no_shard", "zero1", "zero2", "zero3" or "hybrid" (zero3 in groups of `ranks_per_node`).
// Throws c10::Error for another name.
ShardingOptions ParseSharding(const std::string& name, int64_t ranks_per_node);

// "none", "cpu" or "disk:FOLDER": the place, and the folder. Throws c10::Error for another text.
std::pair<Offload, std::string> ParseOffload(const std::string& text);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARDING_OPTIONS_H_
