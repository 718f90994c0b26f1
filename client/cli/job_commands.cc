// GCC 12 takes variables that <regex> moves for uninitialized when it builds for sanitizers.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "client/cli/job_commands.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/suggest.h"
#include "base/text.h"
#include "base/units.h"
#include "client/cli/open_backend.h"
#include "client/cli/output.h"
#include "client/cli/planned_checkpoint.h"
#include "client/jobs/follow_log.h"
#include "client/jobs/job_backend.h"
#include "client/jobs/job_client.h"
#include "client/jobs/job_file.h"
#include "client/jobs/job_files.h"
#include "client/jobs/recovery.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

constexpr char kExitCodes[] =
    "Exit codes: 0 done; 2 wrong options; 3 no such job; 4 the job's state does not allow it; 6 a "
    "limit\nrefuses it; 7 no coordinator answers; 8 it requires a token, or a "
    "different one.";

// Prints an error of a call about `job`, with similar names if there is no such job.
int FailJob(const CommandSpec& spec, const CommandContext& context, JobBackend& client,
            const std::string& job, const absl::Status& status) {
  if (absl::IsNotFound(status)) {
    std::vector<std::string> names;
    if (const auto jobs = client.list({}); jobs.ok()) {
      for (const Job& known : *jobs) names.push_back(known.id);
    }
    return Fail(spec, context, SuggestName(status, job, names), kExitNotFound);
  }
  return FailCall(spec, context, status);
}

int CodeOfJob(const Job& job) {
  return job.state == JobState::kSucceeded ? kExitOk : kExitJobFailed;
}

std::string ProcessesText(int count) {
  return absl::StrCat(count, count == 1 ? " process" : " processes");
}

std::string TimeText(absl::Time time) {
  return time == absl::InfinitePast()
             ? ""
             : absl::FormatTime("%Y-%m-%d %H:%M:%S", time, absl::LocalTimeZone());
}

ordered_json TimeJson(absl::Time time) {
  if (time == absl::InfinitePast()) return nullptr;
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone());
}

ordered_json PlacementsJson(const std::vector<Placement>& placements) {
  ordered_json all = ordered_json::array();
  for (const Placement& placement : placements) {
    all.push_back({{"node", placement.node},
                   {"node_rank", placement.node_rank},
                   {"processes", placement.processes},
                   {"gpus", placement.gpus},
                   {"state", placement.state}});
  }
  return all;
}

ordered_json SparesJson(const std::vector<Placement>& spares) {
  ordered_json all = ordered_json::array();
  for (const Placement& spare : spares) {
    all.push_back({{"node", spare.node}, {"processes", spare.processes}, {"gpus", spare.gpus}});
  }
  return all;
}

ordered_json PlanJson(const JobPlan& plan) {
  ordered_json ports = ordered_json::array();
  for (const PlannedPort& port : plan.ports) {
    ports.push_back({{"name", port.name},
                     {"node", port.node},
                     {"from", port.first > 0 ? ordered_json(port.first) : ordered_json()},
                     {"to", port.last > 0 ? ordered_json(port.last) : ordered_json()},
                     {"why", port.why}});
  }
  const PlannedCheckpoint& from = plan.checkpoint;
  ordered_json checkpoint;
  if (!from.decided_by.empty()) {
    checkpoint = {{"decided_by", from.decided_by},
                  {"resume_from", ResumesFrom(from)},
                  {"step", from.path.empty() ? ordered_json() : ordered_json(from.step)},
                  {"saved_by", from.saved_by},
                  {"folder", from.folder},
                  {"why", from.why}};
  }
  ordered_json json = {
      {"starts_now", plan.starts_now},      {"why", plan.why},
      {"processes", plan.processes},        {"placements", PlacementsJson(plan.placements)},
      {"spares", SparesJson(plan.spares)},  {"ports", std::move(ports)},
      {"checkpoint", std::move(checkpoint)}};
  if (!plan.script.empty()) json["script"] = plan.script;
  return json;
}

// For an attempt that has an end.
ordered_json EndJson(const Attempt& attempt) {
  ordered_json end = {{"class", attempt.end_class},
                      {"why", attempt.why},
                      {"node", attempt.node},
                      {"rank", attempt.rank},
                      {"exit_code", attempt.exit_code},
                      {"signal", attempt.signal},
                      {"last_lines", attempt.last_lines}};
  if (attempt.hung.empty()) return end;
  end["hung"] = ordered_json::array();
  for (const HungRanks& hung : attempt.hung) {
    end["hung"].push_back({{"ranks", hung.ranks}, {"doing", hung.doing}, {"stack", hung.stack}});
  }
  return end;
}

ordered_json JobJson(const Job& job) {
  ordered_json attempts = ordered_json::array();
  for (const Attempt& attempt : job.history) {
    attempts.push_back({{"number", attempt.number},
                        {"restarts_in_place", attempt.restarts},
                        {"started", TimeJson(attempt.started)},
                        {"ended", TimeJson(attempt.ended)},
                        {"placements", PlacementsJson(attempt.placements)},
                        {"end", attempt.has_end ? EndJson(attempt) : ordered_json()}});
  }
  return {{"job", job.id},
          {"state", std::string(JobStateName(job.state))},
          {"why", job.why},
          {"owner", job.owner},
          {"submitted", TimeJson(job.submitted)},
          {"restarts", job.restarts},
          {"spec", SettingsJson(job.spec)},
          {"spares", SparesJson(job.spares)},
          {"attempts", attempts}};
}

