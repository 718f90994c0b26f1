#include "client/cli/job_commands.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/units.h"
#include "client/cli/connection.h"
#include "client/config/suggest.h"
#include "client/jobs/job_file.h"
#include "proto/muster/v1/job.grpc.pb.h"
#include "proto/muster/v1/node.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

constexpr absl::Duration kHold = absl::Seconds(30);  // of a call that waits for a change
constexpr absl::Duration kLogWait = absl::Seconds(5);
constexpr int kLogPiece = 256 << 10;
constexpr int kMostRanks = 64;  // whose logs are followed together
constexpr absl::Duration kRetryDelay = absl::Milliseconds(500);

void PauseBetweenTries() {
  poll(nullptr, 0, static_cast<int>(absl::ToInt64Milliseconds(kRetryDelay)));
}

const OptionSpec kOutput = {.name = "output",
                            .value_name = "FORMAT",
                            .help = "table (default), json, or name",
                            .letter = "o"};

std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  options.add_whitespace = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) text = "{}";
  return text;
}

std::string StateText(v1::JobState state) {
  return absl::StrReplaceAll(v1::JobState_Name(state), {{"JOB_STATE_", ""}});
}

bool HasEnded(const v1::JobRecord& job) {
  return job.state() == v1::JOB_STATE_SUCCEEDED || job.state() == v1::JOB_STATE_FAILED ||
         job.state() == v1::JOB_STATE_CANCELLED;
}

std::string SinceText(int64_t unix_ms) {
  if (unix_ms == 0) return "-";
  const absl::Duration age = absl::Now() - absl::FromUnixMillis(unix_ms);
  return HumanDuration(absl::Seconds(std::max<int64_t>(0, absl::ToInt64Seconds(age))));
}

std::string ProcessesText(const v1::JobSpec& spec) {
  return spec.min_processes() == spec.max_processes()
             ? absl::StrCat(spec.max_processes())
             : absl::StrCat(spec.min_processes(), ":", spec.max_processes());
}

// A command that has been begun and is connected.
struct Session {
  CommandSpec spec;
  const CommandContext& context;
  CommandLine line;
  Connection connection;

  std::unique_ptr<v1::Jobs::Stub> jobs() const { return v1::Jobs::NewStub(connection.channel); }
  std::unique_ptr<v1::Nodes::Stub> nodes() const { return v1::Nodes::NewStub(connection.channel); }
  int Fails(const absl::Status& status) const {
    return Fail(spec, context, status, ExitCodeOf(status));
  }
  bool json() const { return line.Get("output") == "json"; }
  // `hold`: in addition, of a call that is held.
  template <typename Stub, typename Method, typename Request, typename Reply>
  absl::Status Call(Stub& stub, Method method, const Request& request, Reply* reply,
                    absl::Duration hold = absl::ZeroDuration()) const {
    grpc::ClientContext call;
    rpc::SetTimeout(call, connection.timeout + hold);
    return rpc::FromGrpc((stub.*method)(&call, request, reply));
  }
};

// Returns -1, or the exit code.
int Open(const std::vector<std::string>& args, Session* session) {
  if (const int code = Begin(session->spec, args, session->context, &session->line); code >= 0) {
    return code;
  }
  const std::string format = session->line.Get("output");
  if (!format.empty() && format != "table" && format != "json" && format != "name") {
    return session->Fails(absl::InvalidArgumentError(
        absl::StrCat("--output ", format, ": write table, json or name")));
  }
  return Dial(session->spec, session->line, session->context, &session->connection);
}

// The job that the first word names. Returns -1, or the exit code.
int NeedWord(const Session& session, absl::string_view what) {
  if (session.line.words.size() == 1) return -1;
  return session.Fails(absl::InvalidArgumentError(
      absl::StrCat("name one ", what, "; see ", session.spec.name, " --help")));
}

