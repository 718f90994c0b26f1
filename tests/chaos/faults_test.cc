// Faults that processes meet from outside: a stop, a wall clock that jumps, a port that another
// process has, too few descriptors, a watcher that does not read.
#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/client_context.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/watch.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/chaos/cluster.h"
#include "tests/support/command.h"

namespace muster::chaos {
namespace {

using ::testing::HasSubstr;

void Expect(const Plan& plan) {
  Cluster cluster(plan);
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
}

std::unique_ptr<agent::ProcessHost> Host() { return *agent::ProcessHost::Start(); }

Child Coordinator(agent::ProcessHost& host, std::vector<std::string> flags) {
  flags.insert(flags.begin(), {ProgramPath("coordinator/cmd/muster-coordinator"), "--insecure"});
  return Child(host, std::move(flags), {}, [] {});
}

TEST(Faults, CoordinatorStoppedBeyondTheLease_TakesNobodyForLost) {
  Expect(
      {.name = "stopped_coordinator",
       .lease = absl::Seconds(1),
       .signals =
           {{.worker = 0, .round = 6, .signal = SIGSTOP, .stopped_for = absl::Milliseconds(2500)}},
       .expected_generations = 1});
}

TEST(Faults, WorkerStoppedForLessThanItsLease_NothingHappens) {
  Expect({.name = "paused_worker",
          .lease = absl::Seconds(10),
          .signals = {{.worker = 0,
                       .round = 6,
                       .target = 1,
                       .signal = SIGSTOP,
                       .stopped_for = absl::Milliseconds(500)}},
          .expected_generations = 1});
}

TEST(Faults, WorkerStoppedBeyondItsLease_IsNamedAndComesBack) {
  Plan plan = {.name = "stopped_worker",
               .lease = absl::Milliseconds(600),
               .signals = {{.worker = 0,
                            .round = 6,
                            .target = 1,
                            .signal = SIGSTOP,
                            .stopped_for = absl::Milliseconds(1500)}},
               .expected_generations = 2};
  Cluster cluster(plan);
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
}

TEST(Faults, WallClockJumps_NothingHappens) {
  const std::string path = absl::StrCat(testing_support::MakeTestDir("clock"), "/offset");
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(ftruncate(fd, sizeof(int64_t)), 0);
  auto* const offset = static_cast<std::atomic<int64_t>*>(
      mmap(nullptr, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  ASSERT_NE(offset, MAP_FAILED);
  const std::map<std::string, std::string> env = {
      {"LD_PRELOAD", ProgramPath("tests/chaos/libclock_jump.so")}, {"MUSTER_CHAOS_CLOCK", path}};
  const auto jump = [offset](int64_t seconds) { return [=] { offset->store(seconds); }; };
  Plan plan = {.name = "clock_jump",
               .rounds = 24,
               .lease = absl::Seconds(2),
               .coordinator_env = env,
               .worker_env = env,
               .expected_generations = 1};
  plan.signals = {{.worker = 0, .round = 5, .action = jump(86400)},
                  {.worker = 0, .round = 10, .action = jump(-86400)},
                  {.worker = 0, .round = 15, .action = jump(40LL * 365 * 86400)},
                  {.worker = 0, .round = 20, .action = jump(3)}};
  Cluster cluster(plan);
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
  munmap(offset, sizeof(int64_t));
}

TEST(Faults, PortOfAnother_IsRefusedInOneLine) {
  auto host = Host();
  Child first = Coordinator(*host, {"--listen", "127.0.0.1:0"});
  ASSERT_TRUE(first.WaitFor("127.0.0.1:", absl::Seconds(20))) << first.text();
  Child second = Coordinator(*host, {"--listen", *first.first_line()});
  EXPECT_EQ(second.Wait(), kExitCannotServe);
  EXPECT_THAT(second.text(), HasSubstr(absl::StrCat("cannot listen on ", *first.first_line(),
                                                    ": another process has the port")));
  first.Signal(SIGTERM);
  EXPECT_EQ(first.Wait(), 0) << first.text();
}

TEST(Faults, PortStolenBetweenCrashAndRestart_JobGoesOnWhenItIsFree) {
  Expect({.name = "stolen_port",
          .signals = {{.worker = 0, .round = 6, .signal = SIGKILL}},
          .port_is_stolen = true,
          .expected_generations = 1});
}

TEST(Faults, SecondCoordinatorOnTheSameJournal_IsRefusedWithThePid) {
  auto host = Host();
  const std::string data = testing_support::MakeTestDir("second") + "/data";
  Child first = Coordinator(*host, {"--listen", "127.0.0.1:0", "--data_dir", data});
  ASSERT_TRUE(first.WaitFor("127.0.0.1:", absl::Seconds(20))) << first.text();
  Child second = Coordinator(*host, {"--listen", "127.0.0.1:0", "--data_dir", data});
  EXPECT_EQ(second.Wait(), kExitCannotServe);
  EXPECT_THAT(second.text(), HasSubstr(absl::StrCat("is in use by process ", first.pid())));
  first.Signal(SIGTERM);
  EXPECT_EQ(first.Wait(), 0) << first.text();
}

// More connections than descriptors, while a worker dies and its successor wants to come in.
TEST(Faults, TwoHundredAndFiftySixDescriptors_NewcomersWaitAndTheJobGoesOn) {
  std::vector<int> crowd;
  Plan plan = {.name = "descriptors",
               .rounds = 24,
               .coordinator_prefix = {"/usr/bin/prlimit", "--nofile=256:256"}};
  Cluster* running = nullptr;
  const auto connect_crowd = [&] {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    int port = 0;
    ASSERT_TRUE(absl::SimpleAtoi(running->address().substr(10), &port));
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < 400; ++i) {
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      (void)connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address));
      crowd.push_back(fd);
    }
  };
  const auto close_crowd = [&] {
    for (const int fd : crowd) close(fd);
    crowd.clear();
  };
  plan.signals = {{.worker = 0, .round = 4, .action = connect_crowd},
                  {.worker = 0, .round = 10, .action = close_crowd},
                  {.worker = 0, .round = 12, .target = 1, .signal = SIGKILL}};
  Cluster cluster(plan);
  running = &cluster;
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
  close_crowd();
}

int64_t ResidentBytes(pid_t pid) {
  long pages = 0, resident = 0;
  if (FILE* file = std::fopen(absl::StrCat("/proc/", pid, "/statm").c_str(), "r")) {
    if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return resident * sysconf(_SC_PAGESIZE);
}

// The coordinator does not wait for it, spends little memory on it, and reports when it has missed
// events.
TEST(Faults, WatcherThatDoesNotRead_HoldsUpNobodyAndLearnsWhatItMissed) {
  auto host = Host();
  Child coordinator = Coordinator(*host, {"--listen", "127.0.0.1:0"});
  ASSERT_TRUE(coordinator.WaitFor("127.0.0.1:", absl::Seconds(20))) << coordinator.text();
  const std::string address = *coordinator.first_line();
  const auto channel = *rpc::Connect(address);
  {
    v1::JoinRequest join;
    join.mutable_fence()->set_job_id("slow");
    join.mutable_fence()->set_worker_id("w0");
    join.mutable_fence()->set_incarnation(1);
    join.mutable_spec()->set_min_workers(1);
    join.mutable_spec()->set_max_workers(1);
    join.mutable_spec()->mutable_lease()->set_seconds(600);
    v1::JoinReply reply;
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Seconds(20));
    ASSERT_TRUE(v1::Rendezvous::NewStub(channel)->Join(&context, join, &reply).ok());
  }
  v1::WatchRequest request;
  request.set_job_id("slow");
  request.set_keys(true);
  grpc::ClientContext watching;
  const auto own = *rpc::Connect(address, {.own_connection = true});
  const auto reader = v1::Watch::NewStub(own)->Watch(&watching, request);
  v1::WatchBatch batch;
  ASSERT_TRUE(reader->Read(&batch));

  // 96 MiB pass by; 8 MiB of them are kept for watchers.
  const auto kv = v1::KeyValueStore::NewStub(channel);
  v1::TxnRequest put;
  put.mutable_fence()->set_job_id("slow");
  v1::PutOp& op = *put.add_then()->mutable_put();
  op.set_key("key");
  op.set_value(std::string(256 << 10, 'x'));
  for (int i = 0; i < 384; ++i) {
    v1::TxnReply reply;
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Seconds(20));
    const grpc::Status status = kv->Txn(&context, put, &reply);
    ASSERT_TRUE(status.ok()) << i << ": " << status.error_message();
  }
  EXPECT_LT(ResidentBytes(coordinator.pid()), 128 << 20);

  uint64_t last = 0;
  while (reader->Read(&batch)) {
    for (const v1::WatchEvent& event : batch.events()) {
      EXPECT_GT(event.revision(), last);
      last = event.revision();
    }
  }
  const absl::Status status = rpc::FromGrpc(reader->Finish());
  EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_COMPACTED) << status;
  coordinator.Signal(SIGTERM);
  EXPECT_EQ(coordinator.Wait(), 0) << coordinator.text();
}

}  // namespace
}  // namespace muster::chaos
