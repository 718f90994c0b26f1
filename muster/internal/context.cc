#include "muster/internal/context.h"

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "worker/process/c10d_comm.h"
#include "worker/process/checked_comm.h"
#include "worker/process/coordinator_store.h"
#include "worker/process/local_comm.h"
#include "worker/process/process_group.h"
#include "worker/train/guard.h"

namespace muster::internal {
namespace {

template <typename T>
void Assign(Setting<T>* setting, T value, const char* source) {
  if (setting->value == value) return;
  setting->value = std::move(value);
  setting->source = source;
}

absl::Status TakeSeat(ProcessContext* context, Seat* seat) {
  Environment& environment = context->environment;
  CoordinatorClient::Options options;
  options.address = environment.coordinator.value;
  options.job = environment.job.value;
  options.worker_id = environment.worker_id.value;
  options.incarnation = environment.incarnation.value;
  options.on_generation_ended = [](const absl::Status& why) {
    MUSTER_LOG(Error) << "this generation of the job is over: " << why.message();
  };
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<CoordinatorClient> client,
                          CoordinatorClient::Connect(std::move(options)));
  context->coordinator = std::move(client);

  JoinOptions join;
  join.min_workers = join.max_workers = environment.world_size.value;
  join.timeout = environment.timeout.value;
  join.preferred_rank = environment.seated ? environment.rank.value : -1;
  join.local_rank = environment.local_rank.value;
  join.local_world_size = environment.local_world_size.value;
  MUSTER_ASSIGN_OR_RETURN(*seat, context->coordinator->Join(join));
  Assign(&environment.rank, seat->rank, "rendezvous");
  Assign(&environment.world_size, seat->world_size, "rendezvous");
  Assign(&environment.node_rank, seat->node_rank, "rendezvous");
  Assign(&environment.num_nodes, seat->num_nodes, "rendezvous");
  Assign(&environment.generation, static_cast<int64_t>(seat->generation), "rendezvous");
  return absl::OkStatus();
}

// The GPU of this process if it has one.
c10::Device ChooseDevice(int /*local_rank*/) { return c10::Device(c10::kCPU); }

c10::intrusive_ptr<c10d::Store> MakeStore(const ProcessContext& context, const Seat& seat) {
  const Environment& environment = context.environment;
  if (context.coordinator != nullptr) {
    return MakeCoordinatorStore(context.coordinator, seat.key_prefix);
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(environment.master_port.value);
  options.isServer = environment.rank.value == 0;
  options.numWorkers = environment.world_size.value;
  options.timeout = std::chrono::milliseconds(absl::ToInt64Milliseconds(environment.timeout.value));
  return c10::make_intrusive<c10d::TCPStore>(environment.master_addr.value, options);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessContext>> OpenProcessContext(
    const EnvironmentArguments& arguments) {
  auto context = std::make_unique<ProcessContext>();
  MUSTER_ASSIGN_OR_RETURN(context->environment, ReadEnvironment(ProcessVariables(), arguments));
  Environment& environment = context->environment;
  Seat seat;
  if (!environment.coordinator.value.empty()) MUSTER_RETURN_IF_ERROR(TakeSeat(context.get(), &seat));

  const int rank = environment.rank.value, size = environment.world_size.value;
  if (size > 1) SetLogIdentity(absl::StrCat("rank ", rank));
  // Every process sees the same warnings; one of them is enough.
  if (rank == 0) {
    for (const std::string& warning : environment.warnings) MUSTER_LOG(Warning) << warning;
  }

  MUSTER_RETURN_IF_ERROR(Guard([&] {
    if (!environment.use_cpu.value) context->device = ChooseDevice(environment.local_rank.value);
    if (size == 1) {
      context->comm = std::make_unique<LocalComm>();
      return;
    }
    const auto timeout =
        std::chrono::milliseconds(absl::ToInt64Milliseconds(environment.timeout.value));
    const c10::intrusive_ptr<c10d::Store> store = MakeStore(*context, seat);
    GlooOptions gloo;
    gloo.rank = rank;
    gloo.size = size;
    gloo.timeout = timeout;
    gloo.single_host = environment.num_nodes.value == 1;
    gloo.towards = context->coordinator != nullptr
                       ? environment.coordinator.value
                       : absl::StrCat(environment.master_addr.value, ":", environment.master_port.value);
    const c10::intrusive_ptr<c10d::ProcessGroup> group = MakeGlooGroup(store, gloo);
    context->comm = MakeC10dComm(group, {.timeout = timeout});
  }));
  if (environment.debug.value) context->comm = MakeCheckedComm(std::move(context->comm));
  return context;
}

}  // namespace muster::internal
