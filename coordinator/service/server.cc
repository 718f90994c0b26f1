#include "coordinator/service/server.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/status_macros.h"
#include "coordinator/journal/memory_journal.h"
#include "coordinator/journal/sqlite_journal.h"
#include "coordinator/web/prometheus.h"
#include "rpc/address.h"
#include "rpc/session/duration.h"
#include "rpc/token.h"

namespace muster::coordinator {
namespace {

constexpr size_t kLargestKeyFile = 16 << 10;

// Writes process_*, as Prometheus client libraries name them.
void WriteProcess(PrometheusText* text) {
  using Type = PrometheusText::Type;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double cpu = static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                     static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
  text->Family("process_cpu_seconds_total", Type::kCounter, "User and system CPU time spent.");
  text->Sample({}, cpu);
  long pages = 0, resident = 0;
  if (FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  text->Family("process_resident_memory_bytes", Type::kGauge, "Resident memory.");
  text->Sample({}, static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)));
  std::error_code error;
  double open_fds = 0;
  for (std::filesystem::directory_iterator it("/proc/self/fd", error), end; !error && it != end;
       it.increment(error)) {
    ++open_fds;
  }
  text->Family("process_open_fds", Type::kGauge, "Open file descriptors.");
  text->Sample({}, open_fds);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  text->Family("process_max_fds", Type::kGauge, "Limit of open file descriptors.");
  text->Sample({}, static_cast<double>(limit.rlim_cur));
}

// The facts that the core reports about itself, taken in its turn.
struct CoreFacts {
  CoreStats stats;
  size_t kv_bytes = 0;
  std::map<v1::WorkerState, int64_t> members;
  v1::StatusReply status;
};

// Writes a histogram of the current family.
void WriteDurations(const DurationCounts& counts, PrometheusText* text) {
  std::vector<double> bounds;
  for (int i = 0; i + 1 < DurationCounts::kBuckets; ++i) bounds.push_back(DurationCounts::Bound(i));
  text->Histogram({}, bounds,
                  std::vector<uint64_t>(std::begin(counts.buckets), std::end(counts.buckets)),
                  counts.sum_seconds);
}

void WriteCore(const CoreFacts& facts, size_t kv_limit, PrometheusText* out) {
  using Type = PrometheusText::Type;
  PrometheusText& text = *out;
  text.Family("muster_coordinator_term", Type::kGauge,
              "Starts of coordinators on this journal, this one included; 65,536 more for each "
              "--restored.");
  text.Sample({}, static_cast<double>(facts.status.header().term()));
  text.Family("muster_jobs", Type::kGauge, "Jobs known.");
  text.Sample({}, facts.status.jobs_size());
  text.Family("muster_members", Type::kGauge, "Workers of all jobs by state.");
  for (int i = v1::WorkerState_MIN; i <= v1::WorkerState_MAX; ++i) {
    const auto state = static_cast<v1::WorkerState>(i);
    if (state == v1::WORKER_STATE_UNSPECIFIED) continue;
    const auto it = facts.members.find(state);
    const std::string name = absl::AsciiStrToLower(
        v1::WorkerState_Name(state).substr(std::string("WORKER_STATE_").size()));
    text.Sample({{"state", name}},
                it == facts.members.end() ? 0.0 : static_cast<double>(it->second));
  }
  text.Family("muster_generation_changes_total", Type::kCounter,
              "Generations by what happened to them.");
  text.Sample({{"change", "sealed"}}, static_cast<double>(facts.stats.generations_sealed));
  text.Sample({{"change", "ended"}}, static_cast<double>(facts.stats.generations_ended));
  text.Family("muster_barriers_total", Type::kCounter, "Barriers by how they ended.");
  text.Sample({{"result", "passed"}}, static_cast<double>(facts.stats.barriers_passed));
  text.Sample({{"result", "failed"}}, static_cast<double>(facts.stats.barriers_failed));
  text.Family("muster_barrier_wait_seconds", Type::kHistogram,
              "Time from the first arrival to the release of passed barriers.");
  WriteDurations(facts.stats.barrier_wait, &text);
  text.Family("muster_checkpoints_total", Type::kCounter, "Checkpoints by what happened to them.");
  text.Sample({{"result", "published"}}, static_cast<double>(facts.stats.checkpoints_published));
  text.Sample({{"result", "given_up"}}, static_cast<double>(facts.stats.checkpoints_given_up));
  text.Sample({{"result", "damaged"}}, static_cast<double>(facts.stats.checkpoints_damaged));
  text.Family("muster_checkpoint_written_bytes_total", Type::kCounter,
              "Bytes of the files of published checkpoints.");
  text.Sample({}, static_cast<double>(facts.stats.checkpoint_bytes));
  text.Family("muster_checkpoint_stall_seconds", Type::kHistogram,
              "How long training waited for a checkpoint that was published.");
  WriteDurations(facts.stats.checkpoint_stall, &text);
  text.Family("muster_checkpoint_save_seconds", Type::kHistogram,
              "From the beginning of a save to the publication of its checkpoint.");
  WriteDurations(facts.stats.checkpoint_save, &text);
  int64_t saving = 0;
  double bytes = 0, written = 0, seconds = 0;
  for (const v1::JobStatus& job : facts.status.jobs()) {
    if (!job.has_save()) continue;
    ++saving;
    bytes += static_cast<double>(job.save().bytes());
    written += static_cast<double>(job.save().written_bytes());
    seconds = std::max(seconds, absl::ToDoubleSeconds(rpc::FromProto(job.save().elapsed())));
  }
  text.Family("muster_checkpoint_saves_running", Type::kGauge,
              "Jobs whose workers are writing a checkpoint.");
  text.Sample({}, static_cast<double>(saving));
  text.Family("muster_checkpoint_running_bytes", Type::kGauge,
              "Of checkpoints that are being written: bytes in all, as far as they are known.");
  text.Sample({}, bytes);
  text.Family("muster_checkpoint_running_written_bytes", Type::kGauge,
              "Of checkpoints that are being written: bytes that are in their files.");
  text.Sample({}, written);
  text.Family("muster_checkpoint_running_seconds", Type::kGauge,
              "How long the longest of these saves has lasted.");
  text.Sample({}, seconds);
  text.Family("muster_workers_lost_total", Type::kCounter, "Workers whose lease ran out.");
  text.Sample({}, static_cast<double>(facts.stats.workers_lost));
  text.Family("muster_workers_failed_total", Type::kCounter, "Workers that ended with an error.");
  text.Sample({}, static_cast<double>(facts.stats.workers_failed));
  text.Family("muster_fenced_calls_total", Type::kCounter,
              "Calls refused because the caller was stale.");
  text.Sample({}, static_cast<double>(facts.stats.fenced_calls));
  text.Family("muster_calls_without_right_total", Type::kCounter,
              "Calls refused because the caller's role does not permit them.");
  text.Sample({}, static_cast<double>(facts.stats.refused_calls));
  text.Family("muster_unproven_deposals_total", Type::kCounter,
              "Refused callers that had seen a higher term or revision without being members of a "
              "job here.");
  text.Sample({}, static_cast<double>(facts.stats.unproven_deposals));
  text.Family("muster_repeated_requests_total", Type::kCounter,
              "Repeated requests that got their first answer again.");
  text.Sample({}, static_cast<double>(facts.stats.repeated_requests));
  text.Family("muster_kv_writes_total", Type::kCounter, "Keys written.");
  text.Sample({}, static_cast<double>(facts.stats.kv_writes));
  text.Family("muster_kv_bytes", Type::kGauge, "Bytes in the keys of all jobs.");
  text.Sample({}, static_cast<double>(facts.kv_bytes));
  text.Family("muster_kv_limit_bytes", Type::kGauge, "What they may have: beyond it writes fail.");
  text.Sample({}, static_cast<double>(kv_limit));
  text.Family("muster_triggers_raised_total", Type::kCounter, "Triggers raised.");
  text.Sample({}, static_cast<double>(facts.stats.triggers_raised));
}

void WriteLoad(const CoreRunner& runner, const GrpcFrontend& frontend,
               const v1::StatusReply& status, PrometheusText* out) {
  using Type = PrometheusText::Type;
  PrometheusText& text = *out;
  text.Family("muster_agents", Type::kGauge, "Agents with a session.");
  text.Sample({}, static_cast<double>(runner.agents()));
  text.Family("muster_agents_behind_hubs", Type::kGauge, "Agents that hubs speak for.");
  text.Sample({}, status.agents_behind_hubs());
  text.Family("muster_hubs", Type::kGauge, "Agents that speak for others, or are about to.");
  text.Sample({}, status.hubs());
  text.Family("muster_watchers", Type::kGauge, "Open watch streams.");
  text.Sample({}, static_cast<double>(runner.watchers()));
  text.Family("muster_open_calls", Type::kGauge, "Calls waiting for an answer.");
  text.Sample({}, static_cast<double>(runner.open_calls()));
  text.Family("muster_silent_calls", Type::kGauge, "Calls and streams that have sent no message.");
  text.Sample({}, static_cast<double>(frontend.silent_calls()));
  text.Family("muster_held_bytes", Type::kGauge, "Bytes of the requests of waiting calls.");
  text.Sample({{"of", "agents"}}, static_cast<double>(runner.held_bytes(true)));
  text.Sample({{"of", "callers"}}, static_cast<double>(runner.held_bytes(false)));
  text.Family("muster_apply_queue_depth", Type::kGauge, "Events waiting to be applied.");
  text.Sample({}, static_cast<double>(runner.queue_depth()));
  text.Family("muster_applied_events_total", Type::kCounter, "Events applied.");
  text.Sample({}, static_cast<double>(runner.events()));
  text.Family("muster_overloaded_total", Type::kCounter,
              "Calls and sessions refused because of a limit.");
  text.Sample({}, static_cast<double>(runner.overloaded() + frontend.refused_calls()));
  text.Family("muster_quota_refusals_total", Type::kCounter,
              "Of these, calls beyond the quota of a connection or user.");
  text.Sample({{"of", "connection"}}, static_cast<double>(frontend.quota_refusals(false)));
  text.Sample({{"of", "user"}}, static_cast<double>(frontend.quota_refusals(true)));
}

void WriteJournal(const CoreRunner& runner, PrometheusText* out) {
  using Type = PrometheusText::Type;
  PrometheusText& text = *out;
  text.Family("muster_journal_backlog_bytes", Type::kGauge,
              "Bytes of records that are not on disk yet.");
  text.Sample({}, static_cast<double>(runner.journal_backlog_bytes()));
  text.Family("muster_journal_up", Type::kGauge, "1 while the journal can be written.");
  text.Sample({}, runner.journal_ok() ? 1 : 0);
  text.Family("muster_snapshot_up", Type::kGauge, "0 if the last snapshot could not be written.");
  text.Sample({}, runner.snapshot_ok() ? 1 : 0);
  text.Family("muster_snapshots_total", Type::kCounter, "Snapshots by result.");
  text.Sample({{"result", "written"}}, static_cast<double>(runner.snapshots()));
  text.Sample({{"result", "failed"}}, static_cast<double>(runner.snapshot_failures()));
  text.Family("muster_snapshot_bytes", Type::kGauge, "Size of the last snapshot.");
  text.Sample({}, static_cast<double>(runner.snapshot_bytes()));
  text.Family("muster_snapshot_seconds", Type::kGauge,
              "How long the last snapshot took; 0: none was written.");
  text.Sample({}, absl::ToDoubleSeconds(runner.snapshot_took()));
  text.Family("muster_journal_records_total", Type::kCounter, "Records made durable.");
  text.Sample({}, static_cast<double>(runner.journal_records()));
  text.Family("muster_journal_written_bytes_total", Type::kCounter,
              "Bytes of records made durable.");
  text.Sample({}, static_cast<double>(runner.journal_bytes()));
}

void WriteDisk(const DiskWatch& disk, PrometheusText* out) {
  using Type = PrometheusText::Type;
  PrometheusText& text = *out;
  const DiskSizes sizes = disk.sizes();
  text.Family("muster_data_dir_bytes", Type::kGauge, "Bytes of the files in the data directory.");
  text.Sample({}, static_cast<double>(sizes.used));
  text.Family("muster_data_dir_free_bytes", Type::kGauge,
              "Bytes that its file system has left for the coordinator.");
  text.Sample({}, static_cast<double>(sizes.free));
  text.Family("muster_submissions_open", Type::kGauge,
              "0 while no job can be submitted because the disk is nearly full.");
  text.Sample({}, disk.has_room() ? 1 : 0);
}

void WriteTimes(const CoreRunner& runner, PrometheusText* out) {
  using Type = PrometheusText::Type;
  PrometheusText& text = *out;
  text.Family("muster_op_seconds", Type::kHistogram,
              "Time from an operation's turn to its answer, durable where it must be; of calls and "
              "of agents' streams. Operations that wait by design wait here too.");
  for (int kind = 0; kind < CoreRunner::kOpKinds; ++kind) {
    const auto* field = v1::Op::descriptor()->FindFieldByNumber(kind);
    if (field == nullptr || field->containing_oneof() == nullptr) continue;
    const DurationHistogram& seconds = runner.op_seconds(kind);
    text.Histogram({{"op", field->name()}}, DurationHistogram::BoundsInSeconds(), seconds.Counts(),
                   seconds.SumSeconds());
  }
  text.Family("muster_journal_fsync_seconds", Type::kHistogram,
              "Time of a group commit with its fsync.");
  text.Histogram({}, DurationHistogram::BoundsInSeconds(), runner.fsync_seconds().Counts(),
                 runner.fsync_seconds().SumSeconds());
}

// Lets the key in the file, if there is one, sign the manifests of checkpoints.
absl::Status SetCheckpointKey(const std::string& file, CoreOptions* core) {
  if (file.empty()) return absl::OkStatus();
  MUSTER_ASSIGN_OR_RETURN(const std::string pem,
                          ReadSecretFile(file, "checkpoint_key", "private key", kLargestKeyFile));
  MUSTER_ASSIGN_OR_RETURN(const SigningKey key,
                          SigningKey::Parse(pem, absl::StrCat("checkpoint_key: '", file, "'")));
  core->sign_checkpoint = [key](absl::string_view sha256) { return key.Sign(sha256); };
  return absl::OkStatus();
}

absl::StatusOr<rpc::Address> AddressOf(absl::string_view setting, const std::string& text) {
  absl::StatusOr<rpc::Address> address = rpc::ParseAddress(text);
  if (address.ok()) return address;
  return absl::InvalidArgumentError(absl::StrCat(setting, ": ", address.status().message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<CoordinatorServer>> CoordinatorServer::Start(Options options) {
  std::unique_ptr<CoordinatorServer> self(new CoordinatorServer());
  self->started_ = Clock::Real().Now();
  MUSTER_ASSIGN_OR_RETURN(const rpc::Address address, AddressOf("listen", options.rpc.listen));
  std::string token;
  if (!options.token_file.empty()) {
    MUSTER_ASSIGN_OR_RETURN(token, rpc::ReadToken(options.token_file, "token_file"));
  } else if (options.users_file.empty() && address.is_unix() &&
             !options.rpc.only_user.has_value()) {
    options.rpc.only_user = geteuid();
  }
  Callers::Options of_callers{.token = std::move(token), .users_file = options.users_file};
  // Users present a token or a certificate.
  options.rpc.checks_token = !of_callers.token.empty() || !options.users_file.empty();
  options.rpc.certificate_optional = !options.users_file.empty();
  MUSTER_RETURN_IF_ERROR(SetCheckpointKey(options.checkpoint_key, &options.runner.core));
  // Checked before the journal is touched.
  MUSTER_RETURN_IF_ERROR(rpc::CheckCallersAreKnown(options.rpc));
  rpc::Address metrics_address;
  if (!options.metrics_listen.empty()) {
    MUSTER_ASSIGN_OR_RETURN(metrics_address, AddressOf("metrics_listen", options.metrics_listen));
    if (metrics_address.is_unix()) {
      return absl::InvalidArgumentError(
          absl::StrCat("metrics_listen: ", options.metrics_listen,
                       " is a unix socket; write HOST:PORT, because metrics are read over HTTP"));
    }
  }
  std::unique_ptr<Journal> journal = std::move(options.journal);
  if (journal == nullptr && options.data_dir.empty()) journal = std::make_unique<MemoryJournal>();
  if (journal == nullptr) {
    MUSTER_ASSIGN_OR_RETURN(journal, SqliteJournal::Open({.directory = options.data_dir}));
  }
  // The file is next to the journal, whose lock this process has.
  MUSTER_ASSIGN_OR_RETURN(
      AttemptTokens attempts,
      AttemptTokens::Open(options.data_dir.empty() ? ""
                                                   : JoinPath(options.data_dir, "attempts.key")));
  self->attempts_ = std::make_unique<AttemptTokens>(std::move(attempts));
  of_callers.attempts = self->attempts_.get();
  options.runner.core.jobs.attempt_token =
      [attempts = self->attempts_.get()](absl::string_view group) { return attempts->Of(group); };
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<Callers> callers, Callers::Create(std::move(of_callers)));
  std::unique_ptr<AuditLog> audit;
  if (!options.audit_log.empty()) {
    MUSTER_ASSIGN_OR_RETURN(audit, AuditLog::Open(options.audit_log));
  }
  // Both ends have the same limit: an answer that exceeds it is replaced by an error that fits.
  options.runner.limits.answer_bytes =
      static_cast<size_t>(std::max(4096, options.rpc.max_message_bytes) - 1024);
  self->kv_limit_ = options.runner.core.kv_bytes;
  self->runner_ = std::make_unique<CoreRunner>(options.runner, std::move(journal));
  CoordinatorServer* raw = self.get();
  self->frontend_ =
      std::make_unique<GrpcFrontend>(self->runner_.get(), &self->rpc_metrics_, self->started_,
                                     options.frontend, std::move(callers), std::move(audit));
  self->runner_->set_on_deposed(std::move(options.on_deposed));
  self->runner_->set_on_catch_up([raw](absl::Time asked) { raw->frontend_->CatchUp(asked); });
  self->runner_->set_on_journal_health(
      [raw, broken = std::move(options.on_journal_broken)](const absl::Status& status) {
        raw->frontend_->SetServing(status.ok());
        if (!status.ok() && !absl::IsResourceExhausted(status) && broken) broken();
      });
  MUSTER_RETURN_IF_ERROR(self->runner_->Start());
  if (!options.data_dir.empty()) {
    self->disk_ = std::make_unique<DiskWatch>(
        DiskWatch::Options{.directory = options.data_dir,
                           .limits = options.disk,
                           .measure = std::move(options.measure_disk),
                           .on_judged = [raw](const DiskJudgement& judgement) {
                             raw->runner_->WithCore([judgement](Core* core) {
                               if (core != nullptr)
                                 core->SetWarnings(judgement.warnings, judgement.no_room);
                             });
                           }});
    self->disk_->Start();
  }
  MUSTER_FAILPOINT_STATUS("server.listen");
  options.rpc.health = false;  // GrpcFrontend has it: gRPC's own would bring more polling threads
  MUSTER_ASSIGN_OR_RETURN(self->server_,
                          rpc::Server::Start(options.rpc, {}, [raw](grpc::ServerBuilder& builder) {
                            raw->frontend_->Register(builder);
                          }));
  self->frontend_->Serve();
  if (!options.metrics_listen.empty()) {
    MUSTER_RETURN_IF_ERROR(self->StartHttp(metrics_address));
  }
  return self;
}

absl::Status CoordinatorServer::StartHttp(const rpc::Address& address) {
  const auto metrics = [this] {
    return HttpServer::Response{
        .status = 200, .content_type = kPrometheusContentType, .body = Metrics()};
  };
  MUSTER_ASSIGN_OR_RETURN(
      http_, HttpServer::Start(address.host, address.port,
                               {{"/metrics", metrics}, {"/healthz", [this] { return Health(); }}}));
  return absl::OkStatus();
}

CoordinatorServer::~CoordinatorServer() { Shutdown(); }

void CoordinatorServer::Shutdown() {
  MUSTER_FAILPOINT("server.shutdown");
  http_.reset();
  if (frontend_ != nullptr) {
    frontend_->SetServing(false);
    frontend_->EndHealthWatches();
  }
  if (disk_ != nullptr) disk_->Stop();
  if (runner_ != nullptr) runner_->Stop();
  if (server_ != nullptr) server_->Shutdown(absl::Seconds(2));
  if (frontend_ != nullptr) frontend_->Shutdown();
}

HttpServer::Response CoordinatorServer::Health() const {
  const bool ok = runner_->journal_ok();
  return {.status = ok ? 200 : 503,
          .content_type = "text/plain; charset=utf-8",
          .body = !ok ? "the journal cannot be written\n"
                  : runner_->snapshot_ok()
                      ? "ok\n"
                      : "ok, but the last snapshot could not be written: the journal grows, see "
                        "the log\n"};
}

std::string CoordinatorServer::Metrics() {
  PrometheusText text;
  rpc_metrics_.Write(&text);
  CoreFacts facts;
  Notification done;
  runner_->WithCore([&](Core* core) {
    if (core != nullptr) {
      facts.stats = core->stats();
      facts.kv_bytes = core->kv_bytes();
      facts.members = core->MembersByState();
      core->FillStatus(&facts.status);
    }
    done.Notify();
  });
  done.WaitForNotification();
  WriteCore(facts, kv_limit_, &text);
  WriteLoad(*runner_, *frontend_, facts.status, &text);
  WriteJournal(*runner_, &text);
  if (disk_ != nullptr) WriteDisk(*disk_, &text);
  WriteTimes(*runner_, &text);
  WriteProcess(&text);
  return text.text();
}

}  // namespace muster::coordinator
