#include "worker/job/join_job.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <numeric>
#include <utility>

#include "ATen/Parallel.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/broken_pipe.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/checked_comm.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/nccl.h"
#include "worker/collective/observed_comm.h"
#include "worker/collective/process_group.h"
#include "worker/collective/shm_backend.h"
#include "worker/job/coordinator_store.h"
#include "worker/job/device.h"
#include "worker/job/generation_end.h"
#include "worker/job/lost_collective.h"
#include "worker/job/thread_share.h"

namespace muster {
namespace {

std::string MasterAddress(const Environment& env) {
  return env.master_addr.value.find(':') == std::string::npos
             ? absl::StrCat(env.master_addr.value, ":", env.master_port.value)
             : absl::StrCat("[", env.master_addr.value, "]:", env.master_port.value);
}

// The places that this process has taken, by coordinator, job and worker.
class TakenPlaces {
 public:
  static TakenPlaces& Get() {
    static auto* const places = new TakenPlaces;
    return *places;
  }
  bool Holds(const std::string& place) {
    MutexLock lock(&mu_);
    return !places_[place].expired();
  }
  void Take(const std::string& place, const std::shared_ptr<CoordinatorClient>& client) {
    MutexLock lock(&mu_);
    places_[place] = client;
  }
  // Returns how often this process has met others at `place`.
  int Met(const std::string& place) {
    MutexLock lock(&mu_);
    return counts_[place];
  }
  void CountMeeting(const std::string& place) {
    MutexLock lock(&mu_);
    ++counts_[place];
  }

 private:
  Mutex mu_;
  std::map<std::string, std::weak_ptr<CoordinatorClient>> places_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int> counts_ ABSL_GUARDED_BY(mu_);
};

absl::Status MeetAtCoordinator(const JoinJobOptions& options, JoinedProcess* joined) {
  Environment& env = joined->environment;
  if (!env.seated && options.min_workers < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(env.coordinator.source,
                     " is set but no rank is (MUSTER_RANK, MUSTER_WORLD_SIZE), and the "
                     "program does not say how many workers it needs: start it with `muster "
                     "launch`, or unset it to run one process alone"));
  }
  CoordinatorClient::Options client;
  client.address = env.coordinator.value;
  client.job = env.job.value;
  client.worker_id = env.worker_id.value.empty() && env.seated
                         ? absl::StrCat("rank-", env.rank.value)
                         : env.worker_id.value;
  client.incarnation = env.incarnation.value;
  const std::string place = absl::StrCat(client.address, " ", client.job, " ", client.worker_id);
  if (TakenPlaces::Get().Holds(place)) {
    return absl::FailedPreconditionError(
        absl::StrCat("this process has its place in job '", client.job,
                     "' already, in an Accelerator that is still alive: pass that one by "
                     "reference, or destroy it before the next"));
  }
  client.connect_timeout = std::min(client.connect_timeout, env.timeout.value);
  client.outage_tolerance = env.outage_tolerance.value;
  client.tls = {env.tls_ca.value, env.tls_cert.value, env.tls_key.value};
  client.token_file = env.token_file.value;
  client.progress = joined->progress;
  client.saves = joined->saves;
  if (options.on_generation_ended) {
    // The client joins only once, so it has only one generation.
    client.on_generation_ended = [tell = options.on_generation_ended](uint64_t /*generation*/,
                                                                      const absl::Status& why) {
      tell(why);
    };
  }
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<CoordinatorClient> connected,
                          CoordinatorClient::Connect(std::move(client)));
  joined->coordinator = std::move(connected);
  TakenPlaces::Get().Take(place, joined->coordinator);

  JoinOptions join;
  join.min_workers = env.seated ? env.world_size.value : options.min_workers;
  join.max_workers =
      env.seated ? env.world_size.value : std::max(options.min_workers, options.max_workers);
  join.timeout = env.timeout.value;
  join.lease = env.lease.value;
  join.preferred_rank = env.seated ? env.rank.value : -1;
  join.rack = env.rack.value;
  join.nvlink_domain = env.nvlink_domain.value;
  join.local_rank = env.local_rank.value;
  join.local_world_size = env.local_world_size.value;
  MUSTER_ASSIGN_OR_RETURN(const Seat seat, joined->coordinator->Join(join));
  const std::string source = "rendezvous";
  env.seated = true;
  env.rank = {seat.rank, source};
  env.world_size = {seat.world_size, source};
  env.node_rank = {seat.node_rank, source};
  env.num_nodes = {std::max(1, seat.num_nodes), source};
  env.generation = {static_cast<int64_t>(seat.generation), source};
  env.incarnation = {joined->coordinator->incarnation(), source};
  joined->store = MakeCoordinatorStore(joined->coordinator, seat.key_prefix);
  if (options.on_seated) options.on_seated(*joined);
  return absl::OkStatus();
}

