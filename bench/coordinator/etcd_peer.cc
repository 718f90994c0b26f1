#include "bench/coordinator/etcd_peer.h"

#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "bench/coordinator/server_process.h"
#include "rpc/channel.h"

namespace muster::bench {
namespace {

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  int port = 0;
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0) {
    port = ntohs(address.sin_port);
  }
  close(fd);
  return port;
}

// Returns field `number` of a message, with content of less than 128 bytes.
std::string Field(int number, const std::string& content) {
  std::string bytes = {static_cast<char>(number << 3 | 2), static_cast<char>(content.size())};
  return bytes + content;
}

// etcdserverpb.PutRequest{key = 1, value = 2}.
std::string PutRequest(int i) {
  return Field(1, absl::StrCat("bench/", i % 4096)) + Field(2, "0123456789abcdef0123456789abcdef");
}

// Returns the `i`th request of `puts` keys, all different, as etcd requires of a Txn:
// etcdserverpb.TxnRequest{success = 2} of RequestOp{request_put = 2}.
grpc::ByteBuffer Request(int i, int puts) {
  std::string bytes;
  for (int put = 0; put < puts; ++put) {
    const std::string request = PutRequest(i * puts + put);
    bytes += puts == 1 ? request : Field(2, Field(2, request));
  }
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

struct Call {
  grpc::ClientContext context;
  grpc::ByteBuffer reply;
  grpc::Status status;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
};

}  // namespace

absl::StatusOr<double> EtcdPutsPerSecond(const std::string& etcd, const std::string& directory,
                                         const EtcdLoad& load) {
  if (access(etcd.c_str(), X_OK) != 0) {
    return absl::NotFoundError(absl::StrCat(etcd, " is no program"));
  }
  const std::string client = absl::StrCat("127.0.0.1:", FreePort());
  const std::string peer = absl::StrCat("http://127.0.0.1:", FreePort());
  MUSTER_ASSIGN_OR_RETURN(
      const std::unique_ptr<ServerProcess> server,
      ServerProcess::Start(
          {etcd, "--data-dir", directory, "--listen-client-urls", "http://" + client,
           "--advertise-client-urls", "http://" + client, "--listen-peer-urls", peer,
           "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer},
          /*reads_line=*/false));
  MUSTER_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, rpc::Connect(client));
  MUSTER_RETURN_IF_ERROR(rpc::WaitUntilConnected(*channel, client, absl::Seconds(30)));
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  int started = 0;
  const auto start_one = [&] {
    auto* call = new Call;
    rpc::SetTimeout(call->context, absl::Seconds(30));
    call->context.set_wait_for_ready(true);
    call->reader = stub.PrepareUnaryCall(
        &call->context, load.puts == 1 ? "/etcdserverpb.KV/Put" : "/etcdserverpb.KV/Txn",
        Request(started, load.puts), &queue);
    call->reader->StartCall();
    call->reader->Finish(&call->reply, &call->status, call);
    ++started;
  };
  absl::Status status;
  const int warm_up = std::max(100, load.in_flight);
  absl::Time start;
  int finished = 0;
  const int total = load.requests + warm_up;
  for (int i = 0; i < load.in_flight; ++i) start_one();
  while (finished < started) {
    void* tag;
    bool ok;
    if (!queue.Next(&tag, &ok)) break;
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    ++finished;
    if (!call->status.ok())
      status = absl::UnavailableError(absl::StrCat("etcd: ", call->status.error_message()));
    if (finished == warm_up) start = absl::Now();
    if (started < total && status.ok()) start_one();
  }
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  queue.Shutdown();
  MUSTER_RETURN_IF_ERROR(status);
  return load.requests * load.puts / seconds;
}

}  // namespace muster::bench