// An unknown job's error with the nearest name.
absl::Status Explain(const Session& session, absl::Status status, const std::string& job) {
  if (!absl::IsNotFound(status) || !absl::StrContains(status.message(), "no job ")) return status;
  v1::ListJobsRequest request;
  request.set_page_size(500);
  v1::ListJobsReply reply;
  auto stub = session.jobs();
  if (!session.Call(*stub, &v1::Jobs::Stub::List, request, &reply).ok()) return status;
  std::vector<std::string> names;
  for (const v1::JobRecord& record : reply.jobs()) names.push_back(record.job_id());
  return absl::NotFoundError(absl::StrCat(status.message(), DidYouMean(job, names)));
}

absl::Status GetJob(const Session& session, const std::string& job_id, uint64_t seen,
                    v1::JobRecord* job) {
  v1::GetJobRequest request;
  request.set_job_id(job_id);
  request.set_seen_revision(seen);
  const absl::Duration hold = seen == 0 ? absl::ZeroDuration() : kHold;
  *request.mutable_hold() = rpc::ToProto(hold);
  v1::GetJobReply reply;
  auto stub = session.jobs();
  const absl::Status status =
      session.Call(*stub, &v1::Jobs::Stub::Get, request, &reply, hold);
  if (status.ok()) *job = std::move(*reply.mutable_job());
  return status.ok() ? status : Explain(session, status, job_id);
}

int ExitCodeOfJob(const v1::JobRecord& job) {
  return job.state() == v1::JOB_STATE_SUCCEEDED ? kExitOk : kExitJobFailed;
}

// ---- logs

struct Follower {
  int rank = 0;
  int64_t offset = 0;
  bool ended = false;
};

void PrintLines(const Session& session, int rank, bool prefix, const std::string& data) {
  if (!prefix) {
    session.context.out << data;
    return;
  }
  for (const absl::string_view line : absl::StrSplit(absl::StripSuffix(data, "\n"), '\n')) {
    session.context.out << "[" << rank << "]: " << line << "\n";
  }
}

// Prints what is there; `follow`: and what comes until the attempt ends.
absl::Status PrintLogs(const Session& session, const std::string& job, int attempt,
                       std::vector<Follower> followers, int tail, bool follow) {
  auto stub = session.jobs();
  const bool prefix = followers.size() > 1;
  size_t open = followers.size();
  while (open > 0) {
    bool any = false;
    for (Follower& follower : followers) {
      if (follower.ended) continue;
      v1::ReadJobLogRequest request;
      request.set_job_id(job);
      request.set_attempt(attempt);
      request.set_rank(follower.rank);
      request.set_offset(follower.offset);
      request.set_tail_lines(tail);
      request.set_max_bytes(kLogPiece);
      // With several ranks the wait of one delays the others.
      const absl::Duration wait = !follow         ? absl::ZeroDuration()
                                  : open == 1     ? kLogWait
                                  : any           ? absl::ZeroDuration()
                                                  : kRetryDelay;
      *request.mutable_wait() = rpc::ToProto(wait);
      v1::ReadJobLogReply reply;
      const absl::Status status =
          session.Call(*stub, &v1::Jobs::Stub::ReadLog, request, &reply, wait + kHold);
      if (absl::IsUnavailable(status) && follow) {
        PauseBetweenTries();
        continue;
      }
      if (!status.ok()) return Explain(session, status, job);
      if (!reply.data().empty()) PrintLines(session, follower.rank, prefix, reply.data());
      any = any || !reply.data().empty();
      follower.offset = reply.next_offset();
      if (reply.ended() || (!follow && reply.data().empty())) {
        follower.ended = true;
        --open;
      }
    }
    session.context.out.flush();
  }
  return absl::OkStatus();
}

int CountRanks(const v1::JobRecord& job, int attempt) {
  int ranks = 0;
  for (const v1::JobAttempt& one : job.history()) {
    if (one.number() != (attempt == 0 ? job.attempts() : attempt)) continue;
    for (const v1::Placement& placement : one.placements()) ranks += placement.processes();
  }
  return ranks;
}

// ---- watch

