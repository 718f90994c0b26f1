// A worker of outage_test: talks to the coordinator as a training program does, without tensors.
// Ranks whose number is odd add to a durable key, the others wait at a barrier meanwhile.
#include <grpcpp/client_context.h>

#include <memory>
#include <string>

#include "absl/strings/numbers.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "rpc/channel.h"
#include "tests/e2e/worker_talk.h"
#include "worker/job/coordinator_client.h"

namespace {

using muster::Check;
using muster::Say;
using muster::Variable;

constexpr int kAdds = 100;

// The coordinator keeps the class of a key: what is added to it later is durable too.
void MakeDurable(const std::string& job, const std::string& key) {
  auto channel = muster::rpc::Connect(Variable("MUSTER_COORDINATOR"));
  Check(channel.status());
  grpc::ClientContext context;
  muster::rpc::SetTimeout(context, absl::Minutes(1));
  muster::v1::TxnRequest request;
  request.mutable_fence()->set_job_id(job);
  muster::v1::PutOp& put = *request.add_then()->mutable_put();
  put.set_key(key);
  put.set_value("0");
  put.set_klass(muster::v1::KV_CLASS_DURABLE);
  muster::v1::TxnReply reply;
  const grpc::Status status =
      muster::v1::KeyValueStore::NewStub(*channel)->Txn(&context, request, &reply);
  if (!status.ok()) Check(absl::UnknownError(status.error_message()));
}

}  // namespace

int main() {
  muster::CoordinatorClient::Options options;
  options.address = Variable("MUSTER_COORDINATOR");
  options.job = Variable("MUSTER_JOB");
  options.worker_id = Variable("MUSTER_WORKER_ID");
  int rank = 0, world_size = 0;
  if (!absl::SimpleAtoi(Variable("RANK"), &rank) ||
      !absl::SimpleAtoi(Variable("WORLD_SIZE"), &world_size) ||
      !absl::SimpleAtoi(Variable("MUSTER_INCARNATION"), &options.incarnation)) {
    return 2;
  }
  auto client = muster::CoordinatorClient::Connect(options);
  Check(client.status());
  muster::JoinOptions join;
  join.min_workers = join.max_workers = world_size;
  join.preferred_rank = rank;
  Check((*client)->Join(join).status());
  if (rank == 0) MakeDurable(options.job, "count");
  Check((*client)->Barrier("begin", absl::Minutes(2)).status());
  if (rank % 2 == 1) {
    for (int i = 1; i <= kAdds; ++i) {
      Check((*client)->Add("count", 1).status());
      if (i == kAdds / 4) Say("adding");
    }
  } else {
    Say("arriving");
  }
  const auto passed = (*client)->Barrier("meet", absl::Minutes(2), "from " + std::to_string(rank));
  Check(passed.status());
  Say("met " + std::to_string(passed->payloads.size()));
  const auto count = (*client)->Find("count");
  Check(count.status());
  Say("count " + count->value_or("none"));
  Check((*client)->Barrier("end", absl::Minutes(2)).status());
  return 0;
}
