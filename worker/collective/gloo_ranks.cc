#include "worker/collective/gloo_ranks.h"

#include <cstdlib>
#include <exception>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "base/broken_pipe.h"
#include "base/mutex.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/process_group.h"
#include "worker/collective/shm_backend.h"

namespace muster {
namespace {

// hosts[r]: that of rank r; empty: Gloo alone.
void Run(int n, const std::function<void(Comm&)>& fn, const C10dCommOptions& options,
         const std::string& hosts) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  SurviveBrokenPipes();  // as in a process that has joined a job
  auto store = c10::make_intrusive<c10d::HashStore>();
  Mutex mu;
  std::exception_ptr first;
  std::latch met(n);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto comm = [&] {
          // No rank leaves before all have met, as in a job.
          const auto arrive = absl::MakeCleanup([&] { met.count_down(); });
          return MakeHostComm(store, "world", rank, n, hosts, options);
        }();
        met.wait();
        try {
          fn(*comm);
        } catch (...) {
          // Record it before the connections close and the others fail, too.
          MutexLock lock(&mu);
          if (!first) first = std::current_exception();
        }
      } catch (...) {
        MutexLock lock(&mu);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace

std::unique_ptr<Comm> MakeHostComm(const c10::intrusive_ptr<c10d::Store>& store,
                                   const std::string& name, int rank, int size,
                                   const std::string& hosts, const C10dCommOptions& options) {
  GlooOptions gloo;
  gloo.rank = rank;
  gloo.size = size;
  gloo.single_host = true;
  gloo.name = name;
  const auto group = MakeGlooGroup(store, gloo);
  std::string why;
  TORCH_CHECK(hosts.empty() ||
                  AddShmBackend(group, store, options.timeout, &why, std::string(1, hosts[rank])),
              why);
  return MakeC10dComm(group, options);
}

void RunGlooRanks(int n, const std::function<void(Comm&)>& fn, const C10dCommOptions& options) {
  Run(n, fn, options, /*hosts=*/"");
}

void RunShmRanks(int n, const std::function<void(Comm&)>& fn, const C10dCommOptions& options) {
  Run(n, fn, options, std::string(n, 'a'));
}

void RunHostRanks(const std::string& hosts, const std::function<void(Comm&)>& fn,
                  const C10dCommOptions& options) {
  Run(static_cast<int>(hosts.size()), fn, options, hosts);
}

}  // namespace muster
