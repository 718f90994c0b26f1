#include "client/cli/top_command.h"

#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/defaults.h"
#include "base/exit_code.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/units.h"
#include "client/cli/connection.h"
#include "client/cli/job_group.h"
#include "client/cli/output.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

constexpr absl::Duration kLeastInterval = absl::Milliseconds(100);

// Returns the steps per second between two moments; empty: not known.
std::string RateText(int64_t now, std::optional<int64_t> before, absl::Duration passed) {
  // A new generation begins from a checkpoint: its first difference is not its speed.
  if (!before.has_value() || passed <= absl::ZeroDuration() || now < *before) return "";
  return absl::StrFormat("%.2f",
                         static_cast<double>(now - *before) / absl::ToDoubleSeconds(passed));
}

const v1::JobStatus* FindJob(const TopSample& sample, const std::string& job) {
  for (const v1::JobStatus& status : sample.status.jobs()) {
    if (status.job_id() == job) return &status;
  }
  return nullptr;
}

std::string StepsText(const v1::JobStatus& job) {
  return job.min_step() == job.max_step() ? absl::StrCat(job.min_step())
                                          : absl::StrCat(job.min_step(), "-", job.max_step());
}

void AddTable(const std::vector<std::vector<std::string>>& rows, std::vector<std::string>* lines) {
  for (const absl::string_view line : absl::StrSplit(TableText(rows), '\n', absl::SkipEmpty())) {
    lines->emplace_back(line);
  }
}

bool HasEnded(const v1::JobStatus& job) { return job.rendezvous_state() == "CLOSED"; }

// Omits jobs that have ended: records of weeks would leave no room for the running ones.
void AddJobs(const TopSample& now, const TopSample* before, std::vector<std::string>* lines) {
  std::vector<std::vector<std::string>> rows = {
      {"JOB", "GENERATION", "STATE", "RANKS", "STEP", "STEPS/S", "NOTE"}};
  for (const v1::JobStatus& job : now.status.jobs()) {
    if (HasEnded(job)) continue;
    const v1::JobStatus* const was = before == nullptr ? nullptr : FindJob(*before, job.job_id());
    const bool same = was != nullptr && was->generation() == job.generation();
    std::string note = job.waits_for().empty() ? "" : absl::StrCat("waits for ", job.waits_for());
    if (job.silent() > 0) note = absl::StrCat(job.silent(), " workers silent");
    rows.push_back({job.job_id(), absl::StrCat(job.generation()), job.rendezvous_state(),
                    absl::StrCat(job.world_size()), StepsText(job),
                    RateText(job.min_step(), same ? std::optional(was->min_step()) : std::nullopt,
                             before == nullptr ? absl::ZeroDuration() : now.at - before->at),
                    note});
  }
  AddTable(rows, lines);
}

void AddRanks(const TopSample& now, const TopSample* before, std::vector<std::string>* lines) {
  std::map<int, int64_t> steps_before;
  const bool same = before != nullptr && before->group == now.group &&
                    before->members.generation() == now.members.generation();
  if (same) {
    for (const v1::Member& member : before->members.members())
      steps_before[member.rank()] = member.last_step();
  }
  std::map<int, const v1::StragglerRow*> late;
  for (const v1::StragglerRow& row : now.stragglers.rows()) late[row.rank()] = &row;
  std::vector<const v1::Member*> members;
  for (const v1::Member& member : now.members.members()) members.push_back(&member);
  std::stable_sort(members.begin(), members.end(), [](const v1::Member* a, const v1::Member* b) {
    if (a->last_step() != b->last_step()) return a->last_step() < b->last_step();
    return rpc::FromProto(a->heartbeat_age()) > rpc::FromProto(b->heartbeat_age());
  });
  std::vector<std::vector<std::string>> rows = {
      {"RANK", "HOST", "STATE", "STEP", "STEPS/S", "HEARTBEAT", "LATE BY", "DOING"}};
  for (const v1::Member* const member : members) {
    const auto was = steps_before.find(member->rank());
    const auto slow = late.find(member->rank());
    const bool is_late = slow != late.end() && slow->second->barriers() > 0;
    std::string doing = member->exit().message();
    if (doing.empty()) doing = member->phase();
    if (doing.empty()) doing = member->last_collective();
    rows.push_back(
        {member->rank() < 0 ? "" : absl::StrCat(member->rank()), member->host(),
         std::string(absl::StripPrefix(v1::WorkerState_Name(member->state()), "WORKER_STATE_")),
         absl::StrCat(member->last_step()),
         RateText(member->last_step(),
                  was == steps_before.end() ? std::nullopt : std::optional(was->second),
                  same ? now.at - before->at : absl::ZeroDuration()),
         HumanDuration(rpc::FromProto(member->heartbeat_age())) + " ago",
         is_late ? HumanDuration(rpc::FromProto(slow->second->mean_lateness())) : "", doing});
  }
  lines->push_back("");
  lines->push_back(absl::StrCat(Printable(now.group), ", slowest first:"));
  AddTable(rows, lines);
}

// Returns the job whose ranks are shown if none was named: the only running one.
std::string OnlyJob(const v1::StatusReply& status) {
  std::string only;
  for (const v1::JobStatus& job : status.jobs()) {
    if (HasEnded(job) || job.world_size() == 0) continue;
    if (!only.empty()) return "";
    only = job.job_id();
  }
  return only;
}

