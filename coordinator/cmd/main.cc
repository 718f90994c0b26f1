#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/descriptor_limit.h"
#include "base/exit_code.h"
#include "base/failpoint.h"
#include "base/flags/service_settings.h"
#include "base/log.h"
#include "base/log_variables.h"
#include "base/service_notifier.h"
#include "base/variable_list.h"
#include "base/version.h"
#include "coordinator/core.h"
#include "coordinator/hubs.h"
#include "coordinator/journal/sqlite_journal.h"
#include "coordinator/service/disk_watch.h"
#include "coordinator/service/grpc_frontend.h"
#include "coordinator/service/server.h"

namespace muster::coordinator {
namespace {

constexpr char kAbout[] =
    "Muster's coordinator: assigns seats to workers, keeps their barriers, triggers and keys, and "
    "names late ranks.\nPrints its address as one line on standard output, logs to standard error, "
    "and runs until\nSIGTERM or SIGINT.";
constexpr char kFooter[] =
    "\nCallers: on unix:PATH, processes of this user; otherwise clients with a certificate "
    "(--tls_ca) or the\ntoken (--token_file). Off the loopback interface TLS is required as "
    "well.\n\n"
    "Exit codes: 0 stopped by a signal; 2 bad flags, or no way to authenticate callers; 3 cannot "
    "serve (port taken, a\n"
    "file that cannot be read, data directory in use or not writable); 4 the journal is corrupt; "
    "5 a newer coordinator\n"
    "took over, or this one started from an older copy of its directory (the log says which, see "
    "--restored); 6 the journal\n"
    "could not be written (for a reason other than a full disk): start it again.\n\n"
    "Examples:\n"
    "  muster-coordinator --listen unix:/run/muster/coordinator.sock --data_dir /var/lib/muster\n"
    "  muster-coordinator --listen 127.0.0.1:29400 --token_file token\n"
    "  muster-coordinator --listen 10.0.0.5:29400 --tls_cert c.pem --tls_key k.pem --tls_ca "
    "ca.pem\n"
    "  muster-coordinator --config /etc/muster/coordinator.yaml\n"
    "  muster-coordinator --verify /var/lib/muster\n"
    "  muster-coordinator --restore night.backup --data_dir /var/lib/muster\n"
    "  muster-coordinator --restored /var/lib/muster    # once, on a copy of a directory\n";

int Fail(int code, const absl::Status& status) {
  std::fprintf(stderr, "muster-coordinator: %s\n", OneLine(status.message()).c_str());
  return code;
}

CoordinatorExitCode CannotServe(const absl::Status& status) {
  return absl::IsDataLoss(status) ? kExitJournalCorrupt : kExitCannotServe;
}

int CannotRead(const absl::Status& status) {
  return absl::IsInvalidArgument(status) ? int{kExitUsage} : int{CannotServe(status)};
}

// Ends after an operation on an offline journal: prints its result, or the error.
int EndWith(const absl::StatusOr<std::string>& report) {
  if (!report.ok()) return Fail(CannotRead(report.status()), report.status());
  std::printf("%s\n", report->c_str());
  return kExitOk;
}

constexpr int64_t kMostMib = int64_t{1} << 40;

struct Flags {
  CoordinatorServer::Options options;
  std::string verify, restored, restore, log_level, log_format;
  bool version = false, list_failpoints = false;
  double lease = 6, resume = 60, node_lease = 30;
  int max_message_mib = 4;
  int64_t size_warning_mib = DiskLimits().size_warning >> 20;
  int64_t free_warning_mib = DiskLimits().free_warning >> 20;
  int64_t free_least_mib = DiskLimits().free_least >> 20;
};

// Refuses an empty value: an unset variable must not turn into a coordinator that keeps nothing.
CLI::Validator NotEmpty() {
  return CLI::Validator(
      [](const std::string& text) {
        return text.empty() ? "it is empty: give a value or leave the flag out" : std::string();
      },
      "");
}

// Adds the flags of what it serves, and to whom.
void AddServiceFlags(CLI::App* app, Flags* flags) {
  app->add_option("--listen", flags->options.rpc.listen,
                  "HOST:PORT (numeric) or unix:PATH; port 0 selects a free port")
      ->capture_default_str();
  app->add_option("--data_dir", flags->options.data_dir,
                  "directory of the journal; without it everything is in memory only")
      ->check(NotEmpty());
  app->add_flag("--insecure", flags->options.rpc.insecure,
                "let every user of this machine call it, in plain text; refused off the loopback "
                "interface");
  app->add_option("--token_file", flags->options.token_file,
                  "file with the token that every call must carry; only its owner may read it")
      ->envname("MUSTER_TOKEN_FILE")
      ->check(NotEmpty());
  app->add_option("--users_file", flags->options.users_file,
                  "file with users, their roles and the hashes of their tokens (docs/security.md); "
                  "read again when it changes; only its owner may read it")
      ->envname("MUSTER_USERS_FILE")
      ->check(NotEmpty());
  app->add_option("--audit_log", flags->options.audit_log,
                  "file to which a line is appended for each call that changes something")
      ->check(NotEmpty());
  app->add_option("--checkpoint_key", flags->options.checkpoint_key,
                  "file with a private Ed25519 key (PEM), which signs the records of checkpoints; "
                  "only its owner may read it")
      ->envname("MUSTER_CHECKPOINT_KEY")
      ->check(NotEmpty());
  app->add_option("--tls_cert", flags->options.rpc.tls.cert, "PEM file of the server's certificate")
      ->check(NotEmpty());
  app->add_option("--tls_key", flags->options.rpc.tls.key, "PEM file of its key")
      ->check(NotEmpty());
  app->add_option("--tls_ca", flags->options.rpc.tls.ca,
                  "PEM file: clients must present a certificate signed by one of these")
      ->check(NotEmpty());
  app->add_flag("--reflection", flags->options.rpc.reflection,
                "list the services to any caller, for grpcurl and similar tools");
  app->add_option("--metrics_listen", flags->options.metrics_listen,
                  "HOST:PORT for HTTP: /metrics for Prometheus, and /healthz")
      ->check(NotEmpty());
}

void AddLimitFlags(CLI::App* app, Flags* flags) {
  app->add_option("--lease", flags->lease,
                  "seconds without a heartbeat after which a worker counts as lost, unless its job "
                  "sets another time")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 86400.0));
  app->add_option("--resume_window", flags->resume,
                  "seconds within which a disconnected agent can resume its session")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 86400.0));
  app->add_option("--node_lease", flags->node_lease,
                  "seconds of silence after which a node of submitted jobs is lost, if others are "
                  "heard; three times as many if none is")
      ->capture_default_str()
      ->check(CLI::Range(5.0, 90.0));
  app->add_option("--direct_agents", flags->options.runner.core.hubs.direct_agents,
                  "number of agents that connect directly; the others connect through a hub, an "
                  "agent with --hub_listen")
      ->capture_default_str()
      ->check(CLI::Range(0, 1'000'000));
  app->add_option("--agents_per_hub", flags->options.runner.core.hubs.agents_per_hub,
                  "the most agents behind one hub; 0: every agent connects directly")
      ->capture_default_str()
      ->check(CLI::Range(0, static_cast<int>(Hubs::kMaxRoster)));
  JobsOptions& jobs = flags->options.runner.core.jobs;
  app->add_option("--max_jobs_per_user", jobs.max_jobs_of_owner,
                  "submitted jobs of one user that have not ended; 0: any number")
      ->capture_default_str()
      ->check(CLI::Range(0, 1'000'000));
  app->add_option("--max_processes_per_user", jobs.max_processes_of_owner,
                  "processes that the submitted jobs of one user run at a time; 0: any number")
      ->capture_default_str()
      ->check(CLI::Range(0, 1'000'000));
  app->add_option("--max_message_mib", flags->max_message_mib, "largest message accepted, in MiB")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app->add_option("--snapshot_records", flags->options.runner.snapshot_records,
                  "records after which a snapshot is written")
      ->capture_default_str()
      ->check(CLI::Range(uint64_t{1}, uint64_t{1'000'000'000}));
}

void AddDiskFlags(CLI::App* app, Flags* flags) {
  app->add_option("--journal_size_warning_mib", flags->size_warning_mib,
                  "warn when the data directory is larger than this, in MiB; 0: never")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, kMostMib));
  app->add_option("--disk_free_warning_mib", flags->free_warning_mib,
                  "warn when its file system has less free space than this, in MiB; 0: never")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, kMostMib));
  app->add_option("--disk_free_least_mib", flags->free_least_mib,
                  "refuse new jobs when its file system has less free space than this, in MiB, "
                  "which is kept for the records of submitted jobs; 0: never")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, kMostMib));
}

