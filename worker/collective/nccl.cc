#include "worker/collective/nccl.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/bool_word.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/headeronly/version.h"
#include "worker/collective/nccl_plugin/nccl_plugin.h"

namespace muster {
namespace {

std::string FolderOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

// The folder of the real path of libtorch_cpu.so: its CUDA half is next to it.
std::string TorchFolder() {
  Dl_info info = {};
  void* symbol = dlsym(RTLD_DEFAULT,
                       "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_string"
                       "IcSt11char_traitsIcESaIcEEE");
  if (symbol == nullptr || dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return "";
  char* real = realpath(info.dli_fname, nullptr);
  const std::string folder = real == nullptr ? "" : FolderOf(real);
  free(real);
  return folder;
}

std::string ProgramFolder() {
  char* real = realpath("/proc/self/exe", nullptr);
  const std::string folder = real == nullptr ? "." : FolderOf(real);
  free(real);
  return folder;
}

// The folder of the library that contains this code: libmuster.so's, or the program's.
std::string LibraryFolder() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&ProgramFolder), &info) == 0) return ".";
  char* real = realpath(info.dli_fname, nullptr);
  const std::string folder = real == nullptr ? "." : FolderOf(real);
  free(real);
  return folder;
}

// From the plug-in, once it is open.
std::atomic<MusterNcclFlushAtEnd> flush_at_end{nullptr};

struct Plugin {
  MusterNcclVersion version = nullptr;
  MusterNcclMakeBackend make_backend = nullptr;
};

template <class Function>
absl::Status Resolve(void* library, const std::string& path, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("NCCL plug-in ", path, " has no ", name,
                                                    ": it belongs to another version of Muster"));
}

absl::StatusOr<Plugin> OpenPlugin() {
  MUSTER_RETURN_IF_ERROR(LoadCuda());
  std::vector<std::string> places;
  const char* given = std::getenv("MUSTER_NCCL_PLUGIN");
  if (given != nullptr && *given != '\0') {
    places = {given};
  } else {
    const std::string here = ProgramFolder();
    places = {here + "/libmuster_nccl.so", here + "/../lib/libmuster_nccl.so"};
    // For a program that uses an installed libmuster.so from elsewhere.
    const std::string library = LibraryFolder();
    if (library != here) places.push_back(library + "/libmuster_nccl.so");
    // For a program inside a build tree: the plug-in is in the same tree.
    const size_t bin = here.rfind("/bin/");
    if (bin != std::string::npos) {
      places.push_back(here.substr(0, bin) +
                       "/bin/worker/collective/nccl_plugin/libmuster_nccl.so");
    }
  }
  void* library = nullptr;
  std::string found;
  std::string tried;
  for (const std::string& place : places) {
    absl::StrAppend(&tried, tried.empty() ? "" : ", ", place);
    if (access(place.c_str(), R_OK) != 0) continue;
    library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("NCCL plug-in cannot be opened: ", dlerror()));
    }
    found = place;
    break;
  }
  if (library == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("the NCCL plug-in libmuster_nccl.so was not found (looked for ", tried,
                     "): set MUSTER_NCCL_PLUGIN to its path, or run on the CPU (MUSTER_CPU=1)"));
  }
  MusterNcclAbi abi = nullptr;
  MusterNcclTorchVersion torch_version = nullptr;
  Plugin plugin;
  MUSTER_RETURN_IF_ERROR(Resolve(library, found, "muster_nccl_abi", &abi));
  MUSTER_RETURN_IF_ERROR(Resolve(library, found, "muster_nccl_torch_version", &torch_version));
  if (abi() != MUSTER_NCCL_ABI || std::string(torch_version()) != TORCH_VERSION) {
    return absl::FailedPreconditionError(absl::StrCat(
        "NCCL plug-in ", found, " is of ABI ", abi(), " for LibTorch ", torch_version(),
        "; this program is of ABI ", MUSTER_NCCL_ABI, " for LibTorch ", TORCH_VERSION));
  }
  MUSTER_RETURN_IF_ERROR(Resolve(library, found, "muster_nccl_version", &plugin.version));
  MUSTER_RETURN_IF_ERROR(Resolve(library, found, "muster_nccl_make_backend", &plugin.make_backend));
  MusterNcclFlushAtEnd flush = nullptr;
  MUSTER_RETURN_IF_ERROR(Resolve(library, found, "muster_nccl_flush_at_end", &flush));
  flush_at_end.store(flush);
  return plugin;
}

