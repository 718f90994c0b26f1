#include "client/cli/info_commands.h"

#include <google/protobuf/stubs/common.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "absl/base/config.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/defaults.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/units.h"
#include "base/version.h"
#include "client/checkpoints/seal_marks.h"
#include "client/cli/command.h"
#include "client/cli/connection.h"
#include "client/cli/job_group.h"
#include "client/cli/launch_command.h"
#include "client/cli/open_backend.h"
#include "client/cli/output.h"
#include "client/cli/torch_version.h"
#include "client/jobs/client_on_channel.h"
#include "client/jobs/job_backend.h"
#include "proto/checkpoint_verdict.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/checkpoint.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

// The most in the table; the JSON has all.
constexpr size_t kShownStragglers = 3;
constexpr size_t kShownBarriers = 4;
constexpr int kShownReasons = 16;

// The value of -o, or --json, which is older.
std::string FormatOf(const CommandLine& line) {
  if (line.Has("output")) return line.Get("output");
  return line.Get("json") == "true" ? "json" : "text";
}
std::string JsonText(const ordered_json& value, const std::string& format) {
  return format == "yaml" ? YamlText(value) : Dump(value);
}

std::string ProtobufVersion() {
  return google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION);
}

std::string GigaBytes(int64_t bytes) { return absl::StrFormat("%.1f GiB", bytes / 1073741824.0); }

std::string DurationText(const google::protobuf::Duration& duration, int digits = 1) {
  return absl::StrFormat("%.*fs", digits, absl::ToDoubleSeconds(rpc::FromProto(duration)));
}

// Makes texts of programs safe: names, paths, phases, how they have ended. They must not control
// the terminal of a user who looks at a job.
std::string Shown(absl::string_view text) { return Printable(text, /*max_bytes=*/64 << 10); }

std::string OpenBarrierText(const v1::BarrierReport& report) {
  return absl::StrCat(Shown(report.barrier_id()), " counter ", report.counter(), ": ",
                      report.arrived(), " of ", report.expected(), " ranks have arrived, open for ",
                      DurationText(report.open_for()));
}

std::string EndedBarrierText(const v1::BarrierReport& report) {
  if (!report.message().empty()) return Shown(report.message());
  return absl::StrCat("barrier ", Shown(report.barrier_id()), " counter ", report.counter(),
                      " passed: ", report.arrived(), " ranks, first rank ", report.first_rank(),
                      ", last rank ", report.last_rank(), " after ",
                      DurationText(report.open_for(), 3));
}

std::string BarrierText(const v1::BarrierReport& report) {
  return report.state() == v1::BARRIER_STATE_OPEN ? OpenBarrierText(report)
                                                  : EndedBarrierText(report);
}

absl::Status ListBarriers(const std::shared_ptr<grpc::Channel>& channel, const std::string& job,
                          bool only_open, absl::Duration timeout, v1::ListBarriersReply* reply) {
  v1::ListBarriersRequest request;
  request.set_job_id(job);
  request.set_only_open(only_open);
  grpc::ClientContext call;
  rpc::SetTimeout(call, timeout);
  return rpc::FromGrpc(v1::Barrier::NewStub(channel)->List(&call, request, reply));
}

std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) text = "{}";
  return text;
}

std::string StateName(v1::WorkerState state) {
  return absl::StrReplaceAll(v1::WorkerState_Name(state), {{"WORKER_STATE_", ""}});
}

}  // namespace

int RunVersionCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {.name = "muster version", .summary = "Prints Muster's version."};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  context.out << "muster " << kVersion << "\n";
  return kExitOk;
}

namespace {

std::string TorchText() { return absl::StrCat(kTorchVersion, " (expected)"); }
std::string AbseilText() { return absl::StrCat(ABSL_LTS_RELEASE_VERSION); }
std::string CompilerText() { return absl::StrCat("g++ ", __VERSION__); }
std::string KernelText(const Machine& machine) {
  return absl::StrCat(machine.kernel, " ", machine.architecture);
}

// The variables that affect a launch on this machine.
ordered_json VariablesJson(const CommandContext& context) {
  ordered_json variables = ordered_json::object();
  for (const char* name :
       {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"}) {
    const auto it = context.variables.find(name);
    if (it != context.variables.end()) variables[name] = it->second;
  }
  for (const auto& [name, value] : context.variables) {
    if (name.rfind("MUSTER_", 0) == 0) variables[name] = value;
  }
  return variables;
}

// The facts that `muster env` prints.
struct EnvFacts {
  Machine machine;
  ConfigPath path;
  absl::StatusOr<LaunchConfig> config;
  ordered_json variables;
};

ordered_json EnvJson(const EnvFacts& env) {
  const Machine& machine = env.machine;
  ordered_json gpus = ordered_json::array();
  for (const Gpu& gpu : machine.gpus)
    gpus.push_back(gpu.model.empty() ? "unknown model" : gpu.model);
  return {
      {"muster", kVersion},
      {"torch", TorchText()},
      {"grpc", grpc::Version()},
      {"protobuf", ProtobufVersion()},
      {"abseil", AbseilText()},
      {"compiler", CompilerText()},
      {"system", machine.system},
      {"kernel", KernelText(machine)},
      {"host", machine.hostname},
      {"cpu", machine.cpu_model},
      {"cores", machine.cores},
      {"memory_bytes", machine.memory_bytes},
      {"memory_available_bytes", machine.memory_available_bytes},
      {"nvidia_driver", machine.driver},
      {"gpus", gpus},
      {"usable_gpus", machine.usable_gpus},
      {"config_file", env.path.path},
      {"config_error", env.config.ok() ? "" : std::string(env.config.status().message())},
      {"variables", env.variables},
  };
}

std::string EnvText(const EnvFacts& env) {
  const Machine& machine = env.machine;
  const ConfigPath& path = env.path;
  std::string text;
  const auto row = [&](absl::string_view name, absl::string_view value) {
    absl::StrAppendFormat(&text, "%-14s %s\n", name, value.empty() ? "-" : value);
  };
  row("muster", kVersion);
  row("torch", TorchText());
  row("grpc", grpc::Version());
  row("protobuf", ProtobufVersion());
  row("abseil", AbseilText());
  row("compiler", CompilerText());
  row("system", machine.system);
  row("kernel", KernelText(machine));
  row("host", machine.hostname);
  row("cpu", absl::StrCat(machine.cpu_model, " (", machine.cores, " cores to use)"));
  row("memory", absl::StrCat(GigaBytes(machine.memory_bytes), ", ",
                             GigaBytes(machine.memory_available_bytes), " available"));
  row("nvidia driver", machine.driver);
  row("gpus", machine.gpus.empty()
                  ? "none"
                  : absl::StrCat(machine.gpus.size(), ", ", machine.usable_gpus, " to use"));
  for (const Gpu& gpu : machine.gpus) row("", absl::StrCat(gpu.index, ": ", gpu.model));
  for (const auto& [name, value] : env.variables.items())
    row("variable", absl::StrCat(name, "=", value.get<std::string>()));
  row("config", path.path.empty() ? "none found" : absl::StrCat(path.path, " (", path.source, ")"));
  if (!env.config.ok()) {
    row("config error", env.config.status().message());
    return text;
  }
  return absl::StrCat(text, "\nmuster launch would use:\n", DescribeLaunch(*env.config));
}

}  // namespace

int RunEnvCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster env",
      .summary = "Prints versions, devices and libraries: include them in a bug report.",
      .usage = "[OPTIONS]",
      .options = {
          OutputOption({"text", "json", "yaml"}),
          {.name = "json", .help = "As -o json"},
          {.name = "config_file", .value_name = "FILE", .help = "The config file to show"}}};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  EnvFacts env = {.machine = ReadMachine(context.variables),
                  .path = {},
                  .config = absl::UnknownError("not read"),
                  .variables = VariablesJson(context)};
  env.config = ReadLaunchConfig(line, context.variables, &env.path);
  const std::string format = FormatOf(line);
  context.out << (format == "text" ? EnvText(env) : JsonText(EnvJson(env), format));
  return kExitOk;
}

