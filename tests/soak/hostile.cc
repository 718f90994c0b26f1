#include "tests/soak/hostile.h"

#include <arpa/inet.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutate.h"
#include "proto/muster/v1/kv.pb.h"
#include "proto/muster/v1/session.pb.h"
#include "proto/muster/v1/watch.pb.h"
#include "rpc/address.h"
#include "rpc/channel.h"

namespace muster::soak {
namespace {

using Random = std::mt19937;

constexpr char kWait[] = "/muster.v1.KeyValueStore/Wait";
constexpr char kAttach[] = "/muster.v1.Session/Attach";
constexpr char kWatch[] = "/muster.v1.Watch/Watch";
constexpr char kHealthWatch[] = "/grpc.health.v1.Health/Watch";

size_t Draw(Random& random, size_t below) {
  return std::uniform_int_distribution<size_t>(0, below - 1)(random);
}

grpc::ByteBuffer Bytes(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string RandomBytes(Random& random, size_t count) {
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(Draw(random, 256));
  return bytes;
}

std::string WaitMessage(const std::string& job, int keys, size_t bytes) {
  v1::WaitRequest wait;
  wait.mutable_fence()->set_job_id(job);
  for (int i = 0; i < keys; ++i) wait.add_keys(absl::StrCat("never/", i, std::string(bytes, 'x')));
  wait.mutable_timeout()->set_seconds(3000);
  return wait.SerializeAsString();
}

std::string WatchMessage(const std::string& job) {
  v1::WatchRequest watch;
  watch.set_job_id(job);
  watch.set_keys(true);
  return watch.SerializeAsString();
}

// One call of a misbehaving client. Made, used and destroyed by one thread.
class Call {
 public:
  Call(grpc::Channel* channel, const char* method, absl::Duration deadline)
      : stub_(std::shared_ptr<grpc::Channel>(std::shared_ptr<void>(), channel)) {
    rpc::SetTimeout(context_, deadline);
    stream_ = stub_.PrepareCall(&context_, method, &queue_);
    ++in_flight_;
    stream_->StartCall(nullptr);  // sends the headers
  }
  // Goes away, whatever is in flight.
  ~Call() {
    context_.TryCancel();
    while (in_flight_ > 0) Await(absl::InfiniteFuture());
    grpc::Status status;
    stream_->Finish(&status, nullptr);
    ++in_flight_;
    Await(absl::InfiniteFuture());
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  // Waits for what was begun last to end, until `deadline`. Returns false if it did not.
  bool Await(absl::Time deadline) {
    void* tag;
    bool ok;
    if (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(deadline)) !=
        grpc::CompletionQueue::GOT_EVENT) {
      return false;
    }
    --in_flight_;
    return true;
  }
  // Writes once the headers, or the message before it, are on their way. Returns false if they were
  // not for a while.
  bool Write(const std::string& message) {
    while (in_flight_ > 0) {
      if (!Await(absl::Now() + absl::Seconds(1))) return false;
    }
    ++in_flight_;
    stream_->Write(Bytes(message), nullptr);
    return true;
  }

 private:
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  int in_flight_ = 0;
};

}  // namespace

Hostile::Hostile(std::string address, std::string job, uint32_t seed)
    : address_(std::move(address)), job_(std::move(job)), seed_(seed) {
  Start("late messages", &Hostile::LateMessages);
  Start("strangers", &Hostile::Strangers);
  Start("silent calls", &Hostile::SilentCalls);
  Start("held waits", &Hostile::HeldWaits);
  Start("noise", &Hostile::Noise);
  Start("dropped watches", &Hostile::DroppedWatches);
}

Hostile::~Hostile() {
  stop_.Notify();
  for (std::thread& thread : threads_) thread.join();
}

std::map<std::string, int64_t> Hostile::counts() const {
  MutexLock lock(&mu_);
  return counts_;
}

void Hostile::Count(absl::string_view what, int64_t by) {
  MutexLock lock(&mu_);
  counts_[std::string(what)] += by;
}

void Hostile::Start(const char* name, void (Hostile::*round)(uint32_t seed)) {
  const uint32_t first = seed_ * 7919 + static_cast<uint32_t>(threads_.size()) * 104729;
  threads_.emplace_back([this, name, round, first] {
    // A pause between rounds, longer than the round was, leaves the machine to the processes under
    // test: leases run out on one that has no time for their beats.
    absl::Duration breath;
    for (uint32_t i = 0; !stop_.WaitForNotificationWithTimeout(breath); ++i) {
      const absl::Time begun = absl::Now();
      (this->*round)(first + i);
      breath = std::max(6 * (absl::Now() - begun), absl::Milliseconds(20));
      Count(name);
    }
  });
}

std::shared_ptr<grpc::Channel> Hostile::NewChannel() const {
  return *rpc::Connect(address_, {.own_connection = true});
}

void Hostile::LateMessages(uint32_t seed) {
  Random random(seed);
  const std::shared_ptr<grpc::Channel> channel = NewChannel();
  if (!rpc::WaitUntilConnected(*channel, address_, absl::Milliseconds(200)).ok()) return;
  const std::string wait = WaitMessage(job_, 1, 0), watch = WatchMessage(job_);
  for (int i = 0; i < 50 && !stop_.HasBeenNotified(); ++i) {
    const bool watches = Draw(random, 2) == 0;
    const absl::Duration limit = absl::Milliseconds(3);
    const absl::Time over = absl::Now() + limit;
    Call call(channel.get(), watches ? kWatch : kWait, limit);
    // Sends around the deadline, to the microsecond, which is the moment under test.
    const absl::Time send =
        over + absl::Microseconds(static_cast<int64_t>(Draw(random, 1200)) - 800);
    if (!call.Await(over)) continue;
    stop_.WaitForNotificationWithTimeout(send - absl::Now() - absl::Microseconds(200));
    while (absl::Now() < send) {
    }
    call.Write(watches ? watch : wait);
    call.Await(absl::Now() + absl::Milliseconds(Draw(random, 3)));
    Count("messages at the deadline");
  }
}

void Hostile::Strangers(uint32_t seed) {
  Random random(seed);
  const rpc::Address to = *rpc::ParseAddress(address_);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(to.port));
  inet_pton(AF_INET, to.host.c_str(), &name.sin_addr);
  if (connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0) {
    std::string bytes;
    switch (Draw(random, 4)) {
      case 0:
        bytes = RandomBytes(random, 1 + Draw(random, 4096));
        break;
      case 1:
        bytes = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
        break;
      case 2:  // the greeting of HTTP/2, and then noise
        bytes = absl::StrCat("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", RandomBytes(random, 64));
        break;
      case 3:
        bytes = "PRI * HTTP";
        break;
    }
    (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (Draw(random, 2) == 0) {
      const linger at_once = {.l_onoff = 1, .l_linger = 0};  // a reset instead of an end
      setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    }
    Count("connections of strangers");
  }
  close(fd);
}

void Hostile::SilentCalls(uint32_t seed) {
  Random random(seed);
  const std::shared_ptr<grpc::Channel> channel = NewChannel();
  if (!rpc::WaitUntilConnected(*channel, address_, absl::Milliseconds(200)).ok()) return;
  std::vector<std::unique_ptr<Call>> calls;
  const char* methods[] = {kWait, kAttach, kWatch, kHealthWatch, "/muster.v1.No/Such"};
  for (int i = 0; i < 200; ++i) {
    calls.push_back(
        std::make_unique<Call>(channel.get(), methods[Draw(random, 5)], absl::Minutes(10)));
  }
  // Half of them go away before the others, in any order.
  for (int i = 0; i < 100; ++i) {
    std::swap(calls[Draw(random, calls.size())], calls.back());
    calls.pop_back();
  }
  stop_.WaitForNotificationWithTimeout(absl::Milliseconds(Draw(random, 300)));
  Count("calls without a message", 200);
}

void Hostile::HeldWaits(uint32_t seed) {
  Random random(seed);
  const std::shared_ptr<grpc::Channel> channel = NewChannel();
  if (!rpc::WaitUntilConnected(*channel, address_, absl::Milliseconds(200)).ok()) return;
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 30 && !stop_.HasBeenNotified(); ++i) {
    calls.push_back(std::make_unique<Call>(channel.get(), kWait, absl::Minutes(10)));
    // Sends few large keys, or many small ones: 3 MB.
    calls.back()->Write(Draw(random, 2) == 0 ? WaitMessage(job_, 3, 1 << 20)
                                             : WaitMessage(job_, 20'000, 130));
  }
  for (auto& call : calls) call->Await(absl::Now() + absl::Milliseconds(20));
  Count("held waits of 3 MB", static_cast<int64_t>(calls.size()));
}

void Hostile::Noise(uint32_t seed) {
  Random random(seed);
  const std::shared_ptr<grpc::Channel> channel = NewChannel();
  if (!rpc::WaitUntilConnected(*channel, address_, absl::Milliseconds(200)).ok()) return;
  v1::AgentFrame hello;
  hello.mutable_hello()->set_protocol_min(1);
  hello.mutable_hello()->set_protocol_max(1);
  hello.mutable_hello()->set_node("stranger");
  hello.mutable_hello()->set_agent_incarnation(seed);
  for (int i = 0; i < 20 && !stop_.HasBeenNotified(); ++i) {
    const bool attaches = Draw(random, 2) == 0;
    Call call(channel.get(), attaches ? kAttach : kWait, absl::Seconds(10));
    for (int frame = 0; frame < 3; ++frame) {
      const std::string whole =
          attaches ? hello.SerializeAsString() : WaitMessage(job_, 3, Draw(random, 100));
      if (!call.Write(Draw(random, 3) == 0 ? RandomBytes(random, Draw(random, 200))
                                           : Mutate(whole, random))) {
        break;
      }
    }
    Count("frames of noise", 3);
  }
}

void Hostile::DroppedWatches(uint32_t seed) {
  Random random(seed);
  const std::shared_ptr<grpc::Channel> channel = NewChannel();
  if (!rpc::WaitUntilConnected(*channel, address_, absl::Milliseconds(200)).ok()) return;
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 40 && !stop_.HasBeenNotified(); ++i) {
    const bool health = Draw(random, 2) == 0;
    calls.push_back(
        std::make_unique<Call>(channel.get(), health ? kHealthWatch : kWatch, absl::Minutes(10)));
    calls.back()->Write(health ? "" : WatchMessage(job_));
  }
  for (auto& call : calls) call->Await(absl::Now() + absl::Milliseconds(10));
  Count("watches dropped", static_cast<int64_t>(calls.size()));
}

}  // namespace muster::soak
