#ifndef MUSTER_WORKER_BIGMODEL_DISPATCH_H_
#define MUSTER_WORKER_BIGMODEL_DISPATCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/core/ScalarType.h"
#include "worker/bigmodel/device_map.h"
#include "worker/bigmodel/offload_stats.h"
#include "worker/checkpoint/weight_loader.h"

namespace torch::nn {
class Module;
}

namespace muster {

class DividedModel;
class OffloadRing;

// The input for a device map. See muster/bigmodel.h for examples of everything here.
struct DevicePlanOptions {
  // Bytes of each device; empty: those that GetMaxMemory() finds.
  DeviceLimits max_memory = {};
  // Classes whose modules are never divided among devices ("LlamaDecoderLayer", with or without
  // namespace and "Impl").
  std::set<std::string> no_split = {};
  // The type in which floating-point tensors will be loaded.
  std::optional<at::ScalarType> dtype = std::nullopt;
  // The types of single tensors, by full name, whatever `dtype` and their own types are. A tied
  // tensor counts under its first name.
  std::map<std::string, at::ScalarType> special_dtypes = {};
  bool offload_buffers = false;
  bool fallback_allocation = false;
};

// Makes a device map. `mode`: "auto" and "balanced" (GPUs evenly), "balanced_low_0" (GPU 0 as empty
// as possible), "sequential" (one device after the other). Without a GPU all modes are the same.
// Errors: INVALID_ARGUMENT for another mode, a class that no module has, a special type for a
// tensor that does not exist, a module that may not be divided and fits nowhere;
// FAILED_PRECONDITION for a device that does not exist.
absl::StatusOr<DeviceMap> PlanDevices(const torch::nn::Module& module, const std::string& mode,
                                      const DevicePlanOptions& options = {});

struct DispatchOptions {
  // The device on which offloaded modules run. By default the GPU of the part before them (for the
  // first ones, that of the map's first part on a GPU) if `max_memory` leaves room for their ring
  // there, otherwise a GPU that has room, preferably the first one of the map; the CPU if the map
  // names no GPU.
  std::optional<c10::Device> main_device = std::nullopt;
  // Whether buffers of offloaded modules are offloaded too. By default they stay where these
  // modules run.
  bool offload_buffers = false;
  // The folder to which weights in memory go if the map says "disk": into offload.safetensors.
  // Weights that come from a checkpoint are used from its own files.
  std::string offload_folder = "";
  // Memory for offloaded weights that are in use or expected next, on each device where some run.
  // The default is what the device has in `max_memory` besides its own part, at most 1 GiB; without
  // such a limit 256 MiB; at least the largest offloaded tensor. A number smaller than that tensor
  // is INVALID_ARGUMENT.
  std::optional<uint64_t> ring_bytes = std::nullopt;
  // Bytes of each device, as for the plan.
  DeviceLimits max_memory = {};
  // The total number of threads that read, at least one for each device with offloaded weights.
  // They mostly wait for the disk, which is fastest with several requests.
  int readers = 8;
  bool prefetch = true;
  // Whether weights on the disk are used where their files are mapped into memory, without a copy:
  // faster if the files are in the page cache, which must have room for them to stay. Their pages
  // count as the process's memory, but the kernel takes them back when others need it, so that
  // limits (cgroups) hold. Weights that are converted on the way (to another type than in the
  // file), or that do not begin at a multiple of their element size in the file, still go through
  // the ring: stats() reports both. Files must not be changed meanwhile: as without `mmap`, the
  // next use of a weight detects that and throws; but an operator that is running uses what is
  // written into the file, and ends the process (SIGBUS) if the file is truncated or the disk
  // fails. So does code that writes a weight through data_ptr() (SIGSEGV); operators that would
  // write one throw. INVALID_ARGUMENT with weights on the disk that run on a GPU, to which they are
  // copied anyway.
  bool mmap = false;
};

struct LoadCheckpointOptions {
  // The options of load_model: strict by default.
  LoadWeightsOptions weights = {};
  // Returns the names of the model's tensors that one tensor of the files holds, as for
  // WeightFiles::Divide.
  std::function<std::vector<std::string>(const std::string&)> parts = nullptr;
  // Whether buffers that the files lack keep the values and types that the constructor gave them,
  // even with `strict`: tables that are computed. They are listed as missing.
  bool keep_buffers = false;
  DispatchOptions dispatch = {};
};

// A model on its devices. The module is used as before. Once this object is destroyed, only the
// parts that are entirely on a device may be used. With several GPUs, operators move from one to
// the next (divided_model.h), and results are on the device of the last weight.
class DispatchedModel {
 public:
  DispatchedModel();
  DispatchedModel(DispatchedModel&&) noexcept;
  DispatchedModel& operator=(DispatchedModel&&) noexcept;
  ~DispatchedModel();

  const DeviceEntries& device_map() const { return device_map_; }
  // The device to which inputs go.
  c10::Device main_device() const { return main_device_; }
  // The report for the checkpoint, if one was loaded.
  const LoadedWeights& loaded() const { return loaded_; }
  // Bytes of tensors that are permanently on a device, by device.
  const DeviceLimits& resident() const { return resident_; }
  // The sums over all devices; zero if nothing is offloaded.
  OffloadStats stats() const;
  // The ring of the first device on which offloaded weights are used; null if there is none.
  OffloadRing* ring() const { return rings_.empty() ? nullptr : rings_[0].get(); }

 private:
  friend class Dispatcher;

  DeviceEntries device_map_;
  c10::Device main_device_ = c10::Device(c10::kCPU);
  LoadedWeights loaded_;
  DeviceLimits resident_;
  std::vector<std::unique_ptr<OffloadRing>> rings_;
  std::unique_ptr<DividedModel> divided_;  // null: one device
};

// Distributes a model that has its weights.
absl::StatusOr<DispatchedModel> DispatchModel(torch::nn::Module& module,
                                              const DeviceEntries& device_map,
                                              const DispatchOptions& options = {});

// Loads a checkpoint into a model, which may be empty, on the devices of the map. Weights that the
// map offloads are not loaded but used from their files. An empty map: all on the CPU.
absl::StatusOr<DispatchedModel> LoadCheckpointAndDispatch(
    torch::nn::Module& module, const std::string& path, const DeviceEntries& device_map,
    const LoadCheckpointOptions& options = {});

// Keeps all weights in host memory, from which they are copied to `device` when they are used.
absl::StatusOr<DispatchedModel> CpuOffload(torch::nn::Module& module, c10::Device device,
                                           const DispatchOptions& options = {});
// Writes all weights to `folder`, from which they are read to `device` when they are used.
absl::StatusOr<DispatchedModel> DiskOffload(torch::nn::Module& module, const std::string& folder,
                                            c10::Device device,
                                            const DispatchOptions& options = {});

// Returns RESOURCE_EXHAUSTED if the file system of `folder` has less than `bytes` left.
absl::Status CheckDiskSpace(const std::string& folder, uint64_t bytes);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_DISPATCH_H_
