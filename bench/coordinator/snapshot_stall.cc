// For how long reads and durable puts stop while the coordinator writes a snapshot of a large
// state.
//
// The coordinator runs in its own process. Two jobs hold the state as durable keys. One thread
// reads a key and four put durable ones, each one call at a time, first while nothing else happens
// and then while a requested snapshot is written. Prints one JSON object.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/mutex.h"
#include "bench/coordinator/server_process.h"
#include "bench/load_average.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "rpc/channel.h"

namespace muster::bench {
namespace {

constexpr int kJobs = 2;  // one may have 256 MiB of keys
constexpr int kPutsAtATime = 1000;
constexpr int kWriters = 4;
constexpr absl::Duration kPatience = absl::Seconds(120);

void WaitFor(absl::Duration length) { Notification().WaitForNotificationWithTimeout(length); }

template <typename F>
grpc::Status Call(F call) {
  grpc::ClientContext context;
  rpc::SetTimeout(context, kPatience);
  return call(&context);
}

class Client {
 public:
  explicit Client(const std::string& address)
      : channel_(*rpc::Connect(address, {.own_connection = true})),
        kv_(v1::KeyValueStore::NewStub(channel_)) {}

  v1::Fence Join(const std::string& job) {
    v1::JoinRequest request;
    v1::Fence* fence = request.mutable_fence();
    fence->set_job_id(job);
    fence->set_worker_id("w0");
    fence->set_incarnation(1);
    request.mutable_spec()->set_min_workers(1);
    request.mutable_spec()->set_max_workers(1);
    request.mutable_spec()->mutable_lease()->set_seconds(3600);
    v1::JoinReply reply;
    const grpc::Status status = Call([&](grpc::ClientContext* context) {
      return v1::Rendezvous::NewStub(channel_)->Join(context, request, &reply);
    });
    MUSTER_CHECK(status.ok()) << status.error_message();
    fence->set_generation(reply.generation());
    return *fence;
  }
  void Txn(const v1::TxnRequest& request) {
    v1::TxnReply reply;
    const grpc::Status status =
        Call([&](grpc::ClientContext* context) { return kv_->Txn(context, request, &reply); });
    MUSTER_CHECK(status.ok()) << status.error_message();
  }
  // Tries again while another snapshot is being written.
  absl::Duration Snapshot() {
    while (true) {
      const absl::Time start = absl::Now();
      v1::SnapshotReply reply;
      const grpc::Status status = Call([&](grpc::ClientContext* context) {
        return v1::Admin::NewStub(channel_)->Snapshot(context, v1::SnapshotRequest(), &reply);
      });
      if (status.ok()) return absl::Now() - start;
      MUSTER_CHECK(status.error_code() == grpc::StatusCode::UNAVAILABLE) << status.error_message();
      WaitFor(absl::Milliseconds(50));
    }
  }

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::KeyValueStore::Stub> kv_;
};

void AddPut(v1::TxnRequest* request, std::string key, std::string value) {
  v1::PutOp* put = request->add_then()->mutable_put();
  put->set_key(std::move(key));
  put->set_value(std::move(value));
  put->set_klass(v1::KV_CLASS_DURABLE);
}

using Times = std::vector<double>;  // in milliseconds

struct Seen {
  Times reads, puts;  // sorted
  absl::Duration length;
};

double Percentile(const Times& sorted, double p) {
  if (sorted.empty()) return -1;
  return sorted[std::min(sorted.size() - 1,
                         static_cast<size_t>(p * static_cast<double>(sorted.size())))];
}

// Returns what readers and writers see while `body` runs.
template <typename F>
Seen Watch(const std::string& address, const v1::Fence& fence, F body) {
  Notification stop;
  std::vector<Notification> begun(kWriters + 1);
  std::vector<Times> times(kWriters + 1);
  std::vector<std::thread> threads;
  for (int i = 0; i <= kWriters; ++i) {
    threads.emplace_back([&, i] {
      Client client(address);
      v1::TxnRequest request;
      *request.mutable_fence() = fence;
      if (i == 0) {
        request.add_then()->mutable_get()->set_key("probe-1");
      } else {
        AddPut(&request, absl::StrCat("probe-", i), std::string(64, 'x'));
      }
      client.Txn(request);  // connects
      begun[i].Notify();
      while (!stop.HasBeenNotified()) {
        const absl::Time start = absl::Now();
        client.Txn(request);
        times[i].push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
        if (i == 0) stop.WaitForNotificationWithTimeout(absl::Milliseconds(1));
      }
    });
  }
  for (const Notification& one : begun) one.WaitForNotification();
  const absl::Time start = absl::Now();
  body();
  Seen seen;
  seen.length = absl::Now() - start;
  stop.Notify();
  for (std::thread& thread : threads) thread.join();
  seen.reads = std::move(times[0]);
  for (int i = 1; i <= kWriters; ++i)
    seen.puts.insert(seen.puts.end(), times[i].begin(), times[i].end());
  std::sort(seen.reads.begin(), seen.reads.end());
  std::sort(seen.puts.begin(), seen.puts.end());
  return seen;
}

// Returns the most memory that the process had since ForgetPeak.
double PeakMb(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    double kilobytes = 0;
    if (absl::StartsWith(line, "VmHWM:") &&
        absl::SimpleAtod(line.substr(6, line.size() - 6 - 3), &kilobytes))
      return kilobytes / 1024;
  }
  return -1;
}
void ForgetPeak(pid_t pid) { std::ofstream(absl::StrCat("/proc/", pid, "/clear_refs")) << "5"; }

int Main(int argc, char** argv) {
  std::string server = std::filesystem::path(argv[0]).parent_path().string() +
                       "/../../coordinator/cmd/muster-coordinator";
  int megabytes = 270, value_bytes = 256, rounds = 3;
  CLI::App app("How long reads and durable puts stop during a snapshot; one JSON object.",
               "bench_snapshot_stall");
  app.add_option("--server", server, "the muster-coordinator program")->capture_default_str();
  app.add_option("--megabytes", megabytes, "of the state")->capture_default_str();
  app.add_option("--value_bytes", value_bytes, "of a key")->capture_default_str();
  app.add_option("--rounds", rounds, "snapshots; the median of each figure is printed")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  char scratch[] = "/var/tmp/muster-bench-XXXXXX";  // not in memory
  MUSTER_CHECK(mkdtemp(scratch) != nullptr);
  {
    auto process = ServerProcess::Start(
        {server, "--log_level", "error", "--insecure", "--data_dir", scratch}, true);
    MUSTER_CHECK(process.ok()) << process.status().message();
    const std::string address = (*process)->line();
    Client client(address);
    v1::Fence fence;
    const int keys = static_cast<int>(int64_t{megabytes} * 1'000'000 / (value_bytes + 45));
    for (int job = 0, key = 0; job < kJobs; ++job) {
      fence = client.Join(absl::StrCat("job-", job));
      while (key < keys / kJobs * (job + 1)) {
        v1::TxnRequest request;
        *request.mutable_fence() = fence;
        const int at_a_time = std::min(kPutsAtATime, (3 << 20) / (value_bytes + 100));
        for (int i = 0; i < at_a_time; ++i, ++key)
          AddPut(&request, absl::StrCat("key-", key), std::string(value_bytes, 'v'));
        client.Txn(request);
      }
    }
    client.Snapshot();
    std::vector<std::vector<double>> figures;
    for (int round = 0; round < rounds; ++round) {
      const Seen quiet = Watch(address, fence, [] { WaitFor(absl::Seconds(5)); });
      const double rss = (*process)->RssMb();
      ForgetPeak((*process)->pid());
      absl::Duration took;
      const absl::Duration cpu = (*process)->CpuTime();
      const Seen busy = Watch(address, fence, [&] { took = client.Snapshot(); });
      const auto rate = [](const Seen& seen) {
        return static_cast<double>(seen.puts.size()) / absl::ToDoubleSeconds(seen.length);
      };
      const double peak = PeakMb((*process)->pid());
      const absl::Duration spent = (*process)->CpuTime() - cpu;
      WaitFor(absl::Seconds(6));  // a burst is given back by then
      figures.push_back({Percentile(quiet.reads, 0.99), Percentile(quiet.reads, 1),
                         Percentile(busy.reads, 0.99), Percentile(busy.reads, 1),
                         Percentile(quiet.puts, 0.99), Percentile(quiet.puts, 1),
                         Percentile(busy.puts, 0.99), Percentile(busy.puts, 1), rate(quiet),
                         rate(busy), absl::ToDoubleSeconds(took), absl::ToDoubleSeconds(spent), rss,
                         peak, (*process)->RssMb()});
    }
    const char* const names[] = {"quiet_read_p99_ms", "quiet_read_longest_ms",
                                 "read_p99_ms",       "read_longest_ms",
                                 "quiet_put_p99_ms",  "quiet_put_longest_ms",
                                 "put_p99_ms",        "put_longest_ms",
                                 "quiet_puts_per_s",  "puts_per_s",
                                 "snapshot_s",        "server_cpu_s",
                                 "rss_before_mb",     "rss_peak_mb",
                                 "rss_after_mb"};
    std::string line = absl::StrCat("{\"state_mb\": ", megabytes);
    for (size_t i = 0; i < std::size(names); ++i) {
      std::vector<double> each;
      for (const auto& round : figures) each.push_back(round[i]);
      std::sort(each.begin(), each.end());
      absl::StrAppend(&line, ", \"", names[i], "\": ", each[each.size() / 2]);
    }
    std::printf("%s, \"load\": %.2f}\n", line.c_str(), LoadAverage());
  }
  std::error_code ignored;
  std::filesystem::remove_all(scratch, ignored);
  return 0;
}

}  // namespace
}  // namespace muster::bench

int main(int argc, char** argv) { return muster::bench::Main(argc, argv); }
