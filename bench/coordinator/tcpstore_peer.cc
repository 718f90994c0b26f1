#include "bench/coordinator/tcpstore_peer.h"

#include <c10/util/Logging.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace muster::bench {
namespace {

struct Shared {
  int ranks = 0;
  int rounds = 0;
  std::vector<c10::intrusive_ptr<c10d::TCPStore>> stores;
  pthread_barrier_t gate;
  std::vector<absl::Time> starts;
  std::vector<std::vector<absl::Time>> ends;  // by rank, by round
  std::atomic<bool> failed{false};
};

struct Client {
  Shared* shared;
  int rank;
  c10d::TCPStoreOptions options;
};

// Connecting takes longest by far (names are looked up in reverse), so all do it at once.
void* Connect(void* argument) {
  const Client& client = *static_cast<Client*>(argument);
  try {
    client.shared->stores[client.rank] =
        c10::make_intrusive<c10d::TCPStore>("127.0.0.1", client.options);
  } catch (const std::exception&) {
    client.shared->failed = true;
  }
  return nullptr;
}

// Returns false if a thread could not be started: then nothing more can be measured.
bool RunAll(std::vector<Client>& clients, void* (*body)(void*)) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 256 << 10);
  std::vector<pthread_t> threads(clients.size());
  for (size_t i = 0; i < clients.size(); ++i) {
    if (pthread_create(&threads[i], &attributes, body, &clients[i]) != 0) return false;
  }
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  return true;
}

void* RunClient(void* argument) {
  const Client& client = *static_cast<Client*>(argument);
  Shared& shared = *client.shared;
  c10d::TCPStore& store = *shared.stores[client.rank];
  for (int round = 0; round < shared.rounds; ++round) {
    // All wait at the gate first, so that a round starts with every client ready.
    pthread_barrier_wait(&shared.gate);
    if (client.rank == 0) shared.starts[round] = absl::Now();
    try {
      const std::string key = absl::StrCat("b", round);
      if (store.add(key, 1) == shared.ranks) store.set(key + "/done", {1});
      store.wait({key + "/done"});
    } catch (const std::exception&) {
      shared.failed = true;
    }
    shared.ends[client.rank][round] = absl::Now();
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<TcpStoreResult> TcpStoreBarriers(int ranks, int rounds) {
  // Otherwise it warns for each of a thousand clients that their address has no name.
  FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  int pipe_fds[2];
  if (pipe(pipe_fds) != 0) return absl::ErrnoToStatus(errno, "pipe");
  const pid_t server = fork();
  if (server < 0) return absl::ErrnoToStatus(errno, "fork");
  if (server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pipe_fds[0]);
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    c10d::TCPStore store("127.0.0.1", options);
    const uint16_t port = store.getPort();
    if (write(pipe_fds[1], &port, sizeof(port)) != sizeof(port)) _exit(1);
    pause();
    _exit(0);
  }
  close(pipe_fds[1]);
  const auto cleanup = absl::MakeCleanup([&] {
    kill(server, SIGKILL);
    waitpid(server, nullptr, 0);
    close(pipe_fds[0]);
  });
  c10d::TCPStoreOptions options;
  if (read(pipe_fds[0], &options.port, sizeof(options.port)) != sizeof(options.port)) {
    return absl::UnavailableError("TCPStore's server did not start");
  }
  options.waitWorkers = false;
  TcpStoreResult result;
  Shared shared;
  shared.ranks = ranks;
  shared.rounds = rounds;
  shared.starts.resize(rounds);
  shared.ends.assign(ranks, std::vector<absl::Time>(rounds));
  shared.stores.resize(ranks);
  std::vector<Client> clients(ranks);
  for (int i = 0; i < ranks; ++i) clients[i] = {.shared = &shared, .rank = i, .options = options};
  const absl::Time connect_start = absl::Now();
  if (!RunAll(clients, Connect) || shared.failed)
    return absl::UnavailableError("TCPStore: a client cannot connect");
  result.connect_seconds = absl::ToDoubleSeconds(absl::Now() - connect_start);
  try {
    constexpr int kAdds = 3000;
    const absl::Time start = absl::Now();
    for (int i = 0; i < kAdds; ++i) shared.stores[0]->add("count", 1);
    result.adds_per_second = kAdds / absl::ToDoubleSeconds(absl::Now() - start);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("TCPStore: ", error.what()));
  }
  pthread_barrier_init(&shared.gate, nullptr, ranks);
  // The threads that have started would wait at the gate forever.
  if (!RunAll(clients, RunClient)) std::_Exit(1);
  pthread_barrier_destroy(&shared.gate);
  if (shared.failed) return absl::UnavailableError("TCPStore: a client failed");
  for (int round = 0; round < rounds; ++round) {
    absl::Time last = shared.starts[round];
    for (int i = 0; i < ranks; ++i) last = std::max(last, shared.ends[i][round]);
    result.barriers.push_back(last - shared.starts[round]);
  }
  return result;
}

}  // namespace muster::bench