// Prints each change until the job ends. `follow`: and the output of rank 0 of each attempt.
int WatchUntilEnd(const Session& session, v1::JobRecord job, bool follow) {
  uint64_t printed = 0;
  int followed = 0;
  while (true) {
    if (job.revision() != printed) {
      session.context.out << absl::FormatTime("%H:%M:%S ", absl::Now(), absl::LocalTimeZone())
                          << job.job_id() << " " << StateText(job.state()) << ": " << job.why()
                          << std::endl;
      printed = job.revision();
    }
    if (HasEnded(job)) return ExitCodeOfJob(job);
    if (follow && job.attempts() > followed && job.state() != v1::JOB_STATE_QUEUED) {
      followed = job.attempts();
      const absl::Status status = PrintLogs(session, job.job_id(), followed, {Follower{}}, 0, true);
      if (!status.ok()) session.context.err << session.spec.name << ": " << status.message() << "\n";
    }
    const absl::Status status = GetJob(session, job.job_id(), job.revision(), &job);
    if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) {
      // The coordinator is away or busy; the job goes on.
      PauseBetweenTries();
      continue;
    }
    if (!status.ok()) return session.Fails(status);
  }
}

std::string PlacementText(const v1::Placement& placement) {
  std::string text = absl::StrCat(placement.node(), ": ", placement.processes(),
                                  placement.processes() == 1 ? " process" : " processes");
  if (placement.gpus_size() > 0) {
    absl::StrAppend(&text, ", GPUs ", absl::StrJoin(placement.gpus(), ","));
  }
  return text;
}

absl::Status ReadSpec(const CommandLine& line, v1::JobSpec* spec) {
  std::vector<std::string> words = line.words;
  if (words.size() == 1 || (words.size() > 1 && absl::EndsWith(words[0], ".yaml"))) {
    const bool file = absl::EndsWith(words[0], ".yaml") || absl::EndsWith(words[0], ".yml");
    if (file) {
      const absl::StatusOr<std::string> text = ReadFile(words[0], 1 << 20);
      if (!text.ok()) return text.status();
      absl::StatusOr<v1::JobSpec> read = ParseJobFile(*text, words[0]);
      if (!read.ok()) return read.status();
      *spec = *std::move(read);
      words.erase(words.begin());
    }
  }
  for (const JobKey& key : JobKeys()) {
    const auto given = line.options.find(key.name);
    if (given == line.options.end()) continue;
    if (key.name == "user_error_codes") spec->clear_user_error_codes();
    const absl::Status status = SetJobKey(
        key.name,
        key.repeated ? given->second : std::vector<std::string>{given->second.back()}, spec);
    if (!status.ok()) return status;
  }
  if (!words.empty()) {
    spec->clear_argv();
    for (std::string& word : words) spec->add_argv(std::move(word));
  }
  if (spec->argv_size() == 0) {
    return absl::InvalidArgumentError(
        "no program: write muster submit [OPTIONS] -- PROGRAM [ARGS...], or \"command\" in a job "
        "file");
  }
  if (spec->name().empty()) spec->set_name(JobNameOf(spec->argv(0)));
  if (spec->max_processes() == 0) spec->set_max_processes(1);
  return absl::OkStatus();
}

std::string UserName(const CommandContext& context) {
  const std::string user = Variable(context.variables, "USER");
  return user.empty() ? absl::StrCat("uid-", getuid()) : user;
}

}  // namespace