void PrintValue(const CommandContext& context, const std::string& format,
                const ordered_json& value) {
  context.out << (format == "yaml" ? YamlText(value) : Dump(value));
}

void PrintCheckpoint(const CommandContext& context, const PlannedCheckpoint& from) {
  if (from.decided_by.empty()) return;
  context.out << "  checkpoint: " << Printable(ResumesFrom(from), 1000);
  if (!from.path.empty()) context.out << " of step " << from.step;
  context.out << "; the " << Printable(from.decided_by) << " decides: " << Printable(from.why, 1000)
              << "\n";
}

void PrintPlan(const CommandContext& context, const JobPlan& plan) {
  if (!plan.script.empty()) {
    context.out << Printable(plan.why, 1000) << "\n";
    PrintCheckpoint(context, plan.checkpoint);
    context.out << "\n" << plan.script;
    return;
  }
  context.out << (plan.starts_now ? "starts now" : "waits");
  if (!plan.why.empty()) context.out << ": " << Printable(plan.why, 1000);
  context.out << "\n";
  for (const Placement& placement : plan.placements) {
    context.out << "  " << Printable(placement.node) << ": " << ProcessesText(placement.processes);
    if (!placement.gpus.empty()) context.out << ", GPUs " << absl::StrJoin(placement.gpus, ",");
    context.out << "\n";
  }
  for (const Placement& spare : plan.spares) {
    context.out << "  " << Printable(spare.node) << ": spare, room for "
                << ProcessesText(spare.processes) << "\n";
  }
  for (const PlannedPort& port : plan.ports) {
    context.out << "  " << Printable(port.node) << ": " << Printable(port.name) << ", a free port";
    if (port.first > 0) context.out << " from " << port.first << " to " << port.last;
    context.out << "\n";
  }
  PrintCheckpoint(context, plan.checkpoint);
}

void PrintState(const CommandContext& context, const Job& job) {
  context.out << job.id << " " << JobStateName(job.state)
              << (job.why.empty() ? "" : ": " + Printable(job.why, 1000)) << std::endl;
}

// One line: for people, or a JSON object.
void PrintChange(const CommandContext& context, const Job& job, bool json) {
  if (!json) return PrintState(context, job);
  context.out << JobJson(job).dump(-1, ' ', false, ordered_json::error_handler_t::replace)
              << std::endl;
}

// Prints one line (with `json` a JSON object) for each change of the jobs that `filter` selects,
// until the user ends it. Returns the exit code.
int WatchAll(const CommandSpec& spec, const CommandContext& context, JobBackend& client,
             const ListOptions& filter, bool json) {
  std::map<std::string, std::string> shown;
  const absl::Status status = client.watch_all(filter, [&](const JobUpdate& update) {
    if (!update.job.has_value()) {
      shown.erase(update.id);
      if (json) {
        context.out << ordered_json{{"job", update.id}, {"gone", true}}.dump() << std::endl;
      } else {
        context.out << Printable(update.id) << " is gone: it was removed"
                    << (filter.states.empty() ? "" : ", or has another state") << std::endl;
      }
      return context.out.good();
    }
    // Also called when nodes begin and end their parts, which are changes of the job, too.
    std::string& text = shown[update.id];
    const std::string now = absl::StrCat(JobStateName(update.job->state), update.job->why);
    if (std::exchange(text, now) == now) return true;
    PrintChange(context, *update.job, json);
    return context.out.good();
  });
  return status.ok() ? kExitOk : FailCall(spec, context, status);
}

// Prints whole lines of ranks, each with its prefix, and only those that match.
class LogPrinter {
 public:
  LogPrinter(std::ostream& out, std::ostream& err, bool prefixed, std::optional<std::regex> grep)
      : out_(out), err_(err), prefixed_(prefixed), grep_(std::move(grep)) {}

  // `rest` keeps an incomplete line.
  void Print(int rank, absl::string_view data, std::string* rest) {
    rest->append(data.data(), data.size());
    size_t begin = 0;
    for (size_t end; (end = rest->find('\n', begin)) != std::string::npos; begin = end + 1)
      Line(rank, rest->substr(begin, end - begin));
    rest->erase(0, begin);
  }
  void End(int rank, const std::string& rest) {
    if (!rest.empty()) Line(rank, rest);
  }
  bool has_printed() const {
    MutexLock lock(&mu_);
    return has_printed_;
  }
  // Returns false if, for example, the disk is full. Further output would be lost without notice.
  bool can_print() const {
    MutexLock lock(&mu_);
    return out_.good();
  }
  // Reports lines that were gone before they were read.
  void Gap(int rank, int64_t bytes) {
    MutexLock lock(&mu_);
    out_.flush();
    err_ << "muster logs: " << bytes << " bytes of rank " << rank
         << " are missing here: their file is the oldest, and its node has removed it" << std::endl;
  }
  void Warn(const absl::Status& status) {
    MutexLock lock(&mu_);
    out_.flush();
    err_ << "muster logs: " << Printable(status.message(), 1000) << std::endl;
  }

 private:
  void Line(int rank, const std::string& line) {
    if (grep_.has_value() && !Matches(line)) return;
    MutexLock lock(&mu_);
    has_printed_ = true;
    if (prefixed_) out_ << "[" << rank << "]: ";
    out_ << (terminal_ ? ForTerminal(line) : line) << std::endl;
  }

