// How fast a model runs whose weights stay on the disk: bytes of weights per second of a forward
// pass, against reading the same file from the first byte to the last in the same run.
//
//   bazel build -c opt //bench:offload //bench:generate
//   bazel-bin/bench/generate --make DIR && bazel-bin/bench/offload --model DIR --memory 64
#include "muster/offloaded_models.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"

namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Takes the file out of the page cache.
void Forget(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  close(fd);
}

// Bytes per second of reading the file in parts of 8 MiB.
double ReadRate(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  std::vector<char> buffer(size_t{8} << 20);
  const auto start = Clock::now();
  double bytes = 0;
  for (ssize_t n; (n = read(fd, buffer.data(), buffer.size())) > 0;)
    bytes += static_cast<double>(n);
  close(fd);
  return bytes / SecondsSince(start);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Forward passes of a model whose weights stay on the disk");
  std::string dir;
  int64_t memory_mib = 64, tokens = 4, rounds = 5;
  bool cold = false;
  app.add_option("--model", dir, "its folder, with one model.safetensors")->required();
  app.add_option("--memory", memory_mib, "MiB of weights in memory");
  app.add_option("--tokens", tokens, "of the row");
  app.add_option("--rounds", rounds, "passes, of which the median counts");
  app.add_flag("--cold", cold, "take the file out of the page cache before each pass");
  CLI11_PARSE(app, argc, argv);
  auto loaded = muster::load_causal_lm_offloaded(
      dir, {.budget_bytes = static_cast<uint64_t>(memory_mib) << 20});
  if (!loaded.ok()) {
    std::fprintf(stderr, "%s\n", loaded.status().ToString().c_str());
    return 1;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor ids = at::arange(tokens, c10::kLong).unsqueeze(0);
  const std::string file = dir + "/model.safetensors";
  const auto pass = [&] { return loaded->model->NextLogits({.input_ids = ids}, nullptr, 1); };
  // The first pass shows the order.
  pass();
  std::vector<double> disk, forward;
  for (int64_t round = 0; round < rounds; ++round) {
    if (cold) Forget(file);
    disk.push_back(ReadRate(file));
    if (cold) Forget(file);
    const uint64_t before = loaded->weights.stats().read_bytes;
    const auto start = Clock::now();
    pass();
    forward.push_back(static_cast<double>(loaded->weights.stats().read_bytes - before) /
                      SecondsSince(start));
  }
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const muster::OffloadStats stats = loaded->weights.stats();
  std::printf(
      "{\"bench\":\"offload\",\"cold\":%s,\"weights_mib\":%ld,\"memory_mib\":%ld,"
      "\"forward_mib_per_s\":%.0f,\"disk_mib_per_s\":%.0f,\"ratio\":%.3f,\"peak_rss_mib\":%ld}\n",
      cold ? "true" : "false", static_cast<long>(stats.offloaded_bytes >> 20),
      static_cast<long>(memory_mib), Median(forward) / (1 << 20), Median(disk) / (1 << 20),
      Median(forward) / Median(disk), usage.ru_maxrss / 1024);
  return 0;
}
