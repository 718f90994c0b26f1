#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "bench/coordinator/cluster.h"
#include "bench/coordinator/etcd_peer.h"
#include "bench/coordinator/rawsocket_peer.h"
#include "bench/coordinator/server_process.h"
#include "bench/coordinator/tcpstore_peer.h"
#include "bench/load_average.h"

namespace muster::bench {
namespace {

struct Settings {
  std::string server;
  std::string etcd = "/usr/bin/etcd";
  std::string scratch;
  double scale = 1;  // of the number of rounds
};

using Values = std::vector<std::pair<std::string, double>>;

// Prints one JSON object on one line, with the load average at that moment.
void Print(const Values& values) {
  std::string line = "{";
  for (const auto& [key, value] : values) absl::StrAppend(&line, "\"", key, "\": ", value, ", ");
  std::printf("%s\"load\": %.2f}\n", line.c_str(), LoadAverage());
  std::fflush(stdout);
}

double Percentile(std::vector<absl::Duration> times, double p) {
  if (times.empty()) return -1;
  std::sort(times.begin(), times.end());
  const size_t i =
      std::min(times.size() - 1, static_cast<size_t>(p * static_cast<double>(times.size())));
  return absl::ToDoubleMilliseconds(times[i]);
}

absl::StatusOr<std::unique_ptr<ServerProcess>> StartServer(
    const Settings& settings, const std::vector<std::string>& more = {}) {
  std::vector<std::string> argv = {settings.server, "--log_level", "error", "--insecure"};
  argv.insert(argv.end(), more.begin(), more.end());
  return ServerProcess::Start(argv, /*reads_line=*/true);
}

// Prints the median of each value over three runs (or fewer, by the scale).
absl::Status Medians(const Settings& settings,
                     absl::FunctionRef<absl::StatusOr<Values>(int run)> once) {
  const int runs = std::clamp(static_cast<int>(3 * settings.scale), 1, 15);
  std::vector<Values> all;
  for (int i = 0; i < runs; ++i) {
    MUSTER_ASSIGN_OR_RETURN(Values values, once(i));
    all.push_back(std::move(values));
  }
  Values medians = all[0];
  for (size_t v = 0; v < medians.size(); ++v) {
    std::vector<double> each;
    for (const Values& values : all) each.push_back(values[v].second);
    std::sort(each.begin(), each.end());
    medians[v].second = each[each.size() / 2];
  }
  Print(medians);
  return absl::OkStatus();
}

// The clients: streams of single agents with 8 workers each, and those of hubs.
struct Shape {
  int agents = 0;
  int hubs = 0;
  int agents_per_hub = 0;  // the hub itself among them
  int ranks_per_agent = 8;

  Cluster::Options At(const std::string& address) const {
    return {.address = address,
            .agents = agents,
            .ranks_per_agent = ranks_per_agent,
            .hubs = hubs,
            .agents_per_hub = agents_per_hub};
  }
  int ranks() const { return (agents + hubs * agents_per_hub) * ranks_per_agent; }
  // The shape in names of results.
  std::string Name() const { return absl::StrCat(ranks(), hubs > 0 ? "_hubs" : ""); }
};

constexpr Shape k1024 = {.agents = 128};
constexpr Shape k10000 = {.agents = 1250};
// The shape that --direct_agents 64 and --agents_per_hub 48 give.
constexpr Shape k1024Hubs = {.agents = 64, .hubs = 2, .agents_per_hub = 32};
constexpr Shape k10000Hubs = {.agents = 75, .hubs = 25, .agents_per_hub = 47};
constexpr Shape k100000Hubs = {.agents = 54, .hubs = 254, .agents_per_hub = 49};

int Rounds(const Settings& settings, int ranks) {
  const int rounds = ranks <= 2       ? 3000
                     : ranks <= 64    ? 1000
                     : ranks <= 1024  ? 200
                     : ranks <= 10000 ? 40
                                      : 20;
  return std::max(5, static_cast<int>(rounds * settings.scale));
}

// The CPU time since its construction, of the server and of this process, which is the load
// generator.
class CpuMeter {
 public:
  explicit CpuMeter(const ServerProcess& server)
      : server_(server), server_start_(server.CpuTime()), client_start_(ClientTime()) {}

  double ServerUs() const { return absl::ToDoubleMicroseconds(server_.CpuTime() - server_start_); }
  double ClientUs() const { return absl::ToDoubleMicroseconds(ClientTime() - client_start_); }

