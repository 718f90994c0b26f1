#include "client/cli/stacks_command.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "client/cli/connection.h"
#include "client/cli/job_group.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

constexpr size_t kRanksOfCall = 64;
constexpr absl::Duration kCaptureTimeout = absl::Seconds(10);

// Two stacks with equal keys belong to processes at the same place. The key has the frames of the
// first thread, then those of the others in any order, each place once. If a thread has Python
// frames, only these count: at one line of Python, the interpreter may be anywhere in its native
// code.
std::string KeyOf(const v1::RankStack& stack) {
  if (!stack.missing().empty()) return absl::StrCat("missing ", stack.missing());
  std::vector<std::string> places;
  bool is_python = false;  // the current thread
  for (const absl::string_view line : absl::StrSplit(stack.worker().native_stack(), '\n')) {
    const absl::string_view text = absl::StripLeadingAsciiWhitespace(line);
    if (absl::StartsWith(text, "thread")) {
      places.emplace_back();
      is_python = false;
    } else if (absl::StartsWith(text, "py#") || (absl::StartsWith(text, "#") && !is_python)) {
      is_python = absl::StartsWith(text, "py#");
      if (places.empty()) places.emplace_back();
      absl::StrAppend(&places.back(), text, "\n");
    }
  }
  if (places.empty()) return stack.worker().native_stack();
  std::sort(places.begin() + 1, places.end());
  places.erase(std::unique(places.begin() + 1, places.end()), places.end());
  return absl::StrJoin(places, "\n");
}

// More ranks than a job has: launch and submit take at most a million processes.
constexpr int kMaxRanks = 1 << 20;

// Parses "0,3-5" into numbers. Errors: INVALID_ARGUMENT.
absl::StatusOr<std::vector<int>> ParseRanks(const std::string& text) {
  std::vector<int> ranks;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, absl::MaxSplits('-', 1));
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last) ||
        first < 0 || last < first || last >= kMaxRanks) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--rank ", text, ": write ranks such as 3 or 0,4-7, from 0 to ", kMaxRanks - 1));
    }
    for (int rank = first; rank <= last; ++rank) ranks.push_back(rank);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// Captures `ranks` of `group`, or all if `ranks` is empty.
absl::Status Capture(const Connection& connection, const std::string& group,
                     const std::vector<int>& ranks, std::vector<v1::RankStack>* stacks) {
  const auto stub = v1::Membership::NewStub(connection.channel);
  v1::CaptureStacksRequest request;
  request.set_job_id(group);
  *request.mutable_timeout() = rpc::ToProto(kCaptureTimeout);
  size_t asked = 0;
  do {
    request.clear_ranks();
    for (; asked < ranks.size() && request.ranks_size() < static_cast<int>(kRanksOfCall); ++asked)
      request.add_ranks(ranks[asked]);
    v1::CaptureStacksReply reply;
    grpc::ClientContext call;
    rpc::SetTimeout(call, kCaptureTimeout + connection.timeout);
    MUSTER_RETURN_IF_ERROR(rpc::FromGrpc(stub->CaptureStacks(&call, request, &reply)));
    stacks->insert(stacks->end(), reply.stacks().begin(), reply.stacks().end());
    request.set_first(reply.next());
  } while (asked < ranks.size() || request.first() > 0);
  return absl::OkStatus();
}

// Returns the part of a stack's line that people read.
std::string ReadableLine(absl::string_view line) {
  return Printable(
      absl::StrReplaceAll(
          line, {{"std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >",
                  "std::string"},
                 {"absl::debian3::", "absl::"}}),
      /*max_bytes=*/1000);
}

// Whether a thread waits for work in a library, as most threads of every process do.
bool IsIdle(const std::vector<absl::string_view>& thread) {
  static constexpr absl::string_view kIdleIn[] = {"grpc_core::Executor::ThreadMain",
                                                  "grpc_event_engine::",
                                                  "gpr_cv_wait",
                                                  "c10d::ProcessGroupGloo::runLoop",
                                                  "c10d::detail::LibUVStoreDaemon::run",
                                                  "blas_thread_server",
                                                  "gloo::transport::tcp::Loop::run",
                                                  "muster::CoordinatorClient::Impl::Pulse",
                                                  "muster::(anonymous namespace)::ShmBackend"};
  constexpr size_t kTopFrames = 6;
  if (!absl::StrContains(thread.front(), "sleeping")) return false;
  for (size_t i = 1; i < std::min(thread.size(), 1 + kTopFrames); ++i) {
    for (const absl::string_view idle : kIdleIn) {
      if (absl::StrContains(thread[i], idle)) return true;
    }
  }
  return false;
}

// Lines of a stack come from a process of the job: they must not control the terminal.
std::string StackText(absl::string_view stack, bool all_threads) {
  // First the lines before the first thread, then those of each thread.
  std::vector<std::vector<absl::string_view>> parts(1);
  for (const absl::string_view line : absl::StrSplit(stack, '\n', absl::SkipEmpty())) {
    if (absl::StartsWith(absl::StripLeadingAsciiWhitespace(line), "thread")) parts.emplace_back();
    parts.back().push_back(line);
  }
  std::string text;
  bool idle = false;
  for (size_t i = 0; i < parts.size(); ++i) {
    // The main thread is always of interest.
    if (i > 1 && !all_threads && IsIdle(parts[i])) {
      idle = true;
      continue;
    }
    for (const absl::string_view line : parts[i]) {
      absl::StrAppend(&text, "  ", ReadableLine(line), "\n");
    }
  }
  if (idle) absl::StrAppend(&text, "  and idle threads of the libraries (--threads shows them)\n");
  return text;
}

