// Collectives between processes: Muster's own, in shared memory between ranks of one host and by a
// ring between hosts, of tensors anywhere and of those that lie in shared memory, against Gloo in
// the same run; and the reduce-scatter that Muster uses over Gloo without shared memory
// (MUSTER_SHM=no). The ranks are forked here and may take themselves for ranks of several hosts;
// rank 0 prints.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "bench/load_average.h"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/process_group.h"
#include "worker/collective/shm_backend.h"

namespace {

using Clock = std::chrono::steady_clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Flags {
  int ranks = 2;
  std::string hosts;
  int rounds = 7;
  std::vector<int64_t> bytes = {1 << 10, 1 << 16, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20};
};

struct Collective {
  const char* name;
  // `whole` has as many elements as `bytes`, `part` those of one rank.
  std::function<c10::intrusive_ptr<c10d::Work>(c10d::ProcessGroup&, at::Tensor& whole,
                                               at::Tensor& part)>
      begin;
  // The call that a Comm without shared memory makes in place of `begin`; null: the same.
  std::function<void(muster::Comm&, at::Tensor& whole)> of_comm = nullptr;
};

const Collective kCollectives[] = {
    {"all_reduce",
     [](c10d::ProcessGroup& group, at::Tensor& whole, at::Tensor&) {
       std::vector<at::Tensor> tensors = {whole};
       return group.allreduce(tensors);
     }},
    {"all_gather", [](c10d::ProcessGroup& group, at::Tensor& whole,
                      at::Tensor& part) { return group._allgather_base(whole, part); }},
    {"reduce_scatter",
     [](c10d::ProcessGroup& group, at::Tensor& whole, at::Tensor& part) {
       return group._reduce_scatter_base(part, whole);
     },
     [](muster::Comm& comm, at::Tensor& whole) {
       comm.ReduceScatter(whole, muster::ReduceOp::kSum);
     }},
    {"broadcast",
     [](c10d::ProcessGroup& group, at::Tensor& whole, at::Tensor&) {
       std::vector<at::Tensor> tensors = {whole};
       return group.broadcast(tensors);
     }},
};

// Returns the microseconds of one call, the slowest rank's: all begin together, after a call that
// warms up.
double Measure(c10d::ProcessGroup& group, const std::function<void()>& call, int calls) {
  call();
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  at::Tensor micros =
      at::full({1}, std::chrono::duration<double, std::micro>(Clock::now() - start).count() / calls,
               at::kDouble);
  std::vector<at::Tensor> slowest = {micros};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group.allreduce(slowest, options)->wait();
  return micros.item<double>();
}

void Run(int rank, const std::string& path, const Flags& flags) {
  at::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::FileStore>(path, flags.ranks);
  const auto connect = [&](const std::string& name) {
    muster::GlooOptions options;
    options.rank = rank;
    options.size = flags.ranks;
    options.single_host = true;
    options.name = name;
    return muster::MakeGlooGroup(store, options);
  };
  const Group gloo = connect("gloo");
  const Group shared = connect("shared");
  std::string why;
  const auto shm_store = c10::make_intrusive<c10d::PrefixStore>("shm", store);
  TORCH_CHECK(muster::AddShmBackend(shared, shm_store, std::chrono::minutes(1), &why,
                                    flags.hosts.empty() ? "" : flags.hosts.substr(rank, 1)),
              "the ranks cannot share memory: ", why);
  const std::unique_ptr<muster::Comm> comm = muster::MakeC10dComm(gloo);
  for (const Collective& collective : kCollectives) {
    for (const int64_t bytes : flags.bytes) {
      const int64_t elements = bytes / 4 / flags.ranks * flags.ranks;
      at::Tensor whole = at::zeros({elements}, at::kFloat);
      at::Tensor part = at::zeros({elements / flags.ranks}, at::kFloat);
      c10d::Backend& backend = *shared->getBackend(c10::DeviceType::CPU);
      at::Tensor pool_whole = backend.allocateTensor(elements, at::kFloat);
      at::Tensor pool_part = backend.allocateTensor(elements / flags.ranks, at::kFloat);
      const int calls = bytes <= 1 << 16 ? 200 : bytes <= 4 << 20 ? 20 : 5;
      const auto measure = [&](const Group& group, at::Tensor& all, at::Tensor& mine) {
        return Measure(
            *group, [&] { collective.begin(*group, all, mine)->wait(); }, calls);
      };
      std::vector<double> ours, in_place, peers, without;
      for (int round = 0; round < flags.rounds; ++round) {
        ours.push_back(measure(shared, whole, part));
        in_place.push_back(measure(shared, pool_whole, pool_part));
        peers.push_back(measure(gloo, whole, part));
        if (collective.of_comm == nullptr) continue;
        without.push_back(Measure(
            *gloo, [&] { collective.of_comm(*comm, whole); }, calls));
      }
      if (rank != 0) continue;
      std::printf(
          "{\"bench\": \"collectives\", \"op\": \"%s\", \"bytes\": %lld, \"ranks\": %d, "
          "\"hosts\": \"%s\", \"shared_memory_us\": %.1f, \"in_place_us\": %.1f, \"gloo_us\": "
          "%.1f, "
          "\"times_as_fast\": %.1f, \"in_place_times_as_fast\": %.1f, ",
          collective.name, static_cast<long long>(bytes), flags.ranks, flags.hosts.c_str(),
          Median(ours), Median(in_place), Median(peers), Median(peers) / Median(ours),
          Median(peers) / Median(in_place));
      if (!without.empty()) {
        std::printf("\"without_shared_memory_us\": %.1f, \"without_times_as_fast\": %.1f, ",
                    Median(without), Median(peers) / Median(without));
      }
      std::printf("\"load\": %.2f}\n", muster::bench::LoadAverage());
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Muster's collectives against Gloo, one JSON line each.");
  app.add_option("--ranks", flags.ranks)->check(CLI::Range(2, 64));
  app.add_option("--hosts", flags.hosts,
                 "The host that each rank takes itself to be on, instead of --ranks: aabb is two "
                 "hosts of two ranks; all use loopback");
  app.add_option("--rounds", flags.rounds)->check(CLI::PositiveNumber);
  app.add_option("--bytes", flags.bytes, "Of the whole tensor (float32)")
      ->check(CLI::Range(1 << 10, 1 << 30));
  CLI11_PARSE(app, argc, argv);
  if (flags.hosts.size() > 1) flags.ranks = static_cast<int>(flags.hosts.size());
  char path[] = "/tmp/muster-collectives-XXXXXX";
  const int file = mkstemp(path);
  if (file < 0) {
    std::perror("mkstemp");
    return 1;
  }
  close(file);
  unlink(path);  // the store makes it
  std::vector<pid_t> others;
  int rank = 0;
  for (int i = 1; i < flags.ranks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      rank = i;
      break;
    }
    others.push_back(child);
  }
  try {
    Run(rank, path, flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    std::_Exit(1);
  }
  if (rank != 0) std::_Exit(0);
  int failed = 0;
  for (const pid_t child : others) {
    int status = 0;
    waitpid(child, &status, 0);
    failed += status == 0 ? 0 : 1;
  }
  unlink(path);
  return failed == 0 ? 0 : 1;
}
