#include "worker/collective/gloo_ranks.h"

#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/process_group.h"
#include "worker/collective/shm_backend.h"

namespace muster {
namespace {

void Run(int n, const std::function<void(Comm&)>& fn, const C10dCommOptions& options, bool shm) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  auto store = c10::make_intrusive<c10d::HashStore>();
  Mutex mu;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        GlooOptions gloo;
        gloo.rank = rank;
        gloo.size = n;
        gloo.single_host = true;
        const auto group = MakeGlooGroup(store, gloo);
        std::string why;
        TORCH_CHECK(!shm || AddShmBackend(group, store, options.timeout, &why), why);
        const auto comm = MakeC10dComm(group, options);
        try {
          fn(*comm);
        } catch (...) {
          // Before the connections close and the others fail too.
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

void RunGlooRanks(int n, const std::function<void(Comm&)>& fn, const C10dCommOptions& options) {
  Run(n, fn, options, /*shm=*/false);
}

void RunShmRanks(int n, const std::function<void(Comm&)>& fn, const C10dCommOptions& options) {
  Run(n, fn, options, /*shm=*/true);
}

}  // namespace muster