 private:
  static absl::Duration ClientTime() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return absl::DurationFromTimeval(usage.ru_utime) + absl::DurationFromTimeval(usage.ru_stime);
  }
  const ServerProcess& server_;
  const absl::Duration server_start_;
  const absl::Duration client_start_;
};

absl::StatusOr<Values> Rendezvous(const Settings& settings, const Shape& shape) {
  MUSTER_ASSIGN_OR_RETURN(const auto server, StartServer(settings));
  const CpuMeter cpu(*server);
  const absl::Time start = absl::Now();
  Cluster cluster(shape.At(server->line()));
  MUSTER_RETURN_IF_ERROR(cluster.Attach(absl::Seconds(60)));
  const double attach = absl::ToDoubleSeconds(absl::Now() - start);
  MUSTER_RETURN_IF_ERROR(cluster.Join(absl::Seconds(60)));
  const std::string key = absl::StrCat("rendezvous_", shape.Name());
  return Values{{key + "_s", absl::ToDoubleSeconds(absl::Now() - start)},
                {key + "_attach_s", attach},
                {key + "_server_cpu_s", cpu.ServerUs() / 1e6},
                {key + "_client_cpu_s", cpu.ClientUs() / 1e6}};
}

// With `idle`, also measures what the coordinator needs afterwards while only beats come.
absl::Status Barriers(const Settings& settings, const Shape& shape, bool idle) {
  MUSTER_ASSIGN_OR_RETURN(const auto server, StartServer(settings));
  const int ranks = shape.ranks();
  Cluster cluster(shape.At(server->line()));
  MUSTER_RETURN_IF_ERROR(cluster.Attach(absl::Seconds(60)));
  MUSTER_RETURN_IF_ERROR(cluster.Join(absl::Seconds(60)));
  std::vector<absl::Duration> times;
  const int rounds = Rounds(settings, ranks), warm_up = rounds / 10 + 1;
  const CpuMeter cpu(*server);
  for (int i = 0; i < rounds + warm_up; ++i) {
    MUSTER_ASSIGN_OR_RETURN(const absl::Duration took, cluster.Barrier("b", i, absl::Seconds(60)));
    if (i >= warm_up) times.push_back(took);
  }
  const std::string key = absl::StrCat("barrier_", shape.Name());
  Print({{key + "_p50_ms", Percentile(times, 0.5)},
         {key + "_p99_ms", Percentile(times, 0.99)},
         {key + "_server_cpu_us", cpu.ServerUs() / (rounds + warm_up)},
         {key + "_client_cpu_us", cpu.ClientUs() / (rounds + warm_up)}});
  if (idle) {
    // The work of the previous burst has finished by then.
    MUSTER_RETURN_IF_ERROR(cluster.Beat(absl::Seconds(2), absl::Seconds(12)));
    const CpuMeter idle_cpu(*server);
    const absl::Time start = absl::Now();
    MUSTER_RETURN_IF_ERROR(cluster.Beat(absl::Seconds(2), absl::Seconds(10)));
    const std::string name = shape.hubs > 0 ? absl::StrCat("_", shape.Name()) : "";
    Print({{absl::StrCat("rss", name, "_mb"), server->RssMb()},
           {absl::StrCat("idle", name, "_cpu_pct"),
            100 * idle_cpu.ServerUs() / absl::ToDoubleMicroseconds(absl::Now() - start)}});
  }
  return absl::OkStatus();
}

absl::StatusOr<Values> PutsVolatile(const Settings& settings) {
  MUSTER_ASSIGN_OR_RETURN(const auto server, StartServer(settings));
  constexpr int kAgents = 8, kPuts = 64;
  Cluster cluster({.address = server->line(), .agents = kAgents, .ranks_per_agent = 1});
  MUSTER_RETURN_IF_ERROR(cluster.Attach(absl::Seconds(30)));
  MUSTER_RETURN_IF_ERROR(cluster.Join(absl::Seconds(30)));
  const int frames = std::max(50, static_cast<int>(2000 * settings.scale));
  MUSTER_RETURN_IF_ERROR(cluster.Puts(frames / 10, kPuts, 8, false, absl::Seconds(60)).status());
  const CpuMeter cpu(*server);
  MUSTER_ASSIGN_OR_RETURN(const absl::Duration took,
                          cluster.Puts(frames, kPuts, 8, false, absl::Seconds(60)));
  const double puts = 1.0 * frames * kPuts * kAgents;
  return Values{{"put_volatile_per_s", puts / absl::ToDoubleSeconds(took)},
                {"put_volatile_server_cpu_us", cpu.ServerUs() / puts},
                {"put_volatile_client_cpu_us", cpu.ClientUs() / puts},
                {"put_volatile_server_rss_mb", server->RssMb()}};
}

// Uses as many agents as PutsDurable, each with one transaction in flight that has one put.
absl::StatusOr<double> PutsOneEach(const std::string& server, int agents, int frames) {
  Cluster cluster({.address = server, .job = "one_each", .agents = agents, .ranks_per_agent = 1});
  MUSTER_RETURN_IF_ERROR(cluster.Attach(absl::Seconds(30)));
  MUSTER_RETURN_IF_ERROR(cluster.Join(absl::Seconds(30)));
  MUSTER_RETURN_IF_ERROR(cluster.Puts(frames / 10, 1, 1, true, absl::Seconds(60)).status());
  MUSTER_ASSIGN_OR_RETURN(const absl::Duration took,
                          cluster.Puts(frames, 1, 1, true, absl::Seconds(120)));
  return 1.0 * frames * agents / absl::ToDoubleSeconds(took);
}

absl::Status PutsDurable(const Settings& settings) {
  const std::string dir = settings.scratch + "/durable";
  MUSTER_ASSIGN_OR_RETURN(const auto server, StartServer(settings, {"--data_dir", dir}));
  constexpr int kAgents = 64, kPuts = 8;
  Cluster cluster({.address = server->line(), .agents = kAgents, .ranks_per_agent = 1});
  MUSTER_RETURN_IF_ERROR(cluster.Attach(absl::Seconds(30)));
  MUSTER_RETURN_IF_ERROR(cluster.Join(absl::Seconds(30)));
  const int frames = std::max(20, static_cast<int>(400 * settings.scale));
  MUSTER_RETURN_IF_ERROR(cluster.Puts(frames / 10, kPuts, 4, true, absl::Seconds(60)).status());
  const CpuMeter cpu(*server);
  MUSTER_ASSIGN_OR_RETURN(const absl::Duration took,
                          cluster.Puts(frames, kPuts, 4, true, absl::Seconds(120)));
  const double puts = 1.0 * frames * kPuts * kAgents;
  const double server_us = cpu.ServerUs() / puts, client_us = cpu.ClientUs() / puts;
  MUSTER_ASSIGN_OR_RETURN(const double one_each, PutsOneEach(server->line(), kAgents, frames));
  // One writer, one put at a time.
  std::vector<absl::Duration> single;
  Cluster one({.address = server->line(), .job = "one", .agents = 1, .ranks_per_agent = 1});
  MUSTER_RETURN_IF_ERROR(one.Attach(absl::Seconds(30)));
  MUSTER_RETURN_IF_ERROR(one.Join(absl::Seconds(30)));
  for (int i = 0; i < 200; ++i) {
    MUSTER_ASSIGN_OR_RETURN(const absl::Duration each, one.Puts(1, 1, 1, true, absl::Seconds(30)));
    single.push_back(each);
  }
  Print({{"put_durable_per_s", puts / absl::ToDoubleSeconds(took)},
         {"put_durable_server_cpu_us", server_us},
         {"put_durable_client_cpu_us", client_us},
         {"put_durable_one_each_per_s", one_each},
         {"put_durable_single_p50_ms", Percentile(single, 0.5)}});
  return absl::OkStatus();
}

// A real child is killed; its parent's waitpid returns; the report travels; every agent knows.
absl::Status KillNotice(const Settings& settings) {
  MUSTER_ASSIGN_OR_RETURN(const auto server, StartServer(settings));
  Cluster cluster({.address = server->line(), .agents = 128, .ranks_per_agent = 8});
  MUSTER_RETURN_IF_ERROR(cluster.Attach(absl::Seconds(30)));
  std::vector<absl::Duration> all;
  const int rounds = std::max(3, static_cast<int>(30 * settings.scale));
  for (int i = 0; i < rounds; ++i) {
    MUSTER_RETURN_IF_ERROR(cluster.Join(absl::Seconds(60)));
    const pid_t child = fork();
    if (child < 0) return absl::ErrnoToStatus(errno, "fork");
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      pause();
      _exit(0);
    }
    const absl::Time killed = absl::Now();
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    MUSTER_ASSIGN_OR_RETURN(const std::vector<absl::Duration> told,
                            cluster.ReportKill(killed, absl::Seconds(30)));
    all.insert(all.end(), told.begin(), told.end());
  }
  Print({{"kill_notice_p99_ms", Percentile(all, 0.99)},
         {"kill_notice_p50_ms", Percentile(all, 0.5)}});
  return absl::OkStatus();
}