int RunSubmitCommand(const std::vector<std::string>& args, const CommandContext& context) {
  std::vector<OptionSpec> options = {
      {.name = "dry_run", .help = "Print where it would run, and submit nothing"},
      {.name = "wait", .help = "Print each change until the job ends; the exit code is the job's"},
      {.name = "follow", .help = "As --wait, with the output of rank 0", .letter = "f"},
      {.name = "idempotency_key",
       .value_name = "KEY",
       .help = "Submitting again with the same key returns the same job"},
      kOutput};
  for (const JobKey& key : JobKeys()) {
    options.push_back({.name = key.name,
                       .value_name = key.value_name,
                       .help = key.help,
                       .group = "The job",
                       .repeated = key.repeated});
  }
  Session session{.spec = {.name = "muster submit",
                           .summary = "Submits a job to a coordinator, and prints its id.",
                           .usage = "[OPTIONS] JOB.yaml | [OPTIONS] -- PROGRAM [ARGS...]",
                           .details = "A job file has the keys of the options, and command "
                                      "(docs/jobs.md). Options win over the file.",
                           .options = ConnectionOptions(std::move(options)),
                           .takes_program = true},
                  .context = context,
                  .line = {},
                  .connection = {}};
  if (const int code = Begin(session.spec, args, context, &session.line); code >= 0) return code;
  v1::SubmitJobRequest request;
  if (const absl::Status status = ReadSpec(session.line, request.mutable_spec()); !status.ok()) {
    return session.Fails(status);
  }
  if (const int code = Dial(session.spec, session.line, context, &session.connection); code >= 0) {
    return code;
  }
  request.set_dry_run(session.line.Has("dry_run"));
  request.set_owner(UserName(context));
  request.set_unix_ms(absl::ToUnixMillis(absl::Now()));
  request.set_idempotency_key(session.line.Has("idempotency_key")
                                  ? session.line.Get("idempotency_key")
                                  : absl::StrCat("cli-", RandomHex()));
  v1::SubmitJobReply reply;
  auto stub = session.jobs();
  absl::Status status;
  // With the key a repeat does no harm.
  for (int tries = 0; tries < 3; ++tries) {
    if (tries > 0) PauseBetweenTries();
    status = session.Call(*stub, &v1::Jobs::Stub::Submit, request, &reply);
    if (!absl::IsUnavailable(status)) break;
  }
  if (!status.ok()) return session.Fails(status);
  if (session.json()) {
    context.out << Json(reply);
  } else if (request.dry_run()) {
    context.out << (reply.plan().starts_now() ? "It would start now"
                                              : absl::StrCat("It would wait: ", reply.plan().why()))
                << ", with " << reply.plan().processes() << " processes";
    context.out << (reply.plan().starts_now() ? ":\n" : "; on idle nodes:\n");
    for (const v1::Placement& placement : reply.plan().placements()) {
      context.out << "  " << PlacementText(placement) << "\n";
    }
  } else {
    context.out << reply.job().job_id() << std::endl;
  }
  if (request.dry_run() || !(session.line.Has("wait") || session.line.Has("follow"))) {
    return kExitOk;
  }
  return WatchUntilEnd(session, reply.job(), session.line.Has("follow"));
}

int RunListCommand(const std::vector<std::string>& args, const CommandContext& context) {
  Session session{
      .spec = {.name = "muster list",
               .summary = "Lists submitted jobs.",
               .usage = "[OPTIONS]",
               .options = ConnectionOptions(
                   {{.name = "all", .help = "Those that have ended too", .letter = "a"},
                    {.name = "owner", .value_name = "NAME", .help = "Only jobs of this owner"},
                    {.name = "name", .value_name = "PREFIX", .help = "Only ids that begin so"},
                    kOutput})},
      .context = context,
      .line = {},
      .connection = {}};
  if (const int code = Open(args, &session); code >= 0) return code;
  v1::ListJobsRequest request;
  request.set_owner(session.line.Get("owner"));
  request.set_name_prefix(session.line.Get("name"));
  request.set_page_size(500);
  if (!session.line.Has("all")) {
    for (const v1::JobState state :
         {v1::JOB_STATE_QUEUED, v1::JOB_STATE_STARTING, v1::JOB_STATE_RUNNING,
          v1::JOB_STATE_STOPPING, v1::JOB_STATE_SUSPENDED}) {
      request.add_states(state);
    }
  }
  v1::ListJobsReply all;
  auto stub = session.jobs();
  for (bool more = true; more;) {
    v1::ListJobsReply page;
    const absl::Status status = session.Call(*stub, &v1::Jobs::Stub::List, request, &page);
    if (!status.ok()) return session.Fails(status);
    more = page.more() && page.jobs_size() > 0;
    if (more) request.set_after_sequence(page.jobs(page.jobs_size() - 1).sequence());
    all.MergeFrom(page);
  }
  if (session.json()) {
    context.out << Json(all);
    return kExitOk;
  }
  if (session.line.Get("output") == "name") {
    for (const v1::JobRecord& job : all.jobs()) context.out << job.job_id() << "\n";
    return kExitOk;
  }
  if (all.jobs().empty()) {
    context.out << (session.line.Has("all") ? "There are no jobs.\n"
                                            : "No job waits or runs; muster list --all shows those "
                                              "that have ended.\n");
    return kExitOk;
  }
  context.out << absl::StrFormat("%-24s %-10s %5s %5s %-10s %-10s %s\n", "JOB", "STATE", "PROCS",
                                 "TRIES", "OWNER", "AGE", "WHY");
  for (const v1::JobRecord& job : all.jobs()) {
    context.out << absl::StrFormat("%-24s %-10s %5s %5d %-10s %-10s %s\n", job.job_id(),
                                   StateText(job.state()), ProcessesText(job.spec()),
                                   job.attempts(), job.owner(), SinceText(job.submitted_unix_ms()),
                                   job.why());
  }
  return kExitOk;
}