  // std::regex recurses for every character, so long lines would overflow the stack. The search
  // therefore uses overlapping windows: one of them contains any match of up to half a window.
  bool Matches(const std::string& line) const {
    constexpr size_t kWindow = 4096;
    for (size_t begin = 0;; begin += kWindow / 2) {
      const size_t end = std::min(begin + kWindow, line.size());
      auto flags = std::regex_constants::match_default;
      if (begin > 0) flags |= std::regex_constants::match_prev_avail;
      if (end < line.size()) flags |= std::regex_constants::match_not_eol;
      const char* const text = line.data();
      if (std::regex_search(text + begin, text + end, *grep_, flags)) return true;
      if (end == line.size()) return false;
    }
  }

  mutable Mutex mu_;
  bool has_printed_ ABSL_GUARDED_BY(mu_) = false;
  std::ostream& out_;
  std::ostream& err_;
  const bool prefixed_;
  const bool terminal_ = isatty(STDOUT_FILENO) != 0;
  const std::optional<std::regex> grep_;
};

// Reads one rank's log to its present end, or follows it.
absl::Status PrintLog(JobBackend& client, const std::string& job, LogOptions options, bool follow,
                      LogPrinter* printer) {
  std::string rest;
  absl::Status status;
  const bool from_start = options.offset == 0 && options.since == absl::InfiniteDuration();
  int64_t next = from_start ? 0 : -1;  // -1: wherever the log begins
  int attempt = 0;
  const auto take = [&](const LogChunk& chunk) {
    if (attempt != 0 && chunk.attempt != attempt) next = 0;
    attempt = chunk.attempt;
    if (next >= 0 && chunk.offset > next) {
      printer->End(options.rank, rest);
      rest.clear();
      printer->Gap(options.rank, chunk.offset - next);
    }
    next = chunk.next_offset;
    printer->Print(options.rank, chunk.data, &rest);
  };
  if (follow) {
    status = client.follow_log(job, options, [&](const LogChunk& chunk) {
      take(chunk);
      return printer->can_print();
    });
  } else {
    while (true) {
      const absl::StatusOr<LogChunk> chunk = client.read_log(job, options);
      status = chunk.status();
      if (!chunk.ok()) break;
      take(*chunk);
      if (chunk->data.empty() || chunk->ended || !printer->can_print()) break;
      options.offset = chunk->next_offset;
      options.since = absl::InfiniteDuration();
      options.attempt = chunk->attempt;
    }
  }
  printer->End(options.rank, rest);
  return status;
}

}  // namespace

namespace {

CommandSpec SubmitSpec() {
  std::vector<OptionSpec> options;
  for (const JobSettingSpec& setting : JobSettings()) {
    if (!setting.has_flag) continue;
    options.push_back({.name = setting.name,
                       .value_name = setting.value_name,
                       .help = setting.help,
                       .group = "Job",
                       .repeated = setting.repeated,
                       .negative = setting.value_name.empty()});
  }
  options.push_back(
      {.name = "sbatch",
       .value_name = "OPTION",
       .help = "With --on slurm: an option for sbatch, such as --sbatch --partition=gpu",
       .repeated = true});
  options.push_back({.name = "dry_run", .help = "Print the plan and submit nothing"});
  options.push_back(
      {.name = "wait", .help = "Wait until the job has ended; exit 1 if it did not succeed"});
  options.push_back({.name = "follow", .help = "As --wait, and print the output of rank 0"});
  options.push_back({.name = "idempotency_key",
                     .value_name = "KEY",
                     .help = "The same key and job submit once (default: a random one)"});
  options.push_back(OutputOption({"name", "json", "yaml"}));
  return {
      .name = "muster submit",
      .summary = "Submits a job: the coordinator queues it and chooses its nodes.",
      .usage = "[job.yaml] [OPTIONS] [-- PROGRAM ARGS...]",
      .details = absl::StrCat(
          "The file has the job's options as keys, and \"command\". A flag "
          "overrides the file.\nWith --wait and --follow, exit code 1: the job did not succeed.\n",
          kExitCodes),
      .options = JobOptions(std::move(options)),
      .max_words = 1};
}

void PrintSubmission(const CommandContext& context, const std::string& format, bool dry_run,
                     const ResolvedJob& job, const Submission& made) {
  if (format != "name") {
    PrintValue(
        context, format,
        {{"job", JobJson(made.job)}, {"plan", PlanJson(made.plan)}, {"existed", made.existed}});
  } else if (dry_run) {
    for (const auto& [name, given] : job.provenance)
      context.out << name << ": " << given.text << "  (" << given.source << ")\n";
    PrintPlan(context, made.plan);
  } else {
    context.out << made.job.id << std::endl;
  }
}

}  // namespace

int RunSubmitCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = SubmitSpec();
  // The words after "--" are the program; a word before it is the file.
  const auto dashes = std::find(args.begin(), args.end(), "--");
  const std::vector<std::string> program(dashes == args.end() ? dashes : dashes + 1, args.end());
  CommandLine line;
  if (const int code = Begin(spec, {args.begin(), dashes}, context, &line); code >= 0) return code;
  std::string text, source;
  if (!line.words.empty()) {
    source = line.words[0];
    const absl::StatusOr<std::string> read = ReadFile(source, 1 << 20);
    if (!read.ok()) return Fail(spec, context, read.status(), kExitUsage);
    text = *read;
  }
  absl::StatusOr<ResolvedJob> job = ResolveJob(text, source, line.options, program);
  if (!job.ok()) return Fail(spec, context, job.status(), kExitUsage);
  if (const absl::Status read = ReadJobFiles(job->paths, &job->spec.files); !read.ok()) {
    const std::string& from = job->provenance["files"].source;
    return Fail(
        spec, context,
        absl::Status(read.code(),
                     absl::StrCat(from, from[0] == '-' ? ": " : ": files: ", read.message())),
        kExitUsage);
  }
  // SLURM runs a job in the folder in which it was submitted.
  const std::string& path = job->spec.command[0];
  if (path[0] != '/' && absl::StrContains(path, '/') && job->spec.workdir.empty() &&
      job->spec.files.empty() && !IsOnSlurm(line, context)) {
    return Fail(spec, context,
                absl::InvalidArgumentError(absl::StrCat(
                    "program ", Printable(path),
                    " is relative, and without a workdir the job runs in an empty private folder: "
                    "write --workdir \"$PWD\" if every node has this folder, or the "
                    "program's absolute path")),
                kExitUsage);
  }
  const std::string format = line.Has("output") ? line.Get("output") : "name";
  line.words.clear();  // the file is not the name of a job
  int code = 0;
  const std::unique_ptr<JobBackend> client =
      OpenBackend(spec, line, context, &code, /*keeps_jobs=*/true);
  if (client == nullptr) return code;
  const bool dry_run = line.Get("dry_run") == "true";
  const std::string user = Variable(context.variables, "USER");
  const absl::StatusOr<Submission> made = client->submit(
      job->spec,
      {.idempotency_key = line.Get("idempotency_key"), .dry_run = dry_run, .owner = user});
  if (!made.ok()) return FailJob(spec, context, *client, job->spec.name, made.status());
  PrintSubmission(context, format, dry_run, *job, *made);
  const bool follow = line.Get("follow") == "true";
  if (dry_run || (!follow && line.Get("wait") != "true")) return kExitOk;
  if (follow) {
    LogPrinter printer(context.out, context.err, /*prefixed=*/false, std::nullopt);
    const absl::Status status = PrintLog(*client, made->job.id, {}, /*follow=*/true, &printer);
    if (!status.ok()) context.err << spec.name << ": " << Printable(status.message()) << "\n";
  }
  const absl::StatusOr<Job> end = client->watch(
      made->job.id, [](const Job&) { return true; }, absl::InfiniteDuration());
  if (!end.ok()) return FailJob(spec, context, *client, made->job.id, end.status());
  if (end->state != JobState::kSucceeded) {
    context.err << spec.name << ": " << end->id << " " << JobStateName(end->state) << ": "
                << Printable(end->why, 1000) << "\n";
  }
  return CodeOfJob(*end);
}

