// What load_model() costs: weights of several layers in one file, that the page cache does not have
// and that it has, in float32 and converted to it from bfloat16, beside plain reads of the same
// file. "single" is what one thread does that reads each tensor through the page cache and copies
// it. One JSON line: medians in seconds, and the pages of the file that a cold load has left in the
// cache.
#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/checkpoint/plain_disk.h"
#include "bench/load_average.h"
#include "muster/muster.h"
#include "worker/checkpoint/cached_pages.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/weight_files.h"

namespace {

using muster::bench::Check;
using muster::bench::DropFromCache;
using muster::bench::Median;
using muster::bench::Seconds;

torch::nn::Sequential Net(int64_t layers, at::ScalarType type) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(2048, 2048)));
  }
  net->to(type);
  return net;
}

void LoadSingle(const std::string& dir, const torch::nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  const auto files = muster::WeightFiles::Open(dir);
  Check(files.status());
  for (auto& parameter : net->named_parameters()) {
    const muster::WeightEntry* const entry = files->Find(parameter.key());
    torch::Tensor read = torch::empty(
        parameter->sizes(),
        entry->tensor.type == muster::SafetensorsType::kF32 ? torch::kFloat : torch::kBFloat16);
    Check(files->Read(*entry, static_cast<char*>(read.data_ptr())));
    parameter->copy_(read);
  }
}

double CachedShare(const std::string& path, uint64_t bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) muster::bench::Die("cannot open " + path);
  const muster::CachedPages pages(fd, bytes);
  close(fd);
  uint64_t there = 0, all = 0;
  for (uint64_t at = 0; at < bytes; at += uint64_t{1} << 20, ++all) {
    there += pages.Has(at, 4096) ? 1 : 0;
  }
  return static_cast<double>(there) / static_cast<double>(all);
}

void Measure(const std::string& dir, int64_t layers, at::ScalarType type, int rounds) {
  muster::NamedTensors tensors;
  const torch::nn::Sequential saved = Net(layers, type);
  for (auto& parameter : saved->named_parameters()) {
    tensors.emplace_back(parameter.key(), parameter.value().detach());
  }
  Check(muster::MakeDirectories(dir));
  const std::string file = muster::JoinPath(dir, "model.safetensors");
  Check(muster::WriteSafetensors(file, tensors).status());
  torch::nn::Sequential net = Net(layers, torch::kFloat);
  const muster::bench::PlainBlocks blocks = muster::bench::Blocks(/*huge=*/true);
  const auto load = [&] { Check(muster::load_model(*net, dir).status()); };
  const auto single = [&] { LoadSingle(dir, net); };
  std::vector<double> plain, cold, cached, cold_single, cached_single;
  size_t bytes = 0;
  double share = 0;
  for (int round = 0; round < rounds; ++round) {
    bytes = DropFromCache(dir);
    plain.push_back(Seconds([&] {
      muster::bench::PlainRead(file, blocks, bytes / muster::bench::kBlock * muster::bench::kBlock);
    }));
    (void)DropFromCache(dir);
    cold.push_back(Seconds(load));
    share = CachedShare(file, bytes);
    (void)DropFromCache(dir);
    cold_single.push_back(Seconds(single));
    cached_single.push_back(Seconds(single));
    cached.push_back(Seconds(load));
  }
  std::printf(
      "{\"bench\": \"weights\", \"type\": \"%s\", \"gib\": %.2f, \"plain_read_s\": %.3f, "
      "\"cold_s\": %.3f, \"cold_single_s\": %.3f, \"cached_s\": %.3f, \"cached_single_s\": %.3f, "
      "\"left_in_cache\": %.2f, \"load\": %.2f}\n",
      c10::toString(type), static_cast<double>(bytes) / (1 << 30), Median(plain), Median(cold),
      Median(cold_single), Median(cached), Median(cached_single), share,
      muster::bench::LoadAverage());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("load_model() beside plain reads.");
  double gib = 1;
  int rounds = 3;
  std::string dir = "checkpoint-weights-bench";
  app.add_option("--gib", gib, "of weights")->capture_default_str();
  app.add_option("--rounds", rounds)->capture_default_str();
  app.add_option("--dir", dir, "on the disk that is measured")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  for (const at::ScalarType type : {torch::kFloat, torch::kBFloat16}) {
    const int64_t width = 2048LL * 2048 * static_cast<int64_t>(c10::elementSize(type));
    const auto layers = static_cast<int64_t>(gib * (1 << 30)) / width;
    Measure(dir + "/" + c10::toString(type), std::max<int64_t>(layers, 1), type, rounds);
  }
  Check(muster::RemoveTree(dir));
  return 0;
}