int RunDescribeCommand(const std::vector<std::string>& args, const CommandContext& context) {
  Session session{.spec = {.name = "muster describe",
                           .summary = "Shows one submitted job with its attempts.",
                           .usage = "[OPTIONS] JOB",
                           .options = ConnectionOptions({kOutput}),
                           .max_words = 1},
                  .context = context,
                  .line = {},
                  .connection = {}};
  if (const int code = Open(args, &session); code >= 0) return code;
  if (const int code = NeedWord(session, "job"); code >= 0) return code;
  v1::JobRecord job;
  const absl::Status status = GetJob(session, session.line.words[0], 0, &job);
  if (!status.ok()) return session.Fails(status);
  if (session.json()) {
    context.out << Json(job);
    return kExitOk;
  }
  context.out << job.job_id() << ": " << StateText(job.state()) << "\n  " << job.why()
              << "\n  command    " << absl::StrJoin(job.spec().argv(), " ") << "\n  processes  "
              << ProcessesText(job.spec()) << "\n  owner      " << job.owner()
              << "\n  submitted  " << SinceText(job.submitted_unix_ms()) << " ago\n  restarts   "
              << job.restarts() << " of " << job.spec().max_restarts() << "\n";
  for (const v1::JobAttempt& attempt : job.history()) {
    context.out << "  attempt " << attempt.number() << "\n";
    for (const v1::Placement& placement : attempt.placements()) {
      context.out << "    " << PlacementText(placement) << "\n";
    }
    if (!attempt.has_end()) continue;
    context.out << "    ended: " << attempt.end().why() << "\n";
    for (const std::string& text : attempt.end().last_lines()) {
      context.out << "      | " << text << "\n";
    }
  }
  return kExitOk;
}

int RunWatchCommand(const std::vector<std::string>& args, const CommandContext& context) {
  Session session{.spec = {.name = "muster watch",
                           .summary = "Prints each change of a submitted job until it ends; the "
                                      "exit code is the job's.",
                           .usage = "[OPTIONS] JOB",
                           .options = ConnectionOptions({}),
                           .max_words = 1},
                  .context = context,
                  .line = {},
                  .connection = {}};
  if (const int code = Open(args, &session); code >= 0) return code;
  if (const int code = NeedWord(session, "job"); code >= 0) return code;
  v1::JobRecord job;
  const absl::Status status = GetJob(session, session.line.words[0], 0, &job);
  if (!status.ok()) return session.Fails(status);
  return WatchUntilEnd(session, std::move(job), /*follow=*/false);
}