int RunListCommand(const std::vector<std::string>& args, const CommandContext& context) {
  std::vector<std::string> known;
  for (int i = 1; i <= static_cast<int>(JobState::kCancelled); ++i)
    known.emplace_back(JobStateName(static_cast<JobState>(i)));
  const CommandSpec spec = {
      .name = "muster list",
      .summary = "Lists submitted jobs, in the order of submission.",
      .usage = "[PREFIX] [OPTIONS]",
      .details = kExitCodes,
      .options = JobOptions({{.name = "state",
                              .value_name = "STATE",
                              .help = "Only these",
                              .repeated = true,
                              .values = known},
                             {.name = "owner", .value_name = "NAME", .help = "Only this user's"},
                             {.name = "watch",
                              .help = "Continues with one line for each change; with -o json an "
                                      "object for each"},
                             OutputOption({"table", "wide", "json", "yaml", "name"})}),
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  ListOptions filter = {.owner = line.Get("owner"),
                        .id_prefix = line.words.empty() ? "" : line.words[0]};
  if (const auto given = line.options.find("state"); given != line.options.end()) {
    for (const std::string& word : given->second) {
      const auto found = std::find(known.begin(), known.end(), absl::AsciiStrToUpper(word));
      if (found == known.end()) {
        return Fail(spec, context,
                    absl::InvalidArgumentError(absl::StrCat(
                        "--state ", word, DidYouMean(absl::AsciiStrToUpper(word), known),
                        "; write one of ", absl::StrJoin(known, ", "))),
                    kExitUsage);
      }
      filter.states.push_back(static_cast<JobState>(found - known.begin() + 1));
    }
  }
  const std::string format = line.Has("output") ? line.Get("output") : "table";
  const bool watch = line.Get("watch") == "true";
  if (watch && format != "table" && format != "json") {
    return Fail(spec, context,
                absl::InvalidArgumentError(
                    absl::StrCat("--watch with --output ", format, ": write table or json")),
                kExitUsage);
  }
  int code = 0;
  const std::unique_ptr<JobBackend> client = OpenBackend(spec, line, context, &code);
  if (client == nullptr) return code;
  if (watch) return WatchAll(spec, context, *client, filter, format == "json");
  const absl::StatusOr<std::vector<Job>> jobs = client->list(filter);
  if (!jobs.ok()) return FailCall(spec, context, jobs.status());
  if (format == "json" || format == "yaml") {
    ordered_json all = ordered_json::array();
    for (const Job& job : *jobs) all.push_back(JobJson(job));
    PrintValue(context, format, all);
    return kExitOk;
  }
  const bool wide = format == "wide";
  std::vector<std::vector<std::string>> rows = {{"JOB", "STATE", "PROCESSES", "RESTARTS"}};
  if (wide) rows[0].insert(rows[0].end(), {"PRIORITY", "OWNER", "SUBMITTED", "NODES"});
  rows[0].push_back("WHY");
  for (const Job& job : *jobs) {
    if (format == "name") {
      context.out << Printable(job.id) << "\n";
      continue;
    }
    std::vector<std::string> row = {job.id, std::string(JobStateName(job.state)),
                                    ProcessesText(job.spec), absl::StrCat(job.restarts)};
    if (wide) {
      std::vector<std::string> nodes;
      if (!job.history.empty()) {
        for (const Placement& placement : job.history.back().placements)
          nodes.push_back(placement.node);
      }
      row.insert(row.end(), {absl::StrCat(job.spec.priority), job.owner, TimeText(job.submitted),
                             absl::StrJoin(nodes, ",")});
    }
    row.push_back(job.why);
    rows.push_back(std::move(row));
  }
  if (format != "name") context.out << TableText(rows, context.columns);
  return kExitOk;
}

namespace {

// Parses the options of a command for one job. Returns the exit code (>= 0) if the command is done.
int BeginJob(CommandSpec& spec, const std::vector<std::string>& args, const CommandContext& context,
             CommandLine* line) {
  spec.usage = "JOB [OPTIONS]";
  spec.max_words = 1;
  if (const int code = Begin(spec, args, context, line); code >= 0) return code;
  if (line->words.size() != 1) {
    return Fail(spec, context,
                absl::InvalidArgumentError(
                    absl::StrCat("write ", spec.name, " JOB; muster list shows the jobs")),
                kExitUsage);
  }
  return -1;
}
// Does the same, and opens a client.
int BeginJob(CommandSpec& spec, const std::vector<std::string>& args, const CommandContext& context,
             CommandLine* line, std::unique_ptr<JobBackend>* client) {
  if (const int code = BeginJob(spec, args, context, line); code >= 0) return code;
  int code = 0;
  *client = OpenBackend(spec, *line, context, &code);
  return *client != nullptr ? -1 : code;
}

}  // namespace

int RunDescribeCommand(const std::vector<std::string>& args, const CommandContext& context) {
  CommandSpec spec = {.name = "muster describe",
                      .summary = "Shows all that is known of a submitted job.",
                      .details = kExitCodes,
                      .options = JobOptions({OutputOption({"yaml", "json"})})};
  CommandLine line;
  std::unique_ptr<JobBackend> client;
  if (const int code = BeginJob(spec, args, context, &line, &client); code >= 0) return code;
  const absl::StatusOr<Job> job = client->get(line.words[0]);
  if (!job.ok()) return FailJob(spec, context, *client, line.words[0], job.status());
  PrintValue(context, line.Get("output") == "json" ? "json" : "yaml", JobJson(*job));
  return kExitOk;
}

namespace {

// An attempt that did not succeed, and what happened next.
struct Incident {
  const Attempt* attempt;
  Recovery recovery;
  // From its end to the start of the next attempt, by the clocks of their nodes. Absent: there is
  // none yet, or one of the times is not known.
  std::optional<absl::Duration> down;
  bool in_place = false;  // the restart was within the attempt
};

// Returns "3", or "3+1" after a restart within the attempt.
std::string NumberText(const Attempt& attempt) {
  return attempt.restarts == 0 ? absl::StrCat(attempt.number)
                               : absl::StrCat(attempt.number, "+", attempt.restarts);
}

// Returns "attempts 1 to 3+1 are": those before the first one that is kept. Empty: all are kept.
std::string ForgottenText(const Job& job) {
  if (job.history.empty()) return "";
  Attempt last = job.history.front();
  if (last.restarts > 0) {
    --last.restarts;
  } else {
    --last.number;  // the restarts of that attempt do not matter
  }
  if (last.number == 0) return "";
  if (last.number == 1 && last.restarts == 0) return "attempt 1 is";
  return absl::StrCat("attempts 1 to ", NumberText(last), " are");
}

std::vector<Incident> Incidents(const Job& job) {
  std::vector<Incident> incidents;
  for (size_t i = 0; i < job.history.size(); ++i) {
    const Attempt& attempt = job.history[i];
    if (!attempt.has_end || attempt.end_class == "SUCCEEDED") continue;
    const Attempt* const following = i + 1 < job.history.size() ? &job.history[i + 1] : nullptr;
    Incident& incident = incidents.emplace_back(
        Incident{&attempt, RecoveryOf(attempt, following), std::nullopt, false});
    if (following == nullptr) continue;
    incident.in_place = following->number == attempt.number;
    const absl::Time next = following->started;
    // Clocks of two nodes may differ by more than the pause.
    if (attempt.ended != absl::InfinitePast() && next >= attempt.ended) {
      incident.down = next - attempt.ended;
    }
  }
  return incidents;
}

std::optional<absl::Duration> RanFor(const Attempt& attempt) {
  if (attempt.started == absl::InfinitePast() || attempt.ended < attempt.started) {
    return std::nullopt;
  }
  return attempt.ended - attempt.started;
}

ordered_json SecondsJson(std::optional<absl::Duration> duration) {
  if (!duration.has_value()) return nullptr;
  return absl::ToDoubleSeconds(*duration);
}

std::string DurationText(std::optional<absl::Duration> duration) {
  return duration.has_value() ? HumanDuration(*duration) : "";
}

// Returns the stages of a recovery in order, with their names in JSON.
std::vector<std::pair<std::string, std::optional<absl::Duration>>> Stages(
    const Recovery& recovery) {
  return {{"detect", recovery.detect},         {"decide", recovery.decide},
          {"fence", recovery.fence},           {"place", recovery.place},
          {"rendezvous", recovery.rendezvous}, {"restore", recovery.restore},
          {"first_step", recovery.first_step}, {"total", recovery.total}};
}

ordered_json IncidentsJson(const Job& job, const std::vector<Incident>& incidents) {
  ordered_json all = ordered_json::array();
  for (const auto& [attempt, recovery, down, in_place] : incidents) {
    ordered_json incident = {
        {"attempt", attempt->number},        {"restarts_in_place", attempt->restarts},
        {"continued_in_place", in_place},    {"started", TimeJson(attempt->started)},
        {"ended", TimeJson(attempt->ended)}, {"ran_s", SecondsJson(RanFor(*attempt))},
        {"down_s", SecondsJson(down)}};
    for (const auto& [name, took] : Stages(recovery)) {
      incident["recovery"][name + "_s"] = SecondsJson(took);
    }
    incident.update(EndJson(*attempt));
    all.push_back(std::move(incident));
  }
  return {{"job", job.id},
          {"state", std::string(JobStateName(job.state))},
          {"attempts", job.attempts},
          {"forgotten", job.history.empty() ? 0 : job.history.front().number - 1},
          {"forgotten_in_place", job.history.empty() ? 0 : job.history.front().restarts},
          {"incidents", all}};
}

void PrintHung(const CommandContext& context, const Attempt& attempt) {
  for (const HungRanks& hung : attempt.hung) {
    context.out << "\nattempt " << NumberText(attempt) << ", "
                << (hung.ranks.size() == 1 ? "rank " : "ranks ") << absl::StrJoin(hung.ranks, ",")
                << " hung: " << Printable(hung.doing, 1000) << "\n";
    for (const absl::string_view line : absl::StrSplit(hung.stack, '\n', absl::SkipEmpty())) {
      context.out << "  " << Printable(line, 1000) << "\n";
    }
  }
}

void PrintIncidents(const CommandContext& context, const Job& job,
                    const std::vector<Incident>& incidents) {
  std::vector<std::vector<std::string>> rows = {
      {"ATTEMPT", "ENDED", "RAN", "DOWN", "CLASS", "NODE", "RANK", "WHY"}};
  for (const auto& [attempt, recovery, down, in_place] : incidents) {
    rows.push_back({NumberText(*attempt), TimeText(attempt->ended), DurationText(RanFor(*attempt)),
                    DurationText(down), attempt->end_class, attempt->node,
                    attempt->rank < 0 ? "" : absl::StrCat(attempt->rank), attempt->why});
  }
  if (const std::string forgotten = ForgottenText(job); !forgotten.empty()) {
    context.out << forgotten << " no longer kept: see the audit log and the nodes' logs\n";
  }
  if (incidents.empty()) {
    context.out << job.id << " " << JobStateName(job.state) << ": no attempt of "
                << job.history.size() << " has failed\n";
    return;
  }
  context.out << TableText(rows, context.columns);
  std::vector<std::vector<std::string>> stages = {{"ATTEMPT"}};
  for (const auto& [name, took] : Stages(Recovery())) {
    stages[0].push_back(absl::AsciiStrToUpper(name));
  }
  for (const Incident& incident : incidents) {
    stages.push_back({NumberText(*incident.attempt)});
    for (const auto& [name, took] : Stages(incident.recovery)) {
      stages.back().push_back(DurationText(took));
    }
  }
  context.out << "\nfrom the failure to the first step of the next attempt:\n"
              << TableText(stages, context.columns);
  for (const Incident& incident : incidents) {
    const Attempt& attempt = *incident.attempt;
    if (attempt.last_lines.empty()) continue;
    context.out << "\nattempt " << NumberText(attempt) << ", the last lines of "
                << (attempt.rank < 0 ? "its output" : absl::StrCat("rank ", attempt.rank)) << ":\n";
    for (const std::string& line : attempt.last_lines) {
      context.out << "  " << Printable(line, 1000) << "\n";
    }
  }
  for (const Incident& incident : incidents) PrintHung(context, *incident.attempt);
}

}  // namespace

int RunIncidentsCommand(const std::vector<std::string>& args, const CommandContext& context) {
  CommandSpec spec = {
      .name = "muster incidents",
      .summary =
          "Shows each attempt of a submitted job that did not succeed: what ended it, and "
          "where.",
      .details = absl::StrCat(
          "RAN is how long the attempt ran; DOWN is the time from its end to the start of the next "
          "attempt, by the clocks\nof their nodes. The second table uses the coordinator's clock; "
          "each stage begins where the previous one ended:\nDETECT until the coordinator knew of "
          "the failure (a lost node counts as failed when it was last heard), DECIDE\nuntil it had "
          "told all nodes to stop, FENCE until nothing of the attempt was left, PLACE until the "
          "next attempt had\nits nodes, RENDEZVOUS until its workers had met, RESTORE until rank 0 "
          "had loaded its state, FIRST_STEP until rank 0\nhad finished a step. Unknown times are "
          "shown as -: a program without Muster's library reports no restore and no\nstep. The "
          "coordinator keeps only a job's last attempts. ",
          kExitCodes),
      .options = JobOptions({OutputOption({"table", "json", "yaml"})})};
  CommandLine line;
  std::unique_ptr<JobBackend> client;
  if (const int code = BeginJob(spec, args, context, &line, &client); code >= 0) return code;
  const absl::StatusOr<Job> job = client->get(line.words[0]);
  if (!job.ok()) return FailJob(spec, context, *client, line.words[0], job.status());
  const std::vector<Incident> incidents = Incidents(*job);
  const std::string format = line.Get("output");
  if (format == "json" || format == "yaml") {
    PrintValue(context, format, IncidentsJson(*job, incidents));
  } else {
    PrintIncidents(context, *job, incidents);
  }
  return kExitOk;
}

int RunWatchCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster watch",
      .summary =
          "Prints each change of a submitted job until it ends; without JOB, the changes of all "
          "jobs.",
      .usage = "[JOB] [OPTIONS]",
      .details =
          absl::StrCat("It continues after a restart of the coordinator, and prints nothing twice. "
                       "If changes come faster than they can\nbe printed, it skips to the latest. "
                       "muster list --watch has filters.\nExit code 1: the job did not succeed. ",
                       kExitCodes),
      .options = JobOptions({OutputOption({"text", "json"})}),
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  int code = 0;
  const std::unique_ptr<JobBackend> client = OpenBackend(spec, line, context, &code);
  if (client == nullptr) return code;
  const bool json = line.Get("output") == "json";
  if (line.words.empty()) return WatchAll(spec, context, *client, {}, json);
  std::string shown;
  const absl::StatusOr<Job> end = client->watch(
      line.words[0],
      [&](const Job& job) {
        const std::string now = absl::StrCat(JobStateName(job.state), job.why);
        if (now != shown) PrintChange(context, job, json);
        shown = now;
        return context.out.good();
      },
      absl::InfiniteDuration());
  if (!end.ok()) return FailJob(spec, context, *client, line.words[0], end.status());
  if (!context.out.good()) return kExitOk;  // not the job's end; main() reports the error
  return CodeOfJob(*end);
}

