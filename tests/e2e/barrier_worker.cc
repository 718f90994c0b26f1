// A worker of barrier_test: talks to the coordinator as a training program does, without tensors.
// Its first argument says what the job does; each rank prints the result.
#include <grpcpp/client_context.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/variable_list.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/e2e/worker_talk.h"
#include "worker/collective/progress_board.h"
#include "worker/job/agent_tells.h"
#include "worker/job/coordinator_client.h"
#include "worker/job/environment.h"

volatile bool g_forever = true;

// The name that a stack of rank 4 must show.
__attribute__((noinline)) void ReadShardForever() {
  while (g_forever) pause();
}

namespace muster {
namespace {

constexpr absl::Duration kLong = absl::Minutes(5);

std::string Fingerprint(const std::string& bytes) {
  return absl::StrCat(bytes.size(), "-", absl::Hex(std::hash<std::string>()(bytes)));
}

struct Worker {
  std::string job;
  std::unique_ptr<CoordinatorClient> client;
  std::unique_ptr<v1::Barrier::Stub> barriers;
  std::shared_ptr<ProgressBoard> board;
  Seat seat;

  v1::BarrierReport Describe(const std::string& name, uint64_t counter) const {
    grpc::ClientContext context;
    rpc::SetTimeout(context, kLong);
    v1::DescribeBarrierRequest request;
    request.set_job_id(job);
    request.set_barrier_id(name);
    request.set_counter(counter);
    v1::DescribeBarrierReply reply;
    const absl::Status status = rpc::FromGrpc(barriers->Describe(&context, request, &reply));
    if (!absl::IsNotFound(status)) Check(status);
    return reply.report();
  }
  void AwaitArrivals(const std::string& name, uint64_t counter, int count) const {
    while (Describe(name, counter).arrived() < count) {
    }
  }
  // Prints the answer to this rank, and its report.
  void Tell(const std::string& name, const absl::Status& status) const {
    if (status.ok()) return Say("passed");
    const auto detail = rpc::GetDetail(status);
    Say(absl::StrCat("error ", absl::StatusCodeToString(status.code()), " ", status.message()));
    if (!detail.has_value()) return;
    Say(absl::StrCat("detail ", Fingerprint(detail->SerializeAsString())));
    Say(absl::StrCat("report ", Fingerprint(Describe(name, 0).SerializeAsString())));
  }
};

void Hang(Worker& w) {
  if (w.seat.rank == 4) {
    Say("hanging");
    ReadShardForever();
  }
  BarrierCall call;
  call.soft_timeout = absl::Seconds(3);
  w.Tell("saved", w.client->Barrier("saved", absl::Seconds(8), call).status());
  // The agents end the job as soon as one worker has ended: all must have reported by then.
  w.client->Add("told", 1).IgnoreError();
  while (w.client->Find("told")->value_or("") != absl::StrCat(w.seat.world_size - 1)) {
  }
}

// In the first start of the job rank 1 never comes to what rank 0 waits for.
void Stuck(Worker& w) {
  if (Variable("TORCHELASTIC_RESTART_COUNT") != "0") return;
  if (w.seat.rank == 1) {
    w.board->EndCollective();
    w.board->SetPhase("between steps");
    Say("stuck");
    ReadShardForever();
  }
  w.client->Barrier("never", kLong).IgnoreError();
}

void OtherName(Worker& w) {
  const std::string name = w.seat.rank == 0 ? "saved" : "evaluated";
  w.Tell(name, w.client->Barrier(name, kLong).status());
}

void OtherLine(Worker& w) {
  if (w.seat.rank == 0) return w.Tell("saved", w.client->Barrier("saved", kLong).status());
  w.Tell("saved", w.client->Barrier("saved", kLong).status());
}

void OtherCounter(Worker& w) {
  if (w.seat.rank != 0) return w.Tell("saved", w.client->Barrier("saved", kLong).status());
  w.AwaitArrivals("saved", 0, w.seat.world_size - 1);
  // Acts as a rank that skipped an instance.
  v1::ArriveRequest request;
  request.mutable_fence()->set_job_id(w.job);
  request.mutable_fence()->set_worker_id(Variable("MUSTER_WORKER_ID"));
  request.mutable_fence()->set_incarnation(w.client->incarnation());
  request.mutable_fence()->set_generation(w.seat.generation);
  request.set_barrier_id("saved");
  request.set_counter(1);
  request.set_rank(0);
  grpc::ClientContext context;
  rpc::SetTimeout(context, kLong);
  v1::ArriveReply reply;
  w.Tell("saved", rpc::FromGrpc(w.barriers->Arrive(&context, request, &reply)));
}

void Subset(Worker& w) {
  BarrierCall call;
  call.participants = {0, 2};
  if (w.seat.rank == 0 || w.seat.rank == 2) {
    const auto passed = w.client->Barrier(
        "pair", kLong, {.payload = absl::StrCat("from ", w.seat.rank), .participants = {0, 2}});
    Check(passed.status());
    Say(absl::StrCat("pair ", absl::StrJoin(passed->payloads, ", ")));
    Check(w.client->Set("paired", "yes"));
    // Otherwise the barrier might have passed before the outsider comes.
    if (w.seat.rank == 2) Check(w.client->Wait({"outsider"}, kLong).status());
    w.Tell("other", w.client->Barrier("other", kLong, call).status());
  } else {
    Check(w.client->Wait({"paired"}, kLong).status());
    if (w.seat.rank != 1) return;
    const absl::Status came = w.client->Barrier("other", kLong, call).status();
    Check(w.client->Set("outsider", "came"));
    w.Tell("other", came);
  }
}

void Cancel(Worker& w) {
  if (w.seat.rank != 4) {
    w.Tell("saved", w.client->Barrier("saved", kLong).status());
    w.Tell("evaluated", w.client->Barrier("evaluated", kLong).status());
    return;
  }
  w.AwaitArrivals("evaluated", 0, w.seat.world_size - 1);
  Check(w.client->CancelBarrier("evaluated", "the scratch disk is full"));
}

// Rank 2 is the last at each of ten barriers.
void Slow(Worker& w) {
  for (uint64_t i = 0; i < 10; ++i) {
    if (w.seat.rank == 2) w.AwaitArrivals("step", i, w.seat.world_size - 1);
    Check(w.client->Barrier("step", kLong).status());
  }
  Say("stepped");
  const absl::Status status = w.client->Wait({"shown"}, kLong).status();
  // The library does the same: this may come before the agent ends the process.
  if (AgentTells(status, ProcessVariables())) exit(1);
  Check(status);
}

void Alive(Worker& w) {
  if (w.seat.rank == 2) Check(w.client->Wait({"killed"}, kLong).status());
  for (int i = 0; i < 2; ++i) {
    Say("entering");
    const auto living = w.client->AgreeAlive(kLong);
    Check(living.status());
    Say(absl::StrCat("alive ",
                     absl::StrJoin(*living, " ", [](std::string* out, const LivingRank& one) {
                       absl::StrAppend(out, one.rank, ":", absl::Hex(one.incarnation));
                     })));
  }
}

// Trains from a checkpoint, until it is stopped.
void Recover(Worker& w) {
  w.board->SetRestored();
  Check(w.client->Barrier("step", kLong).status());
  w.board->SetStep(8);
  Say("stepping");
  const absl::Status status = w.client->Wait({"nothing"}, kLong).status();
  if (AgentTells(status, ProcessVariables())) exit(1);
  Check(status);
}

// Joins again whenever a generation ends, until all of one have met. Worker w1 hangs.
int Elastic(CoordinatorClient& client, JoinOptions join) {
  join.min_workers = 2;
  join.spare = !Variable("SPARE").empty();
  if (join.spare) join.preferred_rank = -1;
  while (true) {
    const auto seat = client.Join(join);
    Check(seat.status());
    Say(absl::StrCat("seated ", seat->rank, " of ", seat->world_size, " in generation ",
                     seat->generation));
    if (Variable("MUSTER_WORKER_ID") == "w1") ReadShardForever();
    const absl::Status met = client.Barrier("met", kLong).status();
    if (met.ok()) return 0;
    if (!absl::IsAborted(met)) Check(met);
  }
}

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  auto board = std::make_shared<ProgressBoard>();
  if (what != "recover") board->SetStep(7);
  board->BeginCollective("AllReduce", 1024, "Float");
  CoordinatorClient::Options options;
  options.address = Variable("MUSTER_COORDINATOR");
  options.job = Variable("MUSTER_JOB");
  options.worker_id = Variable("MUSTER_WORKER_ID");
  options.heartbeat_period = absl::Milliseconds(100);
  options.progress = board;
  JoinOptions join;
  int rank = -1, world_size = 0;
  if (!absl::SimpleAtoi(Variable("RANK"), &rank) ||
      !absl::SimpleAtoi(Variable("WORLD_SIZE"), &world_size) ||
      !absl::SimpleAtoi(Variable("MUSTER_INCARNATION"), &options.incarnation)) {
    return 2;
  }
  join.min_workers = join.max_workers = world_size;
  join.preferred_rank = rank;
  join.lease = absl::Minutes(5);
  join.end_generation_on_failure = what != "alive";
  Worker w;
  w.job = options.job;
  w.board = board;
  auto client = CoordinatorClient::Connect(options);
  Check(client.status());
  w.client = *std::move(client);
  if (what == "elastic") return Elastic(*w.client, join);
  const auto channel = rpc::Connect(options.address);
  Check(channel.status());
  w.barriers = v1::Barrier::NewStub(*channel);
  const auto seat = w.client->Join(join);
  Check(seat.status());
  w.seat = *seat;
  Check(w.client->Barrier("begin", kLong).status());
  const struct {
    const char* name;
    void (*run)(Worker&);
  } kJobs[] = {{"hang", Hang},
               {"stuck", Stuck},
               {"other_name", OtherName},
               {"other_line", OtherLine},
               {"other_counter", OtherCounter},
               {"subset", Subset},
               {"cancel", Cancel},
               {"slow", Slow},
               {"alive", Alive},
               {"recover", Recover}};
  for (const auto& job : kJobs) {
    if (what == job.name) job.run(w);
  }
  if (what != "hang" && what != "alive") Check(w.client->Barrier("end", kLong).status());
  return 0;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) { return muster::Main(argc, argv); }