int RunLogsCommand(const std::vector<std::string>& args, const CommandContext& context) {
  Session session{
      .spec = {.name = "muster logs",
               .summary = "Prints the output of a submitted job.",
               .usage = "[OPTIONS] JOB",
               .options = ConnectionOptions(
                   {{.name = "follow", .help = "Go on until the attempt ends", .letter = "f"},
                    {.name = "rank", .value_name = "R", .help = "Of this rank (default 0), or all"},
                    {.name = "attempt", .value_name = "N", .help = "Default: the last one"},
                    {.name = "tail", .value_name = "N", .help = "Begin with the last N lines"}}),
               .max_words = 1},
      .context = context,
      .line = {},
      .connection = {}};
  if (const int code = Open(args, &session); code >= 0) return code;
  if (const int code = NeedWord(session, "job"); code >= 0) return code;
  const auto number = [&](const char* option, int* value) {
    return !session.line.Has(option) ||
           (absl::SimpleAtoi(session.line.Get(option), value) && *value >= 0);
  };
  const std::string rank_text = session.line.Get("rank");
  int rank = 0, attempt = 0, tail = 0;
  if (!number("attempt", &attempt) || !number("tail", &tail) ||
      (rank_text != "all" && !number("rank", &rank))) {
    return session.Fails(absl::InvalidArgumentError(
        "--rank, --attempt and --tail are whole numbers; --rank may be all"));
  }
  v1::JobRecord job;
  absl::Status status = GetJob(session, session.line.words[0], 0, &job);
  if (!status.ok()) return session.Fails(status);
  std::vector<Follower> followers;
  const int64_t begin = session.line.Has("tail") ? -1 : 0;
  if (rank_text == "all") {
    const int ranks = CountRanks(job, attempt);
    if (ranks > kMostRanks) {
      return session.Fails(absl::InvalidArgumentError(
          absl::StrCat("--rank all: the job has ", ranks, " ranks, and at most ", kMostRanks,
                       " are shown together; name one")));
    }
    for (int i = 0; i < std::max(ranks, 1); ++i) followers.push_back({i, begin, false});
  } else {
    followers.push_back({rank, begin, false});
  }
  status = PrintLogs(session, job.job_id(), attempt, std::move(followers), tail,
                     session.line.Has("follow"));
  return status.ok() ? kExitOk : session.Fails(status);
}

namespace {

struct JobVerb {
  const char* verb;
  v1::JobAction action;
  const char* summary;
};
constexpr JobVerb kJobVerbs[] = {
    {"cancel", v1::JOB_ACTION_CANCEL, "Ends a submitted job, or takes it from the queue."},
    {"suspend", v1::JOB_ACTION_SUSPEND, "Stops a submitted job until muster resume."},
    {"resume", v1::JOB_ACTION_RESUME, "Queues a suspended job again."},
    {"retry", v1::JOB_ACTION_RETRY, "Queues a job again that has failed or was cancelled."},
    {"forget", v1::JOB_ACTION_REMOVE, "Removes the records of a submitted job that has ended."},
};
struct NodeVerb {
  const char* verb;
  v1::NodeAction action;
  const char* summary;
};
constexpr NodeVerb kNodeVerbs[] = {
    {"cordon", v1::NODE_ACTION_CORDON, "Starts nothing new on a node."},
    {"drain", v1::NODE_ACTION_DRAIN, "Starts nothing new on a node, and moves its jobs away."},
    {"uncordon", v1::NODE_ACTION_UNCORDON, "Lets jobs start on a node again."},
};

}  // namespace

int RunJobActionCommand(const std::string& verb, const std::vector<std::string>& args,
                        const CommandContext& context) {
  const JobVerb& found = *std::find_if(std::begin(kJobVerbs), std::end(kJobVerbs),
                                       [&](const JobVerb& one) { return verb == one.verb; });
  Session session{
      .spec = {.name = absl::StrCat("muster ", verb),
               .summary = found.summary,
               .usage = "[OPTIONS] JOB",
               .options = ConnectionOptions(
                   {{.name = "why", .value_name = "TEXT", .help = "For the job's record"}}),
               .max_words = 1},
      .context = context,
      .line = {},
      .connection = {}};
  if (const int code = Open(args, &session); code >= 0) return code;
  if (const int code = NeedWord(session, "job"); code >= 0) return code;
  const std::string& job_id = session.line.words[0];
  v1::ControlJobRequest request;
  request.set_job_id(job_id);
  request.set_action(found.action);
  request.set_why(session.line.Get("why"));
  absl::Status status;
  if (found.action == v1::JOB_ACTION_RETRY) {
    v1::JobRecord job;
    status = GetJob(session, job_id, 0, &job);
    if (!status.ok()) return session.Fails(status);
    request.set_after_attempt(job.attempts());
  }
  v1::ControlJobReply reply;
  auto stub = session.jobs();
  status = session.Call(*stub, &v1::Jobs::Stub::Control, request, &reply);
  if (!status.ok()) return session.Fails(Explain(session, status, job_id));
  if (reply.has_job()) {
    context.out << job_id << " " << StateText(reply.job().state()) << ": " << reply.job().why()
                << "\n";
  }
  return kExitOk;
}