namespace {

// Each of the following adds lines to the table of `muster status` and returns the same as JSON.
ordered_json AddMembers(const v1::GetMembersReply& members, std::string* table) {
  ordered_json rows = ordered_json::array();
  for (const v1::Member& member : members.members()) {
    rows.push_back({{"rank", member.rank()},
                    {"worker_id", member.worker_id()},
                    {"state", StateName(member.state())},
                    {"host", member.host()},
                    {"pid", member.pid()},
                    {"last_step", member.last_step()},
                    {"heartbeat_age", DurationText(member.heartbeat_age())},
                    {"phase", member.phase()},
                    {"last_collective", member.last_collective()},
                    {"exit", member.exit().message()},
                    {"why_rank", member.why_rank()}});
    const std::string doing =
        member.exit().message().empty() ? member.phase() : member.exit().message();
    absl::StrAppendFormat(table, "  %5d %-12s %-9s %-20s %8d %8d %9s  %s\n", member.rank(),
                          Shown(member.worker_id()), StateName(member.state()),
                          Shown(member.host()), member.pid(), member.last_step(),
                          DurationText(member.heartbeat_age()), Shown(doing));
  }
  return rows;
}

// Why the workers have their ranks, or wait for one: consecutive workers with the same reason
// together.
std::string RanksText(const v1::GetMembersReply& members) {
  std::string text;
  int shown = 0;
  for (int i = 0, end = 0; i < members.members_size(); i = end) {
    const v1::Member& first = members.members(i);
    for (end = i + 1; end < members.members_size(); ++end) {
      const v1::Member& next = members.members(end);
      if (next.why_rank() != first.why_rank() || (next.rank() < 0) != (first.rank() < 0)) break;
    }
    if (first.why_rank().empty()) continue;  // an older coordinator
    if (++shown > kShownReasons) return absl::StrCat(text, "  ... (--json has all)\n");
    const v1::Member& last = members.members(end - 1);
    std::string who =
        first.rank() >= 0 ? absl::StrCat("rank ", first.rank()) : Shown(first.worker_id());
    if (end - i > 1) {
      who = first.rank() >= 0 ? absl::StrCat("ranks ", first.rank(), " to ", last.rank())
                              : absl::StrCat(end - i, " workers");
    }
    absl::StrAppend(&text, "  ", who, ": ", Printable(first.why_rank(), 200), "\n");
  }
  return text;
}

ordered_json AddStragglers(const v1::StragglerReportReply& report, std::string* table) {
  ordered_json stragglers = ordered_json::array();
  for (const v1::StragglerRow& row : report.rows()) {
    if (row.barriers() == 0) continue;
    if (stragglers.size() < kShownStragglers) {
      absl::StrAppendFormat(table, "%s rank %d by %s on average, %s at most, last in %d of %d",
                            stragglers.empty() ? "  late at barriers:" : ";", row.rank(),
                            DurationText(row.mean_lateness(), 3),
                            DurationText(row.max_lateness(), 3), row.times_last(), row.barriers());
    }
    stragglers.push_back({{"rank", row.rank()},
                          {"barriers", row.barriers()},
                          {"times_last", row.times_last()},
                          {"mean_lateness", DurationText(row.mean_lateness(), 6)},
                          {"max_lateness", DurationText(row.max_lateness(), 6)}});
  }
  if (!stragglers.empty()) absl::StrAppend(table, "\n");
  return stragglers;
}

ordered_json AddQuarantined(const v1::JobStatus& job, std::string* table) {
  ordered_json quarantined = ordered_json::array();
  for (const v1::QuarantinedHost& host : job.quarantined()) {
    quarantined.push_back({{"host", host.host()},
                           {"left", DurationText(host.left())},
                           {"automatic", host.automatic()},
                           {"reason", host.reason()}});
    absl::StrAppend(table, "  quarantined ",
                    host.automatic() ? "by itself: " : "by an operator: ", Shown(host.host()),
                    " for another ", DurationText(host.left(), 0),
                    host.reason().empty() ? "" : ": ", Shown(host.reason()), "\n");
  }
  return quarantined;
}

ordered_json AddOpenBarriers(const v1::ListBarriersReply& open, std::string* table) {
  ordered_json barriers = ordered_json::array();
  for (const v1::BarrierReport& report : open.reports()) {
    if (barriers.size() < kShownBarriers)
      absl::StrAppend(table, "  waiting at barrier ", OpenBarrierText(report), "\n");
    barriers.push_back({{"name", report.barrier_id()},
                        {"counter", report.counter()},
                        {"arrived", report.arrived()},
                        {"expected", report.expected()},
                        {"open_for", DurationText(report.open_for())}});
  }
  return barriers;
}

// Describes silent workers, and what the next generation waits for.
std::string WaitingText(const v1::JobStatus& job) {
  std::string text;
  if (job.silent() > 0) {
    absl::StrAppend(&text, "  ", job.silent(), job.silent() == 1 ? " worker" : " workers",
                    " silent for ", DurationText(job.silent_for(), 0),
                    ", not yet considered lost: ", Shown(job.silent_why()), "\n");
  }
  if (!job.waits_for().empty()) {
    absl::StrAppend(&text, "  waits for ", Shown(job.waits_for()));
    if (job.has_waits_at_most()) {
      const absl::Time until = absl::Now() + rpc::FromProto(job.waits_at_most());
      absl::StrAppend(&text, ", until ",
                      absl::FormatTime("%H:%M:%S", until, absl::LocalTimeZone()));
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

// The checkpoint that the job's workers are writing.
std::string SaveText(const v1::JobStatus& job) {
  if (!job.has_save()) return "";
  const v1::SaveProgress& save = job.save();
  std::string text = "  saving";
  if (!save.path().empty()) absl::StrAppend(&text, " ", Shown(save.path()));
  absl::StrAppend(&text, " of step ", save.step(), save.asynchronous() ? " beside training" : "",
                  ": ", HumanBytes(static_cast<int64_t>(save.written_bytes())), " of ",
                  HumanBytes(static_cast<int64_t>(save.bytes())), " by ", job.saving(),
                  job.saving() == 1 ? " rank" : " ranks");
  const absl::Duration elapsed = rpc::FromProto(save.elapsed());
  if (const double seconds = absl::ToDoubleSeconds(elapsed); seconds > 0) {
    const double rate = std::min(static_cast<double>(save.written_bytes()) / seconds, 1e18);
    absl::StrAppend(&text, ", ", HumanBytes(static_cast<int64_t>(rate)), "/s");
  }
  return absl::StrCat(text, ", for ", HumanDuration(elapsed), "\n");
}

ordered_json SaveJson(const v1::JobStatus& job) {
  if (!job.has_save()) return nullptr;
  const v1::SaveProgress& save = job.save();
  return {{"path", save.path()},
          {"step", save.step()},
          {"written_bytes", save.written_bytes()},
          {"bytes", save.bytes()},
          {"elapsed", DurationText(save.elapsed(), 3)},
          {"asynchronous", save.asynchronous()},
          {"ranks", job.saving()}};
}

// Adds one job, with facts that need separate calls.
absl::StatusOr<ordered_json> AddJob(const Connection& connection, const v1::JobStatus& job,
                                    std::string* table) {
  v1::GetMembersReply members;
  const absl::Status listed = ListMembers(connection, job.job_id(), &members);
  const bool too_many = rpc::GetReason(listed) == v1::ERROR_REASON_LIMIT;
  if (!too_many) MUSTER_RETURN_IF_ERROR(listed);
  absl::StrAppendFormat(table, "\n%s: generation %d, %s, %d workers, steps %d to %d\n",
                        Shown(job.job_id()), job.generation(), job.rendezvous_state(),
                        job.world_size(), job.min_step(), job.max_step());
  if (too_many) {
    absl::StrAppend(table, "  (more workers than one message can list)\n");
  } else {
    absl::StrAppendFormat(table, "  %5s %-12s %-9s %-20s %8s %8s %9s  %s\n", "RANK", "WORKER",
                          "STATE", "HOST", "PID", "STEP", "HEARTBEAT", "DOING");
  }
  ordered_json rows = AddMembers(members, table);
  absl::StrAppend(table, RanksText(members));
  absl::StrAppend(table, SaveText(job));

  v1::StragglerReportReply report;
  MUSTER_RETURN_IF_ERROR(ReadStragglers(connection, job.job_id(), &report));
  ordered_json stragglers = AddStragglers(report, table);
  ordered_json quarantined = AddQuarantined(job, table);
  absl::StrAppend(table, WaitingText(job));

  v1::ListBarriersReply open;
  MUSTER_RETURN_IF_ERROR(ListBarriers(connection.channel, job.job_id(), /*only_open=*/true,
                                      connection.timeout, &open));
  ordered_json barriers = AddOpenBarriers(open, table);
  return ordered_json{{"job_id", job.job_id()},
                      {"generation", job.generation()},
                      {"state", job.rendezvous_state()},
                      {"world_size", job.world_size()},
                      {"waiting", job.waiting()},
                      {"waits_for", job.waits_for()},
                      {"silent", job.silent()},
                      {"min_step", job.min_step()},
                      {"max_step", job.max_step()},
                      {"save", SaveJson(job)},
                      {"workers", std::move(rows)},
                      {"stragglers", std::move(stragglers)},
                      {"open_barriers", std::move(barriers)},
                      {"quarantined", std::move(quarantined)}};
}

}  // namespace

int RunStatusCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster status",
      .summary = "Shows the jobs and workers of a running coordinator.",
      .usage = "[JOB] [OPTIONS]",
      .details =
          "Exit codes: 0 shown; 2 wrong options; 3 no such job; 7 no coordinator answers;\n8 it "
          "requires a token, or a different one.",
      .options = ConnectionOptions(
          {OutputOption({"text", "json", "yaml", "name"}), {.name = "json", .help = "As -o json"}}),
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  const std::string& address = connection.address;
  v1::StatusReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status =
      rpc::FromGrpc(v1::Admin::NewStub(connection.channel)->Status(&call, {}, &reply));
  if (!status.ok()) return FailCall(spec, context, status);
  std::string wanted = line.words.empty() ? "" : line.words[0];
  const auto is_known = [&](const std::string& name) {
    return std::any_of(reply.jobs().begin(), reply.jobs().end(),
                       [&](const v1::JobStatus& job) { return job.job_id() == name; });
  };
  bool is_submitted = false;
  if (!wanted.empty()) {
    // A submitted job; for a program without Muster's library only the agents are known.
    const absl::StatusOr<std::string> group = GroupOf(connection, wanted);
    if (!group.ok()) return FailCall(spec, context, group.status());
    is_submitted = *group != wanted && !absl::StartsWith(wanted, kLaunchPrefix);
    for (const std::string& name : {*group, *group + kAgentsSuffix}) {
      if (!is_known(name)) continue;
      wanted = name;
      break;
    }
  } else {
    RemoveAgentGroups(&reply);
  }
  ordered_json jobs = ordered_json::array();
  std::string table;
  for (const v1::JobStatus& job : reply.jobs()) {
    if (!wanted.empty() && job.job_id() != wanted) continue;
    std::string text;
    absl::StatusOr<ordered_json> described = AddJob(connection, job, &text);
    if (absl::IsNotFound(described.status())) continue;  // it was removed since it was listed
    if (!described.ok()) return FailCall(spec, context, described.status());
    table += text;
    jobs.push_back(*std::move(described));
  }
  if (!wanted.empty() && jobs.empty()) {
    if (is_submitted) {
      return Fail(spec, context,
                  absl::NotFoundError(
                      absl::StrCat("no process of job ", line.words[0],
                                   " has joined through Muster's library yet (processes of other "
                                   "programs never do), or the job has ended; muster describe ",
                                   line.words[0], " shows where they run")),
                  kExitNotFound);
    }
    return Fail(spec, context,
                SuggestJob(connection, line.words[0],
                           absl::NotFoundError(absl::StrCat("the coordinator at ", address,
                                                            " has no job ", wanted))),
                kExitNotFound);
  }
  const std::string format = FormatOf(line);
  if (format == "name") {
    for (const ordered_json& job : jobs) {
      context.out << Printable(job["job_id"].get<std::string>()) << "\n";
    }
    return kExitOk;
  }
  if (format != "text") {
    context.out << JsonText(
        {{"coordinator", address},
         {"version", reply.version()},
         {"uptime", DurationText(reply.uptime())},
         {"agents", reply.agents()},
         {"agents_behind_hubs", reply.agents_behind_hubs()},
         {"hubs", reply.hubs()},
         {"journal", reply.journal()},
         {"warnings", std::vector<std::string>(reply.warnings().begin(), reply.warnings().end())},
         {"jobs", jobs}},
        format);
    return kExitOk;
  }
  context.out << "coordinator " << address << ", version " << reply.version() << ", up "
              << DurationText(reply.uptime()) << ", " << reply.agents() << " agents in jobs"
              << (reply.agents_behind_hubs() == 0
                      ? std::string()
                      : absl::StrCat(" (", reply.agents_behind_hubs(), " behind ", reply.hubs(),
                                     reply.hubs() == 1 ? " hub)" : " hubs)"))
              << ", " << jobs.size() << (jobs.size() == 1 ? " job\n" : " jobs\n");
  for (const std::string& warning : reply.warnings()) {
    context.out << "warning: " << Printable(warning, 400) << "\n";
  }
  context.out << table;
  if (jobs.empty()) {
    context.err << "no process has joined a job; where jobs are submitted (muster submit), muster "
                   "list shows also those that wait or have ended\n";
  }
  return kExitOk;
}

int RunTriggerCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster trigger",
      .summary = "Makes all processes of a job act at the same step.",
      .usage = "JOB NAME [OPTIONS]",
      .details =
          "NAME is stop, on which should_stop() acts, or any name for which the program calls "
          "check_trigger().\nReturns at once; the job acts when all its processes have seen the "
          "trigger: never, if the program\nchecks for none.\n"
          "Exit codes: 0 raised; 2 wrong options; 3 no such job; 7 no coordinator answers;\n8 it "
          "requires a token, or a different one.",
      .options = ConnectionOptions(
          {{.name = "payload", .value_name = "TEXT", .help = "Text passed to the program"},
           {.name = "at_step",
            .value_name = "N",
            .help = "Before step N (counted from 1), not the earliest that all can reach"}}),
      .max_words = 2};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  if (line.words.size() != 2) {
    return Fail(spec, context, absl::InvalidArgumentError("write muster trigger JOB NAME"),
                kExitUsage);
  }
  v1::RaiseTriggerRequest request;
  request.set_name(line.words[1]);
  request.set_payload(line.Get("payload"));
  if (line.Has("at_step")) {
    int64_t step = 0;
    if (!absl::SimpleAtoi(line.Get("at_step"), &step) || step < 1) {
      return Fail(spec, context,
                  absl::InvalidArgumentError(absl::StrCat("--at_step ", line.Get("at_step"),
                                                          ": write a step from 1 to ",
                                                          std::numeric_limits<int64_t>::max())),
                  kExitUsage);
    }
    request.set_align(v1::TRIGGER_ALIGN_AT_STEP);
    request.set_step(step);
  }
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  const absl::StatusOr<std::string> group = GroupOf(connection, line.words[0]);
  if (!group.ok()) return FailCall(spec, context, group.status());
  request.mutable_fence()->set_job_id(*group);
  v1::RaiseTriggerReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status =
      rpc::FromGrpc(v1::Triggers::NewStub(connection.channel)->Raise(&call, request, &reply));
  if (!status.ok()) {
    return FailCall(spec, context, SuggestJob(connection, line.words[0], status));
  }
  context.out << "raised " << line.words[1] << " for " << line.words[0]
              << (line.Has("at_step") ? ", before step " + line.Get("at_step") : "") << "\n";
  return kExitOk;
}