absl::StatusOr<Values> Restart(const Settings& settings, const Shape& shape, int run) {
  const std::string dir = absl::StrCat(settings.scratch, "/restart", shape.ranks(), "_", run);
  MUSTER_ASSIGN_OR_RETURN(
      auto server, StartServer(settings, {"--data_dir", dir, "--snapshot_records", "1000000000"}));
  const std::string address = server->line();
  Cluster cluster(shape.At(address));
  MUSTER_RETURN_IF_ERROR(cluster.Attach(absl::Seconds(60)));
  MUSTER_RETURN_IF_ERROR(cluster.Join(absl::Seconds(60)));
  constexpr int kRecords = 100'000;
  MUSTER_RETURN_IF_ERROR(
      cluster.Puts(kRecords / cluster.streams(), 1, 4, true, absl::Seconds(120)).status());
  MUSTER_RETURN_IF_ERROR(cluster.Barrier("before", 0, absl::Seconds(60)).status());
  const absl::Time killed = absl::Now();
  server->Kill();
  MUSTER_ASSIGN_OR_RETURN(server, StartServer(settings, {"--data_dir", dir, "--listen", address}));
  const double serving = absl::ToDoubleSeconds(absl::Now() - killed);
  MUSTER_RETURN_IF_ERROR(cluster.Reattach(absl::Seconds(120)));
  const double attached = absl::ToDoubleSeconds(absl::Now() - killed);
  // No rank has lost its seat: the same ranks, in the same generation, pass a barrier.
  MUSTER_RETURN_IF_ERROR(cluster.Barrier("after", 0, absl::Seconds(60)).status());
  const std::string key =
      shape.hubs > 0 ? absl::StrCat("restart_", shape.Name()) : std::string("restart");
  return Values{{key + "_s", serving},
                {key + "_all_agents_back_s", attached},
                {key + "_barrier_passed_s", absl::ToDoubleSeconds(absl::Now() - killed)}};
}