// Adds the flags of the log, and of what it does instead of serving.
void AddOtherFlags(CLI::App* app, Flags* flags) {
  app->add_option("--log_level", flags->log_level,
                  "debug, info, warning or error (default: $MUSTER_LOG_LEVEL, else info)");
  app->add_option(
         "--log_format", flags->log_format,
         "text, or json: one object a line with time, level, source, file, line and message "
         "(default: $MUSTER_LOG_FORMAT, else text)")
      ->check(CLI::IsMember({"text", "json"}));
  app->add_option(
         "--verify,--verify_journal", flags->verify,
         "check the journal in this directory as a start would read it, or a backup, print "
         "the result, and exit; cuts the incomplete tail that a crash left")
      ->check(NotEmpty());
  app->add_option("--restore", flags->restore,
                  "restore this backup (muster backup) into --data_dir and exit; the previous "
                  "contents are kept next to it, and the next start behaves as after --restored")
      ->check(NotEmpty());
  app->add_option("--restored", flags->restored,
                  "mark this directory as restored from a copy of it, and exit: the next start "
                  "on it begins a term that no caller can have seen, ends every generation in it "
                  "and makes watchers read again")
      ->check(NotEmpty());
  app->add_flag(
      "--list_failpoints", flags->list_failpoints,
      "print the failpoints that MUSTER_FAILPOINTS can arm (docs/failpoints.md), and exit");
  app->add_flag("--version", flags->version, "print the version and exit");
}