namespace {

// One instance of a job's barrier.
struct BarrierName {
  std::string job;
  std::string name;
  uint64_t counter = 0;
};

int CancelBarrier(const CommandSpec& spec, const CommandContext& context,
                  const Connection& connection, const BarrierName& barrier,
                  const std::string& reason) {
  v1::CancelBarrierRequest request;
  request.mutable_fence()->set_job_id(barrier.job);
  request.set_barrier_id(barrier.name);
  request.set_counter(barrier.counter);
  request.set_reason(reason);
  v1::CancelBarrierReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status =
      rpc::FromGrpc(v1::Barrier::NewStub(connection.channel)->Cancel(&call, request, &reply));
  if (!status.ok()) return FailCall(spec, context, status);
  context.out << "cancelled barrier " << barrier.name << " counter " << barrier.counter << " of "
              << barrier.job << "\n";
  return kExitOk;
}

int ShowBarrier(const CommandSpec& spec, const CommandContext& context,
                const Connection& connection, const BarrierName& barrier, bool as_json) {
  v1::DescribeBarrierRequest request;
  request.set_job_id(barrier.job);
  request.set_barrier_id(barrier.name);
  request.set_counter(barrier.counter);
  v1::DescribeBarrierReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status =
      rpc::FromGrpc(v1::Barrier::NewStub(connection.channel)->Describe(&call, request, &reply));
  if (!status.ok()) return FailCall(spec, context, status);
  const v1::BarrierReport& report = reply.report();
  if (as_json) {
    context.out << Json(report) << "\n";
    return kExitOk;
  }
  context.out << BarrierText(report) << "\n";
  if (report.state() == v1::BARRIER_STATE_OPEN) context.out << Shown(report.message()) << "\n";
  for (const v1::Culprit& culprit : report.culprits()) {
    if (culprit.native_stack().empty()) continue;
    context.out << "rank " << culprit.rank() << " is at\n";
    for (const absl::string_view line : absl::StrSplit(culprit.native_stack(), '\n')) {
      context.out << Shown(line) << "\n";
    }
  }
  return kExitOk;
}

}  // namespace

int RunBarrierCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster barrier",
      .summary = "Shows a job's barriers and their late ranks, or cancels a barrier.",
      .usage = "JOB [NAME] [OPTIONS]",
      .details =
          "Without NAME: the open barriers. With NAME: the report of its latest instance, as each "
          "waiting process\nreceived it, with the native stacks of the missing processes.\n"
          "Exit codes: 0 done; 2 wrong options; 3 no such job or barrier; 7 no coordinator "
          "answers;\n8 it requires a token, or a different one.",
      .options =
          ConnectionOptions({{.name = "all", .help = "Also recent barriers that have ended"},
                             {.name = "counter",
                              .value_name = "N",
                              .help = "The instance of NAME to show (default: the latest)"},
                             {.name = "cancel",
                              .value_name = "REASON",
                              .help = "End it: all waiting processes get CANCELLED and the reason"},
                             OutputOption({"text", "json"}),
                             {.name = "json", .help = "As -o json"}}),
      .max_words = 2};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const auto wrong = [&](const std::string& text) {
    return Fail(spec, context, absl::InvalidArgumentError(text), kExitUsage);
  };
  if (line.words.empty()) return wrong("write muster barrier JOB [NAME]");
  BarrierName barrier = {.job = line.words[0], .name = line.words.size() == 2 ? line.words[1] : ""};
  const std::string& job = barrier.job;
  const std::string& name = barrier.name;
  if (name.empty() && line.Has("cancel")) return wrong("--cancel needs the NAME of the barrier");
  if (line.Has("counter") &&
      (name.empty() || !absl::SimpleAtoi(line.Get("counter"), &barrier.counter))) {
    return wrong(absl::StrCat("--counter ", line.Get("counter"), ": write NAME and a number"));
  }
  const bool as_json = FormatOf(line) == "json";
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  const absl::StatusOr<std::string> group = GroupOf(connection, barrier.job);
  if (!group.ok()) return FailCall(spec, context, group.status());
  barrier.job = *group;

  v1::ListBarriersReply list;
  const bool only_open = line.Has("cancel") || (name.empty() && line.Get("all") != "true");
  if (const absl::Status listed =
          ListBarriers(connection.channel, job, only_open, connection.timeout, &list);
      !listed.ok()) {
    return FailCall(spec, context, SuggestJob(connection, line.words[0], listed));
  }
  if (name.empty()) {
    if (as_json) {
      context.out << Json(list) << "\n";
      return kExitOk;
    }
    for (const v1::BarrierReport& report : list.reports()) {
      context.out << BarrierText(report) << "\n";
    }
    return kExitOk;
  }
  if (!line.Has("counter")) {
    // The open ones come first, then those that ended, the latest first.
    const auto it =
        std::find_if(list.reports().begin(), list.reports().end(),
                     [&](const v1::BarrierReport& r) { return r.barrier_id() == name; });
    if (it == list.reports().end()) {
      return Fail(spec, context,
                  absl::NotFoundError(absl::StrCat("job ", job, " has no ",
                                                   line.Has("cancel") ? "open " : "", "barrier ",
                                                   name, " in its current generation")),
                  kExitNotFound);
    }
    barrier.counter = it->counter();
  }
  if (line.Has("cancel")) {
    return CancelBarrier(spec, context, connection, barrier, line.Get("cancel"));
  }
  return ShowBarrier(spec, context, connection, barrier, as_json);
}

int RunQuarantineCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster quarantine",
      .summary = "Excludes a host from the next generations of a job, or readmits it.",
      .usage = "JOB HOST [OPTIONS]",
      .details =
          "The coordinator quarantines a host after repeated strikes; muster status shows which "
          "ones.\n"
          "Exit codes: 0 done; 2 wrong options; 3 no such job; 7 no coordinator answers;\n8 it "
          "requires a token, or a different one.",
      .options = ConnectionOptions(
          {{.name = "for", .value_name = "TIME", .help = "How long (default 30m)"},
           {.name = "reason", .value_name = "TEXT", .help = "The reason that muster status shows"},
           {.name = "lift", .help = "Readmit it"}}),
      .max_words = 2};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  if (line.words.size() != 2) {
    return Fail(spec, context, absl::InvalidArgumentError("write muster quarantine JOB HOST"),
                kExitUsage);
  }
  const bool lift = line.Get("lift") == "true";
  absl::Duration length = absl::Minutes(30);
  if (line.Has("for") && (lift || !absl::ParseDuration(line.Get("for"), &length) ||
                          length < absl::Seconds(1) || length > absl::Hours(24 * 365))) {
    return Fail(spec, context,
                absl::InvalidArgumentError(absl::StrCat("--for ", line.Get("for"),
                                                        ": write 30m or 24h, and not with --lift")),
                kExitUsage);
  }
  v1::QuarantineRequest request;
  request.set_host(line.words[1]);
  if (!lift) request.mutable_for_()->set_seconds(absl::ToInt64Seconds(length));
  request.set_reason(line.Get("reason"));
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  const absl::StatusOr<std::string> group = GroupOf(connection, line.words[0]);
  if (!group.ok()) return FailCall(spec, context, group.status());
  if (*group != line.words[0]) {
    return Fail(
        spec, context,
        absl::InvalidArgumentError(absl::StrCat(line.words[0],
                                                " is a submitted job, and the coordinator chooses "
                                                "its nodes for each attempt: use muster cordon ",
                                                line.words[1], " keeps its jobs away")),
        kExitUsage);
  }
  request.mutable_fence()->set_job_id(*group);
  v1::QuarantineReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status = rpc::FromGrpc(
      v1::Membership::NewStub(connection.channel)->Quarantine(&call, request, &reply));
  if (!status.ok()) {
    return FailCall(spec, context, SuggestJob(connection, line.words[0], status));
  }
  context.out << "host " << line.words[1] << " of " << line.words[0]
              << (lift ? " is no longer quarantined\n" : " is quarantined for ")
              << (lift ? "" : absl::FormatDuration(length) + "\n");
  return kExitOk;
}

int RunRemoveCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster remove",
      .summary =
          "Removes a submitted or launched job that has ended, with its keys and its history.",
      .usage = "JOB [OPTIONS]",
      .details =
          "Exit codes: 0 done; 2 wrong options; 3 no such job; 4 the job has not ended: stop it "
          "first; 7 no coordinator\nanswers; 8 it requires a token, or a different one.",
      .options = JobOptions({}),
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  if (line.words.size() != 1)
    return Fail(spec, context, absl::InvalidArgumentError("write muster remove JOB"), kExitUsage);
  const bool on_slurm = IsOnSlurm(line, context);
  Connection connection;
  std::unique_ptr<JobBackend> backend;
  if (on_slurm) {
    int code = kExitOk;
    backend = OpenBackend(spec, line, context, &code);
    if (backend == nullptr) return code;
  } else {
    if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
    backend =
        CoordinatorBackend(StoppableOn(connection.channel, connection.timeout, connection.timeout));
  }
  // Removes a submitted job, if there is one of this name; else the group of a launch.
  const absl::Status submitted = backend->remove(line.words[0]);
  if (submitted.ok()) {
    context.out << "job " << line.words[0] << " is removed\n";
    return kExitOk;
  }
  if (on_slurm || (!absl::IsNotFound(submitted) && !absl::IsUnimplemented(submitted))) {
    return FailCall(spec, context, submitted);
  }
  v1::RemoveJobRequest request;
  request.mutable_fence()->set_job_id(line.words[0]);
  v1::RemoveJobReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status =
      rpc::FromGrpc(v1::Admin::NewStub(connection.channel)->RemoveJob(&call, request, &reply));
  if (!status.ok()) {
    return FailCall(spec, context, SuggestJob(connection, line.words[0], status));
  }
  context.out << "job " << line.words[0] << " is removed\n";
  return kExitOk;
}