// Returns `error` of a process that has its seat, or ABORTED if its generation has ended.
absl::Status OrEnded(const absl::Status& error, const JoinJobOptions& options,
                     const JoinedProcess& joined) {
  if (!options.reenters || joined.coordinator == nullptr) return error;
  const absl::StatusOr<std::string> ended =
      AwaitGenerationEnd(*joined.coordinator, PatienceForEnd(joined.environment));
  if (!ended.ok()) return error;
  return absl::AbortedError(absl::StrCat(*ended, " (", error.message(), ")"));
}

// Returns where a process meets the others without a coordinator.
std::string MasterPlace(const Environment& env) {
  return absl::StrCat(MasterAddress(env), " rank ", env.rank.value, " attempt ",
                      env.restart_count.value);
}

absl::Status MeetAtMaster(JoinedProcess* joined) {
  const Environment& env = joined->environment;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port.value);
  options.isServer = env.rank.value == 0 && !env.agent_store.value;
  options.numWorkers = static_cast<size_t>(env.world_size.value);
  options.waitWorkers = !env.agent_store.value;
  options.timeout = absl::ToChronoMilliseconds(env.timeout.value);
  // Allows a process to join again while its first store still exists.
  options.multiTenant = true;
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(env.master_addr.value, options);
    // A restarted attempt must not read the keys of the previous one, nor a process that joins
    // again those of its first time.
    joined->store = c10::make_intrusive<c10d::PrefixStore>(
        absl::StrCat("attempt_", env.restart_count.value, "/join_",
                     TakenPlaces::Get().Met(MasterPlace(env))),
        store);
    return absl::OkStatus();
  } catch (const std::exception& e) {
    return absl::UnavailableError(absl::StrCat(
        "rank ", env.rank.value, " of ", env.world_size.value,
        options.isServer ? " cannot open a store for the others at " : " cannot reach rank 0 at ",
        MasterAddress(env), " (", env.master_addr.source, ", ", env.master_port.source,
        "): ", FirstLine(e.what())));
  }
}

// Returns the options for one group of ranks. `ranks`: of the job.
GlooOptions GlooOf(const JoinedProcess& joined, const std::string& name,
                   const std::vector<int>& ranks) {
  const Environment& env = joined.environment;
  GlooOptions gloo;
  gloo.rank =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), env.rank.value) - ranks.begin());
  gloo.size = static_cast<int>(ranks.size());
  gloo.timeout = absl::ToChronoMilliseconds(env.timeout.value);
  gloo.single_host = env.num_nodes.value == 1 && env.local_world_size.value == env.world_size.value;
  gloo.name = name;
  // An agent on this node does not help to find the network; rank 0's address does.
  const bool far =
      !env.coordinator.value.empty() && !absl::StartsWith(env.coordinator.value, "unix:");
  gloo.towards = far ? env.coordinator.value : MasterAddress(env);
  gloo.interface = env.interface.value;
  return gloo;
}

// Whether these ranks are on one node, as far as their numbers tell, because the ranks of a node
// are consecutive. The ranks verify it before they share memory.
bool OnOneNode(const Environment& env, const std::vector<int>& ranks) {
  const int here = env.local_world_size.value;
  if (here * env.num_nodes.value != env.world_size.value) return false;
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](int rank) { return rank / here == ranks[0] / here; });
}

// Uses Muster's own collectives instead of Gloo's, and logs unexpected choices. A node is a host,
// whatever its ranks could share with those of another node. Ranks that are not to use them take
// part, too, because settings may differ.
void AddOwnCollectives(const JoinedProcess& joined,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group, const GlooOptions& gloo,
                       const std::vector<int>& ranks) {
  const Environment& env = joined.environment;
  std::string why;
  const bool added =
      AddShmBackend(group, joined.store, gloo.timeout, &why,
                    absl::StrCat("node ", env.node_rank.value), env.shared_memory.value);
  if (gloo.rank != 0 || !env.shared_memory.value) return;
  if (!added) {
    MUSTER_LOG(Warning) << "no shared memory between the ranks of " << gloo.name
                        << " that are of one node, so all of them exchange tensors through Gloo: "
                        << why << ". MUSTER_SHM=no accepts that";
  } else if (OnOneNode(env, ranks) &&
             group->getBackend(c10::DeviceType::CPU)->getBackendName() != "muster-shm") {
    MUSTER_LOG(Warning) << "no shared memory between the ranks of " << gloo.name
                        << ", which exchange tensors through sockets: they are of one node, but of "
                           "several hosts or pid namespaces. MUSTER_SHM=no accepts that";
  }
}