// Returns nullopt to continue; else the exit code.
std::optional<int> ReadFlags(int argc, char** argv, Flags* flags) {
  CLI::App app(kAbout, "muster-coordinator");
  app.footer(kFooter);
  AddServiceFlags(&app, flags);
  AddLimitFlags(&app, flags);
  AddDiskFlags(&app, flags);
  AddOtherFlags(&app, flags);
  ServiceSettings settings(&app,
                           {.program = "muster-coordinator",
                            .prefix = "MUSTER_COORDINATOR_",
                            .actions = {"verify_journal", "restored", "list_failpoints", "version"},
                            .variables = ProcessVariables()});
  const absl::StatusOr<std::optional<std::string>> text = settings.Parse({argv + 1, argv + argc});
  if (!text.ok()) return Fail(kExitUsage, text.status());
  if (!text->has_value()) return std::nullopt;
  std::fputs((*text)->c_str(), stdout);
  return kExitOk;
}

absl::Status SetUpLog(const Flags& flags) {
  LogLevel level = GetLogLevel();
  if (!flags.log_level.empty() && !ParseLogLevel(flags.log_level, &level)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--log_level '", flags.log_level, "': debug, info, warning or error (see --help)"));
  }
  SetLogLevel(level);
  if (!flags.log_format.empty()) SetLogJson(flags.log_format == "json");
  SetLogIdentity("coordinator");
  return absl::OkStatus();
}

// Verifies a directory or a backup.
int VerifyJournal(const std::string& path) {
  Core core({});
  const auto state = [&](uint64_t, absl::string_view part) { return core.Restore(part); };
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && !S_ISDIR(info.st_mode))
    return EndWith(SqliteJournal::VerifyBackup(path, state));
  return EndWith(SqliteJournal::Verify(
      path, state, [&](uint64_t, absl::string_view record) { return core.Replay(record); }));
}

