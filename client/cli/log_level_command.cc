#include "client/cli/log_level_command.h"

#include <grpcpp/grpcpp.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/log.h"
#include "base/suggest.h"
#include "base/units.h"
#include "client/cli/connection.h"
#include "client/jobs/client_on_channel.h"
#include "client/jobs/job_client.h"
#include "proto/muster/v1/operations.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/log_level.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

// Fills in the request of the command line. Errors: INVALID_ARGUMENT.
absl::Status FillRequest(const CommandLine& line, v1::SetLogLevelRequest* request) {
  if (!line.words.empty()) {
    LogLevel level;
    if (!ParseLogLevel(line.words[0], &level)) {
      return absl::InvalidArgumentError(
          absl::StrCat("level '", line.words[0], "': debug, info, warning or error"));
    }
    request->set_level(rpc::ToProto(level));
  }
  if (!line.Has("for")) return absl::OkStatus();
  if (line.words.empty()) {
    return absl::InvalidArgumentError("--for needs a level: muster log-level debug --for 10m");
  }
  absl::Duration span;
  if (!absl::ParseDuration(line.Get("for"), &span) || span < absl::Seconds(1) ||
      span > absl::Hours(24)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--for ", line.Get("for"), ": write 30s or 10m, 24h at most"));
  }
  *request->mutable_for_() = rpc::ToProto(span);
  return absl::OkStatus();
}

// For a node's agent: prints the level that the agent reported last.
int RunOnNode(const CommandSpec& spec, const CommandLine& line, const CommandContext& context,
              const v1::SetLogLevelRequest& request, const Connection& connection) {
  Client client = ClientOn(connection.channel, connection.timeout, connection.timeout);
  const std::string node = line.Get("node");
  if (request.level() != v1::LOG_LEVEL_UNSPECIFIED) {
    const absl::Status set = client.set_log_level(
        node, rpc::LogLevelName(request.level()),
        request.has_for_() ? rpc::FromProto(request.for_()) : absl::InfiniteDuration());
    if (!set.ok()) return FailCall(spec, context, set);
    context.out << "the agent of node " << node << " logs from "
                << rpc::LogLevelName(request.level()) << " on"
                << (request.has_for_() ? " for " + HumanDuration(rpc::FromProto(request.for_())) +
                                             ", then as before"
                                       : "")
                << "\n";
    return kExitOk;
  }
  const absl::StatusOr<std::vector<Node>> nodes = client.nodes();
  if (!nodes.ok()) return FailCall(spec, context, nodes.status());
  std::vector<std::string> names;
  for (const Node& known : *nodes) {
    names.push_back(known.name);
    if (known.name != node) continue;
    context.out << "the agent of node " << node << " logs from "
                << (known.log_level.empty() ? "a level that it does not tell" : known.log_level)
                << " on\n";
    return kExitOk;
  }
  return Fail(spec, context,
              absl::NotFoundError(
                  absl::StrCat("no node ", node, " is known here", DidYouMean(node, names))),
              kExitNotFound);
}

}  // namespace

int RunLogLevelCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster log-level",
      .summary =
          "Shows or sets how much a running coordinator, or a node's agent, logs, without a "
          "restart.",
      .usage = "[debug|info|warning|error] [--for TIME] [OPTIONS]",
      .details =
          "With --for the previous level returns afterwards. A restart uses --log_level again. "
          "Only admins may set it; the\naudit log of the coordinator records it.\n"
          "Exit codes: 0 shown or set; 2 wrong options; 3 no such node; 7 no coordinator answers, "
          "or "
          "the node is not connected;\n8 it requires a token, or an admin's.",
      .options = ConnectionOptions(
          {{.name = "for",
            .value_name = "TIME",
            .help = "Then the level before returns: 1s to 24h"},
           {.name = "node",
            .value_name = "NODE",
            .help = "The node whose muster-agent --serve to ask (default: the coordinator)"}}),
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  v1::SetLogLevelRequest request;
  if (const absl::Status read = FillRequest(line, &request); !read.ok()) {
    return Fail(spec, context, read, kExitUsage);
  }
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  if (line.Has("node")) return RunOnNode(spec, line, context, request, connection);
  v1::SetLogLevelReply reply;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status = rpc::FromGrpc(
      v1::Operations::NewStub(connection.channel)->SetLogLevel(&call, request, &reply));
  if (!status.ok()) return FailCall(spec, context, status);
  context.out << "the coordinator at " << connection.address << " logs from "
              << rpc::LogLevelName(reply.level()) << " on";
  if (reply.has_left()) {
    context.out << " for another " << HumanDuration(rpc::FromProto(reply.left())) << ", then from "
                << rpc::LogLevelName(reply.next()) << " on";
  }
  context.out << "\n";
  return kExitOk;
}

}  // namespace muster::client
