// Samples per second of a shuffled token loader: blocks of 1,024 tokens out of one memory of
// uint16, as int64 inputs and targets in batches of 32. bench/peers/dataloader.py is the same in
// torch.utils.data. Prints one JSON line.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <random>
#include <tuple>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "muster/data.h"
#include "worker/process/local_comm.h"

namespace {

// Thread-safe.
class Tokens {
 public:
  Tokens(int64_t blocks, int64_t length) : length_(length), tokens_(blocks * length + 1) {
    std::mt19937 random(1);
    for (uint16_t& token : tokens_) token = random() % 50000;
  }
  size_t size() const { return (tokens_.size() - 1) / length_; }
  std::tuple<at::Tensor, at::Tensor> get_batch(const std::vector<int64_t>& indices) const {
    const int64_t rows = indices.size();
    at::Tensor x = at::empty({rows, length_}, at::kLong), y = at::empty({rows, length_}, at::kLong);
    int64_t* const to_x = x.data_ptr<int64_t>();
    int64_t* const to_y = y.data_ptr<int64_t>();
    for (int64_t row = 0; row < rows; ++row) {
      const uint16_t* const from = tokens_.data() + indices[row] * length_;
      std::copy(from, from + length_, to_x + row * length_);
      std::copy(from + 1, from + length_ + 1, to_y + row * length_);
    }
    return {x, y};
  }

 private:
  const int64_t length_;
  std::vector<uint16_t> tokens_;
};

}  // namespace

int main(int argc, char** argv) {
  int64_t workers = 0, rounds = 5;
  CLI::App app("Samples per second of a token loader.");
  app.add_option("--workers", workers)->check(CLI::NonNegativeNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  Tokens tokens(4096, 1024);
  muster::LocalComm comm;
  auto loader =
      muster::PrepareLoader(muster::batches(tokens, 32).shuffle(true).workers(workers), {}, &comm);
  std::vector<double> rates;
  for (int64_t i = 0; i <= rounds; ++i) {
    int64_t seen = 0;
    const auto start = std::chrono::steady_clock::now();
    for (auto& [x, y] : loader) seen += x.size(0);
    const double wall =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i > 0) rates.push_back(seen / wall);
  }
  std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
  std::printf("{\"bench\":\"dataloader\",\"workers\":%ld,\"samples_per_s\":%.0f}\n", workers,
              rates[rates.size() / 2]);
  return 0;
}