namespace {

struct RegistryVerb {
  const char* verb;
  v1::MarkCheckpointRequest::Mark mark;
  const char* summary;
  const char* done;
};

constexpr RegistryVerb kRegistryVerbs[] = {
    {"registered", v1::MarkCheckpointRequest::MARK_UNSPECIFIED,
     "Lists the checkpoints of a job that its coordinator knows.", ""},
    {"pin", v1::MarkCheckpointRequest::PIN, "Makes retention leave a checkpoint alone.",
     "is pinned"},
    {"unpin", v1::MarkCheckpointRequest::UNPIN, "Lets retention take a pinned checkpoint again.",
     "is not pinned"},
    {"promote", v1::MarkCheckpointRequest::PROMOTE, "Lets a resume take a checkpoint.",
     "is promoted"},
    {"hold-back", v1::MarkCheckpointRequest::HOLD_BACK, "Keeps a resume from taking a checkpoint.",
     "is held back"},
};

const RegistryVerb* FindRegistryVerb(const std::string& verb) {
  for (const RegistryVerb& known : kRegistryVerbs) {
    if (verb == known.verb) return &known;
  }
  return nullptr;
}

std::string StateWord(v1::CheckpointState state) {
  switch (state) {
    case v1::CHECKPOINT_STATE_PREPARING:
      return "preparing";
    case v1::CHECKPOINT_STATE_SEALED:
      return "sealed";
    case v1::CHECKPOINT_STATE_PUBLISHED:
      return "published";
    case v1::CHECKPOINT_STATE_DELETING:
      return "deleting";
    default:
      return "unknown";
  }
}

absl::StatusOr<std::vector<v1::CheckpointRecord>> ListRecords(const Connection& connection,
                                                              const std::string& job) {
  const auto stub = v1::Checkpoints::NewStub(connection.channel);
  std::vector<v1::CheckpointRecord> records;
  v1::ListCheckpointsReply reply;
  do {
    v1::ListCheckpointsRequest request;
    request.mutable_fence()->set_job_id(job);
    request.set_after(records.empty() ? 0 : records.back().checkpoint_id());
    reply.Clear();
    grpc::ClientContext call;
    rpc::SetTimeout(call, connection.timeout);
    MUSTER_RETURN_IF_ERROR(rpc::FromGrpc(stub->List(&call, request, &reply)));
    records.insert(records.end(), reply.checkpoints().begin(), reply.checkpoints().end());
  } while (reply.more() && reply.checkpoints_size() > 0);
  return records;
}

// Returns the records of the job that `*job` names, and sets `*job` to the group that has them: for
// a submitted job, the last attempt whose workers have joined, which took over the records of
// earlier attempts.
absl::StatusOr<std::vector<v1::CheckpointRecord>> ListRecordsOfJob(const Connection& connection,
                                                                   std::string* job) {
  MUSTER_ASSIGN_OR_RETURN(std::string group, GroupOf(connection, *job));
  absl::string_view number = group;
  int attempt = 0;
  if (absl::ConsumePrefix(&number, absl::StrCat(*job, "."))) {
    (void)absl::SimpleAtoi(number, &attempt);
  }
  absl::StatusOr<std::vector<v1::CheckpointRecord>> records = ListRecords(connection, group);
  std::vector<Attempt> history;
  if (absl::IsNotFound(records.status()) && attempt > 1) {
    MUSTER_ASSIGN_OR_RETURN(
        const Job submitted,
        ClientOn(connection.channel, connection.timeout, connection.timeout).get(*job));
    history = submitted.history;
  }
  int guesses = 0;
  while (absl::IsNotFound(records.status()) && attempt > 1) {
    int before = 0;
    for (const Attempt& one : history) {
      if (one.number < attempt) before = one.number;
    }
    // The most attempts before the kept ones that are tried, because a restore from a copy may have
    // skipped a million numbers.
    constexpr int kMostGuesses = 100;
    if (before == 0 && ++guesses > kMostGuesses) break;
    attempt = before == 0 ? attempt - 1 : before;
    group = absl::StrCat(*job, ".", attempt);
    records = ListRecords(connection, group);
  }
  if (records.ok()) *job = group;
  return records;
}

// Empty if the status is not known.
v1::JobStatus StatusOfJob(const Connection& connection, const std::string& group) {
  v1::StatusReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  if (v1::Admin::NewStub(connection.channel)->Status(&call, {}, &reply).ok()) {
    for (const v1::JobStatus& status : reply.jobs()) {
      if (status.job_id() == group) return status;
    }
  }
  return v1::JobStatus();
}

std::string VerifiedWord(v1::VerifyDepth depth) {
  return depth == v1::VERIFY_CONTENTS ? "contents" : depth == v1::VERIFY_SIZES ? "sizes" : "never";
}

std::string UtcTime(uint64_t unix_us) {
  return absl::FormatTime(absl::RFC3339_sec, absl::FromUnixMicros(static_cast<int64_t>(unix_us)),
                          absl::UTCTimeZone());
}

ordered_json RecordJson(const v1::CheckpointRecord& record) {
  return {{"id", record.checkpoint_id()},
          {"path", record.path()},
          {"state", StateWord(record.state())},
          {"promoted", record.promoted()},
          {"pinned", record.pinned()},
          {"signed", !record.signature().empty()},
          {"verified", VerifiedWord(record.verified())},
          {"verified_at", record.verified_unix_us() == 0
                              ? ordered_json(nullptr)
                              : ordered_json(UtcTime(record.verified_unix_us()))},
          {"damage", record.damage()},
          {"stall_s", static_cast<double>(record.stall_us()) / 1e6},
          {"save_s", static_cast<double>(record.save_us()) / 1e6},
          {"iteration", record.iteration()},
          {"step", record.step()},
          {"ranks", record.ranks()},
          {"generation", record.generation()},
          {"files", record.files()},
          {"bytes", record.bytes()},
          {"sha256", absl::BytesToHexString(record.sha256())},
          {"previous_sha256", absl::BytesToHexString(record.previous_sha256())}};
}

// The save in progress, in the form of a record: it has no id, and nothing may take it.
ordered_json RunningJson(const v1::JobStatus& job) {
  v1::CheckpointRecord record;
  record.set_path(job.save().path());
  record.set_step(job.save().step());
  record.set_bytes(job.save().bytes());
  record.set_ranks(job.saving());
  record.set_generation(job.generation());
  ordered_json json = RecordJson(record);
  json["id"] = nullptr;
  json["state"] = "saving";
  json["save"] = SaveJson(job);
  return json;
}

std::string RecordText(const v1::CheckpointRecord& record) {
  return absl::StrCat(
      record.checkpoint_id(), "  ", StateWord(record.state()),
      record.promoted() ? "" : ", held back", record.pinned() ? ", pinned" : "",
      record.signature().empty() ? "" : ", signed",
      !record.damage().empty() ? absl::StrCat(", DAMAGED (", Printable(record.damage()), ")")
      : record.verified() == v1::VERIFY_CONTENTS ? ", verified"
                                                 : "",
      ", step ", record.step(), ", ", record.bytes(), " bytes, ", Shown(record.path()), "\n");
}

// Finds a record by id, path, or the last name of the path. The newest if there are several.
const v1::CheckpointRecord* FindRecord(const std::vector<v1::CheckpointRecord>& records,
                                       std::string word) {
  // A shell completes the name of a folder with a slash.
  while (word.size() > 1 && word.back() == '/') word.pop_back();
  std::error_code error;
  const std::string folder = std::filesystem::absolute(word, error).lexically_normal().string();
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    if (absl::StrCat(record->checkpoint_id()) == word || record->path() == word ||
        BaseName(record->path()) == word || record->path() == folder) {
      return &*record;
    }
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<std::vector<RegisteredState>> FindRegisteredStates(const CommandLine& line,
                                                                  const CommandContext& context,
                                                                  const std::string& job) {
  MUSTER_ASSIGN_OR_RETURN(const std::optional<Connection> connection,
                          FindCoordinator(line, context, job));
  if (!connection.has_value()) return std::vector<RegisteredState>();
  const auto records = ListRecords(*connection, job);
  if (absl::IsNotFound(records.status())) return std::vector<RegisteredState>();
  MUSTER_RETURN_IF_ERROR(records.status());
  std::vector<RegisteredState> states;
  for (const v1::CheckpointRecord& record : *records) {
    states.push_back({.sha256 = absl::BytesToHexString(record.sha256()),
                      .state = StateWord(record.state()),
                      .promoted = record.promoted(),
                      .pinned = record.pinned()});
  }
  return states;
}

absl::Status ReportFoundState(const CommandLine& line, const CommandContext& context,
                              const std::string& job, const FoundState& found) {
  MUSTER_ASSIGN_OR_RETURN(const std::optional<Connection> connection,
                          FindCoordinator(line, context, job));
  if (!connection.has_value()) {
    return absl::NotFoundError(absl::StrCat("no coordinator of job ", Printable(job),
                                            " is known: name one with --coordinator"));
  }
  v1::VerifyCheckpointRequest request =
      MakeVerdict(found.id, found.sha256, found.contents, found.damage);
  request.mutable_fence()->set_job_id(job);
  v1::VerifyCheckpointReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection->timeout);
  return rpc::FromGrpc(
      v1::Checkpoints::NewStub(connection->channel)->Verify(&call, request, &reply));
}

std::vector<std::string> RegistryVerbs() {
  std::vector<std::string> verbs;
  for (const RegistryVerb& known : kRegistryVerbs) verbs.emplace_back(known.verb);
  return verbs;
}

int RunRegistryCommand(const std::string& verb, const std::vector<std::string>& args,
                       const CommandContext& context) {
  const RegistryVerb& what = *FindRegistryVerb(verb);
  const bool lists = what.mark == v1::MarkCheckpointRequest::MARK_UNSPECIFIED;
  const bool pins =
      what.mark == v1::MarkCheckpointRequest::PIN || what.mark == v1::MarkCheckpointRequest::UNPIN;
  CommandSpec spec = {
      .name = absl::StrCat("muster checkpoints ", verb),
      .summary = what.summary,
      .usage = lists  ? "JOB [OPTIONS]"
               : pins ? "JOB CHECKPOINT | FOLDER [OPTIONS]"
                      : "JOB CHECKPOINT [OPTIONS]",
      .details = absl::StrCat(
          lists ? "" : "CHECKPOINT is its id, its folder, or the last name of that.\n",
          pins ? "FOLDER is a checkpoint on this machine, which need not have a coordinator: the "
                 "mark is the file pinned in that folder.\n"
               : "",
          "Exit codes: 0 done; 2 wrong options; 3 no such job or checkpoint; 7 no coordinator "
          "answers; 8 it requires a token,\nor a different one."),
      .options = ConnectionOptions({OutputOption({"text", "json"})}),
      .max_words = lists ? 1 : 2};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::string format = line.Has("output") ? line.Get("output") : "text";
  if (pins && line.words.size() == 1 &&
      (PathExists(line.words[0]) || absl::StrContains(line.words[0], '/'))) {
    const std::string& folder = line.words[0];
    const bool pinned = what.mark == v1::MarkCheckpointRequest::PIN;
    if (const absl::Status status = PinFolder(folder, pinned); !status.ok()) {
      return Fail(spec, context, status, ExitCodeOf(status));
    }
    if (format == "json") {
      context.out << Dump({{"path", folder}, {"pinned", pinned}});
    } else {
      context.out << Shown(folder) << " " << what.done << "\n";
    }
    return kExitOk;
  }
  if (static_cast<int>(line.words.size()) != spec.max_words) {
    return Fail(spec, context,
                absl::InvalidArgumentError(absl::StrCat("write ", spec.name, " ", spec.usage)),
                kExitUsage);
  }
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  std::string job = line.words[0];
  const auto records = ListRecordsOfJob(connection, &job);
  if (!records.ok()) {
    return FailCall(spec, context, SuggestJob(connection, line.words[0], records.status()));
  }
  if (lists) {
    ordered_json all = ordered_json::array();
    std::string text;
    for (const v1::CheckpointRecord& record : *records) {
      all.push_back(RecordJson(record));
      absl::StrAppend(&text, RecordText(record));
    }
    // The save in progress has no record yet.
    if (const v1::JobStatus status = StatusOfJob(connection, job); status.has_save()) {
      all.push_back(RunningJson(status));
      absl::StrAppend(&text, SaveText(status));
    }
    context.out << (format == "json" ? Dump(all) : text);
    return kExitOk;
  }
  const v1::CheckpointRecord* const record = FindRecord(*records, line.words[1]);
  if (record == nullptr) {
    return Fail(spec, context,
                absl::NotFoundError(
                    absl::StrCat("job ", line.words[0], " has no checkpoint ", line.words[1],
                                 "; see muster checkpoints registered ", line.words[0])),
                kExitNotFound);
  }
  v1::MarkCheckpointRequest request;
  request.mutable_fence()->set_job_id(job);
  request.set_checkpoint_id(record->checkpoint_id());
  request.set_mark(what.mark);
  v1::MarkCheckpointReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status =
      rpc::FromGrpc(v1::Checkpoints::NewStub(connection.channel)->Mark(&call, request, &reply));
  if (!status.ok()) return FailCall(spec, context, status);
  if (format == "json") {
    context.out << Dump(RecordJson(reply.checkpoint()));
  } else {
    context.out << Shown(record->path()) << " " << what.done << "\n";
  }
  // Programs that read the folder without the coordinator must know the marks, too.
  const v1::CheckpointRecord& marked = reply.checkpoint();
  const RecordedFolder folder = {.path = marked.path(),
                                 .staging = marked.published() ? "" : marked.staging(),
                                 .sha256 = absl::BytesToHexString(marked.sha256())};
  const Marks asked = {.promoted = marked.promoted(), .pinned = marked.pinned()};
  const auto recorded = [&]() -> absl::StatusOr<Marks> {
    // The next attempt of the job may have taken the checkpoint over.
    std::string group = line.words[0];
    MUSTER_ASSIGN_OR_RETURN(const std::vector<v1::CheckpointRecord> now,
                            ListRecordsOfJob(connection, &group));
    for (const v1::CheckpointRecord& one : now) {
      if (one.sha256() == marked.sha256()) {
        return Marks{.promoted = one.promoted(), .pinned = one.pinned()};
      }
    }
    return asked;  // the record is gone: nothing can change its marks
  };
  if (const absl::Status told = MarkRecordedFolder(
          folder, asked, what.mark == v1::MarkCheckpointRequest::UNPIN, recorded);
      !told.ok()) {
    context.err << spec.name << ": " << Shown(told.message()) << "\n";
  }
  return kExitOk;
}

}  // namespace muster::client