// Makes the Comm of one group of ranks over every transport that they have. `ranks`: of the job.
absl::StatusOr<std::unique_ptr<Comm>> BuildComm(const JoinedProcess& joined,
                                                const std::string& name,
                                                const std::vector<int>& ranks) {
  const GlooOptions gloo = GlooOf(joined, name, ranks);
  std::unique_ptr<Comm> comm;
  try {
    auto group = MakeGlooGroup(joined.store, gloo);
    if (gloo.size > 1) AddOwnCollectives(joined, group, gloo, ranks);
    // Only once, because later groups have the same processes.
    if (gloo.size > 1 && joined.comm == nullptr) {
      const std::unique_ptr<Comm> on_cpu = MakeC10dComm(group, {.timeout = gloo.timeout});
      const absl::Status usable =
          joined.device.is_cuda() ? NcclVersion().status() : absl::OkStatus();
      MUSTER_RETURN_IF_ERROR(AgreeOnDevices(*on_cpu, joined.device, usable));
    }
    if (joined.device.is_cuda()) {
      MUSTER_RETURN_IF_ERROR(
          AddNcclBackend(group, joined.store, joined.device, gloo.timeout, gloo.name));
    }
    comm = MakeC10dComm(group, {.timeout = gloo.timeout});
  } catch (const c10::Error& e) {
    return absl::UnavailableError(FirstLine(e.what_without_backtrace()));
  } catch (const std::exception& e) {  // exceptions of Gloo
    return absl::UnavailableError(FirstLine(e.what()));
  }
  return comm;
}

// Returns `comm` as it is used: checked in debug mode, and reporting to the board.
std::unique_ptr<Comm> Watched(const JoinedProcess& joined, std::unique_ptr<Comm> comm,
                              const CollectiveExplainer& explain) {
  const int size = comm->size();
  if (joined.environment.debug.value) comm = MakeCheckedComm(std::move(comm));
  if (size > 1) comm = MakeObservedComm(std::move(comm), joined.progress, explain);
  return comm;
}

// Of a job that computes on the CPU, where its launcher has set no OMP_NUM_THREADS: mpirun and srun
// would leave every process all cores.
void DivideThreads(const JoinedProcess& joined) {
  const Environment& env = joined.environment;
  const char* const given = std::getenv("OMP_NUM_THREADS");
  if (!joined.device.is_cpu() || env.local_world_size.value < 2 ||
      (given != nullptr && *given != '\0')) {
    return;
  }
  std::map<std::string, std::string> variables;
  if (const char* const step = std::getenv("SLURM_CPUS_ON_NODE")) {
    variables["SLURM_CPUS_ON_NODE"] = step;
  }
  // What an earlier Accelerator of this process has divided is not divided again.
  static std::atomic<int> divided = 0;
  const int alone = at::get_num_threads();
  if (alone == divided.load()) return;
  const int threads = ThreadShare(ReadCores(variables), env.local_world_size.value, alone);
  if (threads == alone) return;
  divided.store(threads);
  at::set_num_threads(threads);
  if (env.rank.value != 0) return;
  MUSTER_LOG(Info) << "each process computes with " << threads << " of the " << alone
                   << " threads that it would take alone, because " << env.local_world_size.value
                   << " processes share this node: OMP_NUM_THREADS, or at::set_num_threads() after "
                      "the Accelerator is made, says otherwise";
}

CollectiveExplainer ExplainerFor(const JoinedProcess& joined, std::vector<int> ranks) {
  LostCollectiveSources sources;
  sources.coordinator = joined.coordinator;
  sources.store = joined.store;
  sources.board = joined.progress;
  sources.rank = joined.environment.rank.value;
  sources.ranks = std::move(ranks);
  sources.timeout = joined.environment.timeout.value;
  return [sources = std::move(sources)](absl::string_view error) {
    return ExplainLostCollective(sources, error);
  };
}

}  // namespace

absl::Duration PatienceForEnd(const Environment& environment) {
  return environment.lease.value + absl::Seconds(10);
}