namespace {

// Errors: INVALID_ARGUMENT that says what to write.
absl::StatusOr<absl::Time> ParseSince(const std::string& text) {
  absl::Duration ago;
  absl::Time time;
  std::string wrong;
  if (absl::ParseDuration(text, &ago)) {
    if (ago >= absl::ZeroDuration() && ago != absl::InfiniteDuration()) return absl::Now() - ago;
  } else if (absl::ParseTime(absl::RFC3339_full, text, &time, &wrong) ||
             absl::ParseTime("%Y-%m-%dT%H:%M:%S", text, absl::LocalTimeZone(), &time, &wrong)) {
    if (time != absl::InfinitePast() && time != absl::InfiniteFuture()) return time;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--since ", text, ": write how long ago, 10m, or a time, 2026-01-31T12:00:00"));
}

}  // namespace

int RunLogsCommand(const std::vector<std::string>& args, const CommandContext& context) {
  CommandSpec spec = {
      .name = "muster logs",
      .summary = "Prints the output of a submitted job's processes.",
      .details = kExitCodes,
      .options = JobOptions(
          {{.name = "follow", .help = "Continues until the job has ended", .letter = "f"},
           {.name = "rank", .value_name = "R|all", .help = "Default 0", .values = {"all"}},
           {.name = "attempt", .value_name = "N", .help = "Default: the last one"},
           {.name = "tail", .value_name = "N", .help = "Only the last N lines"},
           {.name = "since",
            .value_name = "TIME",
            .help = "Only lines of the last 10m, or since 2026-01-31T12:00:00 (local time), to "
                    "the second"},
           {.name = "grep",
            .value_name = "REGEX",
            .help = "Only lines that match, by at most 2,048 characters"}})};
  CommandLine line;
  if (const int code = BeginJob(spec, args, context, &line); code >= 0) return code;
  const auto refuse = [&](const std::string& what) {
    return Fail(spec, context, absl::InvalidArgumentError(what), kExitUsage);
  };
  LogOptions options;
  const bool all = line.Get("rank") == "all";
  if (line.Has("rank") && !all &&
      (!absl::SimpleAtoi(line.Get("rank"), &options.rank) || options.rank < 0)) {
    return refuse(absl::StrCat("--rank ", line.Get("rank"), ": write a number from 0 to ",
                               std::numeric_limits<int>::max(), ", or all"));
  }
  if (line.Has("attempt") &&
      (!absl::SimpleAtoi(line.Get("attempt"), &options.attempt) || options.attempt < 1)) {
    return refuse(absl::StrCat("--attempt ", line.Get("attempt"), ": write a number from 1 to ",
                               std::numeric_limits<int>::max()));
  }
  if (line.Has("tail")) {
    int64_t lines = 0;
    if (!absl::SimpleAtoi(line.Get("tail"), &lines) || lines < 1) {
      return refuse(absl::StrCat("--tail ", line.Get("tail"),
                                 ": write a number of lines from 1 to ",
                                 std::numeric_limits<int64_t>::max()));
    }
    // No log has more lines.
    options.tail_lines =
        static_cast<int>(std::min<int64_t>(lines, std::numeric_limits<int>::max()));
    options.offset = -1;
  }
  std::optional<absl::Time> since;
  if (line.Has("since")) {
    const absl::StatusOr<absl::Time> given = ParseSince(line.Get("since"));
    if (!given.ok()) return refuse(std::string(given.status().message()));
    if (line.Has("tail")) return refuse("--since and --tail exclude each other");
    since = *given;
  }
  std::optional<std::regex> grep;
  if (line.Has("grep")) {
    try {
      grep.emplace(line.Get("grep"), std::regex::extended);
    } catch (const std::regex_error&) {
      return refuse("--grep " + line.Get("grep") + ": it is no regular expression");
    }
  }
  int code = 0;
  const std::unique_ptr<JobBackend> client = OpenBackend(spec, line, context, &code);
  if (client == nullptr) return code;
  const std::string& name = line.words[0];
  const bool follow = line.Get("follow") == "true";
  int ranks = 1;
  if (all) {
    const absl::StatusOr<Job> job = client->get(name);
    if (!job.ok()) return FailJob(spec, context, *client, name, job.status());
    // The number of ranks of the selected attempt; if it is no longer kept, the most that it can
    // have had.
    const int attempt = options.attempt == 0 ? LastBegun(*job) : options.attempt;
    ranks = ProcessesOfAttempt(*job, attempt).value_or(job->spec.max_processes);
  }
  LogPrinter printer(context.out, context.err, all && ranks > 1, std::move(grep));
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  for (int i = 0; i < ranks; ++i) {
    LogOptions one = options;
    if (all) one.rank = i;
    const auto print = [&, one, i] {
      LogOptions now = one;
      // Its age by now: reading the previous ranks may have taken long.
      if (since.has_value()) now.since = std::max(absl::ZeroDuration(), absl::Now() - *since);
      statuses[i] = PrintLog(*client, name, now, follow, &printer);
      // Ranks that print nothing would be followed to the end of the job.
      if (follow && !printer.can_print()) client->stop();
    };
    // Without --follow ranks are printed one after the other.
    if (!follow || ranks == 1) {
      print();
      continue;
    }
    try {
      threads.emplace_back(print);
    } catch (const std::system_error& error) {
      // The ranks before this one are followed to their end.
      statuses[i] = absl::ResourceExhaustedError(
          absl::StrCat("ranks ", i, " to ", ranks - 1, " are not followed, since no more threads ",
                       "start (", error.what(), "): raise the limit, or name them with --rank N"));
      printer.Warn(statuses[i]);
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (follow && !printer.can_print()) return kExitOk;  // main() reports the error
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return FailJob(spec, context, *client, name, status);
  }
  if (printer.has_printed()) return kExitOk;
  if (const absl::StatusOr<Job> job = client->get(name); job.ok() && job->attempts == 0) {
    context.err << "muster logs: " << name
                << " has not run, so there is no output: " << Printable(job->why, 1000) << "\n";
  }
  return kExitOk;
}

int RunControlCommand(const std::string& verb, const std::vector<std::string>& args,
                      const CommandContext& context) {
  const bool stops = verb == "cancel" || verb == "suspend";
  std::vector<OptionSpec> options;
  if (stops) options.push_back({.name = "why", .value_name = "TEXT", .help = "For the record"});
  CommandSpec spec = {
      .name = "muster " + verb,
      .summary = verb == "cancel"    ? "Stops a submitted job for good."
                 : verb == "suspend" ? "Stops a submitted job and keeps it until muster resume."
                 : verb == "resume"  ? "Queues a suspended job again."
                                     : "Queues a job again that failed or was cancelled.",
      .details = kExitCodes,
      .options = JobOptions(std::move(options))};
  CommandLine line;
  std::unique_ptr<JobBackend> client;
  if (const int code = BeginJob(spec, args, context, &line, &client); code >= 0) return code;
  const std::string& name = line.words[0];
  const absl::StatusOr<Job> job = verb == "cancel"    ? client->cancel(name, line.Get("why"))
                                  : verb == "suspend" ? client->suspend(name, line.Get("why"))
                                  : verb == "resume"  ? client->resume(name)
                                                      : client->retry(name);
  if (!job.ok()) return FailJob(spec, context, *client, name, job.status());
  PrintState(context, *job);
  return kExitOk;
}

int RunResizeCommand(const std::vector<std::string>& args, const CommandContext& context) {
  CommandSpec spec = {
      .name = "muster resize",
      .summary = "Changes how many processes a submitted job has.",
      .details =
          absl::StrCat("If the attempt has too many processes, it is stopped at once, with time to "
                       "save, and starts again. If it has too\nfew, it continues until there is "
                       "room that no other job waits for, and is stopped then.\n",
                       kExitCodes),
      .options = JobOptions({{.name = "processes",
                              .value_name = "N|MIN:MAX",
                              .help = "Processes of the job, from its next attempt on"},
                             {.name = "why", .value_name = "TEXT", .help = "For the record"}})};
  CommandLine line;
  std::unique_ptr<JobBackend> client;
  if (const int code = BeginJob(spec, args, context, &line, &client); code >= 0) return code;
  const std::string text = line.Get("processes");
  const absl::StatusOr<std::pair<int, int>> processes = ParseProcesses(text);
  if (!processes.ok()) {
    return Fail(
        spec, context,
        absl::InvalidArgumentError(absl::StrCat("--processes", text.empty() ? "" : " ", text,
                                                ": write ", processes.status().message())),
        kExitUsage);
  }
  const absl::StatusOr<Job> job =
      client->resize(line.words[0], processes->first, processes->second, line.Get("why"));
  if (!job.ok()) return FailJob(spec, context, *client, line.words[0], job.status());
  PrintState(context, *job);
  return kExitOk;
}

}  // namespace muster::client