int RestoreBackup(const std::string& backup, const std::string& directory) {
  if (directory.empty()) {
    return Fail(kExitUsage, absl::InvalidArgumentError(
                                "--restore needs --data_dir, the directory to restore into"));
  }
  Core core({});
  return EndWith(SqliteJournal::Restore(
      backup, directory, [&](uint64_t, absl::string_view part) { return core.Restore(part); },
      absl::Now()));
}

absl::Status CheckServiceFlags(const Flags& flags) {
  // NaN passes any range check.
  if (std::isnan(flags.lease) || std::isnan(flags.resume) || std::isnan(flags.node_lease)) {
    return absl::InvalidArgumentError(
        "--lease, --node_lease and --resume_window are numbers of seconds");
  }
  const CoordinatorServer::Options& options = flags.options;
  const std::pair<const std::string*, const char*> ways[] = {
      {&options.token_file, "--token_file (MUSTER_TOKEN_FILE)"},
      {&options.users_file, "--users_file (MUSTER_USERS_FILE)"},
      {&options.rpc.tls.cert, "--tls_cert"}};
  for (const auto& [given, flag] : ways) {
    if (!options.rpc.insecure || given->empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--insecure and ", flag, " exclude each other: it disables authentication"));
  }
  return absl::OkStatus();
}

// Returns the next of `signals`; -1: none came within `at_most`.
int WaitForSignal(const sigset_t& signals, absl::Duration at_most) {
  while (true) {
    const timespec timeout = absl::ToTimespec(at_most);
    const int signal = at_most == absl::InfiniteDuration()
                           ? sigwaitinfo(&signals, nullptr)
                           : sigtimedwait(&signals, nullptr, &timeout);
    if (signal >= 0 || errno == EAGAIN) return signal;
  }
}

// Tells the service manager that this coordinator is alive, as long as events are applied: each
// round sends an event through the core's turn, and reports when it has come back. Used by the main
// thread.
class ServingCheck {
 public:
  ServingCheck(CoordinatorServer* server, ServiceNotifier* notifier)
      : server_(server), notifier_(notifier) {}

  // How often to call Round.
  absl::Duration period() const {
    return notifier_->active() ? std::min(notifier_->period(), kStatusPeriod)
                               : absl::InfiniteDuration();
  }
  void Begin() {
    notifier_->Ready(StatusLine());
    notifier_->Alive(Clock::Real().Now());
    Send();
  }
  void Round() {
    if (!applied_->load()) return;
    notifier_->Alive(Clock::Real().Now());
    notifier_->Status(StatusLine());
    Send();
  }

 private:
  static constexpr absl::Duration kStatusPeriod = absl::Seconds(10);

  void Send() {
    applied_->store(false);
    server_->runner().WithCore([applied = applied_](Core*) { applied->store(true); });
  }
  std::string StatusLine() const {
    CoreRunner& runner = server_->runner();
    return absl::StrCat(
        "serving on ", server_->address(), ", ", runner.agents(), " agents, ", runner.open_calls(),
        " calls wait; ",
        runner.journal_ok() ? "the journal is written" : "the journal cannot be written");
  }

  CoordinatorServer* const server_;
  ServiceNotifier* const notifier_;
  const std::shared_ptr<std::atomic<bool>> applied_ = std::make_shared<std::atomic<bool>>(false);
};

// Serves until a signal, and returns the exit code.
int Serve(CoordinatorServer::Options options, ServiceNotifier::Options notify) {
  // 1,250 agents need more descriptors than the usual soft limit.
  const uint64_t descriptors = RaiseDescriptorLimit();
  // Otherwise gRPC 1.51 keeps 8 KiB for every connection to read into, whatever rpc/server.cc asks
  // for. Its experiments are chosen by the environment only.
  setenv("GRPC_EXPERIMENTS", "-tcp_read_chunks", /*overwrite=*/0);

  // Blocked before any thread starts, so that all threads inherit it and sigwait below is the one
  // that sees them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGUSR1);
  sigaddset(&signals, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  const pthread_t main_thread = pthread_self();
  // Checked in addition to the signals: any process may send those; SLURM, for example, sends
  // SIGUSR1 before its limit.
  std::atomic<bool> deposed{false}, broken{false};
  options.on_deposed = [main_thread, &deposed] {
    deposed = true;
    pthread_kill(main_thread, SIGUSR1);
  };
  options.on_journal_broken = [main_thread, &broken] {
    broken = true;
    pthread_kill(main_thread, SIGUSR2);
  };

  absl::StatusOr<std::unique_ptr<CoordinatorServer>> server =
      CoordinatorServer::Start(std::move(options));
  if (!server.ok()) {
    if (absl::IsInvalidArgument(server.status())) return Fail(kExitUsage, server.status());
    return Fail(CannotServe(server.status()), server.status());
  }
  std::printf("%s\n", (*server)->address().c_str());
  std::fflush(stdout);
  MUSTER_LOG(Info) << "at most " << descriptors << " open files";
  MUSTER_LOG(Info) << "serving on " << (*server)->address() << ", journal "
                   << (*server)->runner().journal().description();
  if ((*server)->metrics_port() != 0)
    MUSTER_LOG(Info) << "metrics on port " << (*server)->metrics_port();
  ServiceNotifier notifier(std::move(notify));
  ServingCheck check(server->get(), &notifier);
  check.Begin();
  int signal = 0;
  while (true) {
    signal = WaitForSignal(signals, check.period());
    if (signal < 0) {
      check.Round();
    } else if ((signal != SIGUSR1 || deposed) && (signal != SIGUSR2 || broken)) {
      break;
    } else {
      MUSTER_LOG(Info) << "signal " << signal << " has no meaning here";
    }
  }
  MUSTER_LOG(Info) << (signal == SIGUSR1   ? "deposed"
                       : signal == SIGUSR2 ? "the journal has failed, a new start replays it"
                       : signal == SIGTERM ? "SIGTERM"
                                           : "SIGINT")
                   << ": stopping";
  notifier.Stopping("answers its calls and writes its journal");
  (*server)->Shutdown();
  if (signal == SIGUSR1) return kExitDeposed;
  return signal == SIGUSR2 ? int{kExitJournalFailed} : int{kExitOk};
}

int Run(int argc, char** argv) {
  Flags flags;
  if (const std::optional<int> code = ReadFlags(argc, argv, &flags)) return *code;
  if (flags.version) {
    std::printf("muster-coordinator %s\n", kVersion);
    return kExitOk;
  }
  if (flags.list_failpoints) {
    std::fputs(ListFailpoints().c_str(), stdout);
    return kExitOk;
  }
  absl::Status status = SetUpLog(flags);
  if (status.ok()) status = CheckLogVariables(ProcessVariables());
  if (status.ok()) status = ArmFailpointsFromEnvironment();
  if (!status.ok()) return Fail(kExitUsage, status);
  if (!flags.verify.empty()) return VerifyJournal(flags.verify);
  if (!flags.restore.empty()) return RestoreBackup(flags.restore, flags.options.data_dir);
  if (!flags.restored.empty()) return EndWith(SqliteJournal::MarkRestored(flags.restored));
  ServiceNotifier::Options notify = ServiceNotifier::TakeFromEnvironment();
  status = CheckServiceFlags(flags);
  if (!status.ok()) return Fail(kExitUsage, status);
  flags.options.runner.core.default_lease = absl::Seconds(flags.lease);
  JobsOptions& jobs = flags.options.runner.core.jobs;
  jobs.node_lease = absl::Seconds(flags.node_lease);
  jobs.outage_tolerance = 3 * jobs.node_lease;
  flags.options.runner.resume_window = absl::Seconds(flags.resume);
  flags.options.rpc.max_message_bytes = flags.max_message_mib << 20;
  flags.options.disk = {.size_warning = flags.size_warning_mib << 20,
                        .free_warning = flags.free_warning_mib << 20,
                        .free_least = flags.free_least_mib << 20};
  return Serve(std::move(flags.options), std::move(notify));
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) { return muster::coordinator::Run(argc, argv); }
