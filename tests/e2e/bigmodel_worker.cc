// A model that is larger than the memory of its process. `--make` writes its weights, in a file
// with holes; `--run` computes with them and prints one line of JSON.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "muster/bigmodel.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/checkpoint/safetensors_format.h"

namespace {

using muster::TextNet;

// Returns a field of /proc/self/status, in bytes.
int64_t MemoryOf(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    int64_t kilobytes = 0;
    if (word == field + ":" && file >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

TextNet EmptyNet(int64_t width, int64_t blocks) {
  return muster::init_empty_weights([&] { return TextNet(1000, width, blocks); });
}

// Every tensor begins with random numbers, and continues with zeros that take no room on the disk.
int Make(const std::string& path, int64_t width, int64_t blocks) {
  std::vector<muster::SafetensorsEntry> entries;
  for (const auto& item : EmptyNet(width, blocks)->named_parameters()) {
    std::vector<uint64_t> shape(item.value().sizes().begin(), item.value().sizes().end());
    entries.push_back({.name = item.key(), .type = muster::SafetensorsType::kF32, .shape = shape});
  }
  const auto layout = muster::LayOutSafetensors(entries, std::nullopt);
  if (!layout.ok()) return 1;
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0644);
  bool good = file >= 0;
  std::string prefix = layout->prefix;
  good =
      good && pwrite(file, prefix.data(), prefix.size(), 0) == static_cast<ssize_t>(prefix.size());
  good =
      good && ftruncate(file, static_cast<off_t>(layout->prefix.size() + layout->data_bytes)) == 0;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.3F);
  for (const muster::SafetensorsEntry& entry : layout->tensors) {
    std::vector<float> some(std::min<uint64_t>(16384, entry.end - entry.begin) / sizeof(float));
    for (float& number : some) number = normal(random);
    const auto bytes = static_cast<ssize_t>(some.size() * sizeof(float));
    good = good && pwrite(file, some.data(), static_cast<size_t>(bytes),
                          static_cast<off_t>(prefix.size() + entry.begin)) == bytes;
  }
  return good && close(file) == 0 ? 0 : 1;
}

// Returns a digest; equal bits have equal digests.
std::string DigestOf(const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.contiguous();
  const auto* const data = static_cast<const unsigned char*>(bytes.const_data_ptr());
  uint64_t digest = 1469598103934665603ULL;
  for (size_t i = 0; i < bytes.nbytes(); ++i) digest = (digest ^ data[i]) * 1099511628211ULL;
  return std::to_string(digest);
}

int Run(const std::string& path, const std::string& max_memory, const std::string& map,
        bool is_half, int64_t width, int64_t blocks) {
  const at::NoGradGuard no_grad;
  const at::Tensor ids = at::arange(8).view({1, 8});
  // Makes libraries take beforehand what they take at their first use.
  TextNet(1000, 64, 1)->forward(ids);
  const int64_t before = MemoryOf("VmRSS"), data = MemoryOf("VmData");
  nlohmann::ordered_json line = {{"data_before", data}};
  if (!path.empty()) {
    TextNet net = EmptyNet(width, blocks);
    muster::BigModelOptions options;
    options.no_split = {"Block"};
    if (is_half) options.dtype = at::kBFloat16;
    if (!max_memory.empty()) {
      const auto limits = muster::get_max_memory(max_memory);
      if (!limits.ok()) return std::cerr << limits.status().message() << "\n", 1;
      options.max_memory = *limits;
    }
    const muster::DeviceMapChoice choice =
        map == "auto" ? muster::DeviceMapChoice(map)
                      : muster::DeviceMapChoice(muster::DeviceEntries{{"", map}});
    const auto model = muster::load_checkpoint_and_dispatch(net, path, choice, options);
    if (!model.ok()) return std::cerr << model.status().message() << "\n", 1;
    line["loaded"] = MemoryOf("VmHWM") - before;
    at::Tensor out;
    for (int pass = 0; pass < 3; ++pass) out = net->forward(ids);
    double resident = 0;
    for (const auto& [device, bytes] : model->resident()) resident += bytes;
    const muster::OffloadStats stats = model->stats();
    line["weights"] = static_cast<int64_t>(resident) + static_cast<int64_t>(stats.offloaded_bytes);
    line["planned"] = static_cast<int64_t>(resident) + static_cast<int64_t>(stats.ring_bytes);
    line["overflow"] = stats.overflow_bytes;
    line["read"] = stats.read_bytes;
    line["peak"] = MemoryOf("VmHWM") - before;
    line["digest"] = DigestOf(out);
  }
  std::cout << line.dump() << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A model that is larger than the memory of its process");
  std::string make, run, max_memory, map = "auto";
  bool is_half = false;
  int64_t width = 2048, blocks = 11;
  app.add_option("--make", make, "write its weights into this file");
  app.add_option("--run", run, "compute with them");
  app.add_option("--max_memory", max_memory, "bytes of each device");
  app.add_option("--map", map, "auto, cpu or disk");
  app.add_flag("--bfloat16", is_half, "convert its weights while they are loaded");
  app.add_option("--width", width, "of the model");
  app.add_option("--blocks", blocks, "of the model");
  CLI11_PARSE(app, argc, argv);
  return make.empty() ? Run(run, max_memory, map, is_half, width, blocks)
                      : Make(make, width, blocks);
}
