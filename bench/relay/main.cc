// What the agent's relay costs: barriers and store calls of the workers of one node, through the
// agent and directly. Coordinator, agent and workers are threads of this process, so CPU time is
// that of all of them.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "agent/node_uplink.h"
#include "base/log.h"
#include "bench/load_average.h"
#include "coordinator/service/server.h"
#include "worker/job/coordinator_client.h"

namespace muster::bench {
namespace {

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

void Check(const absl::Status& status) { MUSTER_CHECK(status.ok()) << status.message(); }

struct Result {
  double barrier_p50_us = 0, barrier_p99_us = 0, barrier_cpu_us = 0, add_p50_us = 0;
};

double Percentile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(p * static_cast<double>(values.size() - 1))];
}

Result Measure(const std::string& address, const std::string& job, int workers, int rounds) {
  std::vector<std::unique_ptr<CoordinatorClient>> clients(workers);
  std::vector<std::thread> threads;
  std::vector<double> barriers, adds;
  double cpu = 0;
  for (int rank = 0; rank < workers; ++rank) {
    threads.emplace_back([&, rank] {
      CoordinatorClient::Options options;
      options.address = address;
      options.job = job;
      options.worker_id = absl::StrCat("w", rank);
      auto client = CoordinatorClient::Connect(options);
      Check(client.status());
      JoinOptions join;
      join.min_workers = join.max_workers = workers;
      join.preferred_rank = rank;
      Check((*client)->Join(join).status());
      for (int i = 0; i < rounds / 10; ++i) {
        Check((*client)->Barrier("warm", absl::Minutes(1)).status());
      }
      const double cpu_before = CpuSeconds();
      for (int i = 0; i < rounds; ++i) {
        const absl::Time start = absl::Now();
        Check((*client)->Barrier("b", absl::Minutes(1)).status());
        if (rank == 0) barriers.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
      }
      if (rank == 0) cpu = (CpuSeconds() - cpu_before) * 1e6 / rounds;
      Check((*client)->Barrier("between", absl::Minutes(1)).status());
      for (int i = 0; rank == 0 && i < rounds; ++i) {
        const absl::Time start = absl::Now();
        Check((*client)->Add("k", 1).status());
        adds.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
      }
      Check((*client)->Barrier("end", absl::Minutes(1)).status());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return {Percentile(barriers, 0.5), Percentile(barriers, 0.99), cpu, Percentile(adds, 0.5)};
}

int Run(int argc, char** argv) {
  int rounds = 2000;
  if (argc > 1 && !absl::SimpleAtoi(argv[1], &rounds)) {
    std::fprintf(stderr, "usage: relay [ROUNDS]\n");
    return 2;
  }
  SetLogLevel(LogLevel::kWarning);
  auto server = coordinator::CoordinatorServer::Start({.rpc = {.insecure = true}});
  Check(server.status());
  auto session = agent::NodeUplink::Start({.coordinator = (*server)->address()});
  Check(session.status());
  Check((*session)->stream().WaitUntilConnected(absl::Seconds(30)));
  for (const int workers : {2, 8}) {
    for (const bool relayed : {false, true}) {
      const Result result =
          Measure(relayed ? (*session)->relay_address() : (*server)->address(),
                  absl::StrCat(relayed ? "relayed" : "direct", workers), workers, rounds);
      std::printf(
          "{\"bench\": \"relay\", \"workers\": %d, \"path\": \"%s\", \"barrier_p50_us\": %.0f, "
          "\"barrier_p99_us\": %.0f, "
          "\"barrier_cpu_us\": %.0f, \"add_p50_us\": %.0f, \"load\": %.2f}\n",
          workers, relayed ? "relay" : "direct", result.barrier_p50_us, result.barrier_p99_us,
          result.barrier_cpu_us, result.add_p50_us, LoadAverage());
    }
  }
  (*session)->Finish(absl::Seconds(1));
  return 0;
}

}  // namespace
}  // namespace muster::bench

int main(int argc, char** argv) { return muster::bench::Run(argc, argv); }
