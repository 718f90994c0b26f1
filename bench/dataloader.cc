// Samples per second of a shuffled token loader: blocks of 1,024 tokens out of a mapped file of
// uint16, as int64 inputs and targets in batches of 32. Workers stay between passes, and the first
// pass does not count. bench/peers/dataloader.py is the same in torch.utils.data. Prints one JSON
// line.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "bench/load_average.h"
#include "muster/data.h"
#include "worker/collective/local_comm.h"

namespace {

// Makes a file of `count` tokens; its name is gone at the end of the program.
std::string TokenFile(int64_t count) {
  std::mt19937 random(1);
  std::vector<uint16_t> tokens(count);
  for (uint16_t& token : tokens) token = random() % 50000;
  const std::string path =
      std::filesystem::temp_directory_path() / ("muster-tokens-" + std::to_string(getpid()));
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(tokens.data()), count * sizeof(uint16_t));
  return path;
}

}  // namespace

int main(int argc, char** argv) {
  int64_t workers = 0, rounds = 5, passes = 100;
  CLI::App app("Samples per second of a token loader.");
  app.add_option("--workers", workers)->check(CLI::NonNegativeNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--passes", passes, "over the file in each round")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  const std::string file = TokenFile(4096 * 1024 + 1);
  const auto tokens = muster::TokenDataset::Open(file, {});
  std::filesystem::remove(file);  // it stays mapped
  if (!tokens.ok()) {
    std::fprintf(stderr, "%s\n", tokens.status().ToString().c_str());
    return 1;
  }
  muster::LocalComm comm;
  auto loader =
      muster::PrepareLoader(muster::batches(*tokens, 32).shuffle(true).workers(workers), {}, &comm);
  const auto samples_of = [&](int64_t times) {
    int64_t seen = 0;
    for (int64_t i = 0; i < times; ++i) {
      for (auto& [x, y] : loader) seen += x.size(0);
    }
    return seen;
  };
  samples_of(1);  // starts the workers
  std::vector<double> rates;
  for (int64_t i = 0; i < rounds; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t seen = samples_of(passes);
    const double wall =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    rates.push_back(seen / wall);
  }
  std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
  std::printf("{\"bench\":\"dataloader\",\"workers\":%ld,\"samples_per_s\":%.0f,\"load\":%.2f}\n",
              workers, rates[rates.size() / 2], muster::bench::LoadAverage());
  return 0;
}
