#include "worker/process/join_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "worker/process/c10d_comm.h"
#include "worker/process/checked_comm.h"
#include "worker/process/coordinator_store.h"
#include "worker/process/local_comm.h"
#include "worker/process/nccl.h"
#include "worker/process/observed_comm.h"
#include "worker/process/process_group.h"
#include "worker/process/shm_backend.h"

namespace muster {
namespace {

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string MasterAddress(const Environment& env) {
  return env.master_addr.value.find(':') == std::string::npos
             ? absl::StrCat(env.master_addr.value, ":", env.master_port.value)
             : absl::StrCat("[", env.master_addr.value, "]:", env.master_port.value);
}

absl::Status MeetAtCoordinator(const JoinJobOptions& options, JoinedProcess* joined) {
  Environment& env = joined->environment;
  if (!env.seated && options.min_workers < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(env.coordinator.source,
                     " is set but no rank is (MUSTER_RANK, MUSTER_WORLD_SIZE), and the "
                     "program does not say how many workers it wants"));
  }
  CoordinatorClient::Options client;
  client.address = env.coordinator.value;
  client.job = env.job.value;
  client.worker_id = env.worker_id.value.empty() && env.seated
                         ? absl::StrCat("rank-", env.rank.value)
                         : env.worker_id.value;
  client.incarnation = env.incarnation.value;
  client.connect_timeout = std::min(client.connect_timeout, env.timeout.value);
  client.outage_tolerance = env.outage_tolerance.value;
  client.tls_ca = env.tls_ca.value;
  client.tls_cert = env.tls_cert.value;
  client.tls_key = env.tls_key.value;
  client.progress = joined->progress;
  client.on_generation_ended = options.on_generation_ended;
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<CoordinatorClient> connected,
                          CoordinatorClient::Connect(std::move(client)));
  joined->coordinator = std::move(connected);

  JoinOptions join;
  join.min_workers = env.seated ? env.world_size.value : options.min_workers;
  join.max_workers =
      env.seated ? env.world_size.value : std::max(options.min_workers, options.max_workers);
  join.timeout = env.timeout.value;
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
  return absl::OkStatus();
}

absl::Status MeetAtMaster(JoinedProcess* joined) {
  const Environment& env = joined->environment;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port.value);
  options.isServer = env.rank.value == 0 && !env.agent_store.value;
  options.numWorkers = static_cast<size_t>(env.world_size.value);
  options.waitWorkers = !env.agent_store.value;
  options.timeout = absl::ToChronoMilliseconds(env.timeout.value);
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(env.master_addr.value, options);
    // A restarted attempt must not read the keys of the one before.
    joined->store = c10::make_intrusive<c10d::PrefixStore>(
        absl::StrCat("attempt_", env.restart_count.value), store);
    return absl::OkStatus();
  } catch (const std::exception& e) {
    return absl::UnavailableError(absl::StrCat(
        "rank ", env.rank.value, " of ", env.world_size.value,
        options.isServer ? " cannot open a store for the others at " : " cannot reach rank 0 at ",
        MasterAddress(env), " (", env.master_addr.source, ", ", env.master_port.source,
        "): ", FirstLine(e.what())));
  }
}

}  // namespace

absl::StatusOr<JoinedProcess> JoinJob(const Environment& environment,
                                      const JoinJobOptions& options) {
  JoinedProcess joined;
  joined.environment = environment;
  Environment& env = joined.environment;
  // Every process sees the same warnings; one of them is enough.
  if (env.rank.value == 0) {
    for (const std::string& warning : env.warnings) MUSTER_LOG(Warning) << warning;
  }
  MUSTER_ASSIGN_OR_RETURN(joined.device, ChooseDevice(env));
  if (!env.coordinator.value.empty()) {
    MUSTER_RETURN_IF_ERROR(MeetAtCoordinator(options, &joined));
  } else if (env.world_size.value > 1) {
    MUSTER_RETURN_IF_ERROR(MeetAtMaster(&joined));
  }
  const int size = env.world_size.value;
  if (size == 1 && !options.always_group) {
    joined.comm = std::make_unique<LocalComm>();
  } else {
    if (joined.store == nullptr) joined.store = c10::make_intrusive<c10d::HashStore>();
    GlooOptions gloo;
    gloo.rank = env.rank.value;
    gloo.size = size;
    gloo.timeout = absl::ToChronoMilliseconds(env.timeout.value);
    gloo.single_host = env.num_nodes.value == 1 && env.local_world_size.value == size;
    // An agent on this node is no way to find the network: rank 0's address is.
    const bool far =
        !env.coordinator.value.empty() && !absl::StartsWith(env.coordinator.value, "unix:");
    gloo.towards = far ? env.coordinator.value : MasterAddress(env);
    gloo.interface = env.interface.value;
    MUSTER_FAILPOINT_STATUS("worker.group_begin");
    try {
      auto group = MakeGlooGroup(joined.store, gloo);
      std::string why;
      if (env.shared_memory.value && gloo.single_host && size > 1 &&
          !AddShmBackend(group, joined.store, gloo.timeout, &why) && env.rank.value == 0) {
        MUSTER_LOG(Warning) << "no shared memory between the ranks, Gloo carries all: " << why;
      }
      if (joined.device.is_cuda()) {
        MUSTER_RETURN_IF_ERROR(
            AddNcclBackend(group, joined.store, joined.device, gloo.timeout, gloo.name));
      }
      joined.comm = MakeC10dComm(group, {.timeout = gloo.timeout});
    } catch (const c10::Error& e) {
      return absl::UnavailableError(FirstLine(e.what_without_backtrace()));
    }
  }
  MUSTER_FAILPOINT_STATUS("worker.group_built");
  if (env.debug.value) joined.comm = MakeCheckedComm(std::move(joined.comm));
  if (size > 1) joined.comm = MakeObservedComm(std::move(joined.comm), joined.progress);
  return joined;
}

}  // namespace muster