// Opened once; a library full of static state is never closed.
absl::StatusOr<Plugin> ThePlugin() {
  static const auto* const plugin = new absl::StatusOr<Plugin>(OpenPlugin());
  return *plugin;
}

std::string CudaHalf() { return absl::StrCat(TorchFolder(), "/libtorch_cuda.so"); }

absl::Status OpenCuda() {
  if (VisibleGpus() == 0) {
    return absl::FailedPreconditionError(
        "no GPU is visible to this process (no driver, or CUDA_VISIBLE_DEVICES hides them all)");
  }
  if (dlopen(CudaHalf().c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("LibTorch's CUDA half cannot be opened: ", dlerror(),
                     ". Run tools/setup --cuda, or run on the CPU (MUSTER_CPU=1)"));
  }
  if (!at::hasCUDA()) {
    return absl::FailedPreconditionError(
        "LibTorch was asked for CUDA before its CUDA half was opened, and answers ever since that "
        "there is none. Muster opens it before main() where a GPU is: unset MUSTER_CPU, or link "
        "the program against libtorch_cuda.so");
  }
  return absl::OkStatus();
}

// If there may be a GPU, LibTorch's CUDA half is opened before main(). If anything asks LibTorch
// for CUDA without that half (torch::manual_seed() and a backward pass do), LibTorch never has it.
// The driver is not touched, so that a program can still set CUDA_VISIBLE_DEVICES.
[[maybe_unused]] const bool opened_at_start = [] {
  // As worker/job/environment.h reads them: the first that is set counts.
  for (const char* const name : {"MUSTER_CPU", "ACCELERATE_USE_CPU"}) {
    const char* const cpu = std::getenv(name);
    if (cpu == nullptr || *cpu == '\0') continue;
    if (ParseBoolWord(cpu).value_or(false)) return false;
    break;
  }
  if (access("/dev/nvidiactl", F_OK) != 0 && access("/dev/dxg", F_OK) != 0) return false;
  // Errors are reported when a GPU is needed.
  return dlopen(CudaHalf().c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
}();

}  // namespace

int VisibleGpus() {
  // LibTorch's CPU half already brings the CUDA runtime along (for its profiler), so asking costs
  // nothing.
  using GetDeviceCount = int (*)(int*);
  const auto get = reinterpret_cast<GetDeviceCount>(dlsym(RTLD_DEFAULT, "cudaGetDeviceCount"));
  int count = 0;
  if (get == nullptr || get(&count) != 0) return 0;
  return count;
}

absl::Status LoadCuda() {
  static const auto* const status = new absl::Status(OpenCuda());
  return *status;
}

absl::Status AddNcclBackend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            const c10::intrusive_ptr<c10d::Store>& store, c10::Device device,
                            std::chrono::milliseconds timeout, const std::string& name) {
  if (!device.is_cuda() || !device.has_index()) {
    return absl::InvalidArgumentError(
        absl::StrCat("NCCL needs a numbered GPU, not ", device.str()));
  }
  MUSTER_ASSIGN_OR_RETURN(const Plugin plugin, ThePlugin());
  auto prefixed = c10::make_intrusive<c10d::PrefixStore>("muster/nccl/" + name, store);
  MusterNcclOptions options = {};
  options.store = static_cast<c10d::Store*>(prefixed.get());
  options.rank = group->getRank();
  options.size = group->getSize();
  options.device = device.index();
  options.timeout_ms = timeout.count();
  options.name = name.c_str();
  char error[1024] = {};
  void* raw = plugin.make_backend(&options, error, sizeof(error));
  if (raw == nullptr) {
    return absl::UnavailableError(absl::StrCat("NCCL group '", name, "' on rank ", options.rank,
                                               " of ", options.size, ", ", device.str(), ": ",
                                               error));
  }
  auto backend = c10::intrusive_ptr<c10d::Backend>::reclaim(static_cast<c10d::Backend*>(raw));
  group->setBoundDeviceId(device);
  group->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
  return absl::OkStatus();
}

void FlushNcclAtEnd(bool flush) {
  const MusterNcclFlushAtEnd set = flush_at_end.load();
  if (set != nullptr) set(flush ? 1 : 0);
}

absl::StatusOr<std::string> NcclVersion() {
  MUSTER_ASSIGN_OR_RETURN(const Plugin plugin, ThePlugin());
  char version[64] = {};
  plugin.version(version, sizeof(version));
  return std::string(version);
}

}  // namespace muster