absl::Status Read(const Connection& connection, const std::string& wanted, TopSample* sample) {
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  MUSTER_RETURN_IF_ERROR(
      rpc::FromGrpc(v1::Admin::NewStub(connection.channel)->Status(&call, {}, &sample->status)));
  sample->at = Clock::Real().Now();
  sample->wall = Clock::Real().WallNow();
  RemoveAgentGroups(&sample->status);
  sample->group = OnlyJob(sample->status);
  if (!wanted.empty()) {
    MUSTER_ASSIGN_OR_RETURN(sample->group, GroupOf(connection, wanted));
  }
  if (sample->group.empty()) return absl::OkStatus();
  absl::Status listed = ListMembers(connection, sample->group, &sample->members);
  if (!wanted.empty() && absl::IsNotFound(listed)) {
    // For a submitted program without Muster's library, only the agents are known.
    const std::string agents = sample->group + kAgentsSuffix;
    if (ListMembers(connection, agents, &sample->members).ok()) {
      sample->group = agents;
      listed = absl::OkStatus();
    }
  }
  // The job may have been removed since.
  if (wanted.empty() && absl::IsNotFound(listed)) {
    sample->group.clear();
    return absl::OkStatus();
  }
  if (rpc::GetReason(listed) != v1::ERROR_REASON_LIMIT) MUSTER_RETURN_IF_ERROR(listed);
  const absl::Status reported = ReadStragglers(connection, sample->group, &sample->stragglers);
  return absl::IsNotFound(reported) ? absl::OkStatus() : reported;
}

// Waits for `interval`. Returns true if the reader of the pictures has gone.
bool ReaderLeft(absl::Duration interval) {
  pollfd reader = {STDOUT_FILENO, 0, 0};
  return poll(&reader, 1, static_cast<int>(absl::ToInt64Milliseconds(interval))) > 0;
}

// Draws over the previous picture, without flicker.
void Draw(std::ostream& out, const std::vector<std::string>& lines, bool terminal) {
  if (terminal) out << "\x1b[H";
  for (const std::string& line : lines) out << line << (terminal ? "\x1b[K\n" : "\n");
  if (terminal) {
    out << "\x1b[J";
  } else {
    out << "\n";
  }
  out.flush();
}

}  // namespace

std::vector<std::string> TopLines(const TopSample& now, const TopSample* before, int width,
                                  int height) {
  const v1::StatusReply& status = now.status;
  const auto ended = std::count_if(status.jobs().begin(), status.jobs().end(), HasEnded);
  std::vector<std::string> lines = {
      absl::StrCat(absl::FormatTime("%H:%M:%S", now.wall, absl::LocalTimeZone()), "  coordinator ",
                   Printable(status.version()), ", up ",
                   HumanDuration(rpc::FromProto(status.uptime())), ", ", status.agents(),
                   status.agents() == 1 ? " agent, " : " agents, ", status.jobs_size(),
                   status.jobs_size() == 1 ? " job" : " jobs",
                   ended == 0 ? "" : absl::StrCat(", ", ended, " of them ended")),
      ""};
  AddJobs(now, before, &lines);
  if (!now.group.empty()) AddRanks(now, before, &lines);
  if (height > 0 && lines.size() > static_cast<size_t>(height)) {
    const size_t shown = std::max(height - 1, 1);
    const size_t left = lines.size() - shown;
    lines.resize(shown);
    lines.push_back(absl::StrCat("... ", left, " more lines (muster status has all)"));
  }
  for (std::string& line : lines) {
    if (width > 0) line.resize(Utf8Prefix(line, width).size());
  }
  return lines;
}

int RunTopCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster top",
      .summary = "Shows jobs, ranks and steps per second, again and again.",
      .usage = "[JOB] [OPTIONS]",
      .details =
          "The ranks are those of JOB, a launch or a submitted job, else those of the only job "
          "that runs; the slowest comes first.\nLATE BY is how much later than the first a rank "
          "reaches barriers, on average. Ctrl-C ends it.\n"
          "Exit codes: 0 --count is reached; 2 wrong options; 3 no such job; 4 it has not started; "
          "7 no coordinator answers, or\nno longer; 8 it requires a token, or a different one.",
      .options = ConnectionOptions(
          {{.name = "interval", .value_name = "TIME", .help = "Between two pictures (default 2s)"},
           {.name = "count", .value_name = "N", .help = "Ends after N pictures"}}),
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const auto wrong = [&](const std::string& text) {
    return Fail(spec, context, absl::InvalidArgumentError(text), kExitUsage);
  };
  absl::Duration interval = absl::Seconds(2);
  if (line.Has("interval") && (!absl::ParseDuration(line.Get("interval"), &interval) ||
                               interval < kLeastInterval || interval > absl::Hours(24))) {
    return wrong(absl::StrCat("--interval ", line.Get("interval"), ": write 500ms, 2s or 1m"));
  }
  int64_t count = 0;
  if (line.Has("count") && (!absl::SimpleAtoi(line.Get("count"), &count) || count < 1)) {
    return wrong(absl::StrCat("--count ", line.Get("count"), ": write a number from 1 to ",
                              std::numeric_limits<int64_t>::max()));
  }
  const std::string wanted = line.words.empty() ? "" : line.words[0];
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  if (terminal) context.out << "\x1b[2J";
  std::optional<TopSample> before;
  for (int64_t drawn = 0;;) {
    TopSample now;
    const absl::Status status = Read(connection, wanted, &now);
    if (!status.ok()) return FailCall(spec, context, SuggestJob(connection, wanted, status));
    winsize size = {};
    if (terminal) (void)ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    Draw(context.out,
         TopLines(now, before.has_value() ? &*before : nullptr, size.ws_col,
                  std::max(0, size.ws_row - 1)),
         terminal);
    before = std::move(now);
    if (++drawn == count || !context.out || ReaderLeft(interval)) return kExitOk;
  }
}

}  // namespace muster::client