std::string WorkerText(const v1::Culprit& worker) {
  return absl::StrCat("rank ", worker.rank(), " (", Printable(worker.host()), ", pid ",
                      worker.pid(), ", ", Printable(worker.process_state()),
                      // Only processes that have joined report steps.
                      worker.generation() == 0 ? "" : absl::StrCat(", step ", worker.last_step()),
                      worker.last_collective().empty() ? "" : ", last collective ",
                      Printable(worker.last_collective()), ")");
}

std::string Text(const std::vector<v1::RankStack>& stacks, bool grouped, bool all_threads) {
  std::vector<StackGroup> groups;
  if (grouped) {
    groups = GroupStacks(stacks);
  } else {
    for (size_t i = 0; i < stacks.size(); ++i) groups.push_back({{static_cast<int>(i)}});
  }
  std::string text;
  for (const StackGroup& group : groups) {
    const v1::RankStack& shown = stacks[group.rows.front()];
    if (group.rows.size() > 1) {
      std::vector<int> ranks;
      for (const int row : group.rows) ranks.push_back(stacks[row].worker().rank());
      absl::StrAppend(&text, "ranks ", RanksText(ranks), " are at the same place; ");
    }
    absl::StrAppend(&text, WorkerText(shown.worker()), ":\n",
                    shown.missing().empty()
                        ? StackText(shown.worker().native_stack(), all_threads)
                        : absl::StrCat("  no stack: ", Printable(shown.missing()), "\n"));
  }
  return text;
}

ordered_json Json(const std::vector<v1::RankStack>& stacks) {
  ordered_json all = ordered_json::array();
  for (const v1::RankStack& stack : stacks) {
    const v1::Culprit& worker = stack.worker();
    all.push_back({{"rank", worker.rank()},
                   {"host", worker.host()},
                   {"pid", worker.pid()},
                   {"process_state", worker.process_state()},
                   {"last_step", worker.last_step()},
                   {"last_collective", worker.last_collective()},
                   {"stack", worker.native_stack()},
                   {"missing", stack.missing()}});
  }
  return all;
}

}  // namespace

std::vector<StackGroup> GroupStacks(const std::vector<v1::RankStack>& stacks) {
  std::vector<StackGroup> groups;
  std::map<std::string, size_t> by_key;
  for (size_t i = 0; i < stacks.size(); ++i) {
    const auto [it, added] = by_key.emplace(KeyOf(stacks[i]), groups.size());
    if (added) groups.emplace_back();
    groups[it->second].rows.push_back(static_cast<int>(i));
  }
  return groups;
}

std::string RanksText(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0, end = 0; i < ranks.size(); i = end) {
    for (end = i + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) ++end;
    absl::StrAppend(&text, text.empty() ? "" : ",", ranks[i]);
    if (end - i > 1) absl::StrAppend(&text, end - i == 2 ? "," : "-", ranks[end - 1]);
  }
  return text;
}

int RunStacksCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster stacks",
      .summary = "Shows where the processes of a running job are: their stacks, now.",
      .usage = "JOB [OPTIONS]",
      .details =
          "JOB is a launch or a submitted job. Ranks at the same place are shown together, with "
          "the stack of the first of them.\nEach process is stopped for a few milliseconds, as a "
          "debugger would. Threads of Python programs (CPython 3.9 to 3.13) show their Python "
          "functions first.\n"
          "Exit codes: 0 shown; 2 wrong options; 3 no such job, or none of its processes is known "
          "yet; 4 "
          "it does not run;\n7 no coordinator answers; 8 it requires a token, or a different one.",
      .options = ConnectionOptions(
          {{.name = "rank", .value_name = "RANKS", .help = "Of these, such as 3 or 0,4-7"},
           {.name = "each", .help = "A stack for each rank, also of those at the same place"},
           {.name = "threads", .help = "Also threads that wait for work in a library"},
           OutputOption({"text", "json"})}),
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::string format = line.Has("output") ? line.Get("output") : "text";
  if (line.words.size() != 1) {
    return Fail(spec, context, absl::InvalidArgumentError("write muster stacks JOB"), kExitUsage);
  }
  std::vector<int> ranks;
  if (line.Has("rank")) {
    absl::StatusOr<std::vector<int>> parsed = ParseRanks(line.Get("rank"));
    if (!parsed.ok()) return Fail(spec, context, parsed.status(), kExitUsage);
    ranks = *std::move(parsed);
  }
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  const absl::StatusOr<std::string> group = GroupOf(connection, line.words[0]);
  if (!group.ok()) return FailCall(spec, context, group.status());
  std::vector<v1::RankStack> stacks;
  const absl::Status status = Capture(connection, *group, ranks, &stacks);
  if (!status.ok()) {
    // A rank that the job does not have is a mistake in the command line.
    if (rpc::GetReason(status) == v1::ERROR_REASON_BAD_FIELD) {
      return Fail(spec, context, status, kExitUsage);
    }
    return FailCall(spec, context, SuggestJob(connection, line.words[0], status));
  }
  context.out << (format == "json"
                      ? Dump(Json(stacks))
                      : Text(stacks, line.Get("each") != "true", line.Get("threads") == "true"));
  return kExitOk;
}

}  // namespace muster::client