absl::Status RawSocket(const Settings& settings) {
  for (const int ranks : {2, 64, 1024, 10'000}) {
    const int rounds = std::max(5, Rounds(settings, ranks) / (ranks >= 1024 ? 2 : 1));
    absl::StatusOr<std::vector<absl::Duration>> times = RawSocketBarriers(ranks, rounds);
    MUSTER_RETURN_IF_ERROR(times.status());
    Print({{absl::StrCat("rawsocket_barrier_", ranks, "_p50_ms"), Percentile(*times, 0.5)},
           {absl::StrCat("rawsocket_barrier_", ranks, "_p99_ms"), Percentile(*times, 0.99)}});
  }
  return absl::OkStatus();
}

absl::Status TcpStore(const Settings& settings) {
  for (const int ranks : {2, 64, 1024}) {
    const int rounds = std::max(5, Rounds(settings, ranks) / (ranks >= 1024 ? 8 : 4));
    MUSTER_ASSIGN_OR_RETURN(const TcpStoreResult result, TcpStoreBarriers(ranks, rounds));
    Print({{absl::StrCat("tcpstore_barrier_", ranks, "_p50_ms"), Percentile(result.barriers, 0.5)},
           {absl::StrCat("tcpstore_barrier_", ranks, "_p99_ms"), Percentile(result.barriers, 0.99)},
           {absl::StrCat("tcpstore_connect_", ranks, "_s"), result.connect_seconds},
           {"tcpstore_add_one_client_per_s", result.adds_per_second}});
  }
  return absl::OkStatus();
}

// Does what PutsDurable does: transactions of 8 puts, 256 in flight; and single puts, 64 in flight.
absl::Status Etcd(const Settings& settings) {
  const int requests = std::max(500, static_cast<int>(10'000 * settings.scale));
  Values values;
  for (const EtcdLoad& load : {EtcdLoad{.requests = requests, .puts = 8, .in_flight = 256},
                               EtcdLoad{.requests = requests, .puts = 1, .in_flight = 64}}) {
    const absl::StatusOr<double> rate =
        EtcdPutsPerSecond(settings.etcd, absl::StrCat(settings.scratch, "/etcd", load.puts), load);
    if (absl::IsNotFound(rate.status())) {
      std::fprintf(stderr, "%s: no etcd figures (--etcd names it)\n",
                   std::string(rate.status().message()).c_str());
      return absl::OkStatus();
    }
    MUSTER_RETURN_IF_ERROR(rate.status());
    values.emplace_back(load.puts == 1 ? "etcd_put_one_each_per_s" : "etcd_put_per_s", *rate);
  }
  Print(values);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Settings settings;
  const std::string all =
      "rawsocket,tcpstore,barrier_2,barrier_64,barrier_1024,rendezvous,barrier_10000,idle,"
      "barrier_1024_hubs,barrier_10000_hubs,barrier_100k,rendezvous_100k,restart_100k,"
      "put_volatile,put_durable,kill_notice,restart,etcd";
  std::string only = all;
  CLI::App app("Measures the coordinator and its peers on this machine; one JSON object a line.",
               "bench_coordinator");
  settings.server = std::filesystem::path(argv[0]).parent_path().string() +
                    "/../../coordinator/cmd/muster-coordinator";
  app.add_option("--server", settings.server, "the muster-coordinator program")
      ->capture_default_str();
  app.add_option("--etcd", settings.etcd, "the etcd program")->capture_default_str();
  app.add_option(
         "--only", only,
         "which to run, separated by commas; idle goes with barriers of 10,000 and more: memory, "
         "and CPU while nothing but beats comes")
      ->capture_default_str();
  app.add_option("--scale", settings.scale,
                 "factor on the number of rounds; below 1, fewer than three runs where "
                 "the median of runs is printed")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const std::set<std::string> chosen = absl::StrSplit(only, ',');
  const std::set<std::string> known = absl::StrSplit(all, ',');
  for (const std::string& name : chosen) {
    if (known.contains(name)) continue;
    std::fprintf(stderr, "bench_coordinator: --only %s: not one of %s\n", name.c_str(),
                 all.c_str());
    return 2;
  }
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  char scratch[] = "/tmp/muster-bench-XXXXXX";
  if (mkdtemp(scratch) == nullptr) {
    std::perror("mkdtemp");
    return 1;
  }
  settings.scratch = scratch;
  int failures = 0;
  const auto run = [&](const std::string& name, const auto& body) {
    if (!chosen.contains(name)) return;
    const absl::Status status = body();
    if (!status.ok()) {
      std::fprintf(stderr, "bench_coordinator: %s: %s\n", name.c_str(), status.ToString().c_str());
      ++failures;
    }
  };
  // The peers that fork come before gRPC has threads.
  run("rawsocket", [&] { return RawSocket(settings); });
  run("tcpstore", [&] { return TcpStore(settings); });
  const bool idle = chosen.contains("idle");
  run("barrier_2", [&] { return Barriers(settings, {.agents = 2, .ranks_per_agent = 1}, false); });
  run("barrier_64", [&] { return Barriers(settings, {.agents = 8}, false); });
  run("barrier_1024", [&] { return Barriers(settings, k1024, false); });
  run("rendezvous",
      [&] { return Medians(settings, [&](int) { return Rendezvous(settings, k10000); }); });
  run("barrier_10000", [&] { return Barriers(settings, k10000, idle); });
  run("barrier_1024_hubs", [&] { return Barriers(settings, k1024Hubs, false); });
  run("barrier_10000_hubs", [&] { return Barriers(settings, k10000Hubs, idle); });
  run("barrier_100k", [&] { return Barriers(settings, k100000Hubs, idle); });
  run("rendezvous_100k",
      [&] { return Medians(settings, [&](int) { return Rendezvous(settings, k100000Hubs); }); });
  run("restart_100k", [&] {
    return Medians(settings, [&](int run) { return Restart(settings, k100000Hubs, run); });
  });
  run("put_volatile",
      [&] { return Medians(settings, [&](int) { return PutsVolatile(settings); }); });
  run("put_durable", [&] { return PutsDurable(settings); });
  run("kill_notice", [&] { return KillNotice(settings); });
  run("restart",
      [&] { return Medians(settings, [&](int run) { return Restart(settings, k10000, run); }); });
  run("etcd", [&] { return Etcd(settings); });
  std::error_code ignored;
  std::filesystem::remove_all(settings.scratch, ignored);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace muster::bench

int main(int argc, char** argv) { return muster::bench::Main(argc, argv); }
