#include "base/machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/identity.h"

namespace muster {
namespace {

std::string ReadAll(const std::string& path) { return ReadFile(path).value_or(""); }

// The text after "NAME<separator>" on the first line that begins with NAME.
std::string Field(const std::string& text, absl::string_view name, char separator) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const size_t at = line.find(separator);
    if (at == absl::string_view::npos) continue;
    if (absl::StripAsciiWhitespace(line.substr(0, at)) != name) continue;
    absl::string_view value = absl::StripAsciiWhitespace(line.substr(at + 1));
    if (value.size() >= 2 && value.front() == '"' && value.back() == '"')
      value = value.substr(1, value.size() - 2);
    return std::string(value);
  }
  return "";
}

int64_t KiloBytes(const std::string& text) {
  int64_t value = 0;
  return absl::SimpleAtoi(absl::StripSuffix(text, " kB"), &value) ? value * 1024 : 0;
}

int Cores(const std::string& root) {
  int cores = 1;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
  const std::vector<std::string> quota =
      absl::StrSplit(absl::StripAsciiWhitespace(ReadAll(root + "/sys/fs/cgroup/cpu.max")), ' ');
  int64_t limit = 0, period = 0;
  if (quota.size() == 2 && absl::SimpleAtoi(quota[0], &limit) &&
      absl::SimpleAtoi(quota[1], &period) && period > 0) {
    cores = std::min<int64_t>(cores, (limit + period - 1) / period);
  }
  return std::max(cores, 1);
}

std::vector<std::string> Names(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

std::vector<std::string> VisibleDevices(const std::string& cuda_visible_devices, int gpus) {
  std::vector<std::string> devices;
  for (absl::string_view entry : absl::StrSplit(cuda_visible_devices, ',')) {
    entry = absl::StripAsciiWhitespace(entry);
    int index = 0;
    const bool named = absl::StartsWith(entry, "GPU-") || absl::StartsWith(entry, "MIG-");
    if (!named && (!absl::SimpleAtoi(entry, &index) || index < 0 || index >= gpus)) break;
    devices.emplace_back(entry);
  }
  return devices;
}

int CountVisible(const std::string& cuda_visible_devices, int gpus) {
  return gpus == 0 ? 0 : static_cast<int>(VisibleDevices(cuda_visible_devices, gpus).size());
}

Machine ReadMachine(const std::map<std::string, std::string>& variables, const std::string& root) {
  Machine machine;
  machine.hostname = HostName();
  utsname kernel;
  if (uname(&kernel) == 0) {
    machine.kernel = kernel.release;
    machine.architecture = kernel.machine;
  }
  machine.system = Field(ReadAll(root + "/etc/os-release"), "PRETTY_NAME", '=');
  machine.cpu_model = Field(ReadAll(root + "/proc/cpuinfo"), "model name", ':');
  machine.cores = Cores(root);
  const std::string memory = ReadAll(root + "/proc/meminfo");
  machine.memory_bytes = KiloBytes(Field(memory, "MemTotal", ':'));
  machine.memory_available_bytes = KiloBytes(Field(memory, "MemAvailable", ':'));

  const std::string driver = ReadAll(root + "/proc/driver/nvidia/version");
  for (const absl::string_view word :
       absl::StrSplit(driver, absl::ByAnyChar(" \n"), absl::SkipEmpty())) {
    // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  ...": the first word that looks
    // like a version.
    if (absl::ascii_isdigit(word[0]) && absl::StrContains(word, '.')) {
      machine.driver = std::string(word);
      break;
    }
  }
  std::set<int> device_nodes;
  for (const std::string& name : Names(root + "/dev")) {
    int index = 0;
    if (absl::StartsWith(name, "nvidia") && absl::SimpleAtoi(name.substr(6), &index))
      device_nodes.insert(index);
  }
  // A container has device nodes only for its own GPUs, but the kernel's list of all GPUs.
  for (const std::string& bus : Names(root + "/proc/driver/nvidia/gpus")) {
    const std::string information =
        ReadAll(root + "/proc/driver/nvidia/gpus/" + bus + "/information");
    int minor = -1;
    if (!absl::SimpleAtoi(Field(information, "Device Minor", ':'), &minor) ||
        device_nodes.erase(minor) == 0)
      continue;
    std::string uuid = Field(information, "GPU UUID", ':');
    // The driver writes "GPU-????????-..." until it has asked the GPU.
    if (absl::StrContains(uuid, '?')) uuid.clear();
    machine.gpus.push_back(
        {static_cast<int>(machine.gpus.size()), Field(information, "Model", ':'), std::move(uuid)});
  }
  for (size_t rest = device_nodes.size(); rest > 0; --rest) {
    machine.gpus.push_back({static_cast<int>(machine.gpus.size()), ""});
  }
  const int gpus = static_cast<int>(machine.gpus.size());
  const auto visible = variables.find("CUDA_VISIBLE_DEVICES");
  machine.usable_gpus = visible == variables.end() ? gpus : CountVisible(visible->second, gpus);
  return machine;
}

}  // namespace muster