int RunNodesCommand(const std::vector<std::string>& args, const CommandContext& context) {
  Session session{.spec = {.name = "muster nodes",
                           .summary = "Lists the nodes that run submitted jobs.",
                           .usage = "[OPTIONS]",
                           .options = ConnectionOptions({kOutput})},
                  .context = context,
                  .line = {},
                  .connection = {}};
  if (const int code = Open(args, &session); code >= 0) return code;
  v1::ListNodesReply all;
  v1::ListNodesRequest request;
  auto stub = session.nodes();
  for (bool more = true; more;) {
    v1::ListNodesReply page;
    const absl::Status status = session.Call(*stub, &v1::Nodes::Stub::List, request, &page);
    if (!status.ok()) return session.Fails(status);
    more = page.more() && page.nodes_size() > 0;
    if (more) request.set_after_node(page.nodes(page.nodes_size() - 1).node());
    all.MergeFrom(page);
  }
  if (session.json()) {
    context.out << Json(all);
    return kExitOk;
  }
  if (session.line.Get("output") == "name") {
    for (const v1::NodeRecord& node : all.nodes()) context.out << node.node() << "\n";
    return kExitOk;
  }
  if (all.nodes().empty()) {
    context.out << "No node waits for jobs: start muster-agent --serve on each.\n";
    return kExitOk;
  }
  context.out << absl::StrFormat("%-20s %-9s %9s %7s %-10s %s\n", "NODE", "STATE", "CPUS", "GPUS",
                                 "HEARD", "JOBS");
  for (const v1::NodeRecord& node : all.nodes()) {
    const char* const state = !node.has_info()  ? "unknown"
                              : node.lost()     ? "lost"
                              : node.draining() ? "draining"
                              : node.cordoned() ? "cordoned"
                                                : "ready";
    context.out << absl::StrFormat(
        "%-20s %-9s %4d/%-4d %3d/%-3d %-10s %s\n", node.node(), state, node.used_cpus(),
        node.info().cpus(), node.used_gpus_size(), node.info().gpus_size(),
        node.has_heard_ago() ? HumanDuration(rpc::FromProto(node.heard_ago())) : "-",
        absl::StrJoin(node.jobs(), ", "));
  }
  return kExitOk;
}

int RunNodeActionCommand(const std::string& verb, const std::vector<std::string>& args,
                         const CommandContext& context) {
  const NodeVerb& found = *std::find_if(std::begin(kNodeVerbs), std::end(kNodeVerbs),
                                        [&](const NodeVerb& one) { return verb == one.verb; });
  Session session{
      .spec = {.name = absl::StrCat("muster ", verb),
               .summary = found.summary,
               .usage = "[OPTIONS] NODE",
               .options = ConnectionOptions(
                   {{.name = "why", .value_name = "TEXT", .help = "For muster nodes"}}),
               .max_words = 1},
      .context = context,
      .line = {},
      .connection = {}};
  if (const int code = Open(args, &session); code >= 0) return code;
  if (const int code = NeedWord(session, "node"); code >= 0) return code;
  v1::ControlNodeRequest request;
  request.set_node(session.line.words[0]);
  request.set_action(found.action);
  request.set_why(session.line.Get("why"));
  v1::ControlNodeReply reply;
  auto stub = session.nodes();
  const absl::Status status = session.Call(*stub, &v1::Nodes::Stub::Control, request, &reply);
  return status.ok() ? kExitOk : session.Fails(status);
}

}  // namespace muster::client