absl::StatusOr<JoinedProcess> JoinJob(const Environment& environment,
                                      const JoinJobOptions& options) {
  JoinedProcess joined;
  joined.environment = environment;
  Environment& env = joined.environment;
  // Every process has the same warnings; one of them is enough.
  if (env.rank.value == 0) {
    for (const std::string& warning : env.warnings) MUSTER_LOG(Warning) << warning;
  }
  MUSTER_ASSIGN_OR_RETURN(joined.device, ChooseDevice(env));
  MakeCurrent(joined.device);
  // A single process keeps the default, so that `./train | head` ends like other programs.
  if (!env.coordinator.value.empty() || env.world_size.value > 1) SurviveBrokenPipes();
  if (!env.coordinator.value.empty()) {
    MUSTER_RETURN_IF_ERROR(MeetAtCoordinator(options, &joined));
  } else if (env.world_size.value > 1) {
    MUSTER_RETURN_IF_ERROR(MeetAtMaster(&joined));
  }
  DivideThreads(joined);
  const int size = env.world_size.value;
  if (size == 1 && !options.always_group) {
    joined.comm = std::make_unique<LocalComm>();
  } else {
    if (joined.store == nullptr) joined.store = c10::make_intrusive<c10d::HashStore>();
    MUSTER_FAILPOINT_STATUS("worker.group_begin");
    std::vector<int> all(size);
    std::iota(all.begin(), all.end(), 0);
    if (size > 1) joined.explain = ExplainerFor(joined, all);
    absl::StatusOr<std::unique_ptr<Comm>> comm = BuildComm(joined, "world", all);
    // All ranks know of a wrong device or plug-in, and then no peer is lost.
    if (absl::IsUnavailable(comm.status())) return OrEnded(comm.status(), options, joined);
    if (!comm.ok()) return comm.status();
    joined.comm = *std::move(comm);
  }
  MUSTER_FAILPOINT_STATUS("worker.group_built");
  joined.comm = Watched(joined, std::move(joined.comm), joined.explain);
  // Only now, because a rank that tries again after an error looks for the others where they still
  // are.
  if (joined.coordinator == nullptr && size > 1) {
    TakenPlaces::Get().CountMeeting(MasterPlace(env));
  }
  return joined;
}

absl::StatusOr<std::unique_ptr<Comm>> MakeSubgroup(JoinedProcess& process, std::vector<int> ranks) {
  const int size = process.comm->size();
  std::sort(ranks.begin(), ranks.end());
  const std::string mine = absl::StrJoin(ranks, ", ");
  const std::vector<std::string> all = process.comm->AllGatherBytes(mine);
  for (int rank = 1; rank < size; ++rank) {
    if (all[rank] == all[0]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("subgroup: rank 0 wants the ranks ", all[0], " and rank ", rank, " wants ",
                     all[rank], ": every rank of the job makes the same subgroups in one order"));
  }
  if (ranks.empty()) return absl::InvalidArgumentError("subgroup: no ranks are given");
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0 || ranks[i] >= size) {
      return absl::InvalidArgumentError(
          absl::StrCat("subgroup: there is no rank ", ranks[i], " among ", size));
    }
    if (i > 0 && ranks[i] == ranks[i - 1]) {
      return absl::InvalidArgumentError(
          absl::StrCat("subgroup: rank ", ranks[i], " is listed twice"));
    }
  }
  const std::string name = absl::StrCat("subgroup_", ++process.subgroups);
  if (!std::binary_search(ranks.begin(), ranks.end(), process.comm->rank())) {
    return std::unique_ptr<Comm>();
  }
  if (ranks.size() == 1) return std::unique_ptr<Comm>(std::make_unique<LocalComm>());
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<Comm> comm, BuildComm(process, name, ranks));
  return Watched(process, std::move(comm), ExplainerFor(process, ranks));
}

absl::StatusOr<std::unique_ptr<Comm>> MakeBackgroundComm(JoinedProcess& process) {
  if (process.comm->size() == 1) return std::unique_ptr<Comm>(std::make_unique<LocalComm>());
  std::vector<int> all(process.comm->size());
  std::iota(all.begin(), all.end(), 0);
  GlooOptions gloo = GlooOf(process, absl::StrCat("background_", ++process.subgroups), all);
  try {
    auto group = MakeGlooGroup(process.store, gloo);
    // The rendezvous has finished; from now on ranks wait for each other's disks, for hours if
    // these are slow or their rate is limited. A rank that dies closes its connections.
    return MakeC10dComm(std::move(group), {.timeout = std::max<std::chrono::milliseconds>(
                                               gloo.timeout, std::chrono::hours(24 * 7))});
  } catch (const c10::Error& e) {
    return absl::UnavailableError(FirstLine(e.what_without_backtrace()));
  }
}

}  // namespace muster
